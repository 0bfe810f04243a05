"""What ranks must have in common before features are exchanged; a rank that differs raises on all of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from trimtab.balance.images import ImageShares
from trimtab.errors import TrimtabError
from trimtab.runtime.vision.control import Control, differing_ranks, fingerprint
from trimtab.runtime.vision.families import Kind
from trimtab.runtime.vision.inputs import VisionInputs
from trimtab.runtime.vision.outputs import Features
from trimtab.runtime.watch import listed
from trimtab.specs import IntArray


def agree_on_inputs(
    control: Control, name: str, words: Sequence[object], inputs: VisionInputs | None, problem: Exception | None
) -> None:
    """Raise where a rank refused what it was given, or was given other images; `inputs` None compares only `words`."""
    parts = () if inputs is None else inputs.parts
    lengths = [(part.name, part.lengths.tolist()) for part in parts]
    fixed = [] if inputs is None else sorted(inputs.fixed)
    mark = fingerprint([*words, lengths, fixed, torch.is_grad_enabled()], [part.rows for part in parts])
    failed = f"rank {{}} refused what {name} was given: that rank's own message says why"
    if others := differing_ranks(control.gather_unless(problem, name, mark, failed=failed)):
        if inputs is None:
            raise TrimtabError(
                f"rank {listed(others)} of the group called {name} with another mode of gradients or tensors of "
                f"another form, or shares images by another rule or cost than the rest: use the same processor and the "
                f"same arguments of vision_dp on every rank"
            )
        raise TrimtabError(
            f"rank {listed(others)} of the group called {name} with other images, another mode of gradients or other "
            f"settings than the rest: this exchange needs the same images on every rank; for ranks with images of "
            f"their own use exchange='dispatch'"
        )


def compare_kinds(
    control: Control, present: Sequence[Kind], kinds: Sequence[Kind]
) -> Iterator[tuple[Kind, list[int], list[int]]]:
    """At the start of a forward: kinds of images that some ranks hold and others lack, with these ranks."""
    told = control.gather("the start of a forward", list(present))
    for kind in kinds:
        holding = [rank for rank, held in enumerate(told) if kind in held]
        if 0 < len(holding) < len(told):
            yield kind, holding, [rank for rank in range(len(told)) if rank not in holding]


def agree_on_kinds(control: Control, present: Sequence[Kind], kinds: Sequence[Kind]) -> None:
    """A rank without images would leave those that have some waiting in the tower."""
    for kind, holding, lacking in compare_kinds(control, present, kinds):
        raise TrimtabError(
            f"rank {listed(lacking)} of the group begins a forward without {kind}s, "
            f"and rank {listed(holding)} has some: this exchange needs the same images "
            f"on every rank; for ranks with images of their own use exchange='dispatch'"
        )


def agree_on_rows(
    control: Control, name: str, features: Features | None, shares: ImageShares, problem: Exception | None
) -> IntArray:
    """Rows of every atom; raises where a tower failed, or features differ in type, gradient or width."""
    own = None
    if features is not None:
        own = features.num_rows.tolist(), str(features.rows.dtype), features.rows.requires_grad, features.widths
    failed = "the vision tower failed on rank {}: that rank's own message says why"
    everyone = control.gather_unless(problem, f"the end of {name}", own, failed=failed)
    counts, *kinds = zip(*everyone, strict=True)
    for column, what in zip(kinds, ("another type", "another need of gradients", "other widths"), strict=True):
        if others := differing_ranks(column):
            raise TrimtabError(
                f"rank {listed(others)} of the group has image features of {what} than the rest: "
                f"use the same precision and freeze the same parameters on every rank"
            )
    num_rows = np.empty(len(shares.order), np.int64)
    for rank, counted in enumerate(counts):
        num_rows[shares.atoms_of(rank)] = counted
    return num_rows
