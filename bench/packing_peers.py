"""Other packers beside ours: best fit decreasing (TRL), greedy knapsack, binpacking, Karmarkar-Karp (verl), ISF.

    python bench/packing_peers.py [--data ../shared/data] [--samples 100000]

Each peer is restated here from its published description, on lengths alone; all but ISF know only tokens. Packs run in
random order unless the method assigns ranks itself (Karmarkar-Karp). `over` is the share of packs above the patch
limit, `over t` above the token limit, `left` the samples of packs that do not fill a last row. CPU seconds of one
thread; ours are compiled, the peers are Python as theirs are.
"""

from __future__ import annotations

import argparse
import bisect
import heapq
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from lengths import DEFAULT_DATA, generate_native, read_mixture
from packing_real import NATIVE_COST
from trimtab.balance.bound import lower_bound_packs
from trimtab.balance.cost import TILE_COST, LinearCost
from trimtab.balance.metrics import dist_ratio, utilisation
from trimtab.balance.packing import pack_samples, warm_up
from trimtab.options import Order, PackMethod
from trimtab.specs import SampleTable

WINDOW = 1000  # samples the trainers' packers look at together (Datasets' map batch)
GLOBAL_BATCH = 1024  # samples Karmarkar-Karp divides among the ranks
Packs = list[list[int]]


def best_fit_decreasing(lengths: list[int], limit: int) -> Packs:
    """Longest first, each into the pack with the least room that holds it (TRL, `packing_strategy="bfd"`)."""
    rooms: list[tuple[int, int]] = []  # (room, pack), ascending
    packs: Packs = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        at = bisect.bisect_left(rooms, (lengths[i], -1))
        if at < len(rooms):
            room, p = rooms.pop(at)
        else:
            room, p = limit, len(packs)
            packs.append([])
        packs[p].append(i)
        bisect.insort(rooms, (room - lengths[i], p))
    return packs


def greedy_knapsack(lengths: list[int], limit: int) -> Packs:
    """Fill one pack at a time, always with the longest sample that still fits (LLaMA-Factory)."""
    left = sorted((length, i) for i, length in enumerate(lengths))
    packs: Packs = []
    while left:
        room, pack = limit, []
        while left and (at := bisect.bisect_right(left, (room, len(lengths)))) > 0:
            length, i = left.pop(at - 1)
            room -= length
            pack.append(i)
        packs.append(pack)
    return packs


def constant_volume(lengths: list[int], limit: int) -> Packs:
    """Longest first, each into the fullest pack that holds it, a new one if none does (`binpacking`, ms-swift).

    `binpacking` looks for the pack with the largest sum that has room: what best fit does with a linear search.
    """
    sums: list[int] = []
    packs: Packs = []
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        best = -1
        for p, total in enumerate(sums):
            if total + lengths[i] <= limit and (best < 0 or total > sums[best]):
                best = p
        if best < 0:
            best = len(sums)
            sums.append(0)
            packs.append([])
        sums[best] += lengths[i]
        packs[best].append(i)
    return packs


def karmarkar_karp(work: list[float], num_parts: int) -> Packs:
    """Largest differencing method (Karmarkar & Karp 1982) for k parts of about equal sums.

    Of all partial partitions the two with the largest spread are merged, largest parts onto smallest.
    """
    heap = [(-w, n, [(w, [i])]) for n, (i, w) in enumerate(enumerate(work))]
    heapq.heapify(heap)
    number = len(heap)
    while len(heap) > 1:
        _, _, a = heapq.heappop(heap)
        _, _, b = heapq.heappop(heap)
        a = a + [(0.0, [])] * (num_parts - len(a)) if len(a) < num_parts else a
        b = b + [(0.0, [])] * (num_parts - len(b)) if len(b) < num_parts else b
        merged = sorted(((x[0] + y[0], x[1] + y[1]) for x, y in zip(a, reversed(b), strict=True)), key=lambda x: -x[0])
        heapq.heappush(heap, (merged[-1][0] - merged[0][0], number, merged))
        number += 1
    return [items for _, items in heap[0][2]]


def in_windows(pack: Callable[[list[int], int], Packs], lengths: np.ndarray, limit: int, dp: int) -> np.ndarray:
    """Packs of windows of the shuffle, as rows of dp in random order: (rows, dp) of lists; the rest is left."""
    order = np.random.default_rng(0).permutation(len(lengths))
    packs: Packs = []
    for first in range(0, len(order), WINDOW):
        part = order[first : first + WINDOW]
        packs += [part[p].tolist() for p in pack(lengths[part].tolist(), limit)]
    return as_rows([packs[i] for i in np.random.default_rng(1).permutation(len(packs))], dp)


