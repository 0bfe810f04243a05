"""A plan's memory, replayed without a device: bytes counted on the real layers, at the packs that each rank runs.

The layers are traced where they are asked for: that needs torch and Transformers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from trimtab.errors import PlanError
from trimtab.models.describe import describe, read_config
from trimtab.models.shipped import find_shipped
from trimtab.partition.assess import DeviceMemory
from trimtab.partition.peaks import ReplayedPeak, replay_peaks
from trimtab.plan.decide.budget import MemoryBudget
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.file.reload import ReloadedPlan, find_config, reload_plan
from trimtab.plan.file.yaml import open_plan
from trimtab.plan.sharing.decision import share_vision
from trimtab.specs import ModelSpec, Stage
from trimtab.units import format_bytes

if TYPE_CHECKING:
    from trimtab.costs.traced_fit import TracedProfile


@dataclass(frozen=True, slots=True, kw_only=True)
class RankMemory:
    """One pipeline rank at its worst moment of the whole run."""

    rank: int
    stages: tuple[Stage, ...]
    peak: ReplayedPeak  # by counted bytes, at the packs that run
    planned: DeviceMemory  # by the plan's own costs, at its limits
    problem: str | None  # a sentence, where the peak exceeds the cap


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryCheck:
    """Every pipeline rank beside the cap."""

    ranks: tuple[RankMemory, ...]
    budget: MemoryBudget  # of the counted bytes: their band is narrower than the plan's
    assumptions: tuple[str, ...]  # how the bytes were counted

    @property
    def problems(self) -> list[str]:
        return [rank.problem for rank in self.ranks if rank.problem is not None]


def check_memory(path: Path | str, *, config: Path | str | None = None) -> MemoryCheck:
    """Peak bytes of every pipeline rank of the plan at `path`, counted again.

    `config` is the model's config.json (or its folder) where the plan does not say, or no longer finds, what its model
    is. Nothing of the plan's estimates is used, and what was changed by hand counts.
    Raises `PlanError` where the plan cannot be read back or `config` is of another model.
    """
    source, model = find_traced_model(path, config)
    found = reload_plan(Path(path), model=model)
    return replay_plan(found, trace_plan(found, source))


def find_traced_model(path: Path | str, config: Path | str | None = None) -> tuple[str, ModelSpec | None]:
    """`config`, or where none is given the plan's own; and its model, where the plan cannot find that itself.

    Raises `PlanError` where there is none, or another model's.
    """
    plan, folder = open_plan(path)
    given = plan.inputs.model
    own = None if given.config is None else find_config(given.config, folder)
    there = own is not None and (find_shipped(own) is not None or Path(own).exists())
    if config is None:
        if own is None or not there:
            where = "was described from Python" if own is None else f"is to be at {own}, and nothing is there"
            raise PlanError(
                f"bytes were to be counted on the layers of {given.name}, whose configuration {where}: give --config, "
                "the model's config.json or its folder"
            )
        return own, None
    model = describe(config, name=given.name, max_pixels=given.max_pixels, max_tiles=given.max_tiles)
    if (len(model.layers), model.num_params) != (given.num_layers, given.num_params):
        raise PlanError(
            f"--config {config} describes {len(model.layers)} layers with {model.num_params} parameters, and the "
            f"plan's {given.name} has {given.num_layers} with {given.num_params}: give the configuration of that model"
        )
    return str(config), None if there else model


def trace_plan(found: ReloadedPlan, config: str) -> TracedProfile:
    """The plan's model, counted with the plan's own dtype, attention, kernels and frozen towers."""
    from trimtab.costs.traced import profile_traced  # torch and Transformers

    options, case = found.case.options, found.case
    return profile_traced(
        read_config(config),
        case.model,
        case.cluster.device,
        dtype=options.dtype,
        attention=options.attention,
        fused_kernels=options.fused_kernels,
        frozen_towers=frozenset(options.frozen_towers),
        lora=options.lora,
    )


def replay_plan(found: ReloadedPlan, traced: TracedProfile) -> MemoryCheck:
    """The plan's stages and packs with the bytes of `traced`."""
    case, stages = found.case, found.stages
    options = replace(case.options, profile=traced.profile)
    plain = case.without_vision()
    profile = profile_setting(case.model, case.cluster, options, case.setting.dims)
    budget = MemoryBudget.of(case.cluster, options)
    counted = replace(plain, options=options, budget=budget, setting=replace(plain.setting, profile=profile))
    if case.vision is not None:
        counted = share_vision(counted, case.vision.decision)
    peaks = replay_peaks(counted.problem, stages, counted.held_work, case.schedule.table)
    planned = case.problem.assess(stages)
    ranks = []
    for rank, peak in enumerate(peaks):
        own = tuple(stage for stage, device in zip(stages, planned.devices, strict=True) if device == rank)
        ranks.append(
            RankMemory(
                rank=rank,
                stages=own,
                peak=peak,
                planned=planned.memory[rank],
                problem=_problem(rank, own, peak, case.model, budget),
            )
        )
    said = [sentence for sentence in profile.assumptions if sentence in traced.profile.assumptions[1:]]
    return MemoryCheck(ranks=tuple(ranks), budget=budget, assumptions=tuple(said))


def _problem(
    rank: int, stages: tuple[Stage, ...], peak: ReplayedPeak, model: ModelSpec, budget: MemoryBudget
) -> str | None:
    need, cap = peak.memory.total_bytes, budget.fill_bytes
    if need <= cap:
        return None
    blocks = sum(model.layers[i].kind == "block" for stage in stages for i in range(stage.start, stage.stop))
    whole = blocks - sum(stage.num_recomputed() for stage in stages)
    cure = (
        f"recompute more of its layers ({whole} of {blocks} blocks keep everything)"
        if whole > 0
        else "plan with more stages or a larger tp"
    )
    return (
        f"pipeline rank {rank} needs {format_bytes(need)} by counted bytes, of {format_bytes(cap)} that may be "
        f"expected of its {format_bytes(budget.total_bytes)}, in step {peak.step} "
        f"of data-parallel rank {peak.dp_rank} ({math.ceil(need - cap)} bytes too many): {cure}, or pack less into a "
        "micro-batch"
    )
