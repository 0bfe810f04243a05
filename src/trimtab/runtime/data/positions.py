"""Position ids that restart with every sample of a pack."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.errors import UnsupportedPlanError
from trimtab.runtime.data.formats import model_classes

RopeIndex = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(tokens,) ids, (tokens,) token types and a sample's grids -> (3, tokens) positions."""


def text_positions(lengths: Sequence[int]) -> Tensor:
    """(1, tokens) 0 1 2 .. 0 1 .. : Transformers takes every restart for a new sample."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def rope_index(config: Any) -> RopeIndex:
    """A family's own `get_rope_index`, without the layers and weights of the model it is a method of.

    The method reads the configuration, sibling methods and what `__init__` copies from the configuration, so it is
    bound to an empty module of its class; where that lacks a field, to the whole model on the meta device.
    """
    core, _ = model_classes(config)
    model: Any = core.__new__(core)
    nn.Module.__init__(model)
    model.config = config

    def positions(ids: Tensor, token_types: Tensor, grids: Mapping[str, Tensor]) -> Tensor:
        nonlocal model
        if not grids:  # the method expects an image; the model itself counts text the same way
            return torch.arange(len(ids)).expand(_num_axes(config), -1)
        taken = inspect.signature(model.get_rope_index).parameters
        given = {"mm_token_type_ids": token_types[None], **grids}
        if "second_per_grids" in taken and "second_per_grid_ts" in given:
            given["second_per_grids"] = given.pop("second_per_grid_ts")
        given = {key: value for key, value in given.items() if key in taken}
        if "attention_mask" in taken and "mm_token_type_ids" not in taken:
            given["attention_mask"] = torch.ones_like(ids)[None]
        try:
            result: Tensor = _ask(model, ids, given)
        except AttributeError:  # a field that only `__init__` makes
            with torch.device("meta"):
                model = core._from_config(config)
            try:
                result = _ask(model, ids, given)
            except (AttributeError, TypeError, ValueError, IndexError, RuntimeError) as error:
                raise UnsupportedPlanError(
                    f"positions of a sample with images were asked of {core.__name__}.get_rope_index, which fails "
                    f"({type(error).__name__}: {error}): see that the configuration names all special tokens, or train "
                    "without packing"
                ) from error
        return result[:, 0].long()

    return positions


def _ask(model: Any, ids: Tensor, given: Mapping[str, Any]) -> Tensor:
    found: Tensor = model.get_rope_index(ids[None], **given)[0]
    return found


def _num_axes(config: Any) -> int:
    """Three, or as many as the rotary embedding has sections (4 in hunyuan_vl)."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    sections = rope.get("mrope_section", ())
    return 4 if len(sections) == 4 else 3


def mrope_rows(lengths: Sequence[int], axes: Sequence[Tensor]) -> Tensor:
    """(1 + axes, 1, tokens): the text positions that mark where samples start, then temporal, height and width."""
    return torch.cat([text_positions(lengths), torch.cat(tuple(axes), dim=1)])[:, None]
