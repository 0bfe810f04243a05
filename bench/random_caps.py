"""Random tiny models under random memory caps: does any plan made from traced bytes hold more than its cap?

For each family, attention and number format a model of random depth and widths is traced and built with real weights;
for each of it random pipelines (1 to 4 stages, 1 to 8 micro-batches) and caps between everything recomputed and nothing
are solved, cuts and tiers together, without reserve. The plan's recompute is switched on in the real model, and one
forward says what every stage holds: storages by saved-tensor hooks, what checkpoints hold, and what else stays alive.
State and transients are as planned. Run: python bench/random_caps.py [CAPS_OF_EACH_MODEL]
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "torch"))
from capped_models import CASES, CappedRun, draw_model, run_capped  # noqa: E402


def main(caps: int = 6) -> None:
    rng, runs = np.random.default_rng(0), list[CappedRun]()
    for case in CASES:
        for attention, dtype in (("sdpa", "bf16"), ("eager", "fp32")):
            made = draw_model(rng, case, attention, dtype)
            own = [run_capped(made, rng) for _ in range(caps)]
            runs += own
            over = sum(run.utilisation > 1 for run in own)
            ratios = [ratio for run in own for ratio in run.saved_ratio]
            fullest = max(run.utilisation for run in own)
            print(
                f"{case.split(',')[0]:16s} {attention:5s} {dtype}: fullest device {fullest:.4f} of its cap, {over} "
                f"over; a stage's saved bytes real / planned {min(ratios):.4f}-{max(ratios):.4f}",
                flush=True,
            )
    used = Counter(tier for run in runs for tier in run.tiers)
    print(f"{len(runs)} plans, {sum(run.utilisation > 1 for run in runs)} over their cap")
    print(f"fullest device: largest {max(r.utilisation for r in runs):.4f} of the cap, ", end="")
    print(f"mean {np.mean([r.utilisation for r in runs]):.4f}; plans that use a tier: {dict(used)}")


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*map(int, sys.argv[1:]))
