"""The one form in which balance, costs and plan say what work costs: a weight for each amount of work, added up.

Symbols: P patches and T tokens of an item (a sample, an image, a frame), P_s segments of full vision attention in it.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from trimtab.specs import FloatArray, IntArray, SampleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class LinearCost:
    """Use it to say what samples or images cost where packs or shares are to be even; any unit (flop, seconds, bytes).

    cost = patches P + patches_sq sum P_s^2 + patches_windowed sum P_w^2 + tokens T + tokens_sq T^2, the weights named
    as in `WORK_TERMS`. Attention that does not look across samples (varlen, block-diagonal) takes its squares per image
    and per sample, so the cost of a pack is the sum over its samples. Not counted: what a pack or a call costs whatever
    is in it.

    >>> LinearCost(patches=6600, patches_sq=1).of([1024, 4096]).tolist()
    [7806976.0, 43810816.0]
    """

    patches: float = 0.0
    patches_sq: float = 0.0
    patches_windowed: float = 0.0
    tokens: float = 0.0
    tokens_sq: float = 0.0

    def of(
        self,
        patches: npt.ArrayLike,
        tokens: npt.ArrayLike = 0.0,
        *,
        patches_sq: npt.ArrayLike | None = None,
        patches_windowed: npt.ArrayLike | None = None,
        tokens_sq: npt.ArrayLike | None = None,
    ) -> FloatArray:
        """Price each item; without squares its patches, or tokens, are one segment, without windows these are."""
        # what is not given is one segment: an image attends to all of itself
        p, t = np.asarray(patches, np.float64), np.asarray(tokens, np.float64)
        squares = p * p if patches_sq is None else np.asarray(patches_sq, np.float64)
        windows = squares if patches_windowed is None else np.asarray(patches_windowed, np.float64)
        seen = self.patches * p + self.patches_sq * squares + self.patches_windowed * windows
        attended = t * t if tokens_sq is None else np.asarray(tokens_sq, np.float64)
        return np.asarray(seen + (self.tokens * t + self.tokens_sq * attended), np.float64)

    def of_images(self, terms: FloatArray) -> FloatArray:
        """Return the cost of each image, (n, 3) its patches, patches_sq and patches_windowed."""
        return self.of(terms[:, 0], patches_sq=terms[:, 1], patches_windowed=terms[:, 2])

    def of_samples(self, samples: SampleTable, rows: IntArray | None = None) -> FloatArray:
        """Return the cost of each sample of a table, or of these rows."""
        # a sample of two sequences attends inside each of them
        columns = (samples.num_patches, samples.num_tokens, samples.patches_sq, samples.patches_windowed)
        patches, tokens, squares, windows = (column if rows is None else column[rows] for column in columns)
        attended = sum(t * t for t in samples.sequences(slice(None) if rows is None else rows))
        return self.of(patches, tokens, patches_sq=squares, patches_windowed=windows, tokens_sq=attended)


TILE_COST = LinearCost(patches=11.9e12, tokens=39.8e9, tokens_sq=0.59e6)
"""Forward flop of InternViT-6B per 448 px tile (1025 patches, attention included) and of InternLM2-20B per token."""

PATCH_COST = LinearCost(patches=11.0e9, patches_sq=0.576e6, tokens=39.8e9, tokens_sq=0.59e6)
"""The same per patch: 2 x 5.5e9 parameters, attention 4 x 3200 x 45 layers per pair; 1025 patches come to 11.9e12."""


def default_cost(samples: SampleTable) -> LinearCost:
    """The 6B + 20B model of the OmniBal paper in the table's unit: where no profile of the real model is at hand."""
    return TILE_COST if samples.patch_unit == "tiles" else PATCH_COST
