"""Compiled: end of every block, when each device runs its blocks in a fixed order.

`seconds` (3, S, M) or (3, S, num_packs): forward; backward, which the stage before waits for; weight gradients, which
nothing waits for. `sends` (2, ...): behind the forward, behind the backward. `device` (S,) of every stage.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from trimtab.compiled import compiled
from trimtab.specs import FloatArray, IntArray


@compiled
def replay(
    stage: npt.NDArray[np.int32],
    microbatch: npt.NDArray[np.int32],
    kind: npt.NDArray[np.int8],
    device: IntArray,
    seconds: FloatArray,
    sends: FloatArray,
    end: FloatArray,
) -> float:
    """Makespan; fills `end` (3, S, M). Blocks start as soon as device and input are there; equal devices send nothing.

    Every pass over the devices runs at least one block, else the order is deadlocked (returns inf). A pass over a 1F1B
    order runs about one block a device, so the cost is O(S M).
    """
    P, N = stage.shape
    S = seconds.shape[1]
    end[:] = -1.0
    at = np.zeros(P, np.int64)
    free = np.zeros(P)
    left = P * N
    while left > 0:
        before = left
        for d in range(P):
            while at[d] < N:
                s, m, k = stage[d, at[d]], microbatch[d, at[d]], kind[d, at[d]]
                ready = 0.0
                if k == 2:
                    ready = end[1, s, m]
                elif k == 1 and s == S - 1:
                    ready = end[0, s, m]
                elif k == 1 or s > 0:
                    source = s - 1 if k == 0 else s + 1
                    ready = end[k, source, m]
                    if ready >= 0.0 and device[source] != d:
                        ready += sends[k, source, m]
                if ready < 0.0:
                    break
                free[d] = max(free[d], ready) + seconds[k, s, m]
                end[k, s, m] = free[d]
                at[d] += 1
                left -= 1
        if left == before:
            return np.inf
    return float(free.max())


@compiled
def replay_steps(
    stage: npt.NDArray[np.int32],
    microbatch: npt.NDArray[np.int32],
    kind: npt.NDArray[np.int8],
    device: IntArray,
    seconds: FloatArray,
    sends: FloatArray,
    table: IntArray,
) -> FloatArray:
    """(num_steps, dp) makespans; costs are of packs, `table[step, rank, slot]` a pack or -1 for an empty slot."""
    num_steps, dp, M = table.shape
    S = seconds.shape[1]
    makespan = np.zeros((num_steps, dp))
    own_seconds = np.zeros((3, S, M))
    own_sends = np.zeros((2, S, M))
    end = np.zeros((3, S, M))
    for step in range(num_steps):
        for rank in range(dp):
            for m in range(M):
                pack = table[step, rank, m]
                for s in range(S):
                    for k in range(3):
                        own_seconds[k, s, m] = seconds[k, s, pack] if pack >= 0 else 0.0
                    for k in range(2):
                        own_sends[k, s, m] = sends[k, s, pack] if pack >= 0 else 0.0
            makespan[step, rank] = replay(stage, microbatch, kind, device, own_seconds, own_sends, end)
    return makespan
