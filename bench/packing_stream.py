"""What a stream packed as it comes loses against the whole packed ahead, by the size of its buffer.

python bench/packing_stream.py [--data ../shared/data] [--samples 200000] [--dp 8]
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
from trimtab.balance.cost import TILE_COST, ColumnCost, LinearCost
from trimtab.balance.metrics import dist_ratio
from trimtab.balance.streaming import StreamPacker
from trimtab.specs import FloatArray, IntArray


def stream(
    sizes: IntArray, limits: tuple[int, int], dp: int, cost: ColumnCost, rows: int, order: str
) -> list[list[int]]:
    packer = StreamPacker(limits, dp, cost=cost, buffer_rows=rows, order=order)
    packs: list[list[int]] = []

    def drain() -> None:
        while (row := packer.pop()) is not None:
            packs.extend(list(pack) for pack in row)

    for sample_id, row in enumerate(sizes.tolist()):
        packer.push(row, sample_id)
        drain()
    packer.flush()
    drain()
    return packs


def show(name: str, packs: list[list[int]], columns: FloatArray, limits: tuple[int, int], dp: int, s: float) -> None:
    sums = np.array([columns[pack].sum(axis=0) for pack in packs]).reshape(-1, dp, 3)
    ratios = " / ".join(f"{dist_ratio(sums[:, :, d]):.4f}" for d in range(3))
    bound = lower_bound_packs(columns[:, :2].astype(np.int64), limits)
    print(f"| {name} | {len(packs) / bound:.4f} | {ratios} | {len(columns) / s / 1e3:.0f} k |", flush=True)


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
    for name, table, limits, w in cases:
        if table is None:
            print(f"{name}: its file is not in {arguments.data}; name another folder with --data")
            continue
        sizes = np.column_stack([table.num_patches, table.num_tokens])
        sizes = sizes[(sizes <= limits).all(axis=1)]
        sizes = sizes[np.random.default_rng(0).permutation(len(sizes))[: arguments.samples]]
        cost = w.of
        columns = np.column_stack([sizes, cost(sizes[:, 0], sizes[:, 1])])
        print(f"\n{name}: {len(sizes):,} samples, limits {limits}, dp {arguments.dp}\n")
        print("| packed | packs / bound | vit / llm / cost | samples/s |\n|---|---|---|---|")
        for order in ("random", "tolerance"):
            start = time.process_time()
            whole = pack_columns([sizes[:, 0], sizes[:, 1]], limits=limits, dp=arguments.dp, cost=cost, order=order)
            seconds = time.process_time() - start
            packs = [whole.pack(p).tolist() for p in range(whole.num_packs)]
            show(f"ahead, {order}", packs, columns, limits, arguments.dp, seconds)
            for rows in (16, 64, 256):
                start = time.process_time()
                packs = stream(sizes, limits, arguments.dp, cost, rows, order)
                show(f"stream, {rows} rows, {order}", packs, columns, limits, arguments.dp, time.process_time() - start)


if __name__ == "__main__":
    main()
