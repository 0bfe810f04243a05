"""What a set of layers takes of the device that holds or runs them; the same sums for our maps and for anyone's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.costs.inference import InferenceTable
from trimtab.partition.chain import Unit
from trimtab.specs import IntArray

ALLOCATOR_DIVISOR = 20  # 5 % of what comes and goes: blocks that the caching allocator keeps and cannot hand out again


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Bytes of one device at its peak."""

    weight_bytes: int
    kv_bytes: int
    activation_bytes: int
    streamed_bytes: int
    reserve_bytes: int

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.streamed_bytes + self.reserve_bytes


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class UnitTable:
    """Bytes of each unit of a chain; sums over a unit's layers, but for the peaks, of which only one is live."""

    weights: IntArray  # 0 for a unit whose weights no GPU holds
    kv_prompt: IntArray
    kv_full: IntArray
    held: IntArray
    prefill: IntArray
    decode: IntArray
    streamed: IntArray  # weights copied to the device to run, 0 for a unit that it holds
    touched: IntArray  # weight bytes read by all runs


def unit_table(
    table: InferenceTable, units: Sequence[Unit], spilled: Iterable[int] = (), on_cpu: Iterable[int] = ()
) -> UnitTable:
    """`spilled` layers have their weights copied in to run; those `on_cpu` run in host memory and take nothing."""
    gone, off = np.zeros(len(table.weights), dtype=bool), np.zeros(len(table.weights), dtype=bool)
    gone[list(spilled)] = True
    off[list(on_cpu)] = True
    resident, streamed = np.where(gone | off, 0, table.weights), np.where(gone & ~off, table.weights, 0)

    def total(column: IntArray) -> IntArray:
        kept = np.where(off, 0, column)
        return np.array([kept[list(u.layers)].sum() for u in units], dtype=np.int64)

    def largest(column: IntArray) -> IntArray:
        kept = np.where(off, 0, column)
        return np.array([kept[list(u.layers)].max() for u in units], dtype=np.int64)

    return UnitTable(
        weights=total(resident),
        kv_prompt=total(table.kv_prompt),
        kv_full=total(table.kv_full),
        held=total(table.held),
        prefill=largest(table.prefill),
        decode=largest(table.decode),
        streamed=largest(streamed),
        touched=total(table.touched),
    )


def device_bytes(table: InferenceTable, layers: Sequence[int], spilled: Iterable[int], context_bytes: int) -> Held:
    """Bytes of a device that runs `layers`, of which the `spilled` ones are copied in each time.

    Weights + max(prompt KV + held + prefill peak, full KV + decode peak) + largest streamed layer + reserve; the
    reserve is the context and 5 % of KV cache and activations. Nothing for a device that runs nothing.
    """
    if not layers:
        return Held(weight_bytes=0, kv_bytes=0, activation_bytes=0, streamed_bytes=0, reserve_bytes=0)
    at, gone = list(layers), set(spilled)
    weights = sum(int(table.weights[i]) for i in at if i not in gone)
    streamed = max((int(table.weights[i]) for i in at if i in gone), default=0)
    prompt = int(table.kv_prompt[at].sum())
    first = prompt + int(table.held[at].sum()) + int(table.prefill[at].max())
    full = int(table.kv_full[at].sum())
    last = full + int(table.decode[at].max())
    kv, live = (prompt, first) if first >= last else (full, last)
    return Held(
        weight_bytes=weights,
        kv_bytes=kv,
        activation_bytes=live - kv,
        streamed_bytes=streamed,
        reserve_bytes=context_bytes + live // ALLOCATOR_DIVISOR,
    )


def run_bytes(units: UnitTable, context_bytes: int) -> IntArray:
    """(n + 1, n + 1): bytes of a device that runs units s <= i < e at [s, e], as `device_bytes` has it; 0 if s >= e."""
    n = len(units.weights)

    def sums(column: IntArray) -> IntArray:
        before = np.concatenate([[0], np.cumsum(column)])
        return np.asarray(before[None, :] - before[:, None], dtype=np.int64)

    def peaks(column: IntArray) -> IntArray:
        found = np.zeros((n + 1, n + 1), dtype=np.int64)
        for start in range(n):
            found[start, start + 1 :] = np.maximum.accumulate(column[start:])
        return found

    live = np.maximum(
        sums(units.kv_prompt) + sums(units.held) + peaks(units.prefill), sums(units.kv_full) + peaks(units.decode)
    )
    total = sums(units.weights) + live + live // ALLOCATOR_DIVISOR + peaks(units.streamed) + context_bytes
    return np.where(np.triu(np.ones((n + 1, n + 1), dtype=bool), k=1), total, 0)
