"""Limits of packs from the statistics of a data set, as OmniBal chooses them: by its paper, and by its code's search.

Symbols: Q_v, Q_t the limits of patches (images there) and tokens; r tokens of a sample for each of its patches.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.balance.bound import above_limits
from trimtab.balance.isf import pack_isf
from trimtab.balance.packing import limited_sizes, pack_samples, report_packing
from trimtab.errors import PackingError
from trimtab.specs import IntArray, SampleTable

START_TOKENS = 4096  # where the search begins, and its two roundings of r: all as in the public code
BIN_TOKENS = 256
RATIO_TOKENS = 16
SEARCH_ITERATIONS = 50
MAX_TRIES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedLimits:
    """A pair of limits whose packs hold about the wanted number of samples, and how even ISF's packs are under it."""

    limits: tuple[int, int]
    samples_per_pack: float
    dist_ratio_vit: float
    dist_ratio_llm: float


def paper_limits(samples: SampleTable) -> tuple[int, int]:
    """Q_t of the longest sample, and Q_v of as many patches as come with so many tokens on the mean.

    Use it where the paper's setting is to be repeated (section "adaptive settings" of arXiv 2407.20761). A sample with
    more patches than that raises Q_v to its own, so that every sample fits a pack.
    """
    sizes = _sizes(samples)
    max_tokens = max(1, int(sizes[:, 1].max()))
    patches, tokens = sizes.sum(axis=0).tolist()
    per_patch = tokens / patches if patches else float(max_tokens)
    return max(1, int(max_tokens / per_patch), int(sizes[:, 0].max())), max_tokens


def search_limits(
    samples: SampleTable, *, mean_batch: int = 4, dp: int = 8, iterations: int = SEARCH_ITERATIONS, seed: int = 0
) -> list[SearchedLimits]:
    """Limits under which ISF packs `mean_batch` to `mean_batch` + 1 samples on the mean, the most even first.

    The public code's search: from (4096 // r, 4096) in steps of one patch and r tokens, larger while packs hold too
    few samples, smaller where they hold too many; every pair that fits the wish is kept, ranked by the sum of both dist
    ratios over `dp` ranks. Samples above a pair's limits are left out of its packs, as there. `trimtab plan` instead
    tries limits by the time of a step.

    Raises `PackingError` where no pair fits the wish.
    """
    if mean_batch < 1:
        raise PackingError(f"packs of {mean_batch} samples were asked for: give 1 or more")
    sizes = _sizes(samples)
    # Patches of one tile, where images come in tiles: what the public code counts is tiles.
    unit = max(1, int(np.gcd.reduce(sizes[:, 0])))
    sizes[:, 0] //= unit
    step = _tokens_per_patch(sizes)
    limits = (max(1, START_TOKENS // step), START_TOKENS)
    found: list[SearchedLimits] = []
    tried: set[tuple[int, int]] = set()
    while limits[0] >= 1 and limits[1] >= 1 and limits not in tried and len(tried) < MAX_TRIES:
        tried.add(limits)
        fits = ~above_limits(sizes, limits)
        num_packs = 0
        if fits.any():
            groups = pack_isf(sizes[fits], limits=limits, filters=None, iterations=iterations, seed=seed)
            num_packs = len(groups.offsets) - 1
        mean = int(fits.sum()) / num_packs if num_packs else 0.0
        if mean_batch <= mean <= mean_batch + 1:
            found.append(_evenness(samples, (limits[0] * unit, limits[1]), dp, iterations, seed))
        if mean > mean_batch + 1:
            if found:
                break
            limits = (limits[0] - 1, limits[1] - step)
        else:
            limits = (limits[0] + 1, limits[1] + step)
    if not found:
        raise PackingError(
            f"no limits near {step} tokens a patch pack {mean_batch} to {mean_batch + 1} samples on the mean: ask for "
            "another number, or give the limits"
        )
    return sorted(found, key=lambda x: (x.dist_ratio_vit + x.dist_ratio_llm, x.limits))


def _evenness(samples: SampleTable, limits: tuple[int, int], dp: int, iterations: int, seed: int) -> SearchedLimits:
    packed = pack_samples(
        samples, limits=limits, dp=dp, method="isf", iterations=iterations, oversize="skip", seed=seed
    )
    report = report_packing(samples, packed)
    return SearchedLimits(
        limits=limits,
        samples_per_pack=report.samples_per_pack,
        dist_ratio_vit=report.dist_ratio_vit,
        dist_ratio_llm=report.dist_ratio_llm,
    )


def _tokens_per_patch(sizes: IntArray) -> int:
    """r: mean tokens, each sample's rounded up to 256, by mean patches, to a multiple of 16."""
    mean_patches = max(1.0, float(sizes[:, 0].mean()))
    mean_tokens = float((-(-sizes[:, 1] // BIN_TOKENS) * BIN_TOKENS).mean())
    return max(RATIO_TOKENS, int((mean_tokens // mean_patches + 1) // RATIO_TOKENS) * RATIO_TOKENS)


def _sizes(samples: SampleTable) -> IntArray:
    if len(samples) == 0:
        raise PackingError("limits were to be chosen from the samples, and there is none: give max_patches, max_tokens")
    return limited_sizes(samples)
