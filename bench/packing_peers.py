"""Our packs and steps and those of others, all figures of the packer in one run; each peer by its published rule.

    python bench/packing_peers.py [--data ../shared/data] [--part packs|orders|steps|online|scale|hunt]

packs      two limits: `balanced`, two-column best fit decreasing (windows of 4,096 samples), ISF (OmniBal).
orders     the data sets in the orders of `balanced`, with what the order costs in randomness (chi2 per step).
steps      N given samples among the ranks: Karmarkar-Karp (verl), longest first to the least loaded rank (greedy
           knapsack), packs filled in the order of arrival (Megatron's dp-balanced scheduler, lmms-engine).
online     `OnlineBalancer` on 64 ranks, 32 samples each, whose towers run at half the rate that multiply-adds expect.
scale      --samples drawn into mapped int32 columns: CPU seconds and resident memory.
hunt       --shapes of data drawn at random, against two-column best fit and ISF: the worst ratios, and where they are.

"rows" is the time of all rows, each as long as its most expensive pack, over that of rows without waiting. CPU seconds
of one thread, compiled loops warm.
"""

import argparse
import heapq
import resource
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
from numba import njit

from lengths import (
    DEFAULT_DATA,
    NATIVE_COST,
    SHAPES,
    draw_lengths,
    draw_shape,
    generate_native,
    read_mixture,
    read_real,
)
from trimtab.balance.cost import PATCH_COST, TILE_COST, LinearCost
from trimtab.balance.metrics import lower_bound_packs
from trimtab.balance.packing import pack_samples, report_packing, warm_up
from trimtab.balance.step import share_step
from trimtab.specs import SampleTable

WINDOW = 4096  # samples that two-column best fit looks at together


@njit(cache=True)
def _best_fit(sizes, limits, order):  # type: ignore[no-untyped-def]
    rest = np.empty((len(order), 2))
    pack_of = np.empty(len(order), np.int64)
    num_packs = 0
    for i in order:
        best, least = -1, np.inf
        for p in range(num_packs):
            a, b = rest[p, 0] - sizes[i, 0], rest[p, 1] - sizes[i, 1]
            if a >= 0 and b >= 0 and a / limits[0] + b / limits[1] < least:
                best, least = p, a / limits[0] + b / limits[1]
        if best < 0:
            best = num_packs
            num_packs += 1
            rest[best] = limits
        pack_of[i] = best
        rest[best] -= sizes[i]
    return pack_of, num_packs


def best_fit_two_columns(sizes: np.ndarray, limits: tuple[int, int], seed: int = 0) -> tuple[np.ndarray, int]:
    """Pack of each sample, and their number: the larger share of the limits first, to the pack with the least rest."""
    order = np.random.default_rng(seed).permutation(len(sizes))
    pack_of, num_packs = np.empty(len(sizes), np.int64), 0
    for first in range(0, len(sizes), WINDOW):
        rows = order[first : first + WINDOW]
        own = sizes[rows].astype(float)
        largest_first = np.argsort(-(own / limits).max(axis=1), kind="stable")
        packs, count = _best_fit(own, np.array(limits, float), largest_first)
        pack_of[rows] = packs + num_packs
        num_packs += count
    return pack_of, num_packs


def row_time(cost: np.ndarray, dp: int, *, order: str = "given") -> float:
    """Sum over rows of the largest cost: rows of dp packs as they are given, in random order, or sorted by cost."""
    if order == "random":
        cost = cost[np.random.default_rng(0).permutation(len(cost))]
    empty = np.zeros(-len(cost) % dp)
    padded = np.concatenate([empty, np.sort(cost)]) if order == "sorted" else np.concatenate([cost, empty])
    return float(padded.reshape(-1, dp).max(axis=1).sum())


