"""Mllama (Llama 3.2 Vision): a tiled ViT with a second, gated encoder behind it; text blocks that attend to its rows.

From Transformers 5.23. Image rows never enter the text: chosen decoder blocks have cross-attention in place of
self-attention, and read keys and values off the projected rows of the tower.
"""

from __future__ import annotations

from dataclasses import replace

from trimtab.models.families.architecture import (
    Architecture,
    Block,
    linear,
    named_block,
    named_layer,
    norm,
    vector,
)
from trimtab.models.families.family import Family
from trimtab.models.families.fields import Fields
from trimtab.models.families.text import read_text, text_layers, text_type
from trimtab.models.families.vit import check_heads, read_channels, reads_quick_gelu, vit_block
from trimtab.models.images.settings import Settings
from trimtab.models.images.size import MAX_TILES
from trimtab.models.images.tiles import PaddedTiles
from trimtab.models.quote import quote
from trimtab.specs import ImageRule, LayerSpec

ROW_MULTIPLE = 8
"""The tower pads the rows of each tile, class token included, to a multiple of this (`MllamaVisionModel.forward`)."""

EXTRA_EMBEDDINGS = 8
"""Rows of the text embedding behind the vocabulary, for the image token; the head has none, so nothing is tied."""


def describe_mllama(config: Fields) -> Architecture:
    vision, language = config.section("vision_config"), config.section("text_config")
    layers = _vision_layers(vision)
    text = read_text(language, text_type(language, ("mllama_text_model",)))
    H = text.hidden_size
    patches = _num_patches(vision)
    share = (patches + 1) / padded_rows(patches)
    projector = linear(vision.size("vision_output_dim"), H, bias=True)
    layers.append(
        named_layer(
            "model.multi_modal_projector",
            "projector",
            "projector",
            projector,
            hidden_size=vision.size("vision_output_dim"),
            output_size=H,
            rows=share,
        )
    )
    crossing = language.indices("cross_attention_layers")
    depth = len(text.blocks)
    language.check(
        all(i < depth for i in crossing),
        f"{language.name('cross_attention_layers')} {list(crossing)} names a layer beyond "
        f"{language.name('num_hidden_layers')} {depth}: correct one of them",
    )
    blocks = tuple(_cross_block(block) if i in crossing else block for i, block in enumerate(text.blocks))
    embed, *rest = text_layers(replace(text, blocks=blocks), "model.language_model", "lm_head", tied=False)
    first_block = len(layers) + 1
    layers.append(replace(embed, num_params=(text.vocab_size + EXTRA_EMBEDDINGS) * H))
    layers += rest
    last = first_block + max((i for i in crossing if i < depth), default=-2)  # without one, the projector is the last
    return Architecture(
        layers=tuple(layers),
        vocab_size=text.vocab_size,
        forbidden_cuts=frozenset(range(1, last + 1)),
        forbidden_cut_reason="the vision tower hands on the hidden states of several blocks together, and every "
        "cross-attention layer reads its result: a cut in front of the last one would have to carry that too",
        joined_cuts=frozenset(range(1, first_block)),
        notes=(
            "Every image takes max_num_tiles tiles in the vision tower: the processor pads to them.",
            "Cross-attention layers are described for inference; their training is not planned.",
        ),
    )


