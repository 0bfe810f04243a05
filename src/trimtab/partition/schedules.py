"""What each device runs in which order, schedule by schedule; and how many micro-batches that keeps alive.

P devices, V chunks (virtual stages) a device, S = P V stages (see `device_of_stage`), M micro-batches. Zero-bubble
schedules split a backward in two: B makes the gradient of a stage's inputs, W, which nothing waits for, that of its
weights (Qi et al. 2024, "Zero Bubble Pipeline Parallelism", arXiv 2401.10241).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import get_args

import numpy as np
import numpy.typing as npt

from trimtab.errors import PartitionError
from trimtab.options import ScheduleName
from trimtab.specs import FloatArray, IntArray

FORWARD, BACKWARD, WEIGHT = 0, 1, 2

_SPLIT_BACKWARD = ("ZBH1", "ZBVZeroBubble")
_MAX_CHUNKS = {"Interleaved1F1B": None, "ZBVZeroBubble": 2}  # others: one


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockOrder:
    """Blocks of each device in the order it runs them: three (P, n) arrays, n = 2 V M, or 3 V M with split backwards.

    The k-th forward of a stage is micro-batch k, and so are its k-th backward and its k-th weight block.
    """

    stage: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]  # FORWARD, BACKWARD (with split backwards: only of the inputs), WEIGHT
    device: IntArray  # (S,) that runs each stage


def splits_backward(schedule: ScheduleName) -> bool:
    """Return whether the schedule runs gradients of inputs and of weights as blocks of their own."""
    return schedule in _SPLIT_BACKWARD


def device_of_stage(schedule: ScheduleName, stage: int, *, num_devices: int, num_chunks: int = 1) -> int:
    """The device that runs stage `stage` of num_devices x num_chunks.

    Stages go round the devices, s mod P; in ZBVZeroBubble they come back, 2 P - 1 - s from the P-th on, so that a
    device holds one of the first and one of the last stages.
    """
    assert 0 <= stage < num_devices * num_chunks
    if schedule == "ZBVZeroBubble" and stage >= num_devices:
        return 2 * num_devices - 1 - stage
    return stage % num_devices


def devices_of_stages(schedule: ScheduleName, *, num_devices: int, num_chunks: int = 1) -> IntArray:
    """Return (S,) `device_of_stage` of every stage."""
    shape = {"num_devices": num_devices, "num_chunks": num_chunks}
    return np.array([device_of_stage(schedule, s, **shape) for s in range(num_devices * num_chunks)], np.int64)


def microbatch_unit(schedule: str, num_devices: int) -> int:
    """Return the unit of a step's micro-batches: interleaved schedules take one for each device at a time."""
    return num_devices if schedule == "Interleaved1F1B" else 1


def check_schedule(schedule: str, *, num_devices: int, num_chunks: int, num_microbatches: int) -> None:
    """Raises `PartitionError` for a schedule that cannot run."""
    if schedule not in get_args(ScheduleName):
        raise PartitionError(
            f"schedule {schedule!r} is unknown: take {', '.join(get_args(ScheduleName))}",
        )
    # sizes, then what each schedule asks of chunks and micro-batches
    if num_devices < 1 or num_chunks < 1 or num_microbatches < 1:
        raise PartitionError(f"no pipeline has {num_devices} stages x {num_chunks} x {num_microbatches} micro-batches")
    if schedule not in _MAX_CHUNKS and num_chunks > 1:
        raise PartitionError(f"{schedule} runs num_chunks=1, not {num_chunks}: take Interleaved1F1B")
    if schedule == "ZBVZeroBubble" and num_chunks != 2:
        raise PartitionError(f"ZBVZeroBubble runs two chunks: give num_chunks=2, not {num_chunks}, or schedule='ZBH1'")
    if num_microbatches % microbatch_unit(schedule, num_devices):
        raise PartitionError(
            f"Interleaved1F1B needs a multiple of {num_devices} micro-batches, not {num_microbatches}: take "
            f"{_nearest_multiples(num_microbatches, num_devices)}, or schedule='1F1B'"
        )