def show_packs(arguments: argparse.Namespace) -> None:
    print(
        "| case | dp | samples a pack | packs over the bound: ours, best fit, ISF | rows, random order | rows, sorted |"
    )
    print("|---|---|---|---|---|---|")
    for name, table, limits, weights, dp in two_limit_cases(arguments.data):
        sizes, cost = np.stack([table.num_patches, table.num_tokens], axis=1), weights.of_samples(table)
        bound = lower_bound_packs(sizes, limits)
        found, seconds = [], []
        for method in ("balanced", "best fit", "isf"):
            start = time.process_time()
            if method == "best fit":
                found.append(np.bincount(best_fit_two_columns(sizes, limits)[0], cost))
            else:
                packed = pack_samples(table, limits=limits, dp=dp, cost=cost, method=method)
                found.append(packed.packing.sums(cost))
            seconds.append(time.process_time() - start)
        over = ", ".join(f"{len(packs) / bound:.4f}" for packs in found)
        alike = pack_samples(table, limits=limits, dp=dp, cost=cost, order="sorted").packing.sums(cost)
        times = [
            ", ".join(f"{seconds * dp / cost.sum():.4f}" for seconds in of)
            for of in (
                [row_time(found[0], dp), *(row_time(packs, dp, order="random") for packs in found[1:])],
                [row_time(alike, dp), *(row_time(packs, dp, order="sorted") for packs in found[1:])],
            )
        ]
        spent = ", ".join(f"{s:.2f}" for s in seconds)
        each = len(table) / len(found[0])
        print(f"| {name} | {dp} | {each:.2f} | {over} | {times[0]} | {times[1]} | {spent} s", flush=True)


def two_limit_cases(data: Path) -> list[tuple[str, SampleTable, tuple[int, int], LinearCost, int]]:
    """The cases in which packers differ most: few samples a pack, columns that do not move together, whole rows."""
    cases: list[tuple[str, SampleTable, tuple[int, int], LinearCost, int]] = []
    uniform = draw_shape("uniform", 8000, (16_380, 8_192))
    for share in (1.0, 1.5, 2.0):
        limits = (int(16_380 * share), int(8_192 * share))
        cases.append((f"independent, limits x {share}", uniform, limits, PATCH_COST, 8))
    for kind, dp in (("correlated", 8), ("log-normal", 8), ("opposed", 64)):
        cases.append((kind, draw_shape(kind, 8000, (16_380, 8_192)), (16_380, 8_192), PATCH_COST, dp))
    r = np.random.default_rng(0)
    tiles = SampleTable.of(r.integers(3, 10, 8000), r.integers(800, 4097, 8000), patch_unit="tiles")
    cases.append(("3 to 9 of 9 tiles", tiles, (9, 4096), TILE_COST, 64))
    cases.append(("all equal", SampleTable.of(np.full(8000, 3), np.full(8000, 700)), (9, 4096), TILE_COST, 8))
    real = read_real(data) or draw_lengths("real")
    for limits in ((18, 6016), (9, 4096)):
        cases += [(f"three real sets, {limits}", real, limits, TILE_COST, dp) for dp in (8, 64, 256, 1024)]
    cases.append(("mixture", read_mixture(data) or draw_lengths("mixture"), (9, 4096), TILE_COST, 8))
    return cases


def show_orders(arguments: argparse.Namespace) -> None:
    print("| data | method, order | packs over the bound | vit / llm / cost | utilisation | chi2 | s |")
    print("|---|---|---|---|---|---|---|")
    for name, table, limits, weights in data_sets(arguments.data):
        for method, order in (
            *(("random", "random"), ("length_group", "random"), ("device_group", "random"), ("isf", "random")),
            *(("balanced", "random"), ("balanced", "sorted")),
        ):
            start = time.process_time()
            packed = pack_samples(table, limits=limits, dp=8, cost=weights, method=method, order=order, oversize="skip")
            seconds = time.process_time() - start
            r = report_packing(table, packed, cost=weights)
            ratios = f"{r.dist_ratio_vit:.4f} / {r.dist_ratio_llm:.4f} / {r.dist_ratio_cost:.4f}"
            figures = (
                f"{r.packs_over_bound:.4f} | {ratios} | {r.utilisation:.4f} | {r.shuffle_chi2:.3f} | {seconds:.2f}"
            )
            print(f"| {name} | {method}, {order} | {figures} |", flush=True)


