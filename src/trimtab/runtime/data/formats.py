"""What a pack of each family must look like: asked of Transformers, unless `models.families` declares it.

A family that follows the conventions of Transformers 5 needs no declaration. Its masks come from positions that
restart, M-RoPE is known by `get_rope_index`, the keys of its images by the signatures of the functions that encode
them, and layers that carry a state along the row by their kinds.
"""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Callable
from typing import Any

from trimtab.errors import UnknownModelError
from trimtab.models.families import PackFormat, family_of
from trimtab.runtime.data.smallest_images import has_blocks

TOKEN_TYPE_KEYS: tuple[str, ...] = ("mm_token_type_ids", "token_type_ids")
"""What processors call 0 text, 1 image, 2 video per token; the second is Gemma's name."""

GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
_NO_IMAGE_KEYS = {
    "self",
    "kwargs",
    "input_ids",
    "inputs_embeds",
    "attention_mask",
    "position_ids",
    "interpolate_pos_encoding",
}


def pack_format(config: Any) -> PackFormat:
    """The declared format of a Transformers configuration's family, or what its model class says."""
    return family_of(config.model_type).pack or ask_format(config)


def ask_format(config: Any) -> PackFormat:
    """What the classes of Transformers say of a family: no weights, no list of names.

    Use it to see what `PackedCollator(config)` found, or to change a field of it: docs/packed-collator.md shows both.
    """
    core, outer = model_classes(config)
    keys: dict[str, None] = {}
    for encode in ("get_image_features", "get_video_features"):
        found = getattr(core, encode, None) or getattr(outer, encode, None)
        keys |= dict.fromkeys(_tensors_of(found)) if found is not None else {}
    mrope = hasattr(core, "get_rope_index")
    taken = inspect.signature(outer.forward).parameters
    types_key = next((key for key in TOKEN_TYPE_KEYS if key in taken and not mrope), None)
    own_side = any(key.endswith("merge_sizes") for key in keys)  # of the blocks of each image
    in_blocks = "image_grid_thw" in keys and not own_side and has_blocks(config) and _names_tokens(core, config)
    return PackFormat(
        joined=tuple(keys) + tuple(key for key in GRIDS if mrope and key not in keys and key in taken),
        mrope=mrope,
        stateful=has_state(config),
        types_key=types_key,
        counts="grid" if in_blocks else "model",
        smallest="block" if in_blocks else None,
    )


def _names_tokens(core: Any, config: Any) -> bool:
    """Whether the configuration has the tokens by which the model places an image: thinkers by themselves lack some."""
    placing = getattr(core, "get_rope_index", None)
    read = re.findall(r"config\.(\w+_token_id)", inspect.getsource(placing)) if placing is not None else ()
    return all(getattr(config, name, None) is not None for name in read)


def _tensors_of(encode: Callable[..., Any]) -> list[str]:
    """Arguments that hold something of each image: their annotation names a tensor."""
    parameters = inspect.signature(inspect.unwrap(encode)).parameters.values()
    return [
        p.name
        for p in parameters
        if p.name not in _NO_IMAGE_KEYS and ("Tensor" in str(p.annotation) or "pixel" in p.name)
    ]


def model_classes(config: Any) -> tuple[Any, Any]:
    """The class without a head that makes positions and encodes images, and the one that is trained."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_MAPPING

    for mapping in (MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING):
        if type(config) in mapping:
            outer = mapping[type(config)]
            return next((MODEL_MAPPING[kind] for kind in type(config).__mro__ if kind in MODEL_MAPPING), outer), outer
    raise UnknownModelError(
        f"packs for model_type {config.model_type!r} were asked for, but Transformers maps its configuration to no "
        f"model: register the class (AutoModelForImageTextToText.register), or give family=PackFormat(...)"
    )


def has_state(config: Any) -> bool:
    """Whether a layer of the text model carries a state along the row: its kind says so, or its code convolves."""
    from transformers import MODEL_MAPPING, masking_utils

    masks = masking_utils.LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
    recurrent = getattr(masking_utils, "create_recurrent_attention_mask", None)  # None: before 5.17 they had no mask

    text = config.get_text_config()
    for kind in set(getattr(text, "layer_types", None) or ()):
        made = masks.get(kind)
        if recurrent in (made.values() if isinstance(made, dict) else (made,)):
            return True
    if type(text) not in MODEL_MAPPING:
        return False
    return "causal_conv1d_fn" in vars(sys.modules[MODEL_MAPPING[type(text)].__module__])
