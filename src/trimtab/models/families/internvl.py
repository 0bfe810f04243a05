"""InternVL: InternViT over tiles, pixel shuffle, two linear layers, a language model.

Two families share the architecture: the remote code that OpenGVLab ships (`internvl_chat`, its own module paths) and
Transformers' port (`internvl`). The remote code was read in OpenGVLab/InternVL, folder internvl_chat/internvl/model
(modeling_intern_vit.py at 1fbcd6a, modeling_internvl_chat.py at 0328579, modeling_internlm2.py at 0c8993d); it holds
no Qwen3 yet, whose modules are taken to be those of Transformers.
"""

from __future__ import annotations

from trimtab.models.families.architecture import (
    Architecture,
    NormKind,
    check_projector,
    linear,
    named_block,
    named_layer,
    norm,
    vector,
    whole_tower,
)
from trimtab.models.families.family import Family, PackFormat
from trimtab.models.families.fields import Fields
from trimtab.models.families.text import read_text, read_tied, text_layers, text_type, tied_pair
from trimtab.models.families.vit import (
    Taps,
    VisionTower,
    check_heads,
    mark_unread,
    read_channels,
    read_grid,
    read_taps,
    vit_block,
)
from trimtab.models.images.settings import Settings
from trimtab.models.images.tiles import DynamicTiling, FixedImage
from trimtab.models.quote import quote
from trimtab.specs import ImageMarkup, ImageRule, LayerSpec

REMOTE_TEXT = ("llama", "internlm2", "phi3", "qwen2", "qwen3", "qwen3_moe")
PORT_TEXT = ("llama", "mistral", "phi3", "qwen2", "qwen3", "qwen3_moe")


def describe_internvl_chat(config: Fields) -> Architecture:
    """The remote code. Its language model is a whole causal model: `llm_config` alone decides on tied weights."""
    vision, language = config.section("vision_config"), config.section("llm_config", "text_config")
    tower = _read_vit(vision, remote=True)
    grid = _tile_grid(config, vision, tower)
    text = read_text(language, text_type(language, REMOTE_TEXT))
    taps = read_taps(config, tower, absent=-1, name="select_layer", silent=True)
    _check_one_tap(config, taps, "select_layer")
    layers = list(mark_unread(tower, taps.num_read_blocks, reads_norm=False))
    layers.append(_projector(config, "mlp1", tower, grid, text.hidden_size))
    tied = language.flag("tie_word_embeddings")
    if text.model_type == "internlm2":
        names = ("language_model.output", "tok_embeddings")
    else:
        names = ("language_model.lm_head", "embed_tokens")
    layers += text_layers(text, "language_model.model", names[0], tied=tied, embed=names[1])
    for switch in ("use_backbone_lora", "use_llm_lora"):
        rank = config.raw(switch)
        config.check(
            not rank,
            f"{switch} is {quote(rank)}: LoRA adds parameters and renames the modules under it, so merge the adapters "
            f"and set {switch} to 0",
        )
    return Architecture(
        layers=tuple(layers),
        vocab_size=text.vocab_size,
        tied=tied_pair(layers, tied=tied),
        joined_cuts=whole_tower(layers),
        notes=taps.notes,
    )


def describe_internvl(config: Fields) -> Architecture:
    """Transformers' port."""
    vision, language = config.section("vision_config"), config.section("text_config")
    tower = _read_vit(vision, remote=False)
    text = read_text(language, text_type(language, PORT_TEXT))
    taps = read_taps(config, tower, absent=-1)
    _check_one_tap(config, taps, "vision_feature_layer")
    # -1 alone means the tower's result; the same state by its positive number is taken in front of the norm
    reads_norm = config.raw("vision_feature_layer") in (None, -1)
    layers = list(mark_unread(tower, taps.num_read_blocks, reads_norm=reads_norm))
    layers.append(_projector(config, "model.multi_modal_projector", tower, tower.grid, text.hidden_size))
    tied = read_tied(config, language, either=False)
    layers += text_layers(text, "model.language_model", "lm_head", tied=tied)
    return Architecture(
        layers=tuple(layers), vocab_size=text.vocab_size, tied=tied_pair(layers, tied=tied), notes=taps.notes
    )


