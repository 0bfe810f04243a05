"""CPU seconds of one thread for packing and dispatch, the compiled loops warm, at several sizes.

python bench/packing_speed.py [--data ../shared/data] [--repeat 3]
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np

from lengths import DEFAULT_DATA, make_table, read_mixture, read_real
from trimtab.balance.packing import pack_samples, warm_up
from trimtab.specs import SampleTable


def resample(table: SampleTable, num_samples: int) -> SampleTable:
    rows = np.random.default_rng(0).integers(0, len(table), num_samples)
    names = table.source_names
    return make_table(table.num_patches[rows], table.num_tokens[rows], table.source[rows], names, "tiles")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--repeat", type=int, default=3)
    arguments = parser.parse_args()
    start = time.perf_counter()
    warm_up()
    print(f"warm-up (compiling, or loading what was compiled before): {time.perf_counter() - start:.1f} s\n")
    real, mixture = read_real(arguments.data), read_mixture(arguments.data)
    if real is None or mixture is None:
        print(f"the length files are not in {arguments.data}; name another folder with --data")
        return
    print(f"{'samples':>10s}  {'method':10s}{'order':11s}{'best s':>8s}{'median s':>10s}{'M samples/s':>13s}")
    for table, limits in ((real, (18, 6016)), (mixture, (9, 4096)), (resample(mixture, 5_000_000), (9, 4096))):
        for method, order in (("isf", "random"), ("balanced", "random"), ("balanced", "sorted")):
            seconds = []
            for _ in range(arguments.repeat):
                start = time.process_time()
                pack_samples(table, limits=limits, dp=8, method=method, order=order)
                seconds.append(time.process_time() - start)
            best, median = min(seconds), sorted(seconds)[len(seconds) // 2]
            print(
                f"{len(table):10d}  {method:10s}{order:11s}{best:8.3f}{median:10.3f}{len(table) / best / 1e6:13.2f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
