"""The frameworks that a plan's stages can be exported to: what each can run, and its export of a plan on disk."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from trimtab.adapters.deepspeed import deepspeed_export, deepspeed_runs
from trimtab.adapters.megatron import MegatronExport, megatron_flags, unsupported_cuts
from trimtab.adapters.megatron_bridge import bridge_fields, bridge_python, bridge_runs, bridge_warnings
from trimtab.adapters.megatron_recompute import megatron_ladders
from trimtab.adapters.ms_swift import swift_arguments, swift_runs, swift_shell, swift_warnings
from trimtab.adapters.pai_megatron import pai_export, pai_ladder, pai_splits
from trimtab.adapters.torch_pipelining import pipelining_export
from trimtab.adapters.torchtitan import titan_export, titan_ladder, titan_unsupported_cuts
from trimtab.errors import PartitionError, UnsupportedPlanError
from trimtab.plan.details import PlanDetails
from trimtab.plan.expressible import (
    Expressible,
    best_expressible,
    overfull_ranks,
    recompute_always,
    recompute_offloaded,
    relative_time,
    replan,
)
from trimtab.plan.reload import ReloadedPlan
from trimtab.specs import ModelSpec, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in a framework's own words."""

    text: str  # to be pasted or saved
    fields: Mapping[str, object]  # the same, or the parts of it, for JSON
    runs: tuple[Stage, ...]  # what the framework makes of the plan
    warnings: tuple[str, ...] = ()
    beside: str | None = None  # something else to set, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One framework."""

    title: str
    can: Callable[[ModelSpec, int], Expressible]  # of a model, at a pipeline degree
    export: Callable[
        [ReloadedPlan, float | None], Exported
    ]  # raises `UnsupportedPlanError`, with the price it is given


def export_plan(found: ReloadedPlan, target: Target) -> Exported:
    """The plan in the target's words, with what that costs; or `UnsupportedPlanError` with reason and price.

    The price is the predicted time of the best plan that the target can run, at the same degrees, over the plan's.
    """
    case, planned = found.case, found.stages
    said = _unsaid(planned)
    if said:
        found = replace(found, stages=recompute_offloaded(recompute_always(planned)))
    try:
        exported = target.export(found, None)
    except UnsupportedPlanError:
        best = best_expressible(case, target.can(case.model, case.setting.dims.pp))
        return target.export(found, math.inf if best is None else relative_time(case, best, planned))
    return replace(exported, warnings=(*said, *exported.warnings)) if said else exported


def _unsaid(stages: Sequence[Stage]) -> list[str]:
    """Sentences on what no export has a word for, and becomes something else that holds no more."""
    said = []
    num_offloaded = sum(stage.num_offloaded() for stage in stages)
    if num_offloaded:
        said.append(
            f"{num_offloaded} layers are planned with offload to host memory, and this export has no word for it: they "
            "are recomputed in full, which holds no more and takes other time"
        )
    shared = [choice for stage in stages for choice in stage.recompute if choice.share is not None]
    if shared:
        said.append(
            f"{sum(len(choice.layers) for choice in shared)} layers are planned with recompute in a share of the "
            "micro-batches, and this export has no word for it: they are recomputed in all, which holds less and takes "
            "longer"
        )
    return said


def cost_of_running(found: ReloadedPlan, exported: Exported) -> list[str]:
    """Sentences on what the target's own recompute and placement add to the plan; none if it runs it as it is."""
    if exported.runs == found.stages:
        return []
    sentences = []
    ratio = relative_time(found.case, exported.runs, found.stages)
    if abs(ratio - 1.0) >= 0.0005:
        sentences.append(
            f"as it will run, a step is predicted to take {ratio:.3f} x as long as planned: --fit FOLDER writes the "
            "best plan found that runs as it says"
        )
    full = overfull_ranks(found.case, exported.runs)
    if full:
        ranks = ", ".join(map(str, full))
        sentences.append(
            f"as it will run, pipeline rank {ranks} would exceed the plan's memory: export with --fit FOLDER"
        )
    return sentences


def fit_plan(found: ReloadedPlan, target: Target) -> PlanDetails:
    """The best plan found that the target can run: packs and degrees unchanged, stages and recompute anew."""
    case = found.case
    can = target.can(case.model, case.setting.dims.pp)
    best = best_expressible(case, can)
    if best is None:
        raise PartitionError(
            f"no split that {target.title} can run fits {case.setting.dims.pp} pipeline ranks in the plan's memory: "
            "plan again with other degrees, a higher ZeRO stage or smaller packs"
        )
    note = f"Split again, with the same packs, within what {target.title} can run."
    return replan(found, best, forbidden_cuts=can.forbidden_cuts, note=note)


# -- the frameworks -------------------------------------------------------------------------------------------------


def _megatron(found: ReloadedPlan, price: float | None) -> MegatronExport:
    case = found.case
    return megatron_flags(
        model=case.model,
        stages=found.stages,
        dims=case.setting.dims,
        schedule=case.options.schedule,
        num_microbatches=case.setting.num_microbatches,
        num_chunks=case.options.num_chunks,
        zero_stage=case.options.zero_stage,
        price=price,
    )