def _read_vit(vision: Fields, *, remote: bool) -> VisionTower:
    """InternViT by the remote code's names of fields and modules, or by Transformers'."""
    H, F = vision.size("hidden_size"), vision.size("intermediate_size")
    heads, depth = vision.size("num_attention_heads"), vision.layers("num_hidden_layers")
    check_heads(vision, "hidden_size", H, "num_attention_heads", heads)
    if not remote and vision.given("model_type"):
        vision.word("model_type", choices=("internvl_vision",))
    # q, k and v come from one matrix, but not `fused_qkv`: without rotary embedding flash attention keeps that one
    # tensor (or with q and k norms a stack of the three) and no second q and k
    block = vit_block(
        H,
        heads,
        F,
        norm_kind=_norm_kind(vision),
        qkv_bias=vision.flag("qkv_bias" if remote else "attention_bias"),
        qk_norm=vision.flag("qk_normalization" if remote else "use_qk_norm"),
        layer_scale=True,
    )
    image, patch = vision.pair("image_size"), vision.pair("patch_size")
    grid = read_grid(vision, image, patch)
    N = grid[0] * grid[1]
    embed = linear(read_channels(vision) * patch[0] * patch[1], H, bias=True) + vector(H)
    if remote or vision.flag("use_absolute_position_embeddings"):
        embed += vector((N + 1) * H)
    if not remote and vision.flag("use_mask_token"):
        embed += vector(H)
    prefix, blocks = ("vision_model", "encoder.layers") if remote else ("model.vision_tower", "encoder.layer")
    layers = [
        named_layer(f"{prefix}.embeddings", "vision", "embed", embed, hidden_size=H, rows=N / (N + 1), rows_out=1.0)
    ]
    layers += [named_block(f"{prefix}.{blocks}.{i}", "vision", block, H) for i in range(depth)]
    if not remote and not vision.flag("use_mean_pooling"):
        name = f"{prefix}.layernorm"
        layers.append(named_layer(name, "vision", "norm", norm(H, "layer_norm"), hidden_size=H, norm="layer_norm"))
    return VisionTower(
        layers=tuple(layers), hidden_size=H, grid=grid, has_class_token=True, num_blocks=depth, first_block=1
    )


def _check_one_tap(config: Fields, taps: Taps, name: str) -> None:
    config.check(
        taps.num_features == 1,
        f"{name} names {taps.num_features} hidden states, but the projector is as wide as vision_config.hidden_size "
        "makes one: give one number",
    )


def _norm_kind(vision: Fields) -> NormKind:
    choice = vision.word("norm_type", choices=("layer_norm", "rms_norm"))
    return "rms_norm" if choice == "rms_norm" else "layer_norm"


def _tile_grid(config: Fields, vision: Fields, tower: VisionTower) -> tuple[int, int]:
    """Patches of one tile: of `force_image_size` where it is given; the tower interpolates its positions to it."""
    if not config.given("force_image_size", "preprocess.force_image_size"):
        return tower.grid
    side = config.size("force_image_size", "preprocess.force_image_size")
    return read_grid(vision, (side, side), vision.pair("patch_size"))