def num_warmup(schedule: ScheduleName, *, device: int, num_devices: int, num_chunks: int, num_microbatches: int) -> int:
    """Count forward blocks of a device before its first backward, without the one forward that every backward follows.

    1F1B, ZBH1: P - d - 1 (PipeDream-Flush; Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1). Interleaved:
    2 (P - d - 1) + (V - 1) P (section 2.2.2, as Megatron-Core and torch's `ScheduleInterleaved1F1B` count). GPipe: all.
    ZBVZeroBubble has no such number: see `block_order`.
    """
    assert schedule != "ZBVZeroBubble"
    P, V, M = num_devices, num_chunks, num_microbatches
    if schedule == "GPipe":
        return M
    # an interleaved device runs ahead by a round trip, and by all chunks but its last
    ahead = 2 * (P - device - 1) + (V - 1) * P if schedule == "Interleaved1F1B" else P - device - 1
    return min(ahead, V * M)


@lru_cache(maxsize=256)
def block_order(schedule: ScheduleName, *, num_devices: int, num_chunks: int = 1, num_microbatches: int) -> BlockOrder:
    """The order in which each device runs its blocks: on each, that of torch 2.13's schedule of the same name.

    1F1B, Interleaved1F1B: after the warm-up forward and backward alternate; the k-th forward of a device belongs to
    chunk (k mod P V) div P, the k-th backward to chunk V - 1 - that. GPipe: all forwards, then the backwards in the
    forwards' order. ZBH1 (torch: `ScheduleInterleavedZeroBubble` with one stage a device): 1F1B whose W blocks device d
    starts d backwards late, so that every device holds P micro-batches, as the first one does in 1F1B. ZBVZeroBubble:
    Qi et al., section 6.
    """
    check_schedule(schedule, num_devices=num_devices, num_chunks=num_chunks, num_microbatches=num_microbatches)
    P, V, M = num_devices, num_chunks, num_microbatches
    # the k-th block of a kind on a chunk is micro-batch k
    own = _stages_of_devices(schedule, P, V)
    rows = []
    for device in range(P):
        sequence = _alternating(schedule, device, P, V, M) if schedule != "ZBVZeroBubble" else _zbv(device, P, M)
        done: dict[tuple[int, int], int] = defaultdict(int)
        blocks = []
        for chunk, what in sequence:
            microbatch = done[chunk, what]
            done[chunk, what] += 1
            if microbatch < M:  # ZBV is laid out for 2 P - 1 micro-batches at least
                blocks.append((own[device, chunk], microbatch, what))
        rows.append(np.array(blocks).T)
    stage, which, kind = np.stack(rows, axis=1)
    return BlockOrder(
        stage=stage.astype(np.int32),
        microbatch=which.astype(np.int32),
        kind=kind.astype(np.int8),
        device=devices_of_stages(schedule, num_devices=P, num_chunks=V),
    )


