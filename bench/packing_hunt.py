"""Shapes of data drawn at random, packed by `balanced` and by the best peer: the worst ratios, and where they are.

    python bench/packing_hunt.py [--shapes 500] [--seed 0] [--samples 4000]

A shape is a kind of sizes, limits and a number of ranks. Peers are two-column best fit decreasing and ISF. Packs are
counted in whole rows. Rows of packs are compared in random order and sorted by cost, each with the peer that makes
fewest packs: one that makes a pack of each sample has even rows, and twice as many.
"""

import argparse

import numpy as np

from lengths import SHAPES, draw_shape
from packing_peers import best_fit_two_columns, row_time
from trimtab.balance.cost import PATCH_COST
from trimtab.balance.packing import pack_samples, warm_up
from trimtab.specs import SampleTable


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shapes", type=int, default=500)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--samples", type=int, default=4000)
    arguments = parser.parse_args()
    warm_up("balanced", "isf")
    r = np.random.default_rng(arguments.seed)
    ratios, names = [], []
    for number in range(arguments.shapes):
        kind, dp = str(r.choice(SHAPES)), int(r.choice([1, 8, 64, 256]))
        largest = (int(r.choice([9, 18, 4096, 16_380])), int(r.choice([4096, 8192])))
        room = float(r.choice([1.0, 1.0, 1.3, 1.5, 2.0, 3.0, 6.0]))
        limits = (int(largest[0] * room), int(largest[1] * room))
        table: SampleTable = draw_shape(kind, int(arguments.samples * r.uniform(0.5, 2)), largest, seed=number)
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


if __name__ == "__main__":
    main()
