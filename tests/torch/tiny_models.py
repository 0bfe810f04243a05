"""Small models of every family: odd configurations, and inputs of one image to run them on. Needs torch."""

import copy
import json
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
import transformers
import yaml

from trimtab.models.asking.model import describe_fields
from trimtab.models.describe import image_rule
from trimtab.models.families import family_of
from trimtab.specs import ImageCounts, ModelSpec

READ = yaml.safe_load(Path(__file__).with_name("small_models.yaml").read_text(encoding="utf-8"))
TEXT, CLIP, SIGLIP, INTERNVIT, QWEN25_VIT = (
    READ["parts"][name] for name in ("text", "clip", "siglip", "internvit", "qwen2_5_vit")
)
ODD_CONFIGS = {
    name: (x["type"], x["vision"], x["text"], {k: v for k, v in x.items() if k not in ("type", "vision", "text")})
    for name, x in READ["odd"].items()
}
"""Model type, fields of the two towers and those around them, by case."""


def odd_config(case: str) -> transformers.PretrainedConfig:
    """The configuration of a case as it stands."""
    model_type, vision, text, outer = copy.deepcopy(ODD_CONFIGS[case])
    return transformers.AutoConfig.for_model(model_type, vision_config=vision, text_config=text, **outer)


def preprocessor_of(model_type: str, vision: dict) -> dict:
    """The few settings that the image rule needs and a configuration does not hold."""
    if model_type == "internvl":
        side = np.max(vision["image_size"]).item()  # a number, or one for each side
        return {"min_patches": 1, "max_patches": 12, "size": {"height": side, "width": side}}
    if model_type.startswith(("qwen", "glm")):
        settings = {"min_pixels": 3136, "max_pixels": 10**6, "patch_size": vision["patch_size"]}
        return {**settings, "merge_size": vision["spatial_merge_size"], "temporal_patch_size": 2}
    return {}


def as_saved(config) -> dict:
    """The whole config.json; without the token count that the class assumes for its own default image size."""
    written = json.loads(config.to_json_string(use_diff=False))
    written.pop("image_seq_length", None)
    return written


BARE = ("model.image_newline", "model.vision_model.class_embedding")
"""Layers that are parameters without a module of their own."""

IMAGE_TOKEN = 199


@dataclass(frozen=True)
class TinyModel:
    """A real model with weights, its description, and one forward's inputs."""

    model: torch.nn.Module
    spec: ModelSpec
    inputs: dict[str, torch.Tensor]
    num_patches: int
    num_tokens: int


def make_config(case: str, *, vision: dict | None = None, text: dict | None = None):
    """The configuration of a case; `vision` and `text` replace some of its fields."""
    model_type, own_vision, own_text, outer = copy.deepcopy(ODD_CONFIGS[case])
    vision, text = {**own_vision, **(vision or {})}, {**own_text, **(text or {})}
    rope = {"rope_type": "default", "rope_theta": 1e4}
    if model_type in ("qwen2_vl", "qwen2_5_vl", "glm4v_moe"):  # rotary thirds for heads this narrow
        sections = [2, 2, 2] if model_type == "glm4v_moe" else [2, 3, 3]
        text.setdefault("rope_parameters", {**rope, "mrope_section": sections})
    if model_type == "mllama":
        text["rope_parameters"] = rope
    token = {"image_token_index": IMAGE_TOKEN} if model_type.startswith("llava") else {"image_token_id": IMAGE_TOKEN}
    return transformers.AutoConfig.for_model(model_type, vision_config=vision, text_config=text, **{**outer, **token})


def describe_here(config, *, preprocessor: dict | None = None, name: str | None = None) -> ModelSpec:
    """As `describe`, but Transformers is asked in this process: a child takes seconds to start."""
    written, family = as_saved(config), family_of(config.model_type)
    spec = describe_fields(written)
    rule = spec.image_rule if family.image_rule is None else image_rule(written, preprocessor)
    return replace(spec, name=name or spec.name, image_rule=rule)