def _projector(config: Fields, name: str, tower: VisionTower, grid: tuple[int, int], hidden_size: int) -> LayerSpec:
    """Pixel shuffle: the class token goes, S x S patches become one row of S^2 times the width."""
    ratio = config.number("downsample_ratio", "preprocess.downsample_ratio", "projector.pixel_shuffle")
    S = max(int(1 / ratio), 1) if 1 / ratio < 1024 else 1
    config.check(
        1 / ratio < 1024 and 1 / ratio == S and grid[0] % S == 0 and grid[1] % S == 0,
        f"downsample_ratio {ratio} does not divide the {grid[0]} x {grid[1]} patches of a tile evenly, which "
        "vision_config.image_size and patch_size give: correct one of them",
    )
    N, M = grid[0] * grid[1], tower.hidden_size * S * S
    check_projector(config, (M, hidden_size), (hidden_size, hidden_size))
    return named_layer(
        name,
        "projector",
        "projector",
        norm(M, "layer_norm") + linear(M, hidden_size, bias=True) + linear(hidden_size, hidden_size, bias=True),
        hidden_size=M,
        output_size=hidden_size,
        rows=N / (S * S) / (N + 1),
        norm="layer_norm",
    )


def _remote_tiles(s: Settings) -> ImageRule:
    """InternVL's remote code: all settings stand in config.json; its preprocessor_config.json is not read."""
    tile = s.first_int(("preprocess", "force_image_size"), ("config", "force_image_size"), ("vision", "image_size"))
    patch = s.first_int(("vision", "patch_size"))
    ratio = s.first_number(("preprocess", "downsample_ratio"), ("config", "downsample_ratio"))
    grid = s.grid(tile, patch)
    tokens = int(grid**2 * ratio**2)
    s.expect_int(tokens, "(tile / patch x downsample_ratio)^2", ("preprocess", "tokens_per_tile"))
    dynamic = s.value("preprocess", "rule") == "internvl_dynamic_tiling" or s.first_bool(
        ("config", "dynamic_image_size")
    )
    rows = grid**2 + 1
    if not dynamic:
        s.check()
        return FixedImage(rows=rows, tokens=tokens)
    low = s.first_tiles(("preprocess", "min_dynamic_patch"), ("config", "min_dynamic_patch"))
    high = s.first_tiles(("preprocess", "max_dynamic_patch"), ("config", "max_dynamic_patch"))
    thumbnail = s.first_bool(("preprocess", "use_thumbnail"), ("config", "use_thumbnail"))
    s.check()
    return DynamicTiling(
        min_tiles=low,
        max_tiles=high,
        tile_size=tile,
        thumbnail=thumbnail,
        rows_per_tile=rows,
        tokens_per_tile=tokens,
    )


def _port_tiles(s: Settings) -> ImageRule:
    """Transformers' own InternVL.

    `crop_to_patches` in preprocessor_config.json is not read: InternVLProcessor switches it on for every call,
    whatever the file says (and published files say false).
    """
    s.require_resize()
    tile = s.agreed_int(("vision", "image_size"), ("file", "size"))
    patch = s.first_int(("vision", "patch_size"))
    ratio = s.first_number(("config", "downsample_ratio"))
    grid = s.grid(tile, patch)
    tokens = int(grid**2 * ratio**2)
    s.expect_int(
        tokens,
        "(image_size / patch_size x downsample_ratio)^2",
        ("config", "image_seq_length"),
        ("file", "image_seq_length"),
    )
    low, high = s.first_tiles(("file", "min_patches")), s.first_tiles(("file", "max_patches"))
    s.check()
    return DynamicTiling(
        min_tiles=low,
        max_tiles=high,
        tile_size=tile,
        thumbnail=True,
        rows_per_tile=grid**2 + 1,
        tokens_per_tile=tokens,
    )


_MARKUP = ImageMarkup(placeholder="<IMG_CONTEXT>", soft="<IMG_CONTEXT>", before="<img>", after="</img>")
"""What Transformers' processor writes, and the remote code's trainer for its `<image>`."""

FAMILIES = {
    "internvl": Family(
        describe=describe_internvl,
        image_rule=_port_tiles,
        markup=_MARKUP,
        pack=PackFormat(joined=("pixel_values",), counts="tiles", smallest="tile"),
    ),
    "internvl_chat": Family(
        describe=describe_internvl_chat, image_rule=_remote_tiles, markup=_MARKUP, is_remote_code=True
    ),
}
