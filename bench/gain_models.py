"""Models with random weights that `training_gain` trains: an InternVL of chosen widths, and Qwen2.5-VL as published.

A tile has 256 / scale tokens and 1024 / scale patches. InternVL is given each tile as an image of its own; Qwen2.5-VL
one image of as many tiles side by side, with the same patches and tokens.
"""

import copy
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForImageTextToText

from timed_profile import make_cases
from trimtab.balance.cost import LinearCost
from trimtab.models.description import read_shipped
from trimtab.specs import SampleTable

VOCABULARY, IMAGE_TOKEN, PATCH = 4096, 4095, 14
Images = Callable[[int, torch.Generator], dict[str, Any]]
"""What a sample of so many tiles holds beside its ids, drawn by the generator."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Widths and depths of the two towers; heads of 64."""

    vision: tuple[int, int]  # width, layers
    text: tuple[int, int]
    key_heads: int


SIZES = {
    "tiny": Size(vision=(64, 1), text=(64, 1), key_heads=1),  # for the bench's own test
    "10m": Size(vision=(192, 4), text=(256, 8), key_heads=2),
    "60m": Size(vision=(384, 8), text=(576, 14), key_heads=3),
    "2b": Size(vision=(1024, 24), text=(2048, 28), key_heads=8),
    "8b": Size(vision=(1024, 24), text=(4096, 36), key_heads=8),
}
QWENS = ("qwen-tiny", "Qwen2.5-VL-3B", "Qwen2.5-VL-7B")
NAMES = (*SIZES, *QWENS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GainModel:
    """A model in training, what its samples hold, and what they cost."""

    module: Any
    image_token: int
    images: Images
    cost: LinearCost  # forward flop per tile and per token
    square_tiles: bool  # whether the tiles of a sample see each other

    def price_by(self, table: SampleTable) -> SampleTable:
        """The samples, their squares those that this model attends to."""
        v = table.num_patches
        return dataclasses.replace(table, patches_sq=v * v) if self.square_tiles else table


def make_model(
    name: str, scale: int, *, attention: str, dtype: torch.dtype, device: str, text_layers: int | None = None
) -> GainModel:
    """One of `NAMES`, on the device; `text_layers`: of a published model, that many of its language model's."""
    config = internvl_config(SIZES[name], scale) if name in SIZES else qwen_config(name, text_layers)
    torch.manual_seed(0)
    with torch.device(device):
        module = AutoModelForImageTextToText.from_config(config, attn_implementation=attention, dtype=dtype)
    make = _internvl if name in SIZES else _qwen
    return make(module.to(device).train(), scale, dtype)


def internvl_config(size: Size, scale: int) -> Any:
    side = PATCH * math.isqrt(1024 // scale)
    (vision_width, vision_layers), (width, layers) = size.vision, size.text
    vision = {
        "hidden_size": vision_width,
        "intermediate_size": 4 * vision_width,
        "num_hidden_layers": vision_layers,
        "num_attention_heads": vision_width // 64,
        "image_size": [side, side],
        "patch_size": [PATCH, PATCH],
    }
    text = {
        "model_type": "qwen2",
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_hidden_layers": layers,
        "num_attention_heads": width // 64,
        "num_key_value_heads": size.key_heads,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 32768,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    return AutoConfig.for_model(
        "internvl",
        vision_config=vision,
        text_config=text,
        image_token_id=IMAGE_TOKEN,
        image_seq_length=256 // scale,
        tie_word_embeddings=False,
    )


def qwen_config(name: str, text_layers: int | None = None) -> Any:
    """The published configuration, its language model cut to `text_layers`; "qwen-tiny": the small one of benches."""
    fields = make_cases(large=False)[1].config if name == "qwen-tiny" else read_shipped(name)["config"]
    fields = {key: copy.deepcopy(value) for key, value in fields.items() if key != "model_type"}
    if text_layers is not None:
        fields["text_config"]["num_hidden_layers"] = text_layers
        fields["text_config"].pop("layer_types", None)  # one for each layer
    return AutoConfig.for_model("qwen2_5_vl", **fields)


def _internvl(module: Any, scale: int, dtype: torch.dtype) -> GainModel:
    """Two flop for each weight a row meets; attention 4 x width x layers per pair, in each tile by itself."""
    side, patches = PATCH * math.isqrt(1024 // scale), 1024 // scale + 1
    vision, text = module.config.vision_config, module.config.text_config
    pairs = 4 * vision.hidden_size * vision.num_hidden_layers
    return GainModel(
        module=module,
        image_token=IMAGE_TOKEN,
        images=lambda tiles, draw: {"pixel_values": torch.randn(tiles, 3, side, side, generator=draw).to(dtype)},
        cost=LinearCost(
            patches=2.0 * _weights(module.model.vision_tower) * patches + pairs * patches**2,
            **_text_cost(module.model.language_model, text),
        ),
        square_tiles=False,
    )


def _qwen(module: Any, scale: int, dtype: torch.dtype) -> GainModel:
    """Windows cost by the tile; the few layers without windows by the tiles of an image squared."""
    side, patches, vision = math.isqrt(1024 // scale), 1024 // scale, module.config.vision_config
    full = len(vision.fullatt_block_indexes)
    window = min((vision.window_size // vision.patch_size) ** 2, patches)
    pair, width = 4 * vision.hidden_size, vision.in_channels * vision.temporal_patch_size * vision.patch_size**2

    def images(tiles: int, draw: torch.Generator) -> dict[str, Any]:
        grid = torch.tensor([[1, side, side * tiles]])
        return {"pixel_values": torch.randn(tiles * patches, width, generator=draw).to(dtype), "image_grid_thw": grid}

    return GainModel(
        module=module,
        image_token=module.config.image_token_id,
        images=images,
        cost=LinearCost(
            patches=2.0 * (_weights(module.model.visual.blocks) + _weights(module.model.visual.merger) / 4) * patches
            + pair * (vision.depth - full) * window * patches,
            patches_sq=float(pair * full * patches**2),
            **_text_cost(module.model.language_model, module.config.text_config),
        ),
        square_tiles=True,
    )


def _text_cost(tower: Any, text: Any) -> dict[str, float]:
    return {
        "tokens": 2.0 * _weights(tower),  # the embedding, which multiplies nothing, stands for the head, not in it
        "tokens_sq": 2.0 * text.hidden_size * text.num_hidden_layers,  # causal: half
    }


def _weights(part: Any) -> int:
    return sum(p.numel() for p in part.parameters() if p.dim() == 2)
