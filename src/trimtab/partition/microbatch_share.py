"""Recompute of a layer in a share of the micro-batches: a finer step than a whole layer in what a stage frees."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np

from trimtab.errors import PartitionError
from trimtab.partition.assess import SplitResult
from trimtab.partition.schedules import splits_backward
from trimtab.partition.stages import SplitProblem, chunk_room, layer_table_of, pipeline_of
from trimtab.specs import IntArray, MicrobatchShare, RecomputeChoice, RecomputedTier, Stage

if TYPE_CHECKING:  # numba comes with these: only when something is solved
    from trimtab.partition.cuts import Pipeline
    from trimtab.partition.layer_table import LayerTable


def share_microbatches(problem: SplitProblem, stages: Sequence[Stage]) -> SplitResult:
    """The given cuts; on each stage the recompute of least time in which at most one layer recomputes in part.

    A stage that holds k micro-batches may recompute a layer in m of every k of them (`MicrobatchShare`): that frees
    m / k of what the layer frees at every peak, at m / k of its time. What the stages recompute already is ignored.
    Exact among such choices (seconds in a table's ticks), so never slower than whole layers alone; not exact over the
    cuts, which were chosen for whole layers. No layer is offloaded in part.

    Raises `PartitionError` where a stage holds its micro-batches in another order than it computes them.
    """
    from trimtab.partition.tiers import IMPOSSIBLE

    if problem.num_chunks > 1 or splits_backward(problem.schedule):
        raise PartitionError(
            f"recompute in a share of the micro-batches was asked for under {problem.schedule} with "
            f"{problem.num_chunks} chunks a device, where peaks are no micro-batches in a row: take 1F1B or GPipe"
        )
    table = layer_table_of(problem)
    pipeline = pipeline_of(problem, table, chunk_room(problem))
    place = {int(position): k for k, position in enumerate(table.positions)}
    found = []
    for stage in stages:
        first, last = place[stage.start], place[stage.stop]
        options = _options(table, pipeline, stage.index, first, last)
        best = min(options, key=lambda option: (option.cost, option.share is not None), default=None)
        if best is None or best.cost >= IMPOSSIBLE:
            raise PartitionError(
                f"stage {stage.index} of layers {stage.start} to {stage.stop - 1} does not fit the memory, whatever it "
                "recomputes: cut the model otherwise"
            )
        found.append(_stage_of(table, best, stage))
    return replace(problem.assess(found), exact=False)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class _Option:
    """Whole layers by class and upgrade, and beside them perhaps one layer in part."""

    cost: float  # composite time
    counts: IntArray  # (C, U)
    share: MicrobatchShare | None = None
    layer_class: int = -1
    upgrade: int = -1


def _options(table: LayerTable, pipeline: Pipeline, i: int, a: int, b: int) -> Iterator[_Option]:
    """The cheapest whole layers beside every part of a layer, and beside none."""
    from trimtab.partition.cuts import first_transient, stage_extra
    from trimtab.partition.tiers import IMPOSSIBLE, allowed, least_extra

    tiers, anything = table.tiers, IMPOSSIBLE // 2
    counts = np.zeros_like(tiers.gain)
    whole = stage_extra(pipeline, tiers, i, a, b, anything, counts)
    if whole < IMPOSSIBLE:
        yield _Option(cost=float(whole), counts=counts.copy())
    k = int(pipeline.in_flight[i])
    if whole == 0 or k < 2:
        return
    alike = pipeline.num_alike[b] - pipeline.num_alike[a]
    lowest = int(first_transient(pipeline, a, b))
    state, saved = pipeline.state[b] - pipeline.state[a], pipeline.saved_first[b] - pipeline.saved_first[a]
    for transient in (lowest, *(int(level) for level in tiers.levels if level > lowest)):
        room = int(pipeline.cap[i] - state - k * pipeline.entry[a]) - transient
        prefix = allowed(tiers, transient)
        for g, u in np.argwhere((tiers.gain > 0) & (tiers.host == 0) & (alike > 0)[:, None]):
            if u >= prefix[g]:
                continue
            rest = alike.copy()
            rest[g] -= 1
            for m in range(1, k):
                # k micro-batches of the first tiers, less what m of them free, less k times what whole layers free
                need = math.ceil((k * int(saved) - room - m * int(tiers.gain[g, u])) / k)
                extra = least_extra(tiers, rest, prefix, need, anything, pipeline.host[i], counts)
                if extra < IMPOSSIBLE:
                    yield _Option(
                        cost=extra + m / k * float(tiers.cost[g, u]),
                        counts=counts.copy(),
                        share=MicrobatchShare(num=m, of=k),
                        layer_class=int(g),
                        upgrade=int(u),
                    )


def _stage_of(table: LayerTable, option: _Option, stage: Stage) -> Stage:
    """Of a class's layers those earlier in the model take the stronger tiers; behind them comes the one in part."""
    counts, part = option.counts.copy(), option.share is not None
    by_tier: dict[tuple[RecomputedTier, MicrobatchShare | None], list[int]] = {}
    for i in range(stage.start, stage.stop):
        g, tier, share = int(table.layer_class[i]), table.first_tier[i], None
        taken = [u for u in reversed(range(counts.shape[1])) if g >= 0 and counts[g, u] > 0]
        if taken:
            counts[g, taken[0]] -= 1
            tier = table.upgrades[i][taken[0]]
        elif part and g == option.layer_class:
            part, tier, share = False, table.upgrades[i][option.upgrade], option.share
        if tier.name != "none":
            by_tier.setdefault((tier.name, share), []).append(i)
    choices = (RecomputeChoice(tier=name, layers=tuple(which), share=share) for (name, share), which in by_tier.items())
    order = ("selective", "attention", "full", "offload")
    return replace(stage, recompute=tuple(sorted(choices, key=lambda x: (order.index(x.tier), x.share is not None))))