def data_sets(data: Path) -> list[tuple[str, SampleTable, tuple[int, int], LinearCost]]:
    return [
        ("three real sets", read_real(data) or draw_lengths("real"), (18, 6016), TILE_COST),
        ("mixture", read_mixture(data) or draw_lengths("mixture"), (9, 4096), TILE_COST),
        ("native (generated)", generate_native(200_000), (41_920, 16_384), NATIVE_COST),
    ]


def karmarkar_karp(work: np.ndarray, num_ranks: int, *, equal_size: bool) -> float:
    """Largest rank by the largest differencing method (Karmarkar & Karp 1982), of as many samples each where asked."""
    largest_first = np.sort(work)[::-1]
    if equal_size:
        parts = [np.sort(part)[::-1] for part in largest_first.reshape(-1, num_ranks)]
    else:
        parts = [np.concatenate([[w], np.zeros(num_ranks - 1)]) for w in largest_first]
    heap = [(-(part[0] - part[-1]), n, part) for n, part in enumerate(parts)]
    heapq.heapify(heap)
    for number in range(len(parts), 2 * len(parts) - 1):
        a, b = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = np.sort(a + b[::-1])[::-1]
        heapq.heappush(heap, (-(merged[0] - merged[-1]), number, merged))
    return float(heap[0][2][0])


def least_loaded(work: np.ndarray, num_ranks: int) -> float:
    """Longest first, each to the rank with the least so far."""
    ranks = [0.0] * num_ranks
    for w in np.sort(work)[::-1].tolist():
        heapq.heapreplace(ranks, ranks[0] + w)
    return max(ranks)


def in_order(work: np.ndarray, num_ranks: int) -> float:
    """Packs filled to the mean rank in the order of arrival, the longest split until each rank has equally many."""
    packs: list[list[float]] = [[]]
    for w in work.tolist():
        if packs[-1] and sum(packs[-1]) + w > work.sum() / num_ranks:
            packs.append([])
        packs[-1].append(w)
    while len(packs) % num_ranks:
        at = max(range(len(packs)), key=lambda p: len(packs[p]))
        packs[at : at + 1] = [packs[at][:-1], packs[at][-1:]]
    sums = np.array([sum(pack) for pack in packs])
    return float(sums.reshape(-1, num_ranks).sum(axis=0).max())


STEP_PEERS: dict[str, Callable[[np.ndarray, int], float]] = {
    "Karmarkar-Karp": lambda work, dp: karmarkar_karp(work, dp, equal_size=False),
    "the same, equal numbers": lambda work, dp: karmarkar_karp(work, dp, equal_size=True),
    "least loaded": least_loaded,
    "in order": in_order,
}


def streams(data: Path) -> list[tuple[str, SampleTable, tuple[int, int], LinearCost]]:
    drawn = draw_shape("log-normal", 100_000, (10**6, 10**6))
    return [*data_sets(data), ("log-normal", drawn, (1, 1), PATCH_COST)]


