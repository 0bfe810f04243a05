"""Exact split of a model's layers into stages, with each layer's recompute under a memory cap; and around it a search.

Minimising the slowest stage is not minimising the step when micro-batches are few: a stage behind others waits for them
before its first forward and after its last backward, so late stages should be smaller than early ones.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.errors import PartitionError, refuse_type
from trimtab.options import RecomputedTier
from trimtab.partition.assess import SplitProblem as SplitProblem
from trimtab.partition.assess import SplitResult, stages_bytes, state_bytes
from trimtab.partition.cuts import (
    PipelineCuts,
    best_tied_cuts,
    least_bottleneck,
    least_choice,
    least_memory,
    least_reachable_bottleneck,
)
from trimtab.partition.layer_table import LayerTable, layer_table, pipeline_of
from trimtab.partition.schedules import BACKWARD, FORWARD, devices_of_stages, splits_backward
from trimtab.partition.simulate import block_costs, blocks_of, makespans, stage_times
from trimtab.specs import NUM_WORK_TERMS, FloatArray, Stage, recomputing
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
    """Return (S,) bytes a (virtual) stage may fill: its device's, divided evenly or as the stages of `like` fill it."""
    P, V = problem.num_stages, problem.num_chunks
    room = problem.room_bytes
    if like is None:
        return np.full(P * V, room / V)
    most = np.asarray(problem.work_max, np.float64)[None]
    saved, _, transient = (x[:, 0] for x in stages_bytes(problem.profile, like.stages, most, once=False))
    held = state_bytes(problem.profile, like.stages) + np.array(like.in_flight) * saved + transient
    device = np.array(like.devices)
    return np.asarray(room * held / np.bincount(device, weights=held)[device])


def stage_of(table: LayerTable, pipeline: PipelineCuts, *, index: int, first: int, last: int) -> Stage | None:
    """Make segments `first <= k < last` stage `index` with its recompute of least time; None if it exceeds the cap.

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


# -- makespans of cuts, each stage with its least recompute; what was priced is remembered ----------------------------


class Evaluator:
    """Prices cuts; a cut is the number of a `LayerTable` position."""

    def __init__(
        self,
        problem: SplitProblem,
        work: FloatArray,
        *,
        link_bytes_per_s: float | None = None,
        latency_s: float = 0.0,
    ) -> None:
        """`work` (steps, num_microbatches, len(WORK_TERMS)): what each micro-batch of each step asks of the layers."""
        work = np.asarray(work, np.float64)
        expected = (problem.num_microbatches, NUM_WORK_TERMS)
        if work.ndim != 3 or work.shape[0] == 0 or work.shape[1:] != expected:
            raise PartitionError(f"work must have shape (steps, {expected[0]}, {expected[1]}), not {work.shape}")
        S = problem.num_stages * problem.num_chunks
        self.problem = problem
        self.rows = work.reshape(-1, NUM_WORK_TERMS)
        self.slots = np.arange(len(self.rows)).reshape(work.shape[:2])
        self.link_bytes_per_s, self.latency_s = link_bytes_per_s, latency_s
        self.table = layer_table(problem)
        self.pipeline = pipeline_of(problem, self.table, chunk_room(problem))
        self.blocks = blocks_of(
            problem.schedule,
            num_devices=problem.num_stages,
            num_chunks=problem.num_chunks,
            num_microbatches=problem.num_microbatches,
        )
        # what was priced before
        self.seen: dict[tuple[int, ...], float] = {}
        self._stages: dict[tuple[int, int, int], Stage | None] = {}
        self._priced: dict[Stage, tuple[FloatArray, FloatArray]] = {}
        self._least: dict[tuple[int, int, int], tuple[float, float]] = {}
        self._devices = devices_of_stages(
            problem.schedule, num_devices=problem.num_stages, num_chunks=problem.num_chunks
        ).tolist()
        self._seconds, self._sends = np.zeros((3, S, len(self.rows))), np.zeros((2, S, len(self.rows)))

    def cuts_of(self, stages: Sequence[Stage]) -> tuple[int, ...]:
        return (*(int(np.searchsorted(self.table.positions, x.start)) for x in stages), self.table.num_segments)

    def makespan(self, cuts: tuple[int, ...], *, below: float = np.inf) -> float:
        """Return the mean makespan with the stages' least recompute; infinite where a stage does not fit.

        Cuts whose `least_makespan` is not below `below` are not simulated: they get that.
        """
        if cuts not in self.seen:
            stages = self.stages(cuts)
            if len(stages) < len(cuts) - 1:
                return np.inf
            if below < np.inf and (least := self.least_makespan(cuts)) >= below:
                return least
            self.seen[cuts] = self.makespan_of(stages)
        return self.seen[cuts]

    def least_makespan(self, cuts: tuple[int, ...]) -> float:
        """Return a lower bound of `makespan`, where all stages fit: the busiest device's blocks, once it is reached.

        A device waits until the stages before its first one ran a forward. Where backwards are whole, its last block is
        one of its first stage, and the stages before run theirs after it.
        """
        num, reached_s = self.problem.num_stages, 0.0
        busy_s = [0.0] * num
        # all blocks of each device; its first stage starts when the stages before were reached
        for i, span in enumerate(itertools.pairwise(cuts)):
            work_s, ends_s = self._least_of(i, *span)
            busy_s[self._devices[i]] += work_s
            if i < num:
                busy_s[i] += reached_s
                reached_s += ends_s
        return max(busy_s)

    def _least_of(self, i: int, first: int, last: int) -> tuple[float, float]:
        """Return mean seconds of a stage's blocks, and of the least of those that others wait for at either end."""
        if (i, first, last) not in self._least:
            stage = self._stages[i, first, last]
            assert stage is not None, "its bound is asked of cuts that fit"
            # of a step its shortest micro-batch, whichever comes first or last
            seconds = self._price_once(stage)[0][:, self.slots]
            ends = seconds[FORWARD].min(axis=1)
            if not splits_backward(self.problem.schedule):
                ends = ends + seconds[BACKWARD].min(axis=1)
            self._least[i, first, last] = float(seconds.sum(axis=(0, 2)).mean()), float(ends.mean())
        return self._least[i, first, last]

    def stages(self, cuts: tuple[int, ...]) -> tuple[Stage, ...]:
        """The stages between the cuts, each with its least recompute; without those that exceed the cap."""
        found = []
        for i, (first, last) in enumerate(itertools.pairwise(cuts)):
            if (i, first, last) not in self._stages:
                stage = stage_of(self.table, self.pipeline, index=i, first=first, last=last)
                self._stages[i, first, last] = stage
            found.append(self._stages[i, first, last])
        return tuple(stage for stage in found if stage is not None)

    def makespan_of(self, stages: Sequence[Stage]) -> float:
        """Return the mean makespan of stages as they are, their own recompute included."""
        for i, stage in enumerate(stages):
            self._seconds[:, i], send = self._price_once(stage)
            if i + 1 < len(stages):
                self._sends[0, i] = self._sends[1, i + 1] = send
        return float(makespans(self.blocks, self._seconds, self._sends, self.slots).mean())

    def _price_once(self, stage: Stage) -> tuple[FloatArray, FloatArray]:
        if stage not in self._priced:
            self._priced[stage] = self._price(stage)
        return self._priced[stage]

    def _price(self, stage: Stage) -> tuple[FloatArray, FloatArray]:
        """Return (3, rows) seconds FORWARD, BACKWARD, WEIGHT; (rows,) to the next stage, as long on the way back."""
        profile = self.problem.profile
        costs = block_costs(stage_times(profile, (stage,), self.rows), self.problem.schedule)
        send = np.zeros(len(self.rows))
        if self.link_bytes_per_s is not None:
            sent = self.rows @ np.array(profile.layers[stage.stop - 1].output_bytes)
            send = self.latency_s + sent / self.link_bytes_per_s
        return costs.seconds[:, 0], send