def make_tiny_model(case: str) -> TinyModel:
    model_type, vision, _, _ = ODD_CONFIGS[case]
    config = make_config(case)
    spec = describe_here(config, preprocessor=preprocessor_of(model_type, vision))
    model = transformers.AutoModelForImageTextToText.from_config(config)
    made = make_inputs(model_type, vision, spec)
    return TinyModel(model, spec, made.inputs, sum(x.patches for x in made.images), made.num_tokens)


@dataclass(frozen=True)
class TinyBatch:
    """Prompts of one length: five tokens, images, some more tokens; what the images of one prompt count."""

    inputs: dict[str, torch.Tensor]
    images: list[ImageCounts]
    num_tokens: int  # of one prompt, as of images


def make_inputs(
    model_type: str, vision: dict, spec: ModelSpec, *, large: bool = False, batch: int = 1, behind: int = 3
) -> TinyBatch:
    """One image of 8 x 4 patches or of one 56 x 56 tile a prompt, or of many (`large`); two tiles and a thumbnail."""
    if model_type.startswith(("qwen", "glm")):
        merge = vision["spatial_merge_size"]
        h, w = {(2, False): (8, 4), (2, True): (24, 16), (3, False): (9, 6), (3, True): (24, 18)}[merge, large]
        images = [_counted(h * w, h * w // merge**2, 1)]
        tokens = images[0].tokens
        pixels = {
            "pixel_values": torch.randn(batch * h * w, 3 * 2 * 14 * 14),
            "image_grid_thw": torch.tensor([[1, h, w]] * batch),
            "mm_token_type_ids": torch.tensor([[0] * 5 + [1] * tokens + [0] * behind] * batch),
        }
    elif model_type == "mllama":
        images = [spec.image_rule.count(56, 56)] * (12 if large else 1)
        tokens = sum(x.tokens for x in images)
        pixels = mllama_images(vision, batch, tokens, num_tokens=5 + tokens + behind)
    else:
        several = model_type in ("llava_next", "llava_onevision")  # a 112 x 56 image: two tiles and a thumbnail
        tiles, rows = 3 if several else 20 if large else 1, 16 + (spec.layers[0].rows_per_input < 1)
        tokens = 16 + 8 * 5 if several else {"internvl": 4, "gemma3": 4, "llava": 16}[model_type] * tiles
        images = [_counted(rows, tokens, tiles)]
        shape = (batch, tiles) if several else (batch * tiles,)
        pixels = {"pixel_values": torch.randn(*shape, 3, 56, 56)}
        if several:
            pixels["image_sizes"] = torch.tensor([[112, 56]] * batch)
    ids = torch.tensor([[3] * 5 + [IMAGE_TOKEN] * tokens + [4] * behind] * batch)
    if model_type == "gemma3":
        pixels["token_type_ids"] = (ids == IMAGE_TOKEN).long()
    return TinyBatch({**pixels, "input_ids": ids}, images, 5 + tokens + behind)


def _counted(rows: int, tokens: int, tiles: int) -> ImageCounts:
    pairs = rows * rows * tiles
    return ImageCounts(patches=rows * tiles, tokens=tokens, tiles=tiles, patches_sq=pairs, patches_windowed=pairs)


def mllama_images(vision: dict, num_sequences: int, num_images: int, *, num_tokens: int) -> dict[str, torch.Tensor]:
    """Images of each sequence that fill all their tiles and are seen by every token."""
    B, M, tiles, side = num_sequences, num_images, vision["max_num_tiles"], vision["image_size"]
    return {
        "pixel_values": torch.randn(B, M, tiles, 3, side, side),
        "aspect_ratio_ids": torch.full((B, M), 2),
        "aspect_ratio_mask": torch.ones(B, M, tiles, dtype=torch.long),
        "cross_attention_mask": torch.ones(B, num_tokens, M, tiles, dtype=torch.long),
    }
