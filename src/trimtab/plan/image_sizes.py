"""Sizes of single images, from a sample table that knows sums over the images of a sample.

A tower that cuts images into tiles of one size encodes tiles apart: they are the atoms, and their number is known.
Elsewhere an image is one atom of p patches, and a sample's table row holds n, Σ p and Σ p². One image, two images, and
images of one size follow from these exactly. Of other samples the sizes are not known: they are taken as one large
image and n - 1 equal ones, which keeps n, Σ p and Σ p² and makes the large one as large as any set of images with these
sums can hold. Sharing images is then not made to look more even than it is.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.errors import TrimtabError
from trimtab.plan.work import one_tile
from trimtab.specs import FloatArray, IntArray, ModelSpec, SampleTable

_EQUAL = 1e-9  # relative: sums of integers below this are those of equal images
_WHOLE_IMAGES = ("llava_anyres",)  # rules whose tiles of one image are encoded together


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ImageSizes:
    """Atoms of every sample: `first[i]` rows of one size and `count[i] - first[i]` of another."""

    count: IntArray  # (num_samples,) atoms
    large: FloatArray  # (num_samples,) patches of the sample's first atom
    small: FloatArray  # (num_samples,) patches of each other one
    patches_sq: FloatArray  # (num_samples,) over Σ p² of the atoms: 1 where an atom is one attention segment
    patches_windowed: FloatArray  # (num_samples,) over Σ p
    known: npt.NDArray[np.bool_]  # (num_samples,) whether these are the true sizes

    def atoms_of(self, rows: IntArray) -> FloatArray:
        """(n, 3): patches, patches_sq and patches_windowed of the atoms of samples `rows`, in their order."""
        count = self.count[rows]
        patches = np.repeat(self.small[rows], count)
        starts = (np.cumsum(count) - count)[count > 0]
        patches[starts] = self.large[rows][count > 0]
        ratios = (np.repeat(ratio[rows], count) for ratio in (self.patches_sq, self.patches_windowed))
        squares, windows = ratios
        return np.stack([patches, patches * patches * squares, patches * windows], axis=1)


def image_sizes(samples: SampleTable, model: ModelSpec) -> ImageSizes:
    """The atoms of every sample of a table in patches."""
    p = samples.num_patches.astype(np.float64)
    squares = samples.patches_sq.astype(np.float64)
    tile = _tile_rows(model)
    if tile is not None:
        count = np.rint(p / tile).astype(np.int64)
        known = count * tile == p
        count = np.where((p > 0) & (count == 0), 1, count)
        large = small = np.divide(p, count, out=np.zeros(len(p)), where=count > 0)
    else:
        count = np.where(p > 0, np.maximum(samples.num_images, 1), 0)
        n = np.maximum(count, 1)
        mean = p / n
        variance = np.maximum(squares / n - mean * mean, 0.0)
        variance[variance <= _EQUAL * mean * mean] = 0.0
        variance[n == 1] = 0.0
        large = mean + np.sqrt((n - 1) * variance)
        small = np.maximum(mean - np.sqrt(variance / np.maximum(n - 1, 1)), 0.0)
        one_segment = np.abs(n * squares - p * p) <= _EQUAL * p * p  # equal images, or one, attending to all of itself
        known = (n == 1) | one_segment | ((n == 2) & (n * squares >= p * p))
    sum_sq = large * large + np.maximum(count - 1, 0) * small * small
    return ImageSizes(
        count=count,
        large=large,
        small=small,
        patches_sq=np.divide(squares, sum_sq, out=np.zeros(len(p)), where=sum_sq > 0),
        patches_windowed=np.divide(samples.patches_windowed, p, out=np.zeros(len(p)), where=p > 0),
        known=known | (count == 0),
    )


def _tile_rows(model: ModelSpec) -> int | None:
    """Rows of one tile, where the tower encodes tiles of one size apart."""
    if model.image_rule.name in _WHOLE_IMAGES:
        return None
    try:
        return one_tile(model).patches
    except TrimtabError:
        return None
