"""Position ids that restart with every sample of a pack."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from types import MethodType, SimpleNamespace
from typing import Any

import torch
from torch import Tensor

RopeIndex = Callable[[Tensor, Tensor, Mapping[str, Tensor]], Tensor]
"""(tokens,) ids, (tokens,) token types and a sample's grids -> (3, tokens) positions."""


def text_positions(lengths: Sequence[int]) -> Tensor:
    """(1, tokens) 0 1 2 .. 0 1 .. : Transformers takes every restart for a new sample."""
    return torch.cat([torch.arange(length) for length in lengths])[None]


def rope_index(config: Any) -> RopeIndex:
    """A family's own `get_rope_index`, without the weights of the model it is a method of.

    The method reads the configuration and one sibling method only (Transformers 5.23: qwen2_vl, qwen2_5_vl, qwen3_vl,
    qwen3_vl_moe), so both are bound to a plain namespace.
    """
    from transformers import MODEL_MAPPING

    model_class = MODEL_MAPPING[type(config)]
    model = SimpleNamespace(config=config)
    model.get_vision_position_ids = MethodType(model_class.get_vision_position_ids, model)

    def positions(ids: Tensor, token_types: Tensor, grids: Mapping[str, Tensor]) -> Tensor:
        if not grids:  # the method expects an image; the model itself counts text the same way
            return torch.arange(len(ids)).expand(3, -1)
        result: Tensor = model_class.get_rope_index(model, ids[None], token_types[None], **grids)[0]
        return result[:, 0]

    return positions


def mrope_rows(lengths: Sequence[int], axes: Sequence[Tensor]) -> Tensor:
    """(4, 1, tokens): the text positions that mark where samples start, then temporal, height and width."""
    return torch.cat([text_positions(lengths), torch.cat(tuple(axes), dim=1)])[:, None]
