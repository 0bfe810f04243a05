"""Pack samples whose sizes you already know: `python examples/pack_lengths.py`.

The lengths are drawn here; yours may come from anywhere. Shows what each order costs in randomness and what it gains.
"""

from __future__ import annotations

import numpy as np

import trimtab


def main() -> None:
    rng = np.random.default_rng(0)
    tiles = rng.choice([0, 1, 3, 5], p=[0.2, 0.2, 0.2, 0.4], size=20_000).astype(np.int64)
    text = np.minimum(rng.lognormal(5.0, 0.9, size=len(tiles)), 2500).astype(np.int64) + 10
    samples = trimtab.SampleTable(
        num_images=np.minimum(tiles, 1),
        num_patches=tiles,
        num_tokens=256 * tiles + text,
        patches_sq=tiles,
        patches_windowed=tiles,
        source=(tiles == 0).astype(np.int32),
        source_names=("images", "text"),
        patch_unit="tiles",
    )
    print(f"{'method':12}{'order':12}{'packs/bound':>12}{'vit':>8}{'llm':>8}{'cost':>8}{'chi2':>8}")
    for method, order in (("isf", "random"), ("balanced", "random"), ("balanced", "sorted")):
        packed = trimtab.pack_samples(samples, limits=(18, 6016), dp=8, method=method, order=order)
        figures = trimtab.report_packing(samples, packed)
        print(
            f"{method:12}{order:12}{figures.packs_over_bound:12.4f}{figures.dist_ratio_vit:8.4f}"
            f"{figures.dist_ratio_llm:8.4f}{figures.dist_ratio_cost:8.4f}{figures.shuffle_chi2 or 0:8.3f}"
        )


if __name__ == "__main__":
    main()
