"""Samples that weigh nothing: for empty slots, and for packs that would leave the vision tower idle."""

from __future__ import annotations

from typing import Any

import torch

from trimtab.errors import UnsupportedPlanError
from trimtab.models.asking.inputs import image_token
from trimtab.models.families import PackFormat
from trimtab.runtime.data.formats import pack_format
from trimtab.runtime.data.loss import IGNORED
from trimtab.runtime.data.smallest_images import smallest_image

TEXT_TOKEN = 0
"""Any id of the vocabulary does: nothing reads what it predicts."""


def filler_sample(config: Any, *, with_image: bool, family: PackFormat | None = None) -> dict[str, Any]:
    """A processed sample of zero loss weight: one token of text, with the smallest image of the family before it.

    That image is 1 token for the Qwen families, 256 for most InternVL and Gemma 3, 576 for LLaVA-1.5. Black pixels.
    """
    num_image_tokens = 0
    image: dict[str, torch.Tensor] = {}
    if with_image:
        smallest = (family or pack_format(config)).smallest
        if smallest is None:
            raise UnsupportedPlanError(
                f"a pack without images was to get a filler image, but the smallest image of {config.model_type!r} is "
                "not known: give vision_in_every_pack=False, or family= with `smallest`"
            )
        num_image_tokens, image = smallest_image(smallest, config)
    ids = torch.tensor([image_token(config)] * num_image_tokens + [TEXT_TOKEN])
    return {"input_ids": ids, "labels": torch.full_like(ids, IGNORED), "loss_weight": 0.0, **image}
