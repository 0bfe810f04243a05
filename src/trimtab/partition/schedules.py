"""What each device runs in which order: 1F1B, GPipe, interleaved 1F1B; and how many micro-batches that keeps alive.

P devices, V chunks (virtual stages) a device, S = P V stages of which stage s runs on device s mod P, M micro-batches.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from trimtab.errors import PartitionError
from trimtab.specs import IntArray

ScheduleName = Literal["1F1B", "GPipe", "Interleaved1F1B"]
FORWARD, BACKWARD = 0, 1


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockOrder:
    """Blocks of each device in the order it runs them: three (P, 2 V M) arrays."""

    stage: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]  # FORWARD or BACKWARD


def check_schedule(schedule: str, *, num_devices: int, num_chunks: int, num_microbatches: int) -> None:
    """Raises `PartitionError` for a schedule that cannot run."""
    if schedule not in get_args(ScheduleName):
        raise PartitionError(
            f"schedule {schedule!r} is unknown: choose one of {', '.join(get_args(ScheduleName))}",
        )
    if num_devices < 1 or num_chunks < 1 or num_microbatches < 1:
        raise PartitionError(
            f"a pipeline of {num_devices} stages x {num_chunks} chunks x {num_microbatches} micro-batches is empty: "
            "give at least 1 of each"
        )
    if schedule != "Interleaved1F1B":
        if num_chunks > 1:
            raise PartitionError(
                f"{schedule} runs one chunk a device, {num_chunks} were asked for: "
                "give num_chunks=1 or schedule='Interleaved1F1B'"
            )
        return
    if num_microbatches % num_devices:
        raise PartitionError(
            f"Interleaved1F1B deals micro-batches in rounds of {num_devices}, one a pipeline device, and "
            f"{num_microbatches} is no multiple: take {_nearest_multiples(num_microbatches, num_devices)} of them, "
            "or schedule='1F1B'"
        )


def num_warmup(schedule: ScheduleName, *, device: int, num_devices: int, num_chunks: int, num_microbatches: int) -> int:
    """Forward blocks a device runs before its first backward, beside the one forward that every backward follows.

    1F1B: P - d - 1 (PipeDream-Flush; Narayanan et al. 2021, arXiv 2104.04473, section 2.2.1). Interleaved:
    2 (P - d - 1) + (V - 1) P (section 2.2.2, as Megatron-Core and torch's `ScheduleInterleaved1F1B` count). GPipe: all.
    """
    P, V, M = num_devices, num_chunks, num_microbatches
    if schedule == "GPipe":
        return M
    ahead = P - device - 1 if schedule == "1F1B" else 2 * (P - device - 1) + (V - 1) * P
    return min(ahead, V * M)


@lru_cache(maxsize=64)
def block_order(schedule: ScheduleName, *, num_devices: int, num_chunks: int = 1, num_microbatches: int) -> BlockOrder:
    """The order in which each device runs its blocks.

    The k-th forward of a device is micro-batch (k div PV) P + k mod P of chunk c = (k mod PV) div P; the k-th backward
    is the same micro-batch of chunk V - 1 - c; with V = 1 both are micro-batch k. After the warm-up forward and
    backward alternate. GPipe runs its backwards in the forwards' order, as torch's `ScheduleGPipe` does.
    """
    check_schedule(schedule, num_devices=num_devices, num_chunks=num_chunks, num_microbatches=num_microbatches)
    P, V, M = num_devices, num_chunks, num_microbatches
    k = np.arange(V * M)
    # V = 1 needs no rounds, and M may then be any number
    chunk, microbatch = (k % (P * V) // P, k // (P * V) * P + k % P) if V > 1 else (np.zeros_like(k), k)
    stage, which, kind = (
        np.empty((P, 2 * V * M), np.int32),
        np.empty((P, 2 * V * M), np.int32),
        np.empty((P, 2 * V * M), np.int8),
    )
    for device in range(P):
        W = num_warmup(schedule, device=device, num_devices=P, num_chunks=V, num_microbatches=M)
        # position of the k-th forward: k in the warm-up, then every second slot; the k-th backward fills the gaps
        forward_at = np.where(k < W, k, 2 * k - W)
        backward_at = np.where(k < V * M - W, W + 1 + 2 * k, V * M + k)
        for at, chunks, side in ((forward_at, chunk, FORWARD), (backward_at, V - 1 - chunk, BACKWARD)):
            stage[device, at], which[device, at], kind[device, at] = chunks * P + device, microbatch, side
    return BlockOrder(stage=stage, microbatch=which, kind=kind)


def peak_in_flight(schedule: ScheduleName, *, num_devices: int, num_chunks: int = 1, num_microbatches: int) -> IntArray:
    """(S,) the most micro-batches whose activations a stage holds at once.

    1F1B: min(P - s, M). GPipe: M. Interleaved: counted along `block_order`; the chunks of one device peak at different
    moments, so their sum may exceed the device's own peak of min(warm-up + 1, V M) (see `peak_saved_bytes`).
    """
    P, V, M = num_devices, num_chunks, num_microbatches
    if schedule == "1F1B":
        return np.minimum(P - np.arange(P), M).astype(np.int64)
    if schedule == "GPipe":
        return np.full(P, M, np.int64)
    return np.stack([_alive(schedule, P, V, M, device).max(axis=0) for device in range(P)], axis=1).reshape(-1)


def peak_saved_bytes(
    saved_bytes: npt.NDArray[np.float64],
    schedule: ScheduleName,
    *,
    num_devices: int,
    num_chunks: int = 1,
    num_microbatches: int,
) -> npt.NDArray[np.float64]:
    """(P,) the most activation bytes a device holds at once, when stage s keeps `saved_bytes[s]` per micro-batch."""
    P, V, M = num_devices, num_chunks, num_microbatches
    if V == 1:
        counts = peak_in_flight(schedule, num_devices=P, num_microbatches=M)
        return np.asarray(counts * saved_bytes, np.float64)
    peaks = [float((_alive(schedule, P, V, M, d) @ np.asarray(saved_bytes)[d::P]).max()) for d in range(P)]
    return np.array(peaks)


def _alive(schedule: ScheduleName, P: int, V: int, M: int, device: int) -> IntArray:
    """(2 V M, V): micro-batches alive in each chunk after each block of the device; a backward frees at its end."""
    order = block_order(schedule, num_devices=P, num_chunks=V, num_microbatches=M)
    step = np.zeros((2 * V * M, V), np.int64)
    step[np.arange(2 * V * M), order.stage[device] // P] = np.where(order.kind[device] == FORWARD, 1, -1)
    return np.cumsum(step, axis=0)


def _nearest_multiples(value: int, base: int) -> str:
    below = value // base * base
    return f"{below} or {below + base}" if below else f"{base}"
