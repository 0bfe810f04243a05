"""Megatron-Energon: `TaskEncoder.select_samples_to_pack` by the balanced packer, under both limits.

Energon calls it with a full buffer of samples and wants them back as packs; nothing of Energon is imported. Read and
tested with megatron-energon 7.4.1.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Generic, Literal, TypeVar

import numpy as np

from trimtab.balance.cost import PATCH_COST, LinearCost
from trimtab.balance.packing import pack_samples
from trimtab.errors import PackingError
from trimtab.specs import SampleTable

Sample = TypeVar("Sample")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """What one sample costs, as its encoder knows it."""

    tokens: int  # of the language model, image tokens included
    patches: int = 0  # rows of the vision tower
    patches_sq: int | None = None  # sum over its images of patches squared; None: it is one image


@dataclass(frozen=True, slots=True, kw_only=True)
class PackSelector(Generic[Sample]):
    """Call it with samples; get them back in packs of at most `max_patches` and `max_tokens`, each sample once.

    Holds no state and draws on no global random numbers, so the packs of a buffer are the same after a restore, in any
    worker. It can be pickled where `size_of` can. A buffer is packed by itself: its last packs are as full as its
    samples allow, and larger buffers fill better.

    A sample above a limit raises a `PackingError` that names it by its `__key__`, or is a pack of its own
    (`oversize="alone"`). Energon would by default swallow up to 100 such errors in a row and drop the buffer each time;
    an encoder that takes the selector itself as its `select_samples_to_pack` stops at the first.
    """

    __failure_tolerance__ = 1  # Energon reads it from the function it calls: errors in a row that end the run

    size_of: Callable[[Sample], SampleSize]
    max_patches: int
    max_tokens: int
    oversize: Literal["error", "alone"] = "error"
    cost: LinearCost = PATCH_COST
    seed: int = 0

    def __post_init__(self) -> None:
        if self.oversize not in ("error", "alone"):
            raise PackingError(
                f"oversize {self.oversize!r} would lose samples of the stream or is unknown: choose 'error' or 'alone'"
            )

    def __call__(self, samples: Sequence[Sample]) -> list[list[Sample]]:
        if not samples:
            return []
        packing = pack_samples(
            _table(samples, [self.size_of(sample) for sample in samples]),
            limits=(self.max_patches, self.max_tokens),
            cost=self.cost,
            oversize=self.oversize,
            seed=self.seed,
        ).packing
        indices, offsets = packing.indices.tolist(), packing.offsets.tolist()
        return [[samples[i] for i in indices[a:b]] for a, b in pairwise(offsets)]


def _table(samples: Sequence[Sample], sizes: Sequence[SampleSize]) -> SampleTable:
    patches = np.array([size.patches for size in sizes], np.int64)
    squares = [size.patches**2 if size.patches_sq is None else size.patches_sq for size in sizes]
    return SampleTable(
        num_images=np.minimum(patches, 1),
        num_patches=patches,
        num_tokens=np.array([size.tokens for size in sizes], np.int64),
        patches_sq=np.array(squares, np.int64),
        patches_windowed=np.array(squares, np.int64),
        ids=tuple(str(getattr(sample, "__key__", i)) for i, sample in enumerate(samples)),
        source=np.zeros(len(samples), np.int32),
    )
