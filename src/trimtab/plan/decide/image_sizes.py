"""Sizes of single images, from a sample table that may know no more than sums over the images of a sample.

A tower that cuts images into tiles of one size encodes tiles apart: they are the atoms, and their number is known.
Elsewhere an image is one atom of p patches. `trimtab size` records them; a table without them holds n, Σ p and Σ p².
One image, two images, and images of one size follow from these exactly. Others are spread like a log-normal
distribution of such sums: near where sizes vary smoothly, too uneven where a sample holds a few sizes many times
(`bench/vision_plan.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.errors import TrimtabError
from trimtab.plan.decide.work import one_tile
from trimtab.specs import FloatArray, IntArray, ModelSpec, SampleTable

_EQUAL = 1e-9  # relative: sums of integers below this are those of equal images
_GOLDEN = (5**0.5 - 1) / 2
_WHOLE_IMAGES = ("llava_anyres",)  # rules whose tiles of one image are encoded together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageSizes:
    """Atoms of every sample, by the numbers that describe them."""

    count: IntArray  # (num_samples,) atoms
    patches: FloatArray  # (num_samples,) of all of them
    patches_sq: FloatArray  # (num_samples,)
    patches_windowed: FloatArray  # (num_samples,)
    known: npt.NDArray[np.bool_]  # (num_samples,) whether these are the true sizes
    each: FloatArray  # (all atoms,) patches of each, in any unit, sample after sample

    def atoms_of(self, rows: IntArray) -> FloatArray:
        """(n, 3): patches, patches_sq and patches_windowed of the atoms of samples `rows`, in their order."""
        count = self.count[rows]
        owner = np.repeat(np.arange(len(rows)), count)
        place = np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
        share = self.each[(np.cumsum(self.count) - self.count)[rows][owner] + place]
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
    if tile is not None:
        count = np.maximum(np.rint(p / tile).astype(np.int64), p > 0)
        known, each = count * tile == p, np.ones(int(count.sum()))
    elif samples.image_patches is not None:
        count, known = np.where(p > 0, samples.num_images, 0), np.ones(len(p), np.bool_)
        each = samples.image_patches[np.repeat(p > 0, samples.num_images)].astype(np.float64)
    else:
        count = np.where(p > 0, np.maximum(samples.num_images, 1), 0)
        known, each = _from_sums(count, np.divide(count * squares, p * p, out=np.ones(len(p)), where=p > 0))
    return ImageSizes(
        count=count,
        patches=p,
        patches_sq=squares,
        patches_windowed=samples.patches_windowed.astype(np.float64),
        known=known | (count == 0),
        each=each,
    )


def _from_sums(count: IntArray, ratio: FloatArray) -> tuple[npt.NDArray[np.bool_], FloatArray]:
    """Whether sizes are known, and every atom, in some unit; `ratio` is n Σp² / (Σp)², 1 of equal images.

    Two images are 1 ± d with d² = ratio - 1. The i-th of n others is exp(s z): s² = ln ratio, as of a log-normal
    distribution, z the logistic quantile of (i + 1/2) / n at variance 1, large and small ones mixed.
    """
    known = (count <= 1) | (np.abs(ratio - 1) <= _EQUAL) | ((count == 2) & (ratio >= 1))
    ratio = np.maximum(ratio, 1.0)
    owner = np.repeat(np.arange(len(count)), count)
    n, i = count[owner], np.arange(len(owner)) - (np.cumsum(count) - count)[owner]
    i = i[np.lexsort((i * _GOLDEN % 1.0, owner))]
    z = np.log((i + 0.5) / (n - i - 0.5)) * (3**0.5 / np.pi)
    pair = 1 + (2 * i - 1) * np.sqrt(np.minimum(ratio - 1, 1.0))[owner]
    return known, np.where(n == 2, pair, np.exp(np.sqrt(np.log(ratio))[owner] * z))


def tile_rows(model: ModelSpec) -> int | None:
    """Rows of one tile, where the tower encodes tiles of one size apart."""
    if model.image_rule.name in _WHOLE_IMAGES:
        return None
    try:
        return one_tile(model).patches
    except TrimtabError:
        return None
