"""Sizes of single images, from a sample table that may know no more than sums over the images of a sample.

A tower that cuts images into tiles of one size encodes tiles apart: they are the atoms, and their number is known.
Elsewhere an image is one atom of p patches. `trimtab size` records them; a table without them holds n, Σ p and Σ p².
One image, two images, and images of one size follow from these exactly. Other samples are then taken as the n quantiles
of the log-normal distribution that has these sums, p_i ~ exp(s z_i) with z_i the normal quantile of (i + 1/2) / n: near
where sizes vary smoothly, too uneven where a sample holds a few sizes many times (`bench/vision_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import numpy.typing as npt

from trimtab.errors import TrimtabError
from trimtab.plan.decide.work import one_tile
from trimtab.specs import FloatArray, IntArray, ModelSpec, SampleTable

_EQUAL = 1e-9  # relative: sums of integers below this are those of equal images
_WHOLE_IMAGES = ("llava_anyres",)  # rules whose tiles of one image are encoded together
_SPREADS = np.linspace(0.0, 12.0, 1201)  # of logarithms; at the last one the largest image is all of its sample
_GOLDEN = (5**0.5 - 1) / 2


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageSizes:
    """Atoms of every sample, by the numbers that describe them."""

    count: IntArray  # (num_samples,) atoms
    patches: FloatArray  # (num_samples,) of all of them
    patches_sq: FloatArray  # (num_samples,)
    patches_windowed: FloatArray  # (num_samples,)
    spread: FloatArray  # (num_samples,) s of exp(s z_i); 0: equal atoms
    known: npt.NDArray[np.bool_]  # (num_samples,) whether these are the true sizes
    quantiles: FloatArray  # zeros, and behind them the z of every n with a spread
    starts: IntArray  # (most atoms + 1,) where those of n atoms begin
    each: FloatArray | None  # patches of every atom, sample after sample; None: as spread
    first: IntArray  # (num_samples,) where each sample's atoms begin in `each`

    def atoms_of(self, rows: IntArray) -> FloatArray:
        """(n, 3): patches, patches_sq and patches_windowed of the atoms of samples `rows`, in their order."""
        count = self.count[rows]
        owner = np.repeat(np.arange(len(rows)), count)
        place = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
        if self.each is not None:
            share = self.each[self.first[rows][owner] + place]
        else:
            share = np.exp(self.spread[rows][owner] * self.quantiles[self.starts[count][owner] + place])
        share /= np.bincount(owner, share, len(rows))[owner]
        squares = share * share
        squares /= np.bincount(owner, squares, len(rows))[owner]
        sums = (self.patches, self.patches_sq, self.patches_windowed)
        return np.stack(
            [part * of[rows][owner] for part, of in zip((share, squares, share), sums, strict=True)], axis=1
        )


def image_sizes(samples: SampleTable, model: ModelSpec) -> ImageSizes:
    """The atoms of every sample of a table in patches."""
    p, squares = samples.num_patches.astype(np.float64), samples.patches_sq.astype(np.float64)
    tile = tile_rows(model)
    each = None if tile is not None or samples.image_patches is None else samples.image_patches.astype(np.float64)
    spread, starts, quantiles = np.zeros(len(p)), dict[int, int](), list[FloatArray]()
    if tile is not None:
        count = np.maximum(np.rint(p / tile).astype(np.int64), p > 0)
        known = count * tile == p
    else:
        count = np.where(p > 0, np.maximum(samples.num_images, 1), 0)
        # n Σp² / (Σp)²: 1 of equal images, n where one of them is all
        ratio = np.divide(count * squares, p * p, out=np.ones(len(p)), where=p > 0)
        known = (count == 1) | (np.abs(ratio - 1) <= _EQUAL) | ((count == 2) & (ratio >= 1))
        unlike = (count > 1) & (ratio > 1 + _EQUAL)
        for n in () if samples.image_patches is not None else np.unique(count[unlike]).tolist():
            rows = unlike & (count == n)
            spread[rows] = _spread_of(n, ratio[rows])
            starts[n] = int(count.max()) + sum(map(len, quantiles))
            quantiles.append(_quantiles(n))
    return ImageSizes(
        count=count,
        patches=p,
        patches_sq=squares,
        patches_windowed=samples.patches_windowed.astype(np.float64),
        spread=spread,
        known=known | (count == 0) | (each is not None),
        quantiles=np.concatenate([np.zeros(int(count.max(initial=0))), *quantiles]),
        starts=np.array([starts.get(n, 0) for n in range(int(count.max(initial=0)) + 1)], np.int64),
        each=each,
        first=np.cumsum(samples.num_images) - samples.num_images,
    )


def _quantiles(n: int) -> FloatArray:
    """Normal quantiles of n atoms, large and small ones mixed: the true order is not known."""
    z = np.array([NormalDist().inv_cdf((i + 0.5) / n) for i in range(n)])
    return z[np.argsort(np.arange(n) * _GOLDEN % 1.0, kind="stable")]


def _spread_of(n: int, ratio: FloatArray) -> FloatArray:
    """s at which n Σ exp(2 s z_i) / (Σ exp(s z_i))² is `ratio`; it grows with s from 1 to n."""
    z = np.sort(_quantiles(n))
    if n == 2:  # p_1 / p_2 = (1 + d) / (1 - d) with d² = ratio - 1
        d = np.sqrt(np.minimum(ratio - 1, 1.0))
        result: FloatArray = np.log((1 + d) / np.maximum(1 - d, 1e-12)) / (z[1] - z[0])
        return result
    e = np.exp(np.outer(_SPREADS, z - z[-1]))
    return np.interp(ratio, n * (e * e).sum(axis=1) / e.sum(axis=1) ** 2, _SPREADS)


def tile_rows(model: ModelSpec) -> int | None:
    """Rows of one tile, where the tower encodes tiles of one size apart."""
    if model.image_rule.name in _WHOLE_IMAGES:
        return None
    try:
        return one_tile(model).patches
    except TrimtabError:
        return None
