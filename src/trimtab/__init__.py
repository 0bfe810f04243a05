"""Balanced training and inference of vision-language models: measure, decide, apply.

Every public name is loaded when it is first used, so that `import trimtab` costs next to nothing.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trimtab.balance.columns import pack_columns
    from trimtab.balance.dispatch import redispatch
    from trimtab.balance.mixture import mix_samples
    from trimtab.balance.packing import pack_samples, report_packing
    from trimtab.balance.streaming import StreamPacker
    from trimtab.costs.devices import find_device, parse_cluster
    from trimtab.costs.inference import Workload
    from trimtab.costs.profile import profile_model
    from trimtab.models.describe import describe
    from trimtab.partition.machine import parse_machine
    from trimtab.partition.placement import Placement, place
    from trimtab.partition.simulate import simulate
    from trimtab.partition.stages import split_stages
    from trimtab.plan.build import make_plan, write_plan
    from trimtab.plan.check import check_plan
    from trimtab.plan.details import PlanDetails
    from trimtab.plan.file import load_plan
    from trimtab.plan.options import PlanOptions
    from trimtab.plan.placement_file import load_placement
    from trimtab.plan.plan import Plan
    from trimtab.plan.vision_choice import VisionChoice
    from trimtab.samples.size import size_samples
    from trimtab.specs import (
        ClusterSpec,
        DeviceSpec,
        ModelSpec,
        Packing,
        ParallelDims,
        Profile,
        SampleTable,
        Schedule,
        Stage,
        Timeline,
    )

__version__ = "0.1.0"

_HOMES = {
    "describe": "trimtab.models.describe",
    "size_samples": "trimtab.samples.size",
    "pack_samples": "trimtab.balance.packing",
    "report_packing": "trimtab.balance.packing",
    "pack_columns": "trimtab.balance.columns",
    "mix_samples": "trimtab.balance.mixture",
    "redispatch": "trimtab.balance.dispatch",
    "StreamPacker": "trimtab.balance.streaming",
    "find_device": "trimtab.costs.devices",
    "parse_cluster": "trimtab.costs.devices",
    "profile_model": "trimtab.costs.profile",
    "Workload": "trimtab.costs.inference",
    "parse_machine": "trimtab.partition.machine",
    "Placement": "trimtab.partition.placement",
    "place": "trimtab.partition.placement",
    "load_placement": "trimtab.plan.placement_file",
    "split_stages": "trimtab.partition.stages",
    "simulate": "trimtab.partition.simulate",
    "PlanOptions": "trimtab.plan.options",
    "VisionChoice": "trimtab.plan.vision_choice",
    "make_plan": "trimtab.plan.build",
    "write_plan": "trimtab.plan.build",
    "check_plan": "trimtab.plan.check",
    "load_plan": "trimtab.plan.file",
    "Plan": "trimtab.plan.plan",
    "PlanDetails": "trimtab.plan.details",
    "ClusterSpec": "trimtab.specs",
    "DeviceSpec": "trimtab.specs",
    "ModelSpec": "trimtab.specs",
    "Packing": "trimtab.specs",
    "ParallelDims": "trimtab.specs",
    "Profile": "trimtab.specs",
    "SampleTable": "trimtab.specs",
    "Schedule": "trimtab.specs",
    "Stage": "trimtab.specs",
    "Timeline": "trimtab.specs",
}

__all__ = [
    "ClusterSpec",
    "DeviceSpec",
    "ModelSpec",
    "Packing",
    "ParallelDims",
    "Placement",
    "Plan",
    "PlanDetails",
    "PlanOptions",
    "Profile",
    "SampleTable",
    "Schedule",
    "Stage",
    "StreamPacker",
    "Timeline",
    "VisionChoice",
    "Workload",
    "check_plan",
    "describe",
    "find_device",
    "load_placement",
    "load_plan",
    "make_plan",
    "mix_samples",
    "pack_columns",
    "pack_samples",
    "parse_cluster",
    "parse_machine",
    "place",
    "profile_model",
    "redispatch",
    "report_packing",
    "simulate",
    "size_samples",
    "split_stages",
    "write_plan",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
