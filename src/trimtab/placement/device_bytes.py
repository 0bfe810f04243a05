"""What a set of layers takes of the device that holds or runs them; the same sums for our maps and for anyone's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.placement.bytes import InferenceTable
from trimtab.placement.chain import Unit
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
    """Bytes of each unit of a chain; sums over a unit's layers, but for the peaks, of which only one is live.

    A peak holds the weights of its layer too where they are copied to the device to run.
    """

    weights: IntArray  # 0 for a unit whose weights no GPU holds
    kv_prompt: IntArray
    kv_full: IntArray
    held: IntArray
    encode: IntArray  # peak of layers in front of the decoder: no cache exists yet
    prefill: IntArray
    decode: IntArray
    touched: IntArray  # weight bytes read by all runs


def unit_table(
    table: InferenceTable, units: Sequence[Unit], spilled: Iterable[int] = (), on_cpu: Iterable[int] = ()
) -> UnitTable:
    """`spilled` layers have their weights copied in to run; those `on_cpu` run in host memory and take nothing."""
    gone, off = np.zeros(len(table.weights), dtype=bool), np.zeros(len(table.weights), dtype=bool)
    gone[list(spilled)] = True
    off[list(on_cpu)] = True
    streamed = np.where(gone, table.weights, 0)

    def total(column: IntArray) -> IntArray:
        kept = np.where(off, 0, column)
        return np.array([kept[list(u.layers)].sum() for u in units], dtype=np.int64)

    def largest(column: IntArray, runs: IntArray) -> IntArray:
        kept = np.where(off | (runs == 0), 0, column + streamed)
        return np.array([kept[list(u.layers)].max() for u in units], dtype=np.int64)

    return UnitTable(
        weights=total(np.where(gone, 0, table.weights)),
        kv_prompt=total(table.kv_prompt),
        kv_full=total(table.kv_full),
        held=total(table.held),
        encode=largest(table.prefill, 1 - table.cached),
        prefill=largest(table.prefill, table.cached),
        decode=largest(table.decode, table.cached),
        touched=total(table.touched),
    )


@dataclass(frozen=True, slots=True)
class _Phase:
    """A moment in which a device may be fullest."""

    kv_bytes: int
    activation_bytes: int
    streamed_bytes: int

    @property
    def live_bytes(self) -> int:
        return self.kv_bytes + self.activation_bytes + self.streamed_bytes


def device_bytes(table: InferenceTable, layers: Sequence[int], spilled: Iterable[int], context_bytes: int) -> Held:
    """Bytes of a device that runs `layers`, of which the `spilled` ones are copied in each time.

    Weights + max(held + encode peak, prompt KV + held + prefill peak, full KV + decode peak) + reserve. A peak is the
    most of any one layer, its weights included where they are copied in; the encode peak is that of tower and
    projector, which are through before the cache begins. The reserve is the context and 5 % of all but the weights that
    stay. Nothing for a device that runs nothing.
    """
    if not layers:
        return Held(weight_bytes=0, kv_bytes=0, activation_bytes=0, streamed_bytes=0, reserve_bytes=0)
    at, gone = list(layers), set(spilled)
    held, prompt, full = (int(column[at].sum()) for column in (table.held, table.kv_prompt, table.kv_full))
    phases: list[_Phase] = []
    for i in at:
        streamed = int(table.weights[i]) if i in gone else 0
        first = _Phase(prompt if table.cached[i] else 0, held + int(table.prefill[i]), streamed)
        phases += [first, _Phase(full, int(table.decode[i]), streamed)] if table.cached[i] else [first]
    phases += [_Phase(prompt, held, 0), _Phase(full, 0, 0)]
    peak = max(phases, key=lambda phase: phase.live_bytes)
    return Held(
        weight_bytes=sum(int(table.weights[i]) for i in at if i not in gone),
        kv_bytes=peak.kv_bytes,
        activation_bytes=peak.activation_bytes,
        streamed_bytes=peak.streamed_bytes,
        reserve_bytes=context_bytes + peak.live_bytes // ALLOCATOR_DIVISOR,
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

    held = sums(units.held)
    live = np.maximum(
        held + np.maximum(peaks(units.encode), sums(units.kv_prompt) + peaks(units.prefill)),
        sums(units.kv_full) + peaks(units.decode),
    )
    total = sums(units.weights) + live + live // ALLOCATOR_DIVISOR + context_bytes
    return np.where(np.triu(np.ones((n + 1, n + 1), dtype=bool), k=1), total, 0)