# -- the search -------------------------------------------------------------------------------------------------------


MAX_SIMULATED = 4000  # candidates
_STEPS = (-1, 1, -2, 2, -3, 3)
"""Runs of layers by which a cut moves."""
_EQUAL = 1 - 1e-12  # makespans nearer than this are rounding apart


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchResult:
    """The best split found; makespans are means over the sampled steps, without optimizer and all-reduce."""

    split: SplitResult
    makespan_s: float
    start_makespan_s: float  # of the split with the least bottleneck, where the search began
    num_simulated: int  # candidate splits


def search_makespan(evaluator: Evaluator, *, max_simulated: int = MAX_SIMULATED) -> SearchResult:
    """Return the split of least mean simulated makespan that was found; never worse than the exact split.

    Descent from the split of least bottleneck: a round tries every move of one kind and takes each that is better at
    once: one cut moved by up to three runs of layers, then neighbouring cuts moved together. Moves whose lower bound is
    no better are not simulated. Each stage has its least recompute under the cap, exact (least time at
    `problem.work_mean`). Heuristic; deterministic; stops after `max_simulated` candidates.
    """
    problem = evaluator.problem
    start = split_stages(problem)
    start_makespan = evaluator.makespan_of(start.stages)
    # down from the exact split
    cuts, makespan = _descend(evaluator, evaluator.cuts_of(start.stages), max_simulated=max_simulated)
    split = start
    if makespan < start_makespan * _EQUAL:  # chunks of the start may share their device's room otherwise
        split = replace(problem.assess(evaluator.stages(cuts)), exact=False)
    return SearchResult(
        split=split,
        makespan_s=min(makespan, start_makespan),
        start_makespan_s=start_makespan,
        num_simulated=len(evaluator.seen),
    )


def _descend(evaluator: Evaluator, cuts: tuple[int, ...], *, max_simulated: int) -> tuple[tuple[int, ...], float]:
    """Take every move that is better, through ever wider neighbourhoods; return the last one's cuts and makespan."""
    best = evaluator.makespan(cuts)
    neighbourhoods = (_single_moves, _joint_moves)
    kind = 0
    while kind < len(neighbourhoods):
        is_better = False
        for move in neighbourhoods[kind](len(cuts) - 2):
            if len(evaluator.seen) >= max_simulated:
                return cuts, best
            moved = tuple(a + step for a, step in zip(cuts, (0, *move, 0), strict=True))
            if any(a >= b for a, b in itertools.pairwise(moved)):
                continue
            makespan = evaluator.makespan(moved, below=best * _EQUAL)
            if makespan < best * _EQUAL:
                best, cuts, is_better = makespan, moved, True
        # wider moves cost more to try: back to single cuts after each success
        kind = 0 if is_better else kind + 1
    return cuts, best


def _single_moves(num_cuts: int) -> Iterator[tuple[int, ...]]:
    for i in range(num_cuts):
        for step in _STEPS:
            yield (0,) * i + (step,) + (0,) * (num_cuts - i - 1)


def _joint_moves(num_cuts: int) -> Iterator[tuple[int, ...]]:
    """Yield runs of two or more neighbouring cuts by the same step."""
    for i, j in itertools.combinations(range(num_cuts + 1), 2):
        if j - i > 1:
            for step in _STEPS:
                yield (0,) * i + (step,) * (j - i) + (0,) * (num_cuts - j)
