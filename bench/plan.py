"""The whole plan on real sizes: seconds it takes, every variant beside the baseline. `python bench/plan.py [FOLDER]`.

FOLDER holds the length files (default ../shared/data); without them it says so and stops. Times of training are
predictions by formula and simulation: compare rows of one table, not tables of other tools.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import trimtab
from trimtab.balance.packing import warm_up
from trimtab.samples.lengths import read_lengths
from trimtab.units import format_seconds

CASES = (
    ("three real sets", "*_lengths.json", trimtab.PlanOptions(pp=4, tp=2, global_batch=208, fused_kernels=True)),
    ("three real sets, all left open", "*_lengths.json", trimtab.PlanOptions()),
    (
        "three real sets, limits given",
        "*_lengths.json",
        trimtab.PlanOptions(dp=4, pp=4, tp=2, max_patches=18 * 1025, max_tokens=6016),
    ),
    (
        "mixture of 1.24 M",
        "mixture_*.parquet",
        trimtab.PlanOptions(pp=4, tp=2, global_batch=208, fused_kernels=True),
    ),
    ("mixture, degrees left open", "mixture_*.parquet", trimtab.PlanOptions(global_batch=208, fused_kernels=True)),
)


def main() -> None:
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else Path(__file__).parents[2] / "shared" / "data"
    model, cluster = trimtab.describe("InternVL-Chat-V1-5", max_tiles=4), trimtab.parse_cluster("32xA100-80GB")
    warm_up()
    for name, pattern, options in CASES:
        files = sorted(folder.glob(pattern))
        if not files:
            print(f"{name}: no {pattern} in {folder}: nothing measured")
            continue
        started = time.process_time()
        samples = read_lengths(files)
        read_s = time.process_time() - started
        details = trimtab.make_plan(model, samples, cluster, options)
        plan_s = time.process_time() - started - read_s
        print(f"\n{name}: {len(samples):,} samples read in {read_s:.2f} s, planned in {plan_s:.2f} s of CPU")
        print(details.plan.summary)
        print(f"{'variant':22}{'packs':26}{'recompute':12}{'epoch':>10}{'samples/s':>11}{'idle':>8}{'memory GiB':>12}")
        for v in details.plan.estimates.variants:
            print(
                f"{v.name:22}{v.packs:26}{v.recompute:12}{format_seconds(v.epoch_s):>10}{v.samples_per_s:11.1f}"
                f"{100 * v.idle_share:7.1f}%{v.peak_memory_gib:12.1f}{'' if v.fits else ' does not fit'}"
            )


if __name__ == "__main__":
    main()
