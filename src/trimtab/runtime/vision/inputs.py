"""What a call of the vision tower is given, divided into atoms that any rank can encode alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.specs import IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Part:
    """One tensor argument whose first dimension belongs to the atoms: `lengths[i]` rows to atom i."""

    name: str
    rows: Tensor
    lengths: IntArray

    def take(self, atoms: IntArray) -> Tensor:
        starts = np.cumsum(self.lengths) - self.lengths
        lengths = self.lengths[atoms]
        within = np.arange(int(lengths.sum())) - np.repeat(np.cumsum(lengths) - lengths, lengths)
        index = torch.from_numpy(np.repeat(starts[atoms], lengths) + within)
        return self.rows.index_select(0, index.to(self.rows.device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class VisionInputs:
    """The arguments of one call: `parts` are divided, `fixed` goes to every rank as it is."""

    parts: tuple[Part, ...]
    patches: IntArray  # (n,) rows of the tower, by atom
    windowed: IntArray | None = None  # (n,) sum over attention windows of rows squared; None: no windows
    entries: IntArray  # atoms of each image or clip of the output
    rows: IntArray | None  # (n,) rows that leave, where the family's rule says so beforehand
    fixed: dict[str, Any] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.patches)

    def to(self, device: torch.device) -> VisionInputs:
        parts = tuple(replace(part, rows=part.rows.to(device, non_blocking=True)) for part in self.parts)
        return replace(self, parts=parts)

    def take(self, atoms: IntArray) -> VisionInputs:
        """Only these atoms, each as an image of its own."""
        return VisionInputs(
            parts=tuple(Part(name=x.name, rows=x.take(atoms), lengths=x.lengths[atoms]) for x in self.parts),
            patches=self.patches[atoms],
            windowed=None if self.windowed is None else self.windowed[atoms],
            entries=np.ones(len(atoms), np.int64),
            rows=None if self.rows is None else self.rows[atoms],
            fixed=self.fixed,
        )

    def cheapest(self) -> VisionInputs:
        return self.take(np.array([int(np.argmin(self.patches))]))

    def arguments(self) -> dict[str, Any]:
        """Keyword arguments that encode these atoms."""
        return {**self.fixed, **{part.name: part.rows for part in self.parts}}


def join_inputs(inputs: Sequence[VisionInputs]) -> VisionInputs | None:
    """One call's arguments from those of several, in their order; None of none."""
    if len(inputs) < 2:
        return inputs[0] if inputs else None
    first = inputs[0]
    parts = tuple(
        Part(
            name=part.name,
            rows=torch.cat([x.parts[i].rows for x in inputs]),
            lengths=np.concatenate([x.parts[i].lengths for x in inputs]),
        )
        for i, part in enumerate(first.parts)
    )
    known = [name for name in ("patches", "windowed", "entries", "rows") if getattr(first, name) is not None]
    joined: dict[str, Any] = {name: np.concatenate([getattr(x, name) for x in inputs]) for name in known}
    return replace(first, parts=parts, **joined)
