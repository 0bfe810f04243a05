"""What a pack of each family must look like: asked of Transformers, and declared where it cannot be asked.

A family that follows the conventions of Transformers 5 needs no line here. Its masks come from positions that restart,
M-RoPE is known by `get_rope_index`, the keys of its images by the signatures of the functions that encode them, and
layers that carry a state along the row by their kinds.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from trimtab.errors import UnknownModelError
from trimtab.runtime.data.smallest_images import SmallestImage, fewest_tiles, one_block, one_tile


@dataclass(frozen=True, slots=True, kw_only=True)
class PackFormat:
    """Give this as `PackedCollator(config, family=...)` where what Transformers says of your model is not enough.

    Example: a family of tiles, of fixed size, whose image tokens see their whole image.

    >>> PackFormat(joined=("pixel_values",), sees="images").counts
    'model'
    """

    joined: tuple[str, ...]  # keys concatenated along dimension 0, in sample order; further dimensions padded with 0
    mrope: bool = False  # positions have several axes, and the rows (text, temporal, height, width) in a pack
    text_row: bool = True  # False: the model takes no row of text positions beside the axes; masks are given explicitly
    sees: Literal["images", "prefix"] | None = None  # tokens that see their whole block, under masks given explicitly
    stateful: bool = False  # layers carry a state along the row: seq_idx and lengths say where samples start
    types_key: str | None = None  # argument of the forward that says which tokens are images
    counts: Literal["grid", "tiles", "sizes", "model"] = (
        "model"  # what tells an image's LLM tokens; the model checks too
    )
    smallest: Callable[[Any], SmallestImage] | None = None  # for packs without images; None: no filler image


_QWEN = PackFormat(
    joined=("pixel_values", "image_grid_thw", "pixel_values_videos", "video_grid_thw", "second_per_grid_ts"),
    mrope=True,
    counts="grid",
    smallest=one_block,
)
_TILES = PackFormat(joined=("pixel_values",), counts="tiles", smallest=one_tile)
_NEXT = PackFormat(joined=("pixel_values", "image_sizes"), counts="sizes", smallest=fewest_tiles)

_GEMMA3 = PackFormat(joined=("pixel_values",), sees="images", counts="tiles", smallest=one_tile)

PACK_FORMATS: dict[str, PackFormat] = {
    "qwen2_vl": _QWEN,
    "qwen2_5_vl": _QWEN,
    "qwen3_vl": _QWEN,
    "qwen3_vl_moe": _QWEN,
    "internvl": _TILES,
    "llava": _TILES,
    "llava_next": _NEXT,
    "llava_onevision": PackFormat(joined=(*_NEXT.joined, "batch_num_images"), counts="sizes", smallest=fewest_tiles),
    "gemma3": _GEMMA3,
    "shieldgemma2": _GEMMA3,
    "hunyuan_vl": PackFormat(joined=("pixel_values", "image_grid_thw"), mrope=True, text_row=False),
    "paligemma": PackFormat(joined=("pixel_values",), sees="prefix"),
}
"""By `config.model_type`: what asking does not tell. All other families are asked."""

SMALLEST: dict[str, Callable[[Any], SmallestImage]] = dict.fromkeys(
    (
        *("cohere_compass", "cosmos3_omni", "exaone4_5", "glm46v", "glm4v", "glm4v_moe", "glm_ocr"),
        *("glmga", "hyperclovax_vision_v2", "qwen3_5", "qwen3_5_moe", "qwen4_exp"),
    ),
    one_block,
)
"""For families that are asked: what fills packs without images. `verify_packing` tries it."""

TOKEN_TYPE_KEYS = ("mm_token_type_ids", "token_type_ids")
"""What processors call 0 text, 1 image, 2 video per token; the second is Gemma's name."""

_GRIDS = ("image_grid_thw", "video_grid_thw", "second_per_grid_ts")
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
    declared = PACK_FORMATS.get(config.model_type)
    return declared if declared is not None else ask_format(config)


def ask_format(config: Any) -> PackFormat:
    """What the classes of Transformers say of a family: no weights, no list of names."""
    core, outer = model_classes(config)
    keys: dict[str, None] = {}
    for encode in ("get_image_features", "get_video_features"):
        found = getattr(core, encode, None) or getattr(outer, encode, None)
        keys |= dict.fromkeys(_tensors_of(found)) if found is not None else {}
    mrope = hasattr(core, "get_rope_index")
    taken = inspect.signature(outer.forward).parameters
    types_key = next((key for key in TOKEN_TYPE_KEYS if key in taken and not mrope), None)
    return PackFormat(
        joined=tuple(keys) + tuple(key for key in _GRIDS if mrope and key not in keys and key in taken),
        mrope=mrope,
        stateful=has_state(config),
        types_key=types_key,
        smallest=SMALLEST.get(config.model_type),
    )


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
        f"model: register the class (AutoModelForImageTextToText.register), or use one of {', '.join(PACK_FORMATS)}"
    )


def has_state(config: Any) -> bool:
    """Whether a layer of the text model carries a state along the row: its kind says so, or its code convolves."""
    from transformers import MODEL_MAPPING
    from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING as MASKS
    from transformers.masking_utils import create_recurrent_attention_mask

    text = config.get_text_config()
    for kind in set(getattr(text, "layer_types", None) or ()):
        made = MASKS.get(kind)
        if create_recurrent_attention_mask in (made.values() if isinstance(made, dict) else (made,)):
            return True
    if type(text) not in MODEL_MAPPING:
        return False
    return "causal_conv1d_fn" in vars(sys.modules[MODEL_MAPPING[type(text)].__module__])