def padded_rows(num_patches: int) -> int:
    """Rows of one tile in the tower's blocks: its patches, the class token, and padding."""
    return -(-(num_patches + 1) // ROW_MULTIPLE) * ROW_MULTIPLE


def _num_patches(vision: Fields) -> int:
    image, patch = vision.size("image_size"), vision.size("patch_size")
    vision.check(
        image >= patch,
        f"{vision.name('image_size')} {image} holds no patch of {vision.name('patch_size')} {patch}: correct one of "
        "them",
    )
    return max(image // patch, 1) ** 2


def _vision_layers(vision: Fields) -> list[LayerSpec]:
    """The tower in forward order; rows are shares of the padded rows of all tiles."""
    H, F = vision.size("hidden_size"), vision.size("intermediate_size")
    heads = vision.size("attention_heads", "num_attention_heads")
    depth, num_global = vision.layers("num_hidden_layers"), vision.layers("num_global_layers")
    tiles, patch = vision.size("max_num_tiles"), vision.size("patch_size")
    check_heads(vision, "hidden_size", H, "attention_heads", heads)
    shapes = 1 + _num_aspect_ratios(vision)  # 0 stands for no image
    states = vision.indices("intermediate_layers_indices")
    vision.check(
        all(i < depth for i in states),
        f"{vision.name('intermediate_layers_indices')} {list(states)} names a layer beyond "
        f"{vision.name('num_hidden_layers')} {depth}: correct one of them",
    )
    width = vision.size("vision_output_dim")
    vision.check(
        width == H * (1 + len(states)),
        f"{vision.name('vision_output_dim')} is {width}, but hidden_size {H} and {len(states)} entries of "
        f"intermediate_layers_indices make it {H * (1 + len(states))}: correct one of them",
    )
    N = _num_patches(vision)
    rows = padded_rows(N)
    bare, classed = N / rows, (N + 1) / rows
    tile_positions = vector(shapes * tiles * H + 1)  # and a gate
    positions = vector((N + 1) * H + 1 + shapes * tiles * (N + 1) * H)
    block = vit_block(
        H,
        heads,
        F,
        norm_kind="layer_norm",
        qkv_bias=False,
        output_bias=False,
        quick_gelu=reads_quick_gelu(vision, absent=False),
    )
    gated = replace(block, weights=block.weights + vector(2))
    layer_norm, path = norm(H, "layer_norm"), "model.vision_model"
    patches = linear(read_channels(vision) * patch * patch, H, bias=False)
    return [
        named_layer(f"{path}.patch_embedding", "vision", "embed", patches, hidden_size=H, rows=bare),
        named_layer(
            f"{path}.pre_tile_positional_embedding", "vision", "embed", tile_positions, hidden_size=H, rows=bare
        ),
        # a bare parameter of the tower, so a layer of its own without work
        named_layer(f"{path}.class_embedding", "vision", "embed", vector(H), hidden_size=H, rows=classed, bare=True),
        named_layer(f"{path}.gated_positional_embedding", "vision", "embed", positions, hidden_size=H, rows=classed),
        named_layer(
            f"{path}.layernorm_pre",
            "vision",
            "norm",
            layer_norm,
            hidden_size=H,
            rows=classed,
            rows_out=1.0,
            norm="layer_norm",
        ),
        *(named_block(f"{path}.transformer.layers.{i}", "vision", block, H) for i in range(depth)),
        named_layer(f"{path}.layernorm_post", "vision", "norm", layer_norm, hidden_size=H, norm="layer_norm"),
        named_layer(f"{path}.post_tile_positional_embedding", "vision", "embed", tile_positions, hidden_size=H),
        *(named_block(f"{path}.global_transformer.layers.{i}", "vision", gated, H) for i in range(num_global)),
    ]


def _num_aspect_ratios(vision: Fields) -> int:
    """Arrangements of tiles, for each of which the tower learns positions."""
    written = vision.raw("supported_aspect_ratios")
    if written is None:
        vision.problems.missing.append(vision.name("supported_aspect_ratios"))
        return 1
    if not isinstance(written, (list, tuple)) or not 0 < len(written) <= 4096:
        vision.problems.wrong.append(
            f"{vision.name('supported_aspect_ratios')} is {quote(written)}: a list of [height, width] in tiles is "
            "needed"
        )
        return 1
    return len(written)


def _cross_block(block: Block) -> Block:
    """A decoder block whose keys and values come from the vision tower: q and k are normed, both halves gated."""
    attention = replace(block.attention, cross=True, causal=False, qk_norm=True)
    return replace(block, weights=block.weights + vector(2 * attention.head_dim + 2), attention=attention)


def _padded_tiles(s: Settings) -> ImageRule:
    """Llama 3.2 Vision: the tower learns positions for `max_num_tiles` tiles, and the processor pads to as many."""
    s.require_resize()
    tile = s.agreed_int(("vision", "image_size"), ("file", "size"))
    patch = s.first_int(("vision", "patch_size"))
    tiles = s.agreed_int(("vision", "max_num_tiles"), ("file", "max_image_tiles"), maximum=MAX_TILES)
    rows = s.grid(tile, patch) ** 2 + 1
    s.check()
    return PaddedTiles(tiles=tiles, rows_per_tile=-(-rows // 8) * 8)  # the tower pads each tile to a multiple of 8


FAMILIES = {"mllama": Family(describe=describe_mllama, image_rule=_padded_tiles, stacks_states=True)}
