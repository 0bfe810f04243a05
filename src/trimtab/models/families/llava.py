"""LLaVA-1.5, LLaVA-NeXT and LLaVA-OneVision: CLIP or SigLIP, two linear layers, a language model."""

from __future__ import annotations

from typing import Literal

from trimtab.models.families.architecture import Architecture, check_projector, linear, named_layer, vector
from trimtab.models.families.fields import Fields
from trimtab.models.families.text import read_text, read_tied, text_layers, text_type, tied_pair
from trimtab.models.families.vit import mark_unread, read_clip, read_taps

TEXT = ("llama", "mistral", "qwen2", "qwen3", "phi3")


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
        layers.append(
            named_layer(
                "model.image_newline",
                "projector",
                "embed",
                vector(H),
                hidden_size=H,
                rows=rows,
                rows_out=rows,
                bare=True,
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
