"""End of every block, when each device runs its blocks in a fixed order; for many steps at once.

A block starts when its device is free and what it waits for has arrived. Of every device the next block, if what it
waits for is in an earlier *wave*, belongs to the next one; a wave is one operation of NumPy over its blocks and all
steps.

Example: 1F1B of 2 stages and 2 micro-batches (F0 on stage 0, f0 on stage 1). Device 0 runs F0 F1 B0 B1, device 1 runs
f0 b0 f1 b1. Waves: F0 | F1 f0 | b0 | B0 f1 | b1 | B1.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from trimtab.options import ScheduleName
from trimtab.partition.schedules import BACKWARD, FORWARD, block_order
from trimtab.specs import FloatArray, IntArray

MOST_AT_ONCE = 2**18  # ends of blocks: 2 MiB


class Wave(NamedTuple):
    """Blocks `first <= j < last`, and what each waits for; `n`: for nothing."""

    first: int
    last: int
    source: IntArray  # the block of another device whose result it takes
    before: IntArray  # the block before it on its device


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Waves:
    """The n blocks of all devices, wave by wave."""

    waves: tuple[Wave, ...]
    kind: IntArray  # (n,) FORWARD, BACKWARD, WEIGHT
    stage: IntArray  # (n,)
    microbatch: IntArray  # (n,)
    sent: IntArray  # (n,) what arrives behind the source: its row among (2, S, M); 2 S M: nothing is sent


@lru_cache(maxsize=256)
def waves_of(schedule: ScheduleName, *, num_devices: int, num_chunks: int, num_microbatches: int) -> Waves:
    """The waves of `block_order`."""
    order = block_order(schedule, num_devices=num_devices, num_chunks=num_chunks, num_microbatches=num_microbatches)
    S, M = num_devices * num_chunks, num_microbatches
    stage, microbatch, kind = (x.ravel().astype(np.int64) for x in (order.stage, order.microbatch, order.kind))
    n, per_device = len(stage), order.stage.shape[1]
    # 1. What each block waits for: its kind on a neighbouring stage, if of another device. What it takes from its own
    #    device came before in the order.
    number = np.full((3, S, M), n)
    number[kind, stage, microbatch] = np.arange(n)
    neighbour = np.select([kind == FORWARD, kind == BACKWARD], [stage - 1, stage + 1], -1)
    waits = (neighbour >= 0) & (neighbour < S)
    neighbour %= S
    waits &= order.device[neighbour] != order.device[stage]
    source = np.where(waits, number[kind, neighbour, microbatch], n)
    before = np.where(np.arange(n) % per_device > 0, np.arange(n) - 1, n)
    sent = np.where(waits, (kind * S + neighbour) * M + microbatch, 2 * S * M)
    # 2. The waves: of each device the next block, if what it waits for was in an earlier wave.
    done = np.zeros(n + 1, np.bool_)
    done[n] = True
    following, waves = np.arange(0, n, per_device), []
    while len(following):
        runs = done[source[following]]
        assert runs.any(), "no schedule deadlocks"
        waves.append(following[runs])
        done[waves[-1]] = True
        following = following + runs
        following = following[~runs | (following % per_device > 0)]
    # 3. Blocks numbered wave by wave.
    sequence = np.concatenate(waves)
    renumbered = np.full(n + 1, n)
    renumbered[sequence] = np.arange(n)
    source, before = renumbered[source[sequence]], renumbered[before[sequence]]
    bounds = itertools.pairwise(np.cumsum([0, *map(len, waves)]).tolist())
    return Waves(
        waves=tuple(Wave(first, last, source[first:last], before[first:last]) for first, last in bounds),
        kind=kind[sequence],
        stage=stage[sequence],
        microbatch=microbatch[sequence],
        sent=sent[sequence],
    )


def replay(waves: Waves, seconds: FloatArray, sends: FloatArray, table: IntArray) -> FloatArray:
    """(n, steps) end of every block in every step, blocks as in `waves`.

    `seconds` (3, S, num_packs): forward; backward, which the stage before waits for; weight gradients, which nothing
    waits for. `sends` (2, S, num_packs): after the forward, after the backward. `table[step, microbatch]` is a pack,
    or -1 for an empty slot, which takes no time.
    """
    S, num_packs = seconds.shape[1:]
    n, (num_steps, M) = len(waves.stage), table.shape
    # 1. What every block takes in every step, and what it waits for behind its source.
    pack = table.T.ravel()
    own = seconds.reshape(3 * S, num_packs).take(pack, axis=1).reshape(3 * S * M, num_steps)
    arriving = np.zeros((2 * S * M + 1, num_steps))
    arriving[:-1] = sends.reshape(2 * S, num_packs).take(pack, axis=1).reshape(2 * S * M, num_steps)
    took = own.take((waves.kind * S + waves.stage) * M + waves.microbatch, axis=0)
    delay = arriving.take(waves.sent, axis=0)
    if table.min() < 0:
        is_empty = (table.T < 0)[waves.microbatch]
        took[is_empty], delay[is_empty] = 0.0, 0.0
    # 2. Wave by wave; the last row, which blocks that wait for nothing read, stays 0.
    end = np.zeros((n + 1, num_steps))
    for first, last, source, before in waves.waves:
        ready = end.take(source, axis=0)
        ready += delay[first:last]
        np.maximum(ready, end.take(before, axis=0), out=ready)
        np.add(ready, took[first:last], out=end[first:last])
    return end[:n]


def makespans(waves: Waves, seconds: FloatArray, sends: FloatArray, table: IntArray) -> FloatArray:
    """(steps,) makespan of each step: see `replay`."""
    at_once = max(1, MOST_AT_ONCE // len(waves.stage))
    parts = [
        replay(waves, seconds, sends, table[first : first + at_once]).max(axis=0)
        for first in range(0, len(table), at_once)
    ]
    return np.concatenate(parts)