def show_steps(arguments: argparse.Namespace) -> None:
    print(
        f"| data | dp | a rank | slowest over mean: ours, {', '.join(STEP_PEERS)}, bound | ms |\n|---|---|---|---|---|"
    )
    worst, cells = 0.0, 0
    for name, table, _, weights in streams(arguments.data):
        cost, sizes = weights.of_samples(table), np.stack([table.num_patches, table.num_tokens], axis=1)
        r = np.random.default_rng(3)
        for dp, each in ((8, 4), (8, 8), (8, 16), (8, 64), (32, 4), (32, 16), (64, 8), (64, 64), (256, 4), (256, 16)):
            found, seconds = [], 0.0
            for step in range(arguments.steps if dp * each <= 512 else max(3, arguments.steps // 20)):
                rows = r.integers(0, len(table), dp * each)
                work = cost[rows]
                start = time.process_time()
                ours = share_step(sizes[rows], work, limits=None, dp=dp, keys=(step,))
                seconds += time.process_time() - start
                slowest = np.add.reduceat(work[ours.members], ours.offsets[:-1]).max()
                bound = max(work.sum() / dp, work.max())
                found.append([slowest, *(peer(work, dp) for peer in STEP_PEERS.values()), bound])
                found[-1] = [x / (work.sum() / dp) for x in found[-1]]
            mean = np.mean(found, axis=0)
            worst, cells = max(worst, mean[0] / mean[1:-1].min()), cells + 1
            figures = ", ".join(f"{x:.4f}" for x in mean)
            print(f"| {name} | {dp} | {each} | {figures} | {seconds / len(found) * 1e3:.2f} |", flush=True)
    print(f"\n{cells} cells; ours over the best peer at most {worst:.5f}")


def show_online(arguments: argparse.Namespace) -> None:
    from trimtab.runtime.training.shared import LearnedCost, share_ranks

    print("| data | slowest over mean: as held, by tokens, by multiply-adds, learned, bound | ms |\n|---|---|---|")
    dp, each = 64, 32
    for name, table, _, weights in streams(arguments.data):
        flops = weights.of_samples(table)
        tower_flops = replace(weights, tokens=0, tokens_sq=0).of_samples(table)
        seconds = flops + tower_flops
        sizes = np.stack([table.num_patches, table.num_tokens, flops - tower_flops, tower_flops], axis=1)
        r, learned, found, took = np.random.default_rng(5), LearnedCost(), [], 0.0
        for step in range(5 * arguments.steps):
            rows = r.integers(0, len(table), dp * each)
            longest_first = np.argsort(-table.num_tokens[rows], kind="stable")
            ranks, by_tokens = [(0, rank) for rank in range(dp)], np.zeros(dp)
            for i in rows[longest_first]:
                tokens, rank = heapq.heappop(ranks)
                by_tokens[rank] += seconds[i]
                heapq.heappush(ranks, (tokens + int(table.num_tokens[i]), rank))
            figures = [seconds[rows].reshape(dp, each).sum(axis=1), by_tokens]
            for weight in (np.array([0.0, 0.0, 1.0, 1.0]), learned.weights):
                start = time.process_time()
                shares = share_ranks(
                    np.split(np.column_stack([sizes[rows][:, :2], sizes[rows] @ weight]), dp), step=step
                )
                took += time.process_time() - start
                figures.append(np.array([seconds[rows[part]].sum() for part in shares.members]))
            passes = [[*sizes[rows[part]].sum(axis=0), seconds[rows[part]].sum()] for part in shares.members]
            learned.add(np.array(passes) * np.insert(r.normal(1, 0.02, (dp, 1)), 0, np.ones((4, dp)), axis=1))
            figures.append(np.array([seconds[rows].sum() / dp, seconds[rows].max()]))  # no rank takes less
            found.append([x.max() / (seconds[rows].sum() / dp) for x in figures])
        print(f"| {name} | {', '.join(f'{x:.4f}' for x in np.mean(found, axis=0))} | {took / len(found) * 500:.2f} |")


def show_scale(arguments: argparse.Namespace) -> None:
    mixture = draw_lengths("mixture")
    with tempfile.TemporaryDirectory() as folder:
        columns = {}
        for name in ("num_patches", "num_tokens"):
            path, random = Path(folder) / f"{name}.npy", np.random.default_rng(0)
            mapped = np.lib.format.open_memmap(path, mode="w+", dtype=np.int32, shape=(arguments.samples,))
            for first in range(0, arguments.samples, 1 << 22):
                rows = random.integers(0, len(mixture), min(1 << 22, arguments.samples - first))
                mapped[first : first + (1 << 22)] = getattr(mixture, name)[rows]
            del mapped
            columns[name] = np.load(path, mmap_mode="r")
        del mixture
        none = np.broadcast_to(np.int32(0), arguments.samples)
        unused = dict.fromkeys(("num_images", "patches_sq", "patches_windowed", "source"), none)
        start = time.process_time()
        packed = pack_samples(
            SampleTable(**columns, **unused, patch_unit="tiles"), limits=(9, 4096), dp=8, cost=TILE_COST
        )
        seconds = time.process_time() - start
    resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    num_packs = packed.packing.num_packs
    print(f"{arguments.samples:,} samples, {num_packs:,} packs: {seconds:.1f} CPU s, {resident:.2f} GiB resident")


def show_hunt(arguments: argparse.Namespace) -> None:
    """A shape is a kind of sizes, limits and a number of ranks. Packs are counted in whole rows.

    Rows of packs are compared in random order and sorted by cost, each with the peer that makes fewest packs: one that
    makes a pack of each sample has even rows, and twice as many.
    """
    warm_up("balanced", "isf")
    r = np.random.default_rng(0)
    ratios, names = [], []
    for number in range(arguments.shapes):
        kind, dp = str(r.choice(SHAPES)), int(r.choice([1, 8, 64, 256]))
        largest = (int(r.choice([9, 18, 4096, 16_380])), int(r.choice([4096, 8192])))
        room = float(r.choice([1.0, 1.0, 1.3, 1.5, 2.0, 3.0, 6.0]))
        limits = (int(largest[0] * room), int(largest[1] * room))
        table: SampleTable = draw_shape(kind, int(4000 * r.uniform(0.5, 2)), largest, seed=number)
        sizes, cost = np.stack([table.num_patches, table.num_tokens], axis=1), PATCH_COST.of_samples(table)
        ours = pack_samples(table, limits=limits, dp=dp, cost=cost, seed=number).packing
        assert (ours.sums(sizes) <= limits).all(), "a limit is broken"
        assert np.array_equal(np.sort(ours.indices), np.arange(len(table))), "a sample is lost"
        isf = pack_samples(table, limits=limits, dp=dp, cost=cost, seed=number, method="isf").packing
        peers = [np.bincount(best_fit_two_columns(sizes, limits, number)[0], cost), isf.sums(cost)]
        rows = [-(-len(packs) // dp) for packs in peers]
        best = peers[int(np.argmin(rows))]
        own = ours.sums(cost)
        alike = pack_samples(table, limits=limits, dp=dp, cost=cost, seed=number, order="sorted").packing.sums(cost)
        times = [row_time(own, dp) / row_time(best, dp, order="random")]
        times.append(row_time(alike, dp) / row_time(best, dp, order="sorted"))
        ratios.append([-(-len(own) // dp) / min(rows), *times])
        names.append(f"{kind}, largest {largest}, limits {limits}, dp {dp}, {len(table)} samples, {len(own)} packs")
    found = np.array(ratios)
    for column, (what, most) in enumerate((("packs", 1.0), ("rows, random", 1.002), ("rows, sorted", 1.002))):
        above = found[:, column] > most
        worst = np.argsort(-found[:, column])[:5]
        print(f"\n{what}: {above.sum()} of {len(found)} above {most}; median {np.median(found[:, column]):.4f}; worst:")
        for i in worst:
            print(f"  {found[i, column]:.4f}  {names[i]}")


PARTS = {
    "packs": show_packs,
    "orders": show_orders,
    "steps": show_steps,
    "online": show_online,
    "scale": show_scale,
    "hunt": show_hunt,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--part", nargs="+", choices=PARTS, default=["packs", "orders", "steps"])
    parser.add_argument("--samples", type=int, default=100_000, help="of scale")
    parser.add_argument("--steps", type=int, default=200, help="of each cell; fewer where they are large")
    parser.add_argument("--shapes", type=int, default=500, help="of hunt")
    arguments = parser.parse_args()
    warm_up()
    best_fit_two_columns(np.ones((4, 2)), (2, 2))
    share_step(np.ones((8, 2), np.int64), np.ones(8), limits=(9, 9), dp=2, num_microbatches=2)
    for part in arguments.part:
        print(f"\n{part}\n")
        PARTS[part](arguments)


if __name__ == "__main__":
    main()
