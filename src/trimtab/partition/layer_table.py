"""A profile at one pair of work vectors as integers: composite time, bytes, classes of layers, segments between cuts.

Composite time = ticks x (num_layers + 1) + number of recomputed layers, so that one comparison prefers less time and,
at equal time, fewer recomputed layers. A tick is a power of two of a second, about 2**-44 of the model's time per
micro-batch: each layer is rounded to it once, after which all comparisons are exact.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.costs.profile import mean_seconds, pass_seconds
from trimtab.errors import PartitionError
from trimtab.options import RecomputeMode
from trimtab.partition.assess import SplitProblem, entry_bytes
from trimtab.partition.cuts import PipelineCuts, Room
from trimtab.partition.schedules import peak_in_flight, peak_pending
from trimtab.partition.tiers import TierTable, Upgrade, tier_table
from trimtab.specs import NUM_WORK_TERMS, FloatArray, IntArray, LayerCost, RecomputeTier

TICK_BITS = 44
MAX_BYTES = 2**60  # an exbibyte stands for "no limit"


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerTable:
    """Integers per layer; `positions[k]` is the layer before which the k-th allowed cut lies."""

    positions: IntArray  # (K + 1,)
    scale: int  # composite units of a tick
    time: IntArray  # (L,) composite: forward, backward and the first tier's extra
    state: IntArray  # (L,) bytes
    transient: IntArray  # (L,) bytes of its backward next to what is saved, on the first tier
    workspace: IntArray  # (L,) the same where what is computed again is counted elsewhere
    saved_first: IntArray  # (L,) bytes of the first tier
    saved_least: IntArray  # (L,) bytes of the smallest tier
    whole: IntArray  # (L,) bytes on tier "none"
    entry: IntArray  # (L,) bytes more on a stage that begins with the layer
    layer_class: IntArray  # (L,) class of a layer that has upgrades, else -1
    first_tier: tuple[RecomputeTier, ...]  # (L,) cheapest tier of each layer
    upgrades: tuple[tuple[RecomputeTier, ...], ...]  # (L,) tiers that save more and cost more, by `TierTable.reach`
    tiers: TierTable

    @property
    def num_segments(self) -> int:
        return len(self.positions) - 1

    @property
    def longest(self) -> int:
        """Return the composite time that no stage exceeds."""
        strongest = max((own[-1].cost for own in self.tiers.upgrades), default=0)
        return int(self.time.sum()) + len(self.time) * strongest

    def prefix(self, values: IntArray) -> list[Any]:
        """Return sums of (L, ...) over the layers before each allowed cut: (K + 1, ...)."""
        sums = np.zeros((len(values) + 1, *values.shape[1:]), np.int64)
        np.cumsum(values, axis=0, out=sums[1:])
        listed: list[Any] = sums[self.positions].tolist()
        return listed


def pipeline_of(problem: SplitProblem, table: LayerTable, cap: FloatArray) -> PipelineCuts:
    """The problem for the solvers of `cuts`, with `cap` (S,) bytes for the (virtual) stages, overhead excluded.

    A stage costs its forward and backward. Where weight gradients run apart it holds at most (in flight - pending)
    micro-batches by its tiers and the pending ones whole: with one chunk a device that is its peak, as
    `SplitProblem.assess` counts it.
    """
    shape = {"num_devices": problem.num_stages, "num_chunks": problem.num_chunks}
    # micro-batches that each stage holds at its worst moment, and those whose weight gradients wait
    held = peak_in_flight(problem.schedule, **shape, num_microbatches=problem.num_microbatches)
    pending = peak_pending(problem.schedule, **shape, num_microbatches=problem.num_microbatches)
    caps = np.minimum(cap, MAX_BYTES).astype(np.int64).tolist()
    transient = table.workspace if pending.any() else table.transient
    one_hot = (table.layer_class[:, None] == np.arange(len(table.tiers.upgrades))).astype(np.int64)
    return PipelineCuts(
        time=table.prefix(table.time),
        state=table.prefix(table.state),
        saved_first=table.prefix(table.saved_first),
        saved_least=table.prefix(table.saved_least),
        whole=table.prefix(table.whole),
        num_alike=table.prefix(one_hot),
        entry=np.append(table.entry, 0)[table.positions].tolist(),
        transient=_range_max(np.maximum.reduceat(transient, table.positions[:-1])),
        rooms=list(map(Room, (held - pending).tolist(), pending.tolist(), caps)),
        tiers=table.tiers,
    )


def layer_table(problem: SplitProblem) -> LayerTable:
    """Return seconds at `work_mean`, bytes (rounded up) at `work_max`."""
    profile, layers, forbidden_cuts = problem.profile, problem.profile.layers, problem.forbidden_cuts
    mean, most = _work_vector(problem.work_mean, "work_mean"), _work_vector(problem.work_max, "work_max")
    forward, backward = mean_seconds(profile, mean)
    workspace = profile.transients(most)
    # layers that share their tiers, as those of one kind do in a profile by formulas, are priced once
    keys = [
        (id(x.tiers), x.backward_s, x.host_forward_s, x.host_backward_s, room)
        for x, room in zip(layers, workspace.tolist(), strict=True)
    ]
    kinds = {key: i for i, key in enumerate(keys)}
    numbers = {key: number for number, key in enumerate(kinds)}
    kind_of = [numbers[key] for key in keys]
    offered = [_offered(layers[i], problem.recompute) for i in kinds.values()]
    extra = [
        [float(pass_seconds(layers[i], tier, mean[None]).again[0]) for tier in tiers]
        for i, tiers in zip(kinds.values(), offered, strict=True)
    ]
    _refuse_negative(forward=forward.min(), backward=backward.min(), recompute=min(map(min, extra)))

    # ticks: fine enough that rounding decides nothing, few enough for 64 bits
    longest = float(forward.sum() + backward.sum() + sum(max(extra[kind]) for kind in kind_of))
    tick_s = 2.0 ** (math.frexp(longest)[1] - TICK_BITS) if longest > 0 else 1.0
    scale = len(layers) + 1

    def composite(seconds: FloatArray | float) -> IntArray:
        return np.rint(np.asarray(seconds) / tick_s).astype(np.int64) * scale

    # options: what each tier costs and saves, those that others dominate left out
    whole = [max(0.0, float(np.dot(layers[i].tiers[0].saved_bytes, most))) for i in kinds.values()]

    def option(kind: int, tier: RecomputeTier, seconds: float) -> _Option:
        saved = max(0.0, float(np.dot(tier.saved_bytes, most)))
        freed = max(0.0, whole[kind] - saved)
        return _Option(
            tier=tier,
            cost=int(composite(seconds)) + (tier.name != "none"),
            saved=math.ceil(saved),
            reach=math.ceil(rooms[kind] + freed),
        )

    rooms = [room for *_, room in kinds]
    of_kind = [
        _useful([option(kind, tier, seconds) for tier, seconds in zip(tiers, extra[kind], strict=True)])
        for kind, tiers in enumerate(offered)
    ]
    ladders = [of_kind[kind] for kind in kind_of]
    first = [ladder[0] for ladder in ladders]
    saved_first = np.array([option.saved for option in first], np.int64)

    # layers with equal upgrades are one class: what is chosen is how many of them
    layer_class, classes = _classes(ladders)
    return LayerTable(
        positions=np.array([c for c in range(len(layers) + 1) if c not in forbidden_cuts], np.int64),
        scale=scale,
        time=composite(forward) + composite(backward) + np.array([option.cost for option in first], np.int64),
        state=np.array([math.ceil(layer.state_bytes) for layer in layers], np.int64),
        transient=np.array([option.reach for option in first], np.int64),
        workspace=np.ceil(workspace).astype(np.int64),
        saved_first=saved_first,
        saved_least=np.array([ladder[-1].saved for ladder in ladders], np.int64),
        whole=np.maximum(saved_first, [math.ceil(whole[kind]) for kind in kind_of]),
        entry=np.ceil(entry_bytes(profile, most)).astype(np.int64),
        layer_class=layer_class,
        first_tier=tuple(option.tier for option in first),
        upgrades=tuple(tuple(option.tier for option in more) for _, *more in ladders),
        tiers=tier_table(classes),
    )


@dataclass(frozen=True, slots=True)
class _Option:
    """One tier of one layer, in integers."""

    tier: RecomputeTier
    cost: int  # composite time
    saved: int  # bytes kept of a micro-batch
    reach: int  # bytes of its backward next to them: workspace, and what is computed again


def _useful(options: Sequence[_Option]) -> list[_Option]:
    """The cheapest tier, then of those that cost more the ones that save more than all before; so `reach` rises."""
    chosen: list[_Option] = []
    for option in sorted(options, key=lambda x: (x.cost, x.saved)):
        if not chosen or option.saved < chosen[-1].saved:
            chosen.append(option)
    return chosen


def _classes(ladders: Sequence[Sequence[_Option]]) -> tuple[IntArray, list[tuple[Upgrade, ...]]]:
    """Return (layers,) class of each layer, -1 without upgrades; the upgrades of each class."""
    alike: dict[tuple[Upgrade, ...], int] = {}
    layer_class = np.full(len(ladders), -1, np.int64)
    for i, (start, *more) in enumerate(ladders):
        if more:
            key = tuple(Upgrade(start.saved - x.saved, x.cost - start.cost, x.reach) for x in more)
            layer_class[i] = alike.setdefault(key, len(alike))
    return layer_class, list(alike)


def _refuse_negative(**lowest_s: float) -> None:
    for name, lowest in lowest_s.items():
        if lowest < 0:
            raise PartitionError(f"a layer's {name} time at the mean micro-batch is {lowest:.3g} s: profile again")


def _offered(layer: LayerCost, recompute: RecomputeMode) -> tuple[RecomputeTier, ...]:
    """The tiers a layer may take: all; the first; or "full" wherever there is one."""
    if recompute == "auto":
        return layer.tiers
    wanted = tuple(tier for tier in layer.tiers if tier.name == recompute)
    return wanted or layer.tiers[:1]


def _work_vector(work: FloatArray | Sequence[float], name: str) -> FloatArray:
    vector = np.asarray(work, np.float64)
    if vector.shape != (NUM_WORK_TERMS,) or not np.isfinite(vector).all() or (vector < 0).any():
        raise PartitionError(f"{name} must be {NUM_WORK_TERMS} finite amounts, none negative: take the packs' mean")
    return vector


def _range_max(values: IntArray) -> list[list[int]]:
    """Make a sparse table of range maxima: [p][a] covers a .. a + 2**p - 1 (the last is repeated past the end)."""
    rows = [values]
    while 2 << (len(rows) - 1) <= len(values):
        step = 1 << (len(rows) - 1)
        last = rows[-1]
        rows.append(np.maximum(last, np.concatenate([last[step:], last[-step:]])))
    return [row.tolist() for row in rows]
