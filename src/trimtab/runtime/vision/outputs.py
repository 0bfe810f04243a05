"""What a vision tower returns, as one matrix of rows, and back into the shape its caller reads.

Understood: an output object with `pooler_output` and perhaps `deepstack_features` (Transformers 5), the features
themselves, or the features and a list of those of DeepStack layers (4.57). Each of these holds one piece for each
image, in a tuple or stacked, or the rows of all.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.inputs import VisionInputs
from trimtab.specs import IntArray

_LOCAL = ("last_hidden_state", "hidden_states", "attentions")
"""Of a rank's own images only, and nobody reads them after the features: not returned."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Features:
    """Rows of some atoms: features and DeepStack features side by side."""

    rows: Tensor  # (sum(num_rows), D)
    num_rows: IntArray  # by atom
    widths: tuple[int, ...]  # of the features and of each DeepStack layer; sums to D
    sample: Any  # what the tower returned: the shape to return in

    def without_rows(self) -> Features:
        """The same of no image: for a share that is empty, and encoded another one to know its form."""
        return replace(self, rows=self.rows[:0], num_rows=np.zeros(0, np.int64))


def read_features(output: Any, inputs: VisionInputs) -> Features:
    """Return `output` of a call that encoded `inputs`, all of their atoms."""
    first, *others = columns_of(output)
    # DeepStack's features have as many rows as the features: one matrix, so one exchange for all
    pieces = [_pieces(first, len(inputs), inputs.rows)]
    num_rows = np.array([len(piece) for piece in pieces[0]], np.int64)
    pieces += [_pieces(column, len(inputs), num_rows) for column in others]
    joined = [torch.cat(list(column)) for column in pieces]
    return Features(
        rows=joined[0] if len(joined) == 1 else torch.cat(joined, dim=-1),
        num_rows=num_rows,
        widths=tuple(column.shape[-1] for column in joined),
        sample=output,
    )


def write_features(features: Features, rows: Tensor, num_rows: IntArray) -> Any:
    """Return an output like `features.sample` that holds `rows`, of which `num_rows[i]` are entry i's."""
    return fill_features(features.sample, torch.split(rows, list(features.widths), dim=-1), num_rows)


def fill_features(sample: Any, columns: Sequence[Tensor], num_rows: IntArray) -> Any:
    """Return an output like `sample` that holds these columns, the features and those of DeepStack layers, as rows."""
    filled = [_fill(like, x, num_rows) for like, x in zip(columns_of(sample), columns, strict=True)]
    return _with_columns(sample, filled)


def _with_columns(sample: Any, columns: list[Any]) -> Any:
    """Return an output like `sample` that holds these columns, as `columns_of` gives them."""
    # the three shapes that models return
    if _has_layers(sample):
        return columns[0], columns[1:]
    if isinstance(sample, (Tensor, tuple, list)):
        return columns[0]
    known = {field.name for field in fields(sample)}  # an output may carry more that was captured on the way
    values = {name: value for name, value in sample.items() if name in known and name not in _LOCAL}
    values["pooler_output"] = columns[0]
    if len(columns) > 1:
        values["deepstack_features"] = type(sample.deepstack_features)(columns[1:])
    return type(sample)(**values)


def touch(output: Any, zero: Tensor) -> Any:
    """Return `output` with a zero added, so that what computed the zero takes part in the backward."""
    if isinstance(output, Tensor):
        return output + zero.to(output)
    if isinstance(output, tuple):
        return (touch(output[0], zero), *output[1:])
    if isinstance(output, list):
        return [touch(output[0], zero), *output[1:]]
    output.pooler_output = touch(output.pooler_output, zero)
    return output


def each_tensor(output: Any, start: int, end: int, change: Callable[[Tensor], Tensor]) -> Any:
    """Return an output of entries `start` to `end` alone, every tensor of features changed."""
    return _with_columns(output, [type(x)(change(piece) for piece in x[start:end]) for x in columns_of(output)])


def columns_of(output: Any) -> list[Any]:
    """The features, then those of each DeepStack layer."""
    if _has_layers(output):
        return [output[0], *output[1]]
    if isinstance(output, Tensor) or (isinstance(output, (tuple, list)) and all(isinstance(x, Tensor) for x in output)):
        return [output]
    if getattr(output, "pooler_output", None) is not None:
        return [output.pooler_output, *(getattr(output, "deepstack_features", None) or [])]
    raise TrimtabError(f"features came as {type(output).__name__}: put vision_dp at get_image_features of the model")


def _has_layers(output: Any) -> bool:
    """The features and a list of those of DeepStack layers."""
    return isinstance(output, tuple) and len(output) == 2 and isinstance(output[1], list)


def rows_of(output: Any) -> list[Tensor]:
    """The features, and those of each DeepStack layer, each as one matrix of rows."""
    pieces = [list(x) if isinstance(x, (list, tuple)) else [x] for x in columns_of(output)]
    return [torch.cat([x.reshape(-1, x.shape[-1]) for x in column]) for column in pieces]


def _pieces(column: Any, num_atoms: int, expected: IntArray | None) -> Sequence[Tensor]:
    """Return the rows of each atom."""
    # a piece for each image; images of equal size stacked; or the rows of all in one matrix
    if isinstance(column, (tuple, list)):
        if len(column) == num_atoms:
            return [piece.reshape(-1, piece.shape[-1]) for piece in column]
        problem = f"{len(column)} pieces"
    elif column.ndim >= 3 and len(column) == num_atoms:
        return list(column.reshape(num_atoms, -1, column.shape[-1]).unbind())
    elif column.ndim == 2 and expected is not None and len(column) == int(expected.sum()):
        return list(torch.split(column, expected.tolist()))
    elif column.ndim == 2 and expected is None and num_atoms == 1:
        return [column]
    else:
        problem = f"shape {tuple(column.shape)}"
    raise TrimtabError(f"features of {num_atoms} images came as {problem}: give a family= that fits the model")


def _fill(like: Any, rows: Tensor, num_rows: IntArray) -> Any:
    if isinstance(like, (tuple, list)):
        return type(like)(torch.split(rows, num_rows.tolist()))
    per_entry = math.prod(like.shape[1:-1])
    if like.ndim < 3 or (num_rows % per_entry).any():  # of some images only a part of the rows
        return rows
    return rows.reshape(-1, *like.shape[1:])
