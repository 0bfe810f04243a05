"""What ranks must have in common before features are exchanged; a rank that differs raises on all of them."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.control import Control, differing_ranks, fingerprint
from trimtab.runtime.vision.families import Kind
from trimtab.runtime.vision.inputs import VisionInputs
from trimtab.runtime.vision.outputs import Features
from trimtab.specs import IntArray

_REFUSED = -1
_TYPES = {kind: i for i, kind in enumerate((torch.float32, torch.float64, torch.bfloat16, torch.float16))}


def agree_on_inputs(
    control: Control, name: str, words: Sequence[object], inputs: VisionInputs | None, problem: Exception | None
) -> None:
    """Raise where a rank refused what it was given, or was given other images; `inputs` None compares `words` alone."""
    parts = () if inputs is None else inputs.parts
    lengths = [(part.name, part.lengths.tolist()) for part in parts]
    fixed = [] if inputs is None else sorted(inputs.fixed)
    mark = fingerprint([*words, lengths, fixed, torch.is_grad_enabled()], [part.rows for part in parts])
    if problem is not None:
        mark = _REFUSED
    marks = np.array([row[0] for row in control.gather(name, [mark])])
    if problem is not None:
        raise problem
    if refusing := np.flatnonzero(marks == _REFUSED).tolist():
        raise TrimtabError(f"rank {_names(refusing)} refused what {name} was given: that rank's own message says why")
    if others := differing_ranks(marks):
        if inputs is None:
            raise TrimtabError(
                f"rank {_names(others)} of the group called {name} with another mode of gradients or tensors of "
                f"another form, or shares images by another rule or cost than the rest: use the same processor and the "
                f"same arguments of vision_dp on every rank"
            )
        raise TrimtabError(
            f"rank {_names(others)} of the group called {name} with other images, another mode of gradients or other "
            f"settings than the rest: this exchange needs the same images on every rank; for ranks with images of "
            f"their own use exchange='dispatch'"
        )


def agree_on_kinds(control: Control, present: Sequence[Kind], kinds: Sequence[Kind]) -> None:
    """At the start of a forward: a rank without images would leave those that have some waiting in the tower."""
    held = np.stack(control.gather("the start of a forward", [kind in present for kind in kinds])).astype(bool)
    for i, kind in enumerate(kinds):
        if held[:, i].any() and not held[:, i].all():
            raise TrimtabError(
                f"rank {_names(np.flatnonzero(~held[:, i]).tolist())} of the group begins a forward without {kind}s, "
                f"and rank {_names(np.flatnonzero(held[:, i]).tolist())} has some: this exchange needs the same images "
                f"on every rank; for ranks with images of their own use exchange='dispatch'"
            )


def agree_on_rows(
    control: Control, name: str, features: Features | None, atoms: IntArray, num_atoms: int, problem: Exception | None
) -> IntArray:
    """Rows of every atom; raises where a tower failed, or features differ in type, gradient or width."""
    counts, kind = np.zeros(num_atoms, np.int64), [_REFUSED] * 3
    if features is not None:
        counts[atoms] = features.num_rows
        kind = _kind(features.rows, features.widths)
    everyone = np.stack(control.gather(f"the end of {name}", [*kind, *counts.tolist()]))
    if problem is not None:
        raise problem
    if failed := np.flatnonzero(everyone[:, 2] == _REFUSED).tolist():
        raise TrimtabError(f"the vision tower failed on rank {_names(failed)}: that rank's own message says why")
    for column, what in enumerate(("another type", "another need of gradients", "other widths")):
        if others := differing_ranks(everyone[:, column]):
            raise TrimtabError(
                f"rank {_names(others)} of the group has image features of {what} than the rest: "
                f"use the same precision and freeze the same parameters on every rank"
            )
    return np.asarray(everyone[:, len(kind) :].sum(axis=0), np.int64)


def _kind(rows: Tensor, widths: tuple[int, ...]) -> list[int]:
    return [_TYPES.get(rows.dtype, len(_TYPES)), int(rows.requires_grad), fingerprint(widths, [])]


def _names(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))
