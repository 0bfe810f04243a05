"""What a source packed buffer by buffer loses against the whole packed ahead, by the size of the buffer.

python bench/packing_buffers.py [--data ../shared/data] [--samples 200000] [--dp 8]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from lengths import DEFAULT_DATA, generate_native, read_mixture
from packing_real import NATIVE_COST
from trimtab.balance.bound import lower_bound_packs
from trimtab.balance.columns import pack_columns
from trimtab.balance.cost import TILE_COST, LinearCost
from trimtab.balance.metrics import dist_ratio
from trimtab.specs import FloatArray


def pack_buffers(columns: FloatArray, limits: tuple[int, int], dp: int, cost: LinearCost, size: int) -> FloatArray:
    """(packs, 3) patches, tokens and cost of each pack, every `size` samples packed for themselves."""
    sums = []
    for first in range(0, len(columns), size):
        own = columns[first : first + size]
        sizes = own[:, :2].astype(np.int64)
        packed = pack_columns([sizes[:, 0], sizes[:, 1]], limits=limits, dp=dp, cost=cost.of, epoch=first)
        sums.append(np.add.reduceat(own[packed.indices], packed.offsets[:-1]))
    return np.concatenate(sums)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--samples", type=int, default=200_000)
    parser.add_argument("--dp", type=int, default=8)
    arguments = parser.parse_args()
    cases: tuple[tuple[str, object, tuple[int, int], LinearCost], ...] = (
        ("mixture", read_mixture(arguments.data), (9, 4096), TILE_COST),
        ("native (generated)", generate_native(arguments.samples), (41_920, 16_384), NATIVE_COST),
    )
    for name, table, limits, cost in cases:
        if table is None:
            print(f"{name}: its file is not in {arguments.data}; name another folder with --data")
            continue
        sizes = np.column_stack([table.num_patches, table.num_tokens])
        sizes = sizes[(sizes <= limits).all(axis=1)]
        sizes = sizes[np.random.default_rng(0).permutation(len(sizes))[: arguments.samples]]
        columns = np.column_stack([sizes, cost.of(sizes[:, 0], sizes[:, 1])])
        bound = lower_bound_packs(sizes, limits)
        print(f"\n{name}: {len(sizes):,} samples, limits {limits}, dp {arguments.dp}\n")
        print("| packed | packs / bound | vit / llm / cost | time of the rows | samples/s |\n|---|---|---|---|---|")
        ahead_s = 0.0
        for rows in (None, 256, 64, 16):
            size = len(sizes) if rows is None else len(sizes) * rows * arguments.dp // bound
            start = time.process_time()
            packs = pack_buffers(columns, limits, arguments.dp, cost, size)
            seconds = time.process_time() - start
            packs = packs[: len(packs) // arguments.dp * arguments.dp].reshape(-1, arguments.dp, 3)
            ratios = " / ".join(f"{dist_ratio(packs[:, :, d]):.4f}" for d in range(3))
            row_s = float(packs[:, :, 2].max(axis=1).sum())
            ahead_s = ahead_s or row_s
            told = "ahead" if rows is None else f"buffers of {rows} rows"
            print(
                f"| {told} | {packs.size / 3 / bound:.4f} | {ratios} | {row_s / ahead_s:.4f} | "
                f"{len(sizes) / seconds / 1e3:.0f} k |",
                flush=True,
            )


if __name__ == "__main__":
    main()
