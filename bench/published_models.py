"""The models of published runs: shipped ones, decoders of data/run_models.json, and towers before decoders.

"EVA-CLIP-8B + InternLM2-20B" are put together as InternVL puts them: a tower, its projector and an LLM.
OmniBal's Table 9 trains towers and language models that were never published together. A tower is read 448 px tiles of
patch 14, four patches become one row, and two linear layers lead to the language model, as in InternVL-Chat-1.5.

`data/composed_parts.json` holds the layers of each tower and language model, as description files do. Their sizes:
EVA-CLIP-1B from baaivision/EVA clip/model_configs/EVA_CLIP_g_14.json at d333114 (MLP width 4.3637 x 1408 = 6144);
EVA-CLIP-8B from arXiv 2402.04252, which gives 7.5 B parameters; InternVL-6B, as the paper calls InternViT-6B, from the
shipped InternVL-Chat-V1-5. Language models: the config.json of the Hub's internlm/internlm2-20b, 01-ai/Yi-34B,
meta-llama/Meta-Llama-3-*; no head is tied.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

from trimtab.costs.measured.fitted import place_blocks
from trimtab.models.describe import describe
from trimtab.models.description import read_layers
from trimtab.models.images.rules import DynamicTiling, FixedImage
from trimtab.plan.predict import parse_stages
from trimtab.specs import AttentionSpec, LayerSpec, Linear, MlpSpec, ModelSpec

PARTS = Path(__file__).parent / "data" / "composed_parts.json"
SHAPES = Path(__file__).parent / "data" / "run_models.json"
DESCRIBED = Path(__file__).parent / "data" / "models"
"""Models with latent attention, as `trimtab describe` asked Transformers; sizes by the config.json of their makers."""
ROWS, TOKENS = 1025, 256  # of a tile: 32 x 32 patches and the class token; rows after pixel shuffle
TILES = DynamicTiling(
    min_tiles=1, max_tiles=12, tile_size=448, thumbnail=True, rows_per_tile=ROWS, tokens_per_tile=TOKENS
)


@cache
def model_of(name: str, built: str | None = None) -> ModelSpec:
    """Return the model of a row; `built`: with as many blocks of each tower as these stages hold.

    "A + B": tower and language model of `PARTS`. A name of run_models.json: a decoder, a decoder behind a tower, or a
    shipped model with another tower. Any other: the shipped description.
    """
    asked, shape = DESCRIBED / f"{name}.json", json.loads(SHAPES.read_text(encoding="utf-8")).get(name)
    if " + " in name:
        model = composed_model(*name.split(" + "))
    elif shape is None:
        model = describe(asked if asked.exists() else name)
    elif "of" in shape:
        shipped = describe(shape["of"])
        text = [x for x in shipped.layers if x.tower == "language"]
        model = replace(shipped, layers=(*part("towers", shape["tower"]), *text), forbidden_cuts=frozenset(), tied=())
    else:
        model = _decoder(name, shape)
    return model if built is None else place_blocks(model, parse_stages(built))[0]


def composed_model(vision: str, language: str) -> ModelSpec:
    """The model of one tower and one language model of `PARTS`."""
    tower, decoder = part("towers", vision), part("languages", language)
    return ModelSpec(
        name=f"{vision} + {language}",
        family="internvl_chat",
        layers=(*tower, _projector(tower[0].hidden_size, decoder[0].hidden_size), *decoder),
        image_rule=TILES,
        vocab_size=decoder[-1].output_size,
        joined_cuts=frozenset(range(1, len(tower) + 1)),
    )


def part(kind: str, name: str) -> tuple[LayerSpec, ...]:
    """Return the layers of a tower or of a language model."""
    return tuple(read_layers(parts()[kind][name]))


@cache
def parts() -> dict[str, Any]:
    """Return the layers of "towers" and of "languages", by name."""
    return dict(json.loads(PARTS.read_text()))


def _projector(width: int, hidden: int) -> LayerSpec:
    """Pixel shuffle, a norm over four patches, two linear layers with biases."""
    M = 4 * width
    return LayerSpec(
        name="mlp1",
        tower="projector",
        kind="projector",
        hidden_size=M,
        output_size=hidden,
        num_params=2 * M + (M + 1) * hidden + (hidden + 1) * hidden,
        num_matmul_params=M * hidden + hidden * hidden,
        rows_per_input=TOKENS / ROWS,
        rows_out_per_input=TOKENS / ROWS,
        norm="layer_norm",
    )


def _decoder(name: str, m: Mapping[str, Any]) -> ModelSpec:
    """Blocks without biases between a token embedding and a head; every second block has the window, if any."""
    h, f, vocabulary = m["width"], m["mlp"], m["vocabulary"]
    d = m.get("head", h // m["heads"])
    experts, chosen = m.get("experts"), m.get("chosen", 1)
    attention, each = 2 * h * d * (m["heads"] + m["kv"]), (3 if m["gated"] else 2) * h * f
    router = h * experts if experts else 0
    biases = experts * (2 * f + h) if m.get("biased") else 0
    block = LayerSpec(
        name="block",
        tower="language",
        kind="block",
        hidden_size=h,
        output_size=h,
        num_params=attention + router + (experts or 1) * each + biases + 2 * h,
        num_matmul_params=attention + router + chosen * each,
        attention=AttentionSpec(
            num_heads=m["heads"],
            num_kv_heads=m["kv"],
            head_dim=d,
            value_head_dim=d,
            causal=True,
            qk_norm=m.get("qk_norm", False),
            fused_qkv=m["heads"] == m["kv"] and not experts,
        ),
        mlp=MlpSpec(intermediate_size=f, gated=m["gated"], num_experts=experts, experts_per_token=m.get("chosen")),
        norm="rms_norm" if m["gated"] else "layer_norm",
        linears=_qwen_linears(h, f) if m.get("linears") == "qwen" else None,
    )
    assert block.attention is not None
    seen = replace(block.attention, window=m.get("window"))
    blocks = [replace(block, attention=seen if i % 2 == 0 else block.attention) for i in range(m["blocks"])]
    bare = replace(block, num_params=vocabulary * h, attention=None, mlp=None, norm=None, linears=None)
    layers = (
        replace(bare, name="embed", kind="embed", num_matmul_params=0),
        *(replace(x, name=f"blocks.{i}") for i, x in enumerate(blocks)),
        replace(bare, name="norm", kind="norm", num_params=h, num_matmul_params=0, norm=block.norm),
        replace(
            bare,
            name="head",
            kind="head",
            output_size=vocabulary,
            num_params=0 if m["tied"] else vocabulary * h,
            num_matmul_params=vocabulary * h,
        ),
    )
    image = FixedImage(rows=1, tokens=1)
    tower = _tower(m["tower"], h) if "tower" in m else ()
    return ModelSpec(name=name, family="text", layers=(*tower, *layers), image_rule=image, vocab_size=vocabulary)


def _tower(m: Mapping[str, Any], hidden: int) -> tuple[LayerSpec, ...]:
    """Return patches, blocks with biases, and one matrix to the decoder: four patches become one of its rows."""
    h, f = m["width"], m["mlp"]
    pixels, block = 3 * m["patch"] ** 2 * h, 4 * h * h + 2 * h * f
    heads = AttentionSpec(
        num_heads=m["heads"],
        num_kv_heads=m["heads"],
        head_dim=h // m["heads"],
        value_head_dim=h // m["heads"],
        causal=False,
    )
    bare = LayerSpec(
        name="patches",
        tower="vision",
        kind="embed",
        hidden_size=h,
        output_size=h,
        num_params=pixels,
        num_matmul_params=pixels,
    )
    inner = replace(
        bare,
        kind="block",
        num_params=block + 9 * h + f,
        num_matmul_params=block,
        attention=heads,
        mlp=MlpSpec(intermediate_size=f, gated=False),
        norm="layer_norm",
    )
    last = replace(
        bare,
        name="projector",
        tower="projector",
        kind="projector",
        output_size=hidden,
        num_params=h * hidden,
        num_matmul_params=h * hidden,
        rows_per_input=0.25,
        rows_out_per_input=0.25,
    )
    return (bare, *(replace(inner, name=f"vision.{i}") for i in range(m["blocks"])), last)


def _qwen_linears(h: int, f: int) -> tuple[Linear, ...]:
    """The linear layers of Qwen's first models: q, k, v are one matrix."""
    widths = {"c_attn": (h, 3 * h), "attn.c_proj": (h, h), "w1": (h, f), "w2": (h, f), "mlp.c_proj": (f, h)}
    return tuple(Linear(name=name, in_width=a, out_width=b) for name, (a, b) in widths.items())
