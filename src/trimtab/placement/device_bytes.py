"""What a set of layers takes of the device that holds or runs them; the same sums for our maps and for anyone's."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.placement.bytes import InferenceTable
from trimtab.placement.chain import Unit
from trimtab.specs import IntArray

ALLOCATOR_DIVISOR = 20  # 5 % of what comes and goes: blocks that the caching allocator keeps and cannot hand out again

DeviceKey = int | str  # a GPU's number, "cpu" or "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What one device holds, and how much of it is taken at the peak."""

    device: DeviceKey
    capacity_bytes: int | None = None  # None: a disk is not counted
    weight_bytes: int = 0
    kv_bytes: int = 0  # cache when the peak comes: none yet, of the prompts, or of everything at the last new token
    activation_bytes: int = 0  # live beside it at that moment
    streamed_bytes: int = 0  # weights of the layer that runs at that moment, where they are copied here to run
    reserve_bytes: int = 0  # CUDA context and the allocator's slack; 0 where nothing runs
    modules: tuple[str, ...] = ()  # whose weights it holds

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.streamed_bytes + self.reserve_bytes

    @property
    def fraction(self) -> float:
        """Share of the capacity in use: above 1 it does not fit; 0 for an empty device and for a disk."""
        if self.capacity_bytes is None or self.total_bytes == 0:
            return 0.0
        return self.total_bytes / self.capacity_bytes if self.capacity_bytes else float("inf")


def device_bytes(
    table: InferenceTable,
    layers: Sequence[int],
    spilled: Collection[int],
    context_bytes: int,
    *,
    device: DeviceKey = 0,
    capacity_bytes: int | None = None,
    modules: tuple[str, ...] = (),
) -> DeviceUse:
    """Bytes of a device that runs `layers`, of which the `spilled` ones are copied in each time.

    Weights + max(held + encode peak, prompt KV + held + prefill peak, full KV + decode peak) + reserve. A peak is the
    most of any one layer, its weights included where they are copied in; the encode peak is that of tower and
    projector, which are through before the cache begins. The reserve is the context and 5 % of all but the weights that
    stay. Nothing for a device that runs nothing.
    """
    if not layers:
        return DeviceUse(device=device, capacity_bytes=capacity_bytes)
    at = list(layers)
    held, prompt, full = (int(column[at].sum()) for column in (table.held, table.kv_prompt, table.kv_full))
    moments: list[tuple[int, int, int]] = []  # KV cache, activations, weights copied in
    for i in at:
        streamed = int(table.weights[i]) if i in spilled else 0
        moments.append((prompt if table.cached[i] else 0, held + int(table.prefill[i]), streamed))
        if table.cached[i]:
            moments.append((full, int(table.decode[i]), streamed))
    peak = max([*moments, (prompt, held, 0), (full, 0, 0)], key=sum)
    return DeviceUse(
        device=device,
        capacity_bytes=capacity_bytes,
        weight_bytes=sum(int(table.weights[i]) for i in at if i not in spilled),
        kv_bytes=peak[0],
        activation_bytes=peak[1],
        streamed_bytes=peak[2],
        reserve_bytes=context_bytes + sum(peak) // ALLOCATOR_DIVISOR,
        modules=modules,
    )


def run_bytes(
    table: InferenceTable,
    units: Sequence[Unit],
    context_bytes: int,
    *,
    spilled: Collection[int] = (),
    on_cpu: Collection[int] = (),
) -> IntArray:
    """(n + 1, n + 1): bytes of a device that runs units s <= i < e at [s, e], as `device_bytes` has it; 0 if s >= e.

    `spilled` layers have their weights copied in to run; those `on_cpu` run in host memory and take nothing.
    """
    n = len(units)
    order = [i for unit in units for i in unit.layers]
    first = np.cumsum([0, *(len(unit.layers) for unit in units[:-1])])  # of each unit, in that order
    off = np.isin(np.arange(len(table.weights)), list(on_cpu))
    gone = np.isin(np.arange(len(table.weights)), list(spilled))
    streamed = np.where(gone, table.weights, 0)

    def sums(column: IntArray) -> IntArray:
        of_unit = np.add.reduceat(np.where(off, 0, column)[order], first)
        before = np.concatenate([[0], np.cumsum(of_unit)])
        return np.asarray(before[None, :] - before[:, None], dtype=np.int64)

    def peaks(column: IntArray, runs: IntArray) -> IntArray:
        """Only one layer's peak is live at a time; those that do not run have none."""
        of_unit = np.maximum.reduceat(np.where(off | (runs == 0), 0, column + streamed)[order], first)
        found = np.zeros((n + 1, n + 1), dtype=np.int64)
        for start in range(n):
            found[start, start + 1 :] = np.maximum.accumulate(of_unit[start:])
        return found

    live = np.maximum(
        sums(table.held)
        + np.maximum(
            peaks(table.prefill, 1 - table.cached), sums(table.kv_prompt) + peaks(table.prefill, table.cached)
        ),
        sums(table.kv_full) + peaks(table.decode, table.cached),
    )
    total = sums(np.where(gone, 0, table.weights)) + live + live // ALLOCATOR_DIVISOR + context_bytes
    return np.where(np.triu(np.ones((n + 1, n + 1), dtype=bool), k=1), total, 0)
