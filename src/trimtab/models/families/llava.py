"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: CLIP or SigLIP, two linear layers, a language model."""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Literal

from trimtab.models.families.architecture import Architecture, check_projector, linear, named_layer, vector
from trimtab.models.families.family import Family, PackFormat
from trimtab.models.families.fields import Fields
from trimtab.models.families.text import read_text, read_tied, text_layers, text_type, tied_pair
from trimtab.models.families.vit import mark_unread, read_clip, read_taps
from trimtab.models.images.settings import Settings
from trimtab.models.images.tiles import AnyRes, FixedImage
from trimtab.models.quote import quote
from trimtab.specs import ImageMarkup, ImageRule

TEXT = ("llama", "mistral", "qwen2", "qwen3", "phi3")
CLASS_TOKENS = MappingProxyType({"clip_vision_model": 1, "siglip_vision_model": 0})
"""Rows that a vision tower adds to the patches of each tile, by its `model_type`."""


def describe_llava(config: Fields) -> Architecture:
    return _describe(config, feature_layer=-2, strategy="default", either_ties=True, has_newline=False)


def describe_llava_next(config: Fields) -> Architecture:
    return _describe(config, feature_layer=-2, strategy="default", either_ties=False, has_newline=True)


def describe_llava_onevision(config: Fields) -> Architecture:
    return _describe(config, feature_layer=-1, strategy="full", either_ties=True, has_newline=True)


def _describe(
    config: Fields, *, feature_layer: int, strategy: Literal["default", "full"], either_ties: bool, has_newline: bool
) -> Architecture:
    vision, language = config.section("vision_config"), config.section("text_config")
    kind: Literal["clip_vision_model", "siglip_vision_model"] = "clip_vision_model"
    if vision.word("model_type", choices=("clip_vision_model", "siglip_vision_model")) != kind:
        kind = "siglip_vision_model"
    tower = read_clip(vision, "model.vision_tower", kind=kind)
    taps = read_taps(config, tower, absent=feature_layer)
    text = read_text(language, text_type(language, TEXT))
    H = text.hidden_size
    # older files predate both switches; the published models of a family agree on them
    if config.given("vision_feature_select_strategy"):
        drops_first_row = config.word("vision_feature_select_strategy", choices=("default", "full")) == "default"
    else:
        drops_first_row = strategy == "default"
    bias = config.flag("multimodal_projector_bias", absent=True)
    width = tower.hidden_size * taps.num_features
    check_projector(config, (width, H), (H, H))

    rows_in = tower.num_patches + tower.has_class_token
    rows = (rows_in - drops_first_row) / rows_in
    # hidden states are taken in front of the tower's last norm, even the last of them
    layers = list(mark_unread(tower, taps.num_read_blocks, reads_norm=False))
    layers.append(
        named_layer(
            "model.multi_modal_projector",
            "projector",
            "projector",
            linear(width, H, bias=bias) + linear(H, H, bias=bias),
            hidden_size=width,
            output_size=H,
            rows=rows,
        )
    )
    cuts, reasons = set(taps.forbidden_cuts), [taps.reason] if taps.reason else []
    if has_newline:
        cuts.add(len(layers))
        reasons.append("model.image_newline is a bare parameter beside the projector and cannot run without it")
        newline = vector(H)
        layers.append(
            named_layer(
                "model.image_newline", "projector", "embed", newline, hidden_size=H, rows=rows, rows_out=rows, bare=True
            )
        )
    tied = read_tied(config, language, either=either_ties)
    layers += text_layers(text, "model.language_model", "lm_head", tied=tied)
    notes = taps.notes
    if tower.layers[-1].name.endswith(".head"):
        notes += ("vision_use_head is true: the pooling head is computed, but nothing reads it.",)
    return Architecture(
        layers=tuple(layers),
        vocab_size=text.vocab_size,
        tied=tied_pair(layers, tied=tied),
        forbidden_cuts=frozenset(cuts),
        forbidden_cut_reason="; ".join(reasons) or None,
        notes=notes,
    )


def _one_tile(s: Settings) -> ImageRule:
    tile, grid, class_tokens = _clip_tile(s)
    rows = grid * grid + class_tokens
    tokens = rows - (_feature_strategy(s, class_tokens) == "default")
    s.expect_int(
        tokens,
        f"a tile of {tile} pixels with {rows} rows",
        ("preprocess", "tokens_per_image"),
        ("config", "image_seq_length"),
    )
    s.check()
    return FixedImage(rows=rows, tokens=tokens)


