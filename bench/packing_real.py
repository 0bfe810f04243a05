"""Packing side by side: random, length- and device-grouped, ISF and balanced in its three orders.

    python bench/packing_real.py [--data ../shared/data] [--dp 8] [--seed 0] [--out rows.json]

Cost is the forward flop of InternViT-6B + InternLM2-20B (native: of a 0.6B + 7B model, its
attention causal as in the other two, and once more with all pairs of tokens counted). Seconds are CPU seconds of one
thread for packing and dispatch, the compiled loops warm.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import time
from pathlib import Path

from lengths import DEFAULT_DATA, draw_lengths, generate_native, read_mixture, read_real
from trimtab.balance.cost import TILE_COST, LinearCost
from trimtab.balance.packing import pack_samples, report_packing, warm_up

RUNS = (
    ("random", "random"),
    ("length_group", "random"),
    ("device_group", "random"),
    ("isf", "random"),
    ("isf", "sorted"),
    ("balanced", "random"),
    ("balanced", "tolerance"),
    ("balanced", "sorted"),
)
NATIVE_COST = LinearCost(patches=1.2e9, patches_sq=0.0, tokens=14e9, tokens_sq=0.2e6)  # 4 x 28 layers x 3584 / 2
NATIVE_FULL_COST = LinearCost(patches=1.2e9, patches_sq=0.0, tokens=14e9, tokens_sq=0.4e6)

HEADER = (
    f"{'method':13s}{'order':10s}{'packs':>8s}{'/bound':>8s}{'ave':>6s}{'over':>7s}{'pad':>7s}{'vit':>8s}{'llm':>8s}"
    f"{'cost':>8s}{'util':>7s}{'fill v':>7s}{'fill t':>7s}{'chi2':>7s}{'s':>8s}"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, default=DEFAULT_DATA)
    parser.add_argument("--dp", type=int, default=8)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    arguments = parser.parse_args()
    real, mixture = read_real(arguments.data), read_mixture(arguments.data)
    drawn = "" if real is not None and mixture is not None else f" (drawn: {arguments.data} lacks the files)"
    cases = [
        (f"three real sets{drawn}", real or draw_lengths("real"), (18, 6016), TILE_COST),
        (f"three real sets, few samples a pack{drawn}", real or draw_lengths("real"), (9, 4096), TILE_COST),
        (f"mixture{drawn}", mixture or draw_lengths("mixture"), (9, 4096), TILE_COST),
        ("native (generated)", generate_native(200_000), (41_920, 16_384), NATIVE_COST),
        ("native, attention not causal", generate_native(200_000), (41_920, 16_384), NATIVE_FULL_COST),
    ]
    warm_up()
    rows = []
    for name, table, limits, cost in cases:
        print(f"\n{name}: {len(table):,} samples, limits {limits}, dp {arguments.dp}, seed {arguments.seed}\n{HEADER}")
        for method, order in RUNS:
            start = time.process_time()
            result = pack_samples(
                table,
                limits=limits,
                dp=arguments.dp,
                method=method,
                order=order,
                cost=cost,
                seed=arguments.seed,
                oversize="skip",
            )
            seconds = time.process_time() - start
            r = report_packing(table, result, cost=cost)
            rows.append({"case": name, "seconds": seconds} | dataclasses.asdict(r))
            print(
                f"{r.method:13s}{r.order:10s}{r.num_packs:8d}{r.packs_over_bound:8.4f}{r.samples_per_pack:6.2f}"
                f"{r.num_over_limit:7d}{r.pad_ratio:7.3f}{r.dist_ratio_vit:8.4f}{r.dist_ratio_llm:8.4f}"
                f"{r.dist_ratio_cost:8.4f}{r.utilisation:7.4f}{r.fill_patches:7.4f}{r.fill_tokens:7.4f}"
                f"{r.shuffle_chi2:7.3f}{seconds:8.3f}",
                flush=True,
            )
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
