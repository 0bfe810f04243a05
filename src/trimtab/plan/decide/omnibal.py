"""Choices of OmniBal (arXiv 2407.20761) and its public code: limits of packs, sets packed apart, ISF by iterations.

Symbols: Q_v, Q_t the limits of patches (images there) and tokens; r tokens of a sample for each of its patches.
`trimtab plan` instead tries limits by the time of a step.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trimtab.balance.metrics import BalanceReport, above_limits
from trimtab.balance.packing import PackResult, pack_samples, read_sizes, report_packing
from trimtab.balance.published import default_filters, pack_isf
from trimtab.balance.schedule import fill_table, offsets_of
from trimtab.compiled import permutation
from trimtab.errors import PackingError
from trimtab.plan.decide.work import select_rows
from trimtab.specs import IntArray, Packing, SampleTable

START_TOKENS = 4096  # where the search begins, and its two roundings of r: all as in the public code
BIN_TOKENS = 256
RATIO_TOKENS = 16
SEARCH_ITERATIONS = 50
MAX_TRIES = 400


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedLimits:
    """Limits whose packs hold about the wanted number of samples, and how even ISF's packs are under them."""

    limits: tuple[int, int]
    report: BalanceReport

    @property
    def unevenness(self) -> float:
        """Return what the search ranks by: the sum of both dist ratios."""
        return self.report.dist_ratio_vit + self.report.dist_ratio_llm


def paper_limits(samples: SampleTable) -> tuple[int, int]:
    """Return Q_t of the longest sample, and Q_v of as many patches as come with so many tokens on the mean (section 5).

    A sample with more patches than that raises Q_v to its own, so that every sample fits a pack.
    """
    sizes = _sizes(samples)
    max_tokens = max(1, int(sizes[:, 1].max()))
    patches, tokens = sizes.sum(axis=0).tolist()
    per_patch = tokens / patches if patches else float(max_tokens)
    return max(1, int(max_tokens / per_patch), int(sizes[:, 0].max())), max_tokens


