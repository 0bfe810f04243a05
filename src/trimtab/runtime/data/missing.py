"""What stands in for a sample that could not be read: the same size, and no weight in the loss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from trimtab.errors import SampleError

IGNORED = -100
"""The label that Transformers and `torch.nn.functional.cross_entropy` leave out."""


class UnreadableSampleError(SampleError):
    """A sample whose record or media cannot be read: a filler may stand for it, as for no sample that differs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingSample:
    """A sample that is missing, and how large the plan takes it to be."""

    row: int
    sample_id: str
    reason: str
    num_tokens: int
    num_patches: int
    num_images: int

    def __str__(self) -> str:
        return (
            f"sample {self.sample_id} (row {self.row} of the plan) cannot be read ({self.reason}): a filler of "
            f"{self.num_tokens} tokens without weight takes its place"
        )


def make_text_filler(filler: MissingSample) -> dict[str, torch.Tensor]:
    """As many tokens as the sample has, none of them with a label; no images.

    The language model computes what was planned, the vision tower less: it has `num_patches` rows fewer.
    """
    length = max(1, filler.num_tokens)
    return {"input_ids": torch.zeros(length, dtype=torch.int64), "labels": torch.full((length,), IGNORED)}