def by_global_batch(lengths: np.ndarray, limit: int, dp: int) -> np.ndarray:
    """Karmarkar-Karp as verl uses it: a global batch to the ranks, then each rank's part to micro-batches.

    Work of a sample is 24576 s + s^2; a rank makes ceil(sum / limit) micro-batches, all ranks as many as the most.
    """
    order = np.random.default_rng(0).permutation(len(lengths))
    rows: Packs = []
    for first in range(0, len(order) - GLOBAL_BATCH + 1, GLOBAL_BATCH):
        part = order[first : first + GLOBAL_BATCH]
        s = lengths[part].astype(float)
        work = 24576.0 * s + s * s
        ranks = [np.array(p) for p in karmarkar_karp(work.tolist(), dp)]
        micro = max(int(np.ceil(s[p].sum() / limit)) for p in ranks)
        split = [karmarkar_karp(work[p].tolist(), micro) for p in ranks]
        for m in range(micro):
            rows += [part[ranks[r][split[r][m]]].tolist() for r in range(dp)]
    return as_rows(rows, dp)


def as_rows(packs: Packs, dp: int) -> np.ndarray:
    whole = len(packs) // dp
    rows = np.empty((whole, dp), object)
    for i in range(whole * dp):
        rows[i // dp, i % dp] = packs[i]
    return rows


def our_rows(
    table: SampleTable, limits: tuple[int, int], dp: int, cost: np.ndarray, method: PackMethod, order: Order
) -> np.ndarray:
    result = pack_samples(table, limits=limits, dp=dp, cost=cost, method=method, order=order)
    parts = np.split(result.packing.indices, result.packing.offsets[1:-1])
    slots = result.schedule.table.transpose(0, 2, 1).reshape(-1)
    return as_rows([parts[p].tolist() for p in slots[slots >= 0]], dp)


def show(name: str, rows: np.ndarray, table: SampleTable, cost: np.ndarray, limits: tuple[int, int], s: float) -> None:
    flat = rows.reshape(-1)
    members = np.concatenate([np.array(pack, np.int64) for pack in flat])
    starts = np.concatenate([[0], np.cumsum([len(pack) for pack in flat])[:-1]])

    def sums(column: np.ndarray) -> np.ndarray:
        return np.add.reduceat(column[members].astype(float), starts).reshape(rows.shape)

    v, t, c = sums(table.num_patches), sums(table.num_tokens), sums(cost)
    sizes = np.stack([table.num_patches, table.num_tokens], axis=1)
    left = len(table) - len(members)
    print(
        f"| {name} | {rows.size / lower_bound_packs(sizes, limits):.4f} | {dist_ratio(v):.4f} / {dist_ratio(t):.4f} / "
        f"{dist_ratio(c):.4f} | {utilisation(c, c):.3f} | {v.mean() / limits[0]:.3f} / {t.mean() / limits[1]:.3f} | "
        f"{(v > limits[0]).mean():.3f} | {(t > limits[1]).mean():.3f} | {left} | {s:.2f} |",
        flush=True,
    )


def select(table: SampleTable, rows: np.ndarray) -> SampleTable:
    names = ("num_images", "num_patches", "num_tokens", "patches_sq", "patches_windowed", "source")
    columns = {name: getattr(table, name)[rows] for name in names}
    return SampleTable(**columns, source_names=table.source_names, patch_unit=table.patch_unit)


def compare(table: SampleTable, limits: tuple[int, int], weights: LinearCost, dp: int) -> None:
    print("| method | packs / bound | vit / llm / cost | util | fill v / t | over v | over t | left | s |")
    print("|---|---|---|---|---|---|---|---|---|")
    cost, lengths, limit = weights.of_samples(table), table.num_tokens, limits[1]
    runs: list[tuple[str, Callable[[], np.ndarray]]] = [
        ("best fit decreasing", lambda: in_windows(best_fit_decreasing, lengths, limit, dp)),
        ("greedy knapsack", lambda: in_windows(greedy_knapsack, lengths, limit, dp)),
        ("binpacking", lambda: in_windows(constant_volume, lengths, limit, dp)),
        ("Karmarkar-Karp", lambda: by_global_batch(lengths, limit, dp)),
        ("isf", lambda: our_rows(table, limits, dp, cost, "isf", "random")),
        ("**balanced, random**", lambda: our_rows(table, limits, dp, cost, "balanced", "random")),
        ("**balanced, tolerance**", lambda: our_rows(table, limits, dp, cost, "balanced", "tolerance")),
        ("**balanced, sorted**", lambda: our_rows(table, limits, dp, cost, "balanced", "sorted")),
    ]
    for method, run in runs:
        start = time.process_time()
        rows = run()
        show(method, rows, table, cost, limits, time.process_time() - start)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument(
        "--samples", type=int, default=100_000, help="drawn at random from each set: the peers are slow"
    )
    arguments = parser.parse_args()
    warm_up()
    cases = (
        ("mixture", read_mixture(arguments.data), (9, 4096), TILE_COST),
        ("native (generated)", generate_native(200_000), (41_920, 16_384), NATIVE_COST),
    )
    for name, whole, limits, weights in cases:
        if whole is None:
            print(f"{name}: its file is not in {arguments.data}; name another folder with --data")
            continue
        fits = np.flatnonzero((whole.num_patches <= limits[0]) & (whole.num_tokens <= limits[1]))
        drawn = np.sort(np.random.default_rng(2).permutation(fits)[: arguments.samples])
        table = select(whole, drawn)
        print(f"\n{name}: {len(table):,} samples, limits {limits}, dp {arguments.dp}\n")
        compare(table, limits, weights, arguments.dp)


if __name__ == "__main__":
    main()
