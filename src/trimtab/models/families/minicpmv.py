"""MiniCPM-V 2.6: SigLIP over slices, a resampler with learned queries, Qwen2; remote code, its own module paths."""

from __future__ import annotations

from trimtab.models.families.architecture import Architecture, Weights, linear, named_layer, norm, vector, whole_tower
from trimtab.models.families.family import Family
from trimtab.models.families.fields import Fields
from trimtab.models.families.text import read_text, text_layers, text_type, tied_pair
from trimtab.models.families.vit import read_clip
from trimtab.models.images.settings import Settings
from trimtab.models.images.tiles import Slices
from trimtab.specs import ImageRule


def describe_minicpmv(config: Fields) -> Architecture:
    """Published files keep the language model's fields at the top; `text_config` is read where it is given."""
    vision = config.section("vision_config")
    if config.has_key("text_config") or not config.given("hidden_size"):
        language = config.section("text_config")
        kind = text_type(language, ("qwen2",))
    else:
        language, kind = config, "qwen2"
    tower = read_clip(vision, "vpm", kind="siglip_vision_model", has_pooling_head=False)
    text = read_text(language, kind)
    queries = config.size("query_num", "projector.query_num", "preprocess.query_num")
    slice_side = config.size("slice_config.scale_resolution", "preprocess.scale_resolution")
    height, width = vision.pair("patch_size")
    slice_patches = max((slice_side // height) * (slice_side // width), 1)
    H, V = text.hidden_size, tower.hidden_size
    # keys and values of every patch; queries, output and last projection of `queries` rows a slice
    each_patch = linear(V, H, bias=False) if V != H else Weights()
    each_patch += linear(H, 2 * H, bias=True)
    each_query = linear(H, H, bias=True) * 2 + linear(H, H, bias=False) + vector(queries * H)
    norms = norm(H, "layer_norm") * 3
    layers = list(tower.layers)
    layers.append(
        named_layer(
            "resampler",
            "projector",
            "projector",
            Weights((each_patch + each_query + norms).num_params, each_patch.num_matmul_params),
            hidden_size=V,
            output_size=H,
            rows=1.0,
            rows_out=queries / slice_patches,
            norm="layer_norm",
        )
    )
    tied = language.flag("tie_word_embeddings")
    layers += text_layers(text, "llm.model", "llm.lm_head", tied=tied)
    return Architecture(
        layers=tuple(layers),
        vocab_size=text.vocab_size,
        tied=tied_pair(layers, tied=tied),
        joined_cuts=whole_tower(layers),
        notes=(
            "MiniCPM-V is described after public copies of its remote code; the total is not checked against it.",
            f"The resampler's work on its {queries} query rows a slice is not counted (under a tenth of its whole); "
            f"rows leave it as from a slice of {slice_side} x {slice_side} pixels.",
        ),
    )


def _slices(s: Settings) -> ImageRule:
    if s.value("file", "slice_mode") is False:
        s.problem(
            "reads `slice_mode` = false in preprocessor_config.json",
            "images would reach the tower unresized, which no rule describes",
            "set it to true",
        )
    slices = s.first_tiles(
        ("file", "max_slice_nums"), ("preprocess", "max_slice_nums"), ("config", "slice_config.max_slice_nums")
    )
    resolution = s.first_int(
        ("file", "scale_resolution"), ("preprocess", "scale_resolution"), ("config", "slice_config.scale_resolution")
    )
    patch = s.agreed_int(("file", "patch_size"), ("preprocess", "patch_size"), ("vision", "patch_size"))
    s.grid(resolution, patch)
    tokens = s.agreed_int(("file", "image_feature_size"), ("preprocess", "query_num"), ("config", "query_num"))
    s.check()
    return Slices(max_slices=slices, resolution=resolution, patch_size=patch, tokens_per_slice=tokens)


FAMILIES = {"minicpmv": Family(describe=describe_minicpmv, image_rule=_slices, is_remote_code=True)}
