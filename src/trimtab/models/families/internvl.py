"""InternVL: InternViT over tiles, pixel shuffle, two linear layers, a language model.

Two families share the architecture: the remote code that OpenGVLab ships (`internvl_chat`, its own module paths), whose
layers stand here as no library has them, and Transformers' port (`internvl`), whose layers are asked. The remote code
was read in OpenGVLab/InternVL, folder internvl_chat/internvl/model (modeling_intern_vit.py at 1fbcd6a,
modeling_internvl_chat.py at 0328579, modeling_internlm2.py at 0c8993d); it holds no Qwen3 yet, whose modules are taken
to be those of Transformers.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab.errors import quote
from trimtab.models.families.architecture import (
    Architecture,
    linear,
    named_layer,
    norm,
    numbered,
    vector,
)
from trimtab.models.families.family import Family, PackFormat
from trimtab.models.families.text import read_text, text_layers, tied_pair
from trimtab.models.families.vit import read_channels, read_vit_block
from trimtab.models.fields import Fields
from trimtab.models.images.settings import read_tile, require_resize
from trimtab.models.images.size import MAX_TILES
from trimtab.models.images.tiles import DynamicTiling, FixedImage
from trimtab.specs import ImageMarkup, ImageRule, LayerSpec

_TILE_SIDES = ("force_image_size", "preprocess.force_image_size", "vision_config.image_size")
REMOTE = "internvl_chat"
"""As first published, with code of its own."""

TEXT = ("llama", "internlm2", "phi3", "qwen2", "qwen3", "qwen3_moe")


def describe_internvl_chat(config: Fields) -> Architecture:
    """The remote code. Its language model is a whole causal model: only `llm_config` decides on tied weights."""
    vision, language = config.section("vision_config"), config.section("llm_config", "text_config")
    grid = _read_grid(vision, vision.pair("image_size"))
    tower = _read_vit(vision, grid)
    if config.given("force_image_size", "preprocess.force_image_size"):  # the tower interpolates its positions to it
        side = config.size("force_image_size", "preprocess.force_image_size")
        grid = _read_grid(vision, (side, side))
    text = read_text(language, language.word("model_type", choices=TEXT))
    num_unread = _unread_blocks(config, len(tower) - 1)
    layers = [replace(x, unread=True) if i >= len(tower) - num_unread else x for i, x in enumerate(tower)]
    layers.append(_projector(config, tower[0].hidden_size, grid, text.hidden_size))
    tower_end = len(layers)
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
    notes: tuple[str, ...] = ()
    if num_unread:
        notes = (
            f"select_layer leaves the last {num_unread} vision blocks unread: they are computed all the same, and no "
            "gradient reaches them: they cost forward time alone.",
        )
    return Architecture(
        layers=tuple(layers),
        vocab_size=text.vocab_size,
        tied=tied_pair(layers, tied=tied),
        joined_cuts=frozenset(range(1, tower_end)),  # nothing here has run its blocks apart
        notes=notes,
    )


def _read_grid(vision: Fields, image: tuple[int, int]) -> tuple[int, int]:
    """Patches of one tile: rows and columns."""
    patch = vision.pair("patch_size")
    vision.check(
        image[0] >= patch[0] and image[1] >= patch[1],
        f"{vision.name('image_size')} {list(image)} holds no patch of {vision.name('patch_size')} {list(patch)}: "
        "correct one of them",
    )
    return max(image[0] // patch[0], 1), max(image[1] // patch[1], 1)


def _read_vit(vision: Fields, grid: tuple[int, int]) -> list[LayerSpec]:
    """InternViT: patches with a class token and positions, then its blocks."""
    # q, k and v come from one matrix, but not `fused_qkv`: without rotary embedding flash attention keeps that one
    # tensor (or with q and k norms a stack of the three) and no second q and k
    block = read_vit_block(
        vision,
        heads="num_attention_heads",
        norm_kind="rms_norm"
        if vision.word("norm_type", choices=("layer_norm", "rms_norm")) == "rms_norm"
        else "layer_norm",
        qkv_bias=vision.flag("qkv_bias"),
        qk_norm=vision.flag("qk_normalization"),
        layer_scale=vision.flag("layer_scale", absent=True),  # no published InternViT is without
    )
    H, patch, N = block.hidden_size, vision.pair("patch_size"), grid[0] * grid[1]
    embed = linear(read_channels(vision) * patch[0] * patch[1], H, bias=True) + vector(H) + vector((N + 1) * H)
    name = "vision_model.embeddings"
    first = named_layer(
        name, "vision", "embed", embed, hidden_size=H, rows_per_input=N / (N + 1), rows_out_per_input=1.0
    )
    return [first, *numbered("vision_model.encoder.layers", [block] * vision.layers("num_hidden_layers"))]


def _unread_blocks(config: Fields, depth: int) -> int:
    """Blocks after the hidden state that the projector reads: state 0 enters the first block, -1 leaves the last."""
    state = config.raw("select_layer")
    if state is None:
        return 0
    well_formed = isinstance(state, int) and not isinstance(state, bool) and -depth - 1 <= state <= depth
    config.check(
        well_formed,
        f"select_layer is {quote(state)}: one whole number is needed, that of a hidden state of vision_config."
        f"num_hidden_layers {depth}",
    )
    return 0 if not isinstance(state, int) or not well_formed else (-1 - state if state < 0 else depth - state)


def _projector(config: Fields, width: int, grid: tuple[int, int], hidden_size: int) -> LayerSpec:
    """Pixel shuffle: the class token goes, S x S patches become one row of S^2 times the width."""
    ratio = config.number("downsample_ratio", "preprocess.downsample_ratio", "projector.pixel_shuffle")
    S = max(int(1 / ratio), 1) if 1 / ratio < 1024 else 1
    config.check(
        1 / ratio < 1024 and 1 / ratio == S and grid[0] % S == 0 and grid[1] % S == 0,
        f"downsample_ratio {ratio} does not divide the {grid[0]} x {grid[1]} patches of a tile evenly, which "
        "vision_config.image_size and patch_size give: correct one of them",
    )
    N, M = grid[0] * grid[1], width * S * S
    return named_layer(
        "mlp1",
        "projector",
        "projector",
        norm(M, "layer_norm") + linear(M, hidden_size, bias=True) + linear(hidden_size, hidden_size, bias=True),
        hidden_size=M,
        output_size=hidden_size,
        rows_per_input=N / (S * S) / (N + 1),
        norm="layer_norm",
    )


def _remote_tiles(s: Fields) -> ImageRule:
    """InternVL's remote code: all settings stand in config.json; its preprocessor_config.json is not read."""
    tile, grid = read_tile(s, next(x for x in _TILE_SIDES if s.given(x) or x == _TILE_SIDES[-1]))
    ratio = s.number("downsample_ratio", "preprocess.downsample_ratio")
    tokens = int(grid**2 * ratio**2)
    s.expect(tokens, "(tile / patch x downsample_ratio)^2", "preprocess.tokens_per_tile")
    rows = grid**2 + 1
    if s.raw("preprocess.rule") != "internvl_dynamic_tiling" and not s.flag("dynamic_image_size"):
        s.raise_problems()
        return FixedImage(rows=rows, tokens=tokens)
    low = s.size("min_dynamic_patch", "preprocess.min_dynamic_patch", maximum=MAX_TILES)
    high = s.size("max_dynamic_patch", "preprocess.max_dynamic_patch", maximum=MAX_TILES)
    thumbnail = s.flag("use_thumbnail", "preprocess.use_thumbnail")
    s.raise_problems()
    return DynamicTiling(
        min_tiles=low,
        max_tiles=high,
        tile_size=tile,
        thumbnail=thumbnail,
        rows_per_tile=rows,
        tokens_per_tile=tokens,
    )


def _port_tiles(s: Fields) -> ImageRule:
    """Transformers' own InternVL.

    `crop_to_patches` in preprocessor_config.json is not read: InternVLProcessor switches it on for every call,
    whatever the file says (and published files say false).
    """
    require_resize(s)
    tile, grid = read_tile(s, "vision_config.image_size", "preprocessor_config.size")
    tokens = int(grid**2 * s.number("downsample_ratio") ** 2)
    names = ("image_seq_length", "preprocessor_config.image_seq_length")
    s.expect(tokens, "(image_size / patch_size x downsample_ratio)^2", *names)
    low = s.size("preprocessor_config.min_patches", maximum=MAX_TILES)
    high = s.size("preprocessor_config.max_patches", maximum=MAX_TILES)
    s.raise_problems()
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
        image_rule=_port_tiles,
        markup=_MARKUP,
        pack=PackFormat(joined=("pixel_values",), counts="tiles", smallest="tile"),
    ),
    REMOTE: Family(describe=describe_internvl_chat, image_rule=_remote_tiles, markup=_MARKUP, is_remote_code=True),
}
