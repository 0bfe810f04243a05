"""Exact split of a model's layers into pipeline stages together with each layer's recompute, under a memory cap."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from trimtab.errors import PartitionError, refuse_type
from trimtab.options import RecomputedTier
from trimtab.partition.assess import SplitProblem as SplitProblem
from trimtab.partition.assess import SplitResult, stages_bytes, state_bytes
from trimtab.partition.cuts import (
    Pipeline,
    best_tied_cuts,
    least_bottleneck,
    least_choice,
    least_memory,
    least_reachable_bottleneck,
)
from trimtab.partition.layer_table import LayerTable, layer_table, pipeline_of
from trimtab.specs import FloatArray, Stage, recomputing
from trimtab.units import format_bytes


def split_stages(problem: SplitProblem) -> SplitResult:
    """The contiguous split and recompute choice whose slowest stage takes least time per micro-batch.

    Use this to cut a model whose packs you have already; `make_plan` calls it for you.

    Stage time: forward + backward + recompute of its layers at `work_mean`; sends are not counted. Memory of a device:
    see `SplitProblem.assess`; it stays within `memory_bytes`. `num_stages` devices hold `num_chunks` virtual
    stages each.

    Exact for 1F1B, GPipe and ZBH1, up to rounding every layer's time to 1e-12 of the whole; ties go to the least
    recompute time in sum, then to the smallest fullest device, then to earlier cuts. With several chunks a device:
    exact if the best split without a cap fits; otherwise a device's room is divided among its chunks beforehand, evenly
    and as that split would fill it, and the better outcome taken: safe, but not optimal (`exact` says which).

    Raises `PartitionError` with the missing bytes where nothing fits.

    >>> import numpy as np
    >>> from trimtab import describe, find_device, profile_model, SplitProblem
    >>> profile = profile_model(describe("Qwen2.5-VL-7B"), find_device("A100-80GB"))
    >>> work = np.array([1.0, 4096, 4096 * 1024, 4096 * 64, 8192, 8 * 1024**2, 8 * 1024**2])
    >>> problem = SplitProblem(profile=profile, num_stages=4, work_mean=work, work_max=work, memory_bytes=80e9,
    ...                        overhead_bytes=4e9, num_microbatches=8)
    >>> [stage.stop - stage.start for stage in split_stages(problem).stages]
    [40, 8, 9, 8]
    """
    refuse_type("problem", problem, SplitProblem, "SplitProblem(profile=...)")
    table = layer_table(problem)
    if problem.num_chunks == 1:
        result = _solve_capped(problem, table, chunk_room(problem))
        if result is None:
            raise _infeasible(problem, table)
        return replace(result, exact=True)
    # several chunks share a device's room: without a cap first, then divided beforehand in two ways
    free = _solve_capped(problem, table, np.full(problem.num_stages * problem.num_chunks, np.inf))
    if free is None:  # more bytes than the solver counts to: limits of 1e12 tokens make such packs
        raise _infeasible(problem, table)
    if free.peak_bytes <= problem.memory_bytes:
        return replace(free, exact=True)
    found = [_solve_capped(problem, table, rooms) for rooms in (chunk_room(problem), chunk_room(problem, like=free))]
    fitting = [result for result in found if result is not None]
    if not fitting:
        raise _infeasible(problem, table)
    return min(fitting, key=lambda result: (result.bottleneck_s, sum(result.recompute_s)))


def recompute_stages(problem: SplitProblem, stages: Sequence[Stage]) -> SplitResult:
    """The given stages' cuts with the recompute choices of least time under the cap: exact, stage by stage.

    What the stages recompute already is ignored. Interleaved: as `split_stages` where the cap binds.
    """
    cuts = frozenset(stage.start for stage in stages)
    others = frozenset(c for c in range(1, len(problem.profile.layers)) if c not in cuts)
    return problem.assess(split_stages(replace(problem, forbidden_cuts=others)).stages)


def chunk_room(problem: SplitProblem, *, like: SplitResult | None = None) -> FloatArray:
    """(S,) bytes a (virtual) stage may fill: its device's, divided evenly or as the stages of `like` would fill it."""
    P, V = problem.num_stages, problem.num_chunks
    room = problem.room_bytes
    if like is None:
        return np.full(P * V, room / V)
    most = np.asarray(problem.work_max, np.float64)[None]
    saved, _, transient = (x[:, 0] for x in stages_bytes(problem.profile, like.stages, most, once=False))
    held = state_bytes(problem.profile, like.stages) + np.array(like.in_flight) * saved + transient
    device = np.array(like.devices)
    return np.asarray(room * held / np.bincount(device, weights=held)[device])


