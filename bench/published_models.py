"""Models put together as InternVL puts them: EVA-CLIP-8B and InternLM2-20B are a tower, its projector and an LLM.

OmniBal's Table 9 trains towers and language models that were never published together. A tower is read 448 px tiles of
patch 14, four patches become one row, and two linear layers lead to the language model, as in InternVL-Chat-1.5.

`data/composed_parts.json` holds the layers of each tower and language model, as description files do. Their sizes:
EVA-CLIP-1B from baaivision/EVA clip/model_configs/EVA_CLIP_g_14.json at d333114 (MLP width 4.3637 x 1408 = 6144);
EVA-CLIP-4B from timm/models/eva.py, eva02_enormous_patch14_clip_224; EVA-CLIP-8B and 18B from arXiv 2402.04252, which
gives 1.0, 4.4, 7.5 and 17.5 B parameters (18B has RMSNorm, and no biases of q, k and v, section 2); InternVL-6B, as the
paper calls InternViT-6B, from the shipped InternVL-Chat-V1-5. Language models: the config.json of the Hub's
internlm/internlm2-*, Qwen/Qwen1.5-*, meta-llama/Meta-Llama-3-*, 01-ai/Yi-*; no head is tied.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

from trimtab.models.description import read_layers
from trimtab.models.images.rules import DynamicTiling
from trimtab.specs import LayerSpec, ModelSpec

PARTS = Path(__file__).parent / "data" / "composed_parts.json"
ROWS, TOKENS = 1025, 256  # of a tile: 32 x 32 patches and the class token; rows after pixel shuffle
TILES = DynamicTiling(
    min_tiles=1, max_tiles=12, tile_size=448, thumbnail=True, rows_per_tile=ROWS, tokens_per_tile=TOKENS
)


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
