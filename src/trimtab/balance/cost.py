"""What one sample costs a training step, as one number that adds up over the samples of a pack."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.specs import FloatArray, SampleTable


@dataclass(frozen=True, slots=True, kw_only=True)
class CostWeights:
    """cost = patches * P + patches_sq * sum P_i^2 + tokens * T + tokens_sq * sum T_i^2, in any unit (flop, seconds).

    With attention that does not look across samples (varlen, block-diagonal) the squares are taken per image and per
    sample, so the cost of a pack is the sum of its samples' costs. Not counted: what a pack costs whatever is in it.
    """

    patches: float
    tokens: float
    patches_sq: float = 0.0
    tokens_sq: float = 0.0

    def of(self, samples: SampleTable) -> FloatArray:
        """Cost of each sample."""
        t = samples.num_tokens.astype(np.float64)
        return self.patches * samples.num_patches + self.patches_sq * samples.patches_sq + self._of_tokens(t)

    def of_padding(self, num_tokens: FloatArray, padded_tokens: FloatArray) -> FloatArray:
        """What the tokens beyond each sample's own add when it is padded: the patches are not padded."""
        return self._of_tokens(padded_tokens) - self._of_tokens(num_tokens)

    def _of_tokens(self, t: FloatArray) -> FloatArray:
        return self.tokens * t + self.tokens_sq * t * t


TILE_COST = CostWeights(patches=11.9e12, tokens=39.8e9, tokens_sq=0.59e6)
"""Forward flop of InternViT-6B per 448 px tile (1025 patches, attention included) and of InternLM2-20B per token."""

PATCH_COST = CostWeights(patches=11.0e9, patches_sq=0.576e6, tokens=39.8e9, tokens_sq=0.59e6)
"""The same per patch: 2 x 5.5e9 parameters, attention 4 x 3200 x 45 layers per pair; 1025 patches come to 11.9e12."""


def default_cost(samples: SampleTable) -> CostWeights:
    """The 6B + 20B model of the OmniBal paper in the table's unit: where no profile of the real model is at hand."""
    return TILE_COST if samples.patch_unit == "tiles" else PATCH_COST