def _alternating(schedule: ScheduleName, device: int, P: int, V: int, M: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk, kind) of every block: forwards to warm up, then forward and backward by turns."""
    ahead = num_warmup(schedule, device=device, num_devices=P, num_chunks=V, num_microbatches=M)
    # V = 1 needs no rounds, and M may then be any number
    chunk = [k % (P * V) // P if V > 1 else 0 for k in range(V * M)]
    yield from ((c, FORWARD) for c in chunk[:ahead])
    for k in range(V * M):
        if k + ahead < V * M:
            yield chunk[k + ahead], FORWARD
        yield V - 1 - chunk[k], BACKWARD
        if schedule == "ZBH1" and k >= device:
            yield 0, WEIGHT
    if schedule == "ZBH1":
        yield from [(0, WEIGHT)] * min(device, M)


def _zbv(device: int, P: int, M: int) -> Iterator[tuple[int, int]]:
    """Yield (chunk, kind) of blocks for max(M, 2 P - 1) micro-batches; chunk 0 on the way down, 1 on the way up."""
    # laid out for as many as fill both ways; blocks of micro-batches that are not there are left out
    N = max(M, 2 * P - 1)
    down, up = ([(chunk, BACKWARD), (chunk, WEIGHT)] for chunk in (0, 1))
    yield from [(0, FORWARD)] * (2 * (P - device) - 1)
    yield from [(1, FORWARD), (0, FORWARD)] * device
    yield from [(1, FORWARD), *up] * (P - device)
    ahead = N - (2 * P - 1 - device)  # forwards that chunk 0 has not run
    yield from [(0, FORWARD), *down, (1, FORWARD), *up] * ahead
    yield from [*down, (1, FORWARD), *up] * (N - P - ahead)
    yield from [(0, BACKWARD), (1, BACKWARD)] * device
    yield from down * (P - device)
    yield from [(1, WEIGHT)] * device
    yield from [(0, WEIGHT)] * device


# -- what is held ---------------------------------------------------------------------------------------------------


def peak_in_flight(schedule: ScheduleName, *, num_devices: int, num_chunks: int = 1, num_microbatches: int) -> IntArray:
    """Return (S,) the most micro-batches of which a stage holds something at once: from forward to backward, or to W.

    1F1B: min(P - s, M). GPipe: M. ZBH1: min(P, M). Others: counted along `block_order`; the chunks of one device peak
    at different moments, so their sum may exceed the device's own peak (see `peak_saved_bytes`).
    """
    P, V, M = num_devices, num_chunks, num_microbatches
    if schedule == "1F1B":
        return np.minimum(P - np.arange(P), M).astype(np.int64)
    if schedule == "GPipe":
        return np.full(P, M, np.int64)
    return _per_stage(schedule, P, V, M, lambda held: held.sum(axis=0))


def peak_pending(schedule: ScheduleName, *, num_devices: int, num_chunks: int = 1, num_microbatches: int) -> IntArray:
    """Return (S,) the most micro-batches at once that a stage has begun to run B for, W not being done; 0 without W."""
    P, V, M = num_devices, num_chunks, num_microbatches
    if not splits_backward(schedule):
        return np.zeros(P * V, np.int64)
    return _per_stage(schedule, P, V, M, lambda held: held[1])


def peak_saved_bytes(
    saved_bytes: FloatArray,
    schedule: ScheduleName,
    *,
    num_devices: int,
    num_chunks: int = 1,
    num_microbatches: int,
    pending_bytes: FloatArray | None = None,
) -> FloatArray:
    """Return (P,) the most activation bytes a device holds at once.

    Stage s holds `saved_bytes[s]` for a micro-batch from its forward to its backward and, where W comes apart from B,
    `pending_bytes[s]` (None: the same) from B's start to W's end: what was computed again for B is there until W has
    used it. Not counted: the gradients that B leaves for W, nor what only B needed and could free.
    """
    P, V, M = num_devices, num_chunks, num_microbatches
    saved = np.asarray(saved_bytes, np.float64)
    # one chunk peaks when most micro-batches are in flight; chunks of one device peak at different moments
    if V == 1 and not splits_backward(schedule):
        return np.asarray(peak_in_flight(schedule, num_devices=P, num_microbatches=M) * saved, np.float64)
    pending = saved if pending_bytes is None else np.asarray(pending_bytes, np.float64)
    own = _stages_of_devices(schedule, P, V)
    peaks = np.empty(P)
    for device in range(P):
        waiting, begun = _held(schedule, P, V, M, device)
        peaks[device] = (waiting @ saved[own[device]] + begun @ pending[own[device]]).max()
    return peaks


def _per_stage(schedule: ScheduleName, P: int, V: int, M: int, count: Callable[[IntArray], IntArray]) -> IntArray:
    result = np.empty(P * V, np.int64)
    for device, stages in enumerate(_stages_of_devices(schedule, P, V)):
        result[stages] = count(_held(schedule, P, V, M, device)).max(axis=0)
    return result


@lru_cache(maxsize=256)
def _stages_of_devices(schedule: ScheduleName, P: int, V: int) -> IntArray:
    """Return (P, V) the stages of each device, first chunk first."""
    return np.argsort(devices_of_stages(schedule, num_devices=P, num_chunks=V), kind="stable").reshape(P, V)


@lru_cache(maxsize=1024)
def _held(schedule: ScheduleName, P: int, V: int, M: int, device: int) -> IntArray:
    """Count (2, n, V) micro-batches held in each chunk once each block of the device has begun, or, if it frees, ended.

    [0]: forward run, backward not begun (not ended, where it is whole). [1]: B begun, W not ended.
    """
    order = block_order(schedule, num_devices=P, num_chunks=V, num_microbatches=M)
    kind = order.kind[device]
    chunk = np.searchsorted(_stages_of_devices(schedule, P, V)[device], order.stage[device])
    # one more when a block begins to hold, one less when it frees
    step = np.zeros((2, len(kind), V), np.int64)
    at = np.arange(len(kind))
    step[0, at, chunk] = np.select([kind == FORWARD, kind == BACKWARD], [1, -1], 0)
    if splits_backward(schedule):
        step[1, at, chunk] = np.select([kind == BACKWARD, kind == WEIGHT], [1, -1], 0)
    held: IntArray = np.cumsum(step, axis=1)
    return held


def _nearest_multiples(value: int, base: int) -> str:
    below = value // base * base
    return f"{below} or {below + base}" if below else f"{base}"
