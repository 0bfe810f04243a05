"""Compiled: start and end of every block, when each device runs its blocks in a fixed order."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
from numba import njit

from trimtab.specs import FloatArray, IntArray


@njit(cache=True)
def replay(
    stage: npt.NDArray[np.int32],
    microbatch: npt.NDArray[np.int32],
    kind: npt.NDArray[np.int8],
    forward_s: FloatArray,
    backward_s: FloatArray,
    send_forward_s: FloatArray,
    send_backward_s: FloatArray,
    end: FloatArray,
) -> float:
    """Makespan; fills `end` (2, S, M), forward and backward ends. Blocks start as soon as device and input are there.

    Every pass over the devices runs at least one block, else the order is deadlocked (returns inf). A pass over a 1F1B
    order runs about one block a device, so the cost is O(S M).
    """
    P, N = stage.shape
    S = forward_s.shape[0]
    end[:] = -1.0
    at = np.zeros(P, np.int64)
    free = np.zeros(P)
    left = P * N
    while left > 0:
        before = left
        for d in range(P):
            while at[d] < N:
                s, m = stage[d, at[d]], microbatch[d, at[d]]
                ready = 0.0
                if kind[d, at[d]] == 0:
                    if s > 0:
                        ready = end[0, s - 1, m]
                        if ready >= 0.0 and P > 1:
                            ready += send_forward_s[s - 1, m]
                    length = forward_s[s, m]
                else:
                    if s == S - 1:
                        ready = end[0, s, m]
                    else:
                        ready = end[1, s + 1, m]
                        if ready >= 0.0 and P > 1:
                            ready += send_backward_s[s + 1, m]
                    length = backward_s[s, m]
                if ready < 0.0:
                    break
                free[d] = max(free[d], ready) + length
                end[kind[d, at[d]], s, m] = free[d]
                at[d] += 1
                left -= 1
        if left == before:
            return np.inf
    return float(free.max())


@njit(cache=True)
def replay_steps(
    stage: npt.NDArray[np.int32],
    microbatch: npt.NDArray[np.int32],
    kind: npt.NDArray[np.int8],
    forward_s: FloatArray,
    backward_s: FloatArray,
    send_forward_s: FloatArray,
    send_backward_s: FloatArray,
    table: IntArray,
) -> FloatArray:
    """(num_steps, dp) makespans; costs are (S, num_packs), `table[step, rank, slot]` a pack or -1 for an empty slot."""
    num_steps, dp, M = table.shape
    S = forward_s.shape[0]
    makespan = np.zeros((num_steps, dp))
    own = np.zeros((4, S, M))
    end = np.zeros((2, S, M))
    for step in range(num_steps):
        for rank in range(dp):
            for m in range(M):
                pack = table[step, rank, m]
                for s in range(S):
                    own[0, s, m] = forward_s[s, pack] if pack >= 0 else 0.0
                    own[1, s, m] = backward_s[s, pack] if pack >= 0 else 0.0
                    own[2, s, m] = send_forward_s[s, pack] if pack >= 0 else 0.0
                    own[3, s, m] = send_backward_s[s, pack] if pack >= 0 else 0.0
            makespan[step, rank] = replay(stage, microbatch, kind, own[0], own[1], own[2], own[3], end)
    return makespan
