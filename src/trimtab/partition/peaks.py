"""Peak bytes of every pipeline rank over a run's real micro-batches, block by block of the schedule."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.partition.assess import DeviceMemory, SplitProblem, stage_bytes
from trimtab.partition.schedules import BACKWARD, FORWARD, splits_backward
from trimtab.specs import FloatArray, IntArray, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplayedPeak:
    """The worst moment of one pipeline rank, and in which step of which data-parallel rank it comes."""

    memory: DeviceMemory
    step: int
    dp_rank: int


def replay_peaks(
    problem: SplitProblem,
    stages: Sequence[Stage],
    work: FloatArray,
    table: IntArray,
) -> tuple[ReplayedPeak, ...]:
    """The peak of each pipeline rank when `table` (num_steps, dp, M) runs packs of `work` (num_packs, T).

    As `SplitProblem.assess` adds up a device, with each micro-batch's own bytes: a forward adds what its stage's tiers
    hold, a backward takes it away; while either runs, the stage's largest transient lies on top (of a forward: an upper
    bound). So never above `problem.assess(stages)` where no pack exceeds `problem.work_max`.
    """
    P, V, M = problem.num_stages, problem.num_chunks, problem.num_microbatches
    profile, split = problem.profile, splits_backward(problem.schedule)
    assert table.shape[2] == M, "the schedule has another number of micro-batches"
    packs = table.reshape(-1, M)  # an empty slot is -1, the last row of what follows
    work = np.vstack([work, np.zeros((1, work.shape[1]))])
    order = problem.order
    result = []
    for device in range(P):
        numbers = [s for s in range(P * V) if order.device[s] == device]
        own = {s: stage_bytes(profile, stages[s], work, once=split) for s in numbers}
        state = sum(x.state_bytes for s in numbers for x in profile.layers[stages[s].start : stages[s].stop])
        held, most = np.zeros(len(packs)), np.full(len(packs), -1.0)
        saved_then = np.zeros(len(packs))
        blocks = zip(order.stage[device], order.microbatch[device], order.kind[device], strict=True)
        for stage, microbatch, kind in blocks:
            which, pack = own[int(stage)], packs[:, microbatch]
            if kind == FORWARD:
                held = held + which.saved[pack]
            elif kind == BACKWARD and split:
                held = held + (which.whole - which.saved)[pack]
            now = held + which.transient[pack]
            saved_then = np.where(now > most, held, saved_then)
            most = np.maximum(most, now)
            if kind != FORWARD and not (kind == BACKWARD and split):
                held = held - (which.whole if split else which.saved)[pack]
        worst = int(most.argmax())
        result.append(
            ReplayedPeak(
                memory=DeviceMemory(
                    state_bytes=float(state),
                    saved_bytes=float(saved_then[worst]),
                    transient_bytes=float(most[worst] - saved_then[worst]),
                    overhead_bytes=float(problem.overhead_bytes),
                ).with_share(problem.overhead_share),
                step=worst // table.shape[1],
                dp_rank=worst % table.shape[1],
            )
        )
    return tuple(result)