def stage_of(table: LayerTable, pipeline: Pipeline, *, index: int, first: int, last: int) -> Stage | None:
    """Segments `first <= k < last` as stage `index` with its recompute of least time; None if it exceeds the cap.

    Of a class's layers those earlier in the model recompute first, the stronger tier before the weaker.
    """
    choice = least_choice(pipeline, index, first, last)
    if choice is None:
        return None
    # the choice counts layers of a class; here each layer gets its tier
    counts = [list(own) for own in choice.counts]
    start, stop = int(table.positions[first]), int(table.positions[last])
    tiers: dict[int, RecomputedTier] = {}
    for i in range(start, stop):
        g, tier = int(table.layer_class[i]), table.first_tier[i]
        for k in reversed(range(len(table.upgrades[i]))):
            if counts[g][k] > 0:
                counts[g][k] -= 1
                tier = table.upgrades[i][k]
                break
        if tier.name != "none":
            tiers[i] = tier.name
    return recomputing(Stage(index=index, start=start, stop=stop), tiers)


def _solve_capped(problem: SplitProblem, table: LayerTable, cap: FloatArray) -> SplitResult | None:
    """The optimum with `cap` (S,) bytes for the (virtual) stages, overhead excluded; None when nothing fits."""
    pipeline = pipeline_of(problem, table, cap)

    def best_cuts(bottleneck: int) -> list[int] | None:
        # what is not slower by a whole tick ties: the count of recomputed layers is no part of the bottleneck
        return best_tied_cuts(pipeline, (bottleneck // table.scale + 1) * table.scale - 1)

    bottleneck = least_bottleneck(pipeline, high=table.longest)
    if bottleneck is None:
        return None
    cuts = best_cuts(bottleneck)
    if cuts is None:  # only where a later stage has less room than an earlier one
        bottleneck = least_reachable_bottleneck(pipeline, low=bottleneck, high=table.longest)
        if bottleneck is None:
            return None
        cuts = best_cuts(bottleneck)
    assert cuts is not None, "within this limit a split was found before"
    stages = []
    for i, (first, last) in enumerate(itertools.pairwise(cuts)):
        stage = stage_of(table, pipeline, index=i, first=first, last=last)
        assert stage is not None, "its recompute was found before"
        stages.append(stage)
    return problem.assess(stages)


def _infeasible(problem: SplitProblem, table: LayerTable) -> PartitionError:
    """Return how many bytes the fullest device lacks in the split that needs least on it."""
    pipeline = pipeline_of(problem, table, chunk_room(problem))
    least = least_memory(pipeline) * problem.num_chunks * (1 + problem.overhead_share) + problem.overhead_bytes
    missing = least - problem.memory_bytes
    how = {
        "auto": "even with the strongest recompute everywhere",
        "none": "without recompute",
        "full": "with full recompute",
    }[problem.recompute]
    if problem.num_chunks > 1:
        how += " and a device's room shared evenly by its chunks"
    # what may help, of what this problem leaves to change
    tries = ["more stages", "a larger tp", "fewer patches and tokens in a micro-batch"]
    kept = {layer.name.rstrip("0123456789") for layer in problem.profile.layers if len(layer.tiers) == 1}
    if problem.recompute == "auto" and (never := sorted(name for name in kept if name.endswith("."))):
        how += f" but in {' and '.join(name.rstrip('.') for name in never)}, which the host cannot recompute,"
        tries.append("smaller images (--max-pixels)")
    if problem.schedule != "1F1B" and problem.num_chunks == 1:
        tries.append("schedule='1F1B'")
    if problem.num_chunks > 1:
        tries.append("fewer chunks" if problem.schedule == "Interleaved1F1B" else "schedule='1F1B'")
    if problem.recompute != "auto":
        tries.append("recompute='auto'")
    num, held = problem.num_stages, format_bytes(problem.memory_bytes)
    devices = f"one device that may hold {held}" if num == 1 else f"{num} devices that may hold {held} each"
    return PartitionError(
        f"{len(problem.profile.layers)} layers do not fit {devices}: {how} the fullest device needs "
        f"{format_bytes(least)}, {format_bytes(missing)} ({missing:,.0f} bytes) too many: try {', '.join(tries[:-1])} "
        f"or {tries[-1]}"
    )