def _next_tiles(s: Settings) -> ImageRule:
    return _anyres(s, max_feature_tiles=None, lone_images_only=False, name="llava_anyres")


def _onevision_tiles(s: Settings) -> ImageRule:
    rule = s.first_text(("preprocess", "rule"), ("config", "vision_aspect_ratio"))
    match = re.fullmatch(r"(?:llava_)?anyres_max_([1-9][0-9]{0,3})", rule)
    if rule and match is None:
        s.problem(
            "reads `vision_aspect_ratio` in config.json",
            f"{quote(rule)} is not of the form anyres_max_N with N up to 9999",
            "correct it, for released checkpoints to anyres_max_9",
        )
    limit = int(match.group(1)) if match else None
    return _anyres(s, max_feature_tiles=limit, lone_images_only=True, name=f"llava_anyres_max_{limit}")


def _anyres(s: Settings, *, max_feature_tiles: int | None, lone_images_only: bool, name: str) -> ImageRule:
    tile, grid, class_tokens = _clip_tile(s)
    strategy = _feature_strategy(s, class_tokens)
    if (strategy == "default") != (class_tokens == 1):
        s.problem(
            f"reads `vision_feature_select_strategy` = {quote(strategy)} in config.json",
            f"a tower with {class_tokens} class tokens would not leave a square of features per tile",
            'use "default" with CLIP and "full" with SigLIP',
        )
    s.expect_int(grid * grid, "(tile / patch)^2", ("preprocess", "base_tokens"))
    pinpoints = s.pinpoints()
    s.check()
    return AnyRes(
        tile_size=tile,
        pinpoints=pinpoints,
        grid_size=grid,
        rows_per_tile=grid * grid + class_tokens,
        max_feature_tiles=max_feature_tiles,
        lone_images_only=lone_images_only,
        name=name,
    )


def _clip_tile(s: Settings) -> tuple[int, int, int]:
    """Side of a tile in pixels and in patches, and class tokens, of a CLIP or SigLIP tower."""
    s.require_resize()
    tile = s.agreed_int(("vision", "image_size"), ("file", "crop_size"), ("file", "size"))
    s.expect_int(tile, "`image_size` of vision_config", ("preprocess", "tile"), ("preprocess", "image_size"))
    patch = s.first_int(("vision", "patch_size"))
    tower = s.first_text(("vision", "model_type"))
    if tower and tower not in CLASS_TOKENS:
        s.problem(
            f"reads `model_type` = {quote(tower)} in vision_config",
            f"only towers {' and '.join(CLASS_TOKENS)} are described",
            "plan with one of those",
        )
    return tile, s.grid(tile, patch), CLASS_TOKENS.get(tower, 0)


def _feature_strategy(s: Settings, class_tokens: int) -> str:
    """ "default" drops the first row of each tile, "full" keeps all."""
    if s.value("preprocess", "rule") is not None and s.value("config", "vision_feature_select_strategy") is None:
        return "default" if class_tokens else "full"  # a zoo entry states the tokens that remain; they are checked
    strategy = s.first_text(("config", "vision_feature_select_strategy"))
    if strategy not in ("", "default", "full"):
        s.problem(
            "reads `vision_feature_select_strategy` in config.json",
            f"{quote(strategy)} is neither default nor full",
            "correct it in that file",
        )
    return strategy


_MARKUP = ImageMarkup(placeholder="<image>", soft="<image>")
_SIZED = ("pixel_values", "image_sizes")

FAMILIES = {
    "llava": Family(
        describe=describe_llava,
        image_rule=_one_tile,
        markup=_MARKUP,
        pack=PackFormat(joined=("pixel_values",), counts="tiles", smallest="tile"),
    ),
    "llava_next": Family(
        describe=describe_llava_next,
        image_rule=_next_tiles,
        markup=_MARKUP,
        pack=PackFormat(joined=_SIZED, counts="sizes", smallest="fewest tiles"),
        joins_tiles=True,
    ),
    "llava_onevision": Family(
        describe=describe_llava_onevision,
        image_rule=_onevision_tiles,
        markup=_MARKUP,
        pack=PackFormat(joined=(*_SIZED, "batch_num_images"), counts="sizes", smallest="fewest tiles"),
        joins_tiles=True,
    ),
}