def search_limits(
    samples: SampleTable, *, mean_batch: int = 4, dp: int = 8, iterations: int = SEARCH_ITERATIONS, seed: int = 0
) -> list[SearchedLimits]:
    """Return limits under which ISF packs `mean_batch` to `mean_batch` + 1 samples on the mean, the most even first.

    The public code's `search_arguments`: from (4096 // r, 4096) in steps of one patch and r tokens, larger while packs
    hold too few samples, smaller where they hold too many; every pair that fits the wish is kept. Samples above a
    pair's limits are left out of its packs, as there. Raises `PackingError` where no pair fits the wish.
    """
    sizes = _sizes(samples)
    # patches of one tile, where images come in tiles: what the public code counts is tiles
    unit = max(1, int(np.gcd.reduce(sizes[:, 0])))
    sizes = sizes // np.array([unit, 1], np.int64)
    step = _tokens_per_patch(sizes)
    # up while packs hold too few samples, down while too many, until a pair comes again
    limits = (max(1, START_TOKENS // step), START_TOKENS)
    found: list[SearchedLimits] = []
    tried: set[tuple[int, int]] = set()
    while min(limits) >= 1 and limits not in tried and len(tried) < MAX_TRIES:
        tried.add(limits)
        small = sizes[~above_limits(sizes, limits)]
        mean = 0.0
        if len(small):
            packs = pack_isf(small, limits=limits, filters=None, iterations=iterations, seed=seed)
            mean = len(small) / packs.num_packs
        if mean_batch <= mean <= mean_batch + 1:
            chosen = (limits[0] * unit, limits[1])
            packed = pack_samples(
                samples, limits=chosen, dp=dp, method="isf", iterations=iterations, oversize="skip", seed=seed
            )
            found.append(SearchedLimits(limits=chosen, report=report_packing(samples, packed)))
        if mean > mean_batch + 1 and found:
            break
        sign = -1 if mean > mean_batch + 1 else 1
        limits = (limits[0] + sign, limits[1] + sign * step)
    if not found:
        raise PackingError(
            f"no limits near {step} tokens a patch pack {mean_batch} to {mean_batch + 1} samples: choose another "
            "mean_batch, or give max_patches and max_tokens"
        )
    return sorted(found, key=lambda x: (x.unevenness, x.limits))


def _tokens_per_patch(sizes: IntArray) -> int:
    """Return r: mean tokens, each sample's rounded up to 256, by mean patches, to a multiple of 16."""
    mean_patches = max(1.0, float(sizes[:, 0].mean()))
    mean_tokens = float((-(-sizes[:, 1] // BIN_TOKENS) * BIN_TOKENS).mean())
    return max(RATIO_TOKENS, int((mean_tokens // mean_patches + 1) // RATIO_TOKENS) * RATIO_TOKENS)


def _sizes(samples: SampleTable) -> IntArray:
    if len(samples) == 0:
        raise PackingError("no samples, from which limits were to be chosen: give max_patches and max_tokens")
    return read_sizes(samples)


# -- sets packed apart ------------------------------------------------------------------------------------------------


def pack_apart(
    samples: SampleTable,
    *,
    limits: Sequence[tuple[int, int]],
    dp: int = 1,
    num_microbatches: int = 1,
    seed: int = 0,
    how: Mapping[str, Any],
) -> PackResult:
    """Pack every source for itself, by `pack_samples` with the arguments `how` (`multi_group` of the public code).

    `limits`: one pair for all sources, or one for each. A row, what the ranks run at the same time, is of one source;
    rows of all sources are shuffled together. Nothing is dropped or padded with samples that come twice: a source whose
    packs fill no row leaves slots empty, and such rows come last.
    """
    # every source by itself; its packs are numbered behind those of the sources before
    parts, rows, packs_before = [], [], 0
    owns = [np.flatnonzero(samples.source == source) for source in np.unique(samples.source)]
    for number, own in enumerate(owns):
        part = pack_samples(select_rows(samples, own), limits=limits[number % len(limits)], dp=dp, seed=seed, **how)
        table = part.schedule.table[:, :, 0]  # one micro-batch a step: a step is a row
        rows.append(np.where(table >= 0, table + packs_before, -1))
        packs_before += part.packing.num_packs
        parts.append(part.packing)
    # one packing of all, whose rows are shuffled; rows with an empty slot come last
    counts = np.concatenate([np.diff(part.offsets) for part in parts])
    packing = Packing(
        offsets=offsets_of(counts),
        indices=np.concatenate([own[part.indices] for own, part in zip(owns, parts, strict=True)]),
        limits=(max(q for q, _ in limits), max(q for _, q in limits)),
        oversize=np.sort(np.concatenate([own[part.oversize] for own, part in zip(owns, parts, strict=True)])),
        method=how.get("method", "balanced"),
        seed=seed,
    )
    mixed = np.concatenate(rows)
    mixed = mixed[permutation(len(mixed), seed, 0x6170)]
    mixed = mixed[np.argsort((mixed < 0).any(axis=1), kind="stable")]
    return PackResult(
        packing=packing, schedule=fill_table(mixed.reshape(-1), dp, num_microbatches, how.get("order", "random"))
    )


# -- ISF, iteration by iteration --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class IsfIteration:
    """What ISF has after one iteration, and how even the packs are if that is the last."""

    number: int  # from 1
    num_kept: int  # packs that a filter let pass, up to here
    share_left: float  # of the samples, for the next iteration
    num_packs: int  # if this is the last: what is left is packed too
    dist_ratio_vit: float
    dist_ratio_llm: float
    dist_ratio_cost: float


def isf_iterations(
    samples: SampleTable, *, limits: tuple[int, int], iterations: int = 10, **how: Any
) -> Iterator[IsfIteration]:
    """Yield the table of the paper for the arguments of `pack_samples`; samples above a limit are not counted.

    Packs T times, with 1 to T iterations, which begin alike: what passes a filter was kept before the last one.
    """
    filters = how.get("filters") or default_filters(limits)
    sizes = read_sizes(samples)
    small = sizes[~above_limits(sizes, limits)]
    # as the last iteration lets all through, what a filter kept is counted again
    for number in range(1, iterations + 1):
        packs = pack_isf(small, limits=limits, filters=filters, iterations=number, seed=how.get("seed", 0))
        sums = np.add.reduceat(small[packs.members], packs.offsets[:-1])
        is_kept = (sums >= filters).any(axis=1)
        held = int(np.diff(packs.offsets)[is_kept].sum())
        packed = pack_samples(samples, limits=limits, method="isf", iterations=number, **how)
        report = report_packing(samples, packed)
        yield IsfIteration(
            number=number,
            num_kept=int(is_kept.sum()),
            share_left=1 - held / max(1, len(small)),
            num_packs=report.num_packs,
            dist_ratio_vit=report.dist_ratio_vit,
            dist_ratio_llm=report.dist_ratio_llm,
            dist_ratio_cost=report.dist_ratio_cost,
        )