def _to_megatron(found: ReloadedPlan, price: float | None) -> Exported:
    export = _megatron(found, price)
    beside = None
    if export.vision_fields:
        beside = f"set on the vision tower's config, or it may be truncated:\n{export.vision_python()}"
    return Exported(
        text=export.shell(),
        fields={
            "flags": export.flags,
            "simple_flags": export.simple_flags,
            "layout": export.layout,
            "vision_config": dict(export.vision_fields),
        },
        runs=export.runs,
        warnings=export.warnings,
        beside=beside,
    )


def _to_bridge(found: ReloadedPlan, price: float | None) -> Exported:
    export = _megatron(found, price)
    return Exported(
        text=bridge_python(export),
        fields=dict(bridge_fields(export)),
        runs=bridge_runs(found.case.model, export.runs),
        warnings=bridge_warnings(export),
    )


def _to_swift(found: ReloadedPlan, price: float | None) -> Exported:
    export = _megatron(found, price)
    return Exported(
        text=swift_shell(export),
        fields=dict(swift_arguments(export)),
        runs=swift_runs(found.case.model, export.runs),
        warnings=swift_warnings(export, len(found.case.model.indices("vision", "block"))),
    )


def _to_pai(found: ReloadedPlan, price: float | None) -> Exported:
    case = found.case
    export = pai_export(
        model=case.model,
        stages=found.stages,
        dims=case.setting.dims,
        schedule=case.options.schedule,
        num_microbatches=case.setting.num_microbatches,
        num_chunks=case.options.num_chunks,
        zero_stage=case.options.zero_stage,
        price=price,
    )
    return Exported(
        text=export.shell(),
        fields={"environment": dict(export.environment), "arguments": export.arguments},
        runs=export.runs,
        warnings=export.warnings,
    )


def _to_torchtitan(found: ReloadedPlan, price: float | None) -> Exported:
    case = found.case
    export = titan_export(
        model=case.model,
        stages=found.stages,
        dims=case.setting.dims,
        schedule=case.options.schedule,
        num_microbatches=case.setting.num_microbatches,
        zero_stage=case.options.zero_stage,
        price=price,
    )
    return Exported(
        text=export.python(),
        fields={
            "parallelism": dict(export.parallelism),
            "local_batch_size": export.local_batch_size,
            "activation_checkpoint": export.recompute,
        },
        runs=export.runs,
        warnings=export.warnings,
    )


def _to_deepspeed(found: ReloadedPlan, _price: float | None) -> Exported:
    case = found.case
    export = deepspeed_export(
        model=case.model,
        stages=found.stages,
        dims=case.setting.dims,
        schedule=case.options.schedule,
        num_microbatches=case.setting.num_microbatches,
        num_chunks=case.options.num_chunks,
        zero_stage=case.options.zero_stage,
    )
    return Exported(
        text=export.python,
        fields={"parts": export.parts, "config": export.config, "python": export.python},
        runs=export.runs,
        warnings=export.warnings,
    )


def _to_torch_pipelining(found: ReloadedPlan, _price: float | None) -> Exported:
    case = found.case
    export = pipelining_export(
        model=case.model,
        stages=found.stages,
        dims=case.setting.dims,
        schedule=case.options.schedule,
        num_microbatches=case.setting.num_microbatches,
        num_chunks=case.options.num_chunks,
    )
    return Exported(text=export.json(), fields=export.as_dict(), runs=found.stages, warnings=export.warnings)


def _megatron_can(model: ModelSpec, _pp: int) -> Expressible:
    return Expressible(
        forbidden_cuts=unsupported_cuts(model), selective=False, ladders=partial(megatron_ladders, model)
    )


def _bridge_can(model: ModelSpec, _pp: int) -> Expressible:
    def ladders(stages: Sequence[Stage]) -> Iterator[list[tuple[Stage, ...]]]:
        for ladder in megatron_ladders(model, stages):
            if all(way == bridge_runs(model, way) for way in ladder):
                yield ladder

    return Expressible(forbidden_cuts=unsupported_cuts(model), selective=False, ladders=ladders)


def _pai_can(model: ModelSpec, pp: int) -> Expressible:
    cuts = unsupported_cuts(model)
    return Expressible(
        forbidden_cuts=cuts,
        splits=pai_splits(model, pp),
        selective=False,
        ladders=lambda stages: [pai_ladder(model, stages)],
    )


def _titan_can(model: ModelSpec, _pp: int) -> Expressible:
    return Expressible(
        forbidden_cuts=titan_unsupported_cuts(model),
        selective=False,
        ladders=lambda stages: [titan_ladder(model, stages)],
    )


TARGETS: Mapping[str, Target] = {
    "megatron": Target(title="Megatron-Core", can=_megatron_can, export=_to_megatron),
    "megatron-bridge": Target(title="Megatron-Bridge", can=_bridge_can, export=_to_bridge),
    "ms-swift": Target(title="ms-swift", can=_megatron_can, export=_to_swift),
    "pai-megatron": Target(title="Pai-Megatron-Patch", can=_pai_can, export=_to_pai),
    "torchtitan": Target(title="torchtitan", can=_titan_can, export=_to_torchtitan),
    "deepspeed": Target(
        title="DeepSpeed",
        can=lambda _model, _pp: Expressible(selective=False, ladders=lambda stages: [[deepspeed_runs(stages)]]),
        export=_to_deepspeed,
    ),
    "torch-pipelining": Target(
        title="torch.distributed.pipelining", can=lambda _model, _pp: Expressible(), export=_to_torch_pipelining
    ),
}
