"""What each number of `balance/balanced.py` is worth: packs of drawn lengths with one number changed at a time.

    python bench/aim_sweep.py [--samples 40000] [--dp 8 64]

For each case: the sum over rows of the largest cost of their packs (ranks wait for each other), beside that of the
numbers as they stand; and the dist ratios of the cost and of the worse of patches and tokens. Lengths are drawn from
fitted distributions (bench/data/fitted_lengths.json) or generated. What moves neither in any case can go.
"""

import argparse
from dataclasses import fields, replace
from typing import Any

import numpy as np

from lengths import NATIVE_COST, draw_lengths, generate_native
from trimtab.balance import balanced as aim
from trimtab.balance.cost import TILE_COST, LinearCost
from trimtab.balance.packing import PackResult, pack_samples, report_packing, warm_up
from trimtab.specs import SampleTable


def row_time(packed: PackResult, cost: np.ndarray) -> float:
    """Sum over rows of the largest cost: what the ranks need that wait for each other."""
    sums = packed.packing.sums(cost)
    table = packed.schedule.table.transpose(0, 2, 1).reshape(-1, packed.schedule.table.shape[1])
    return float(np.where(table >= 0, sums[np.maximum(table, 0)], 0.0).max(axis=1).sum())


def changed(value: Any) -> list[Any]:
    """Values to try beside `value`: a weight that is gone, and twice as large; of a fill and a count half and twice."""
    if isinstance(value, int):
        return [value // 2, 2 * value]
    if 0.9 < value < 1:
        return [1 - 2 * (1 - value), 1 - (1 - value) / 2]
    return [0.0, 2 * value]


def measure(
    table: SampleTable, limits: tuple[int, int], weights: LinearCost, dp: int, seed: int
) -> tuple[float, float, float]:
    packed = pack_samples(table, limits=limits, dp=dp, cost=weights, oversize="skip", seed=seed)
    found = report_packing(table, packed, cost=weights)
    time = row_time(packed, weights.of_samples(table))
    return time, found.dist_ratio_cost, max(found.dist_ratio_vit, found.dist_ratio_llm)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=40_000)
    parser.add_argument("--dp", type=int, nargs="+", default=[8, 64])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", nargs="+", help="these numbers alone")
    arguments = parser.parse_args()
    native = generate_native(arguments.samples)
    tables: list[tuple[Any, ...]] = [
        ("mixture", draw_lengths("mixture", arguments.samples), (9, 4096), TILE_COST),
        ("native", native, (41_920, 16_384), NATIVE_COST),
    ]
    cases = [
        (f"{name} dp {dp}", table, limits, cost, dp, arguments.seed)
        for name, table, limits, cost in tables
        for dp in arguments.dp
    ]
    warm_up()
    before = [measure(*case[1:]) for case in cases]
    names = [case[0] for case in cases]
    print(f"{'number':16s}{'value':>18s}" + "".join(f"{name:>22s}" for name in names) + "   largest")
    row = "".join(f"{'':8s}{cost:7.4f}{worse:7.4f}" for _, cost, worse in before)
    print(f"{'as they stand':16s}{'':18s}{row}")
    stands = aim.NUMBERS
    for field in fields(stands):
        if arguments.only and field.name not in arguments.only:
            continue
        largest = 0.0
        for value in changed(getattr(stands, field.name)):
            aim.NUMBERS = replace(stands, **{field.name: value})
            after = [measure(*case[1:]) for case in cases]
            times = [now[0] / then[0] - 1 for now, then in zip(after, before, strict=True)]
            largest = max([largest, *map(abs, times)])
            row = "".join(f"{x:+8.2%}{now[1]:7.4f}{now[2]:7.4f}" for x, now in zip(times, after, strict=True))
            print(f"{field.name:16s}{value!s:>18s}{row}{largest:10.2%}", flush=True)
    aim.NUMBERS = stands


if __name__ == "__main__":
    main()
