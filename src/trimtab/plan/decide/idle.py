"""Why devices wait in the simulated steps, told apart by taking one cause away after the other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np

from trimtab.partition.simulate import StageTimes, simulate_steps
from trimtab.partition.stages import SplitProblem
from trimtab.plan.decide.variant import IdleParts
from trimtab.specs import FloatArray, IntArray

_MOST_STEPS, _MOST_CELLS = 256, 2**22  # of the sampled steps: how many, and seconds of a stage and micro-batch
_WORK = ("forward_s", "backward_s", "weight_s")
_SENDS = ("send_forward_s", "send_backward_s")


def split_idle(
    times: StageTimes, table: IntArray, problem: SplitProblem, idle_share: float
) -> tuple[IdleParts, FloatArray]:
    """`idle_share` in parts, from up to 256 steps of `table` (steps, ranks, micro-batches) spread over the data set.

    And (3, ranks) the least, mean and most seconds that each data-parallel rank's pipeline takes in these steps.

    On each rank the same seconds of work are simulated three times: as they are; with every micro-batch the mean of
    the rank's own (what falls away is the packs' part); and with every stage the mean of all stages too (the stages'
    part). What then is left is the bubble; ranks that end before the slowest of their step wait for it.

    Worked example: two stages of 3 s and 1 s a micro-batch, four equal micro-batches, one rank. As it is the step takes
    4 x 3 = 12 s, with equal stages of 2 s (4 + 1) x 2 = 10 s. Both devices work for 16 s together: of 24 s they are
    idle for 8, of which 2 x (12 - 10) = 4 are the stages' and 20 - 16 = 4 the bubble.
    """
    most = max(1, min(_MOST_STEPS, len(table), _MOST_CELLS // (len(times.forward_s) * table[0].size)))
    table = table[np.unique(np.linspace(0, len(table) - 1, num=most).astype(np.int64))]
    steps, dp, M = table.shape

    def makespans(shown: StageTimes, slots: IntArray) -> FloatArray:
        """(steps, ranks) seconds of every rank alone."""
        alone = simulate_steps(
            shown, slots.reshape(steps * dp, 1, M), schedule=problem.schedule, num_devices=problem.num_stages
        )
        return alone.reshape(steps, dp)

    # 1. as they are
    real = makespans(times, table)
    slowest = real.max(axis=1, keepdims=True)
    # 2. every micro-batch the mean of its rank's, an empty slot counting as none
    own = np.repeat(np.arange(steps * dp), M).reshape(table.shape)
    even = _mean_of_ranks(times, table)
    alike = makespans(even, own)
    # 3. every stage the mean of all stages
    flat = makespans(_mean_of_stages(even), own)
    total = float(slowest.sum()) * dp
    busy = M * float((even.forward_s + even.backward_s).sum()) / problem.num_stages
    waits = np.array([flat.sum() - busy, (alike - flat).sum(), (real - alike).sum(), (slowest - real).sum()]) / total
    waits = np.maximum(waits, 0.0)  # a favourable order of uneven packs may end sooner than even ones
    # the parts of the sampled steps, in proportion, are those of all steps
    waits *= idle_share / waits.sum() if waits.sum() > 0 else 0.0
    bubble, stages, packs, ranks = waits.tolist()
    parts = IdleParts(bubble=bubble, stages=stages, packs=packs, ranks=ranks)
    return parts, np.array([real.min(axis=0), real.mean(axis=0), real.max(axis=0)])


def _mean_of_ranks(times: StageTimes, table: IntArray) -> StageTimes:
    """(S, steps x ranks) seconds: for each rank of each step the mean over its micro-batches."""
    there, packs = (table >= 0).reshape(-1, table.shape[2]), np.maximum(table, 0).reshape(-1, table.shape[2])
    return _changed(times, _WORK + _SENDS, lambda seconds: (seconds[:, packs] * there).mean(axis=2))


def _mean_of_stages(times: StageTimes) -> StageTimes:
    """Every stage as long as all of them are in the mean; sends as they are."""
    return _changed(times, _WORK, lambda seconds: np.tile(seconds.mean(axis=0), (len(seconds), 1)))


def _changed(times: StageTimes, names: Sequence[str], change: Callable[[FloatArray], FloatArray]) -> StageTimes:
    given = {name: getattr(times, name) for name in names}
    return replace(times, **{name: change(seconds) for name, seconds in given.items() if seconds is not None})
