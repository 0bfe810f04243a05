"""What a micro-batch is to a pipeline: the tensors that cross a cut, and the arguments of a stage's forward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

ENCODED = "encoded_images"
"""Key of a batch whose images were encoded already: an `Encoded`."""
NOT_GIVEN = ("labels", "loss_weights", "denominator", ENCODED)
"""Keys of a batch that are no arguments of a model here."""
Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Sealed:
    """A batch that torch's schedules do not look into: they would search its tensors for gradients."""

    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """What other ranks have encoded of a micro-batch."""

    outputs: Mapping[str, Any]  # "image" and "video" -> what the function that encodes them returns
    rows: Mapping[str, Tensor]  # the same as rows, by `feature_name`


def feature_name(kind: str, column: int) -> str:
    """Of image features, 0, and those of DeepStack layers, as one tensor across a cut."""
    return f"{kind} features" + (f" {column}" if column else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One tensor across a cut, for one micro-batch."""

    name: str  # of the layer that made it, or of image features
    shape: tuple[int, ...]
    requires_grad: bool


def is_pixels(key: str) -> bool:
    return "pixel_values" in key or key == "flattened_patches"


def has_images(batch: Batch) -> bool:
    return any(is_pixels(key) and value is not None and len(value) for key, value in batch.items())


def arguments_of(batch: Batch, *, with_images: bool = True) -> dict[str, Any]:
    """What the model's forward is called with."""
    return {
        key: value
        for key, value in batch.items()
        if key not in NOT_GIVEN and (with_images or not is_pixels(key)) and value is not None
    } | {"use_cache": False}


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if isinstance(value, Tensor)}
