"""Small models of several families for placement tests."""

import json
from dataclasses import replace

from described_configs import FOLDER, describe

from trimtab.specs import ModelSpec


def small_model(*, tied: bool = False, num_layers: int = 2, depth: int = 2, vocab_size: int = 203) -> ModelSpec:
    """A Qwen2.5-VL of these sizes, whose last vision block sees the whole image."""
    data = json.loads((FOLDER / "small-qwen2.5.json").read_text())
    patches, windowed, whole, merger, embed, first, other, norm, head = data["layers"]
    blocks = [windowed | {"num_alike": depth - 1}] if depth > 1 else []
    layers = [first] + ([other | {"num_alike": num_layers - 1}] if num_layers > 1 else [])
    embed |= {"num_params": 64 * vocab_size}
    head |= {"num_params": 0 if tied else 64 * vocab_size, "num_matmul_params": 64 * vocab_size}
    head |= {"output_size": vocab_size}
    whole |= {"name": f"model.visual.blocks.{depth - 1}"}
    data |= {"layers": [patches, *blocks, whole, merger, embed, *layers, norm, head], "vocab_size": vocab_size}
    data |= {"tied": [[embed["name"], head["name"]]] if tied else []}
    return describe(data)


def sliding(*, window: int = 64, num_layers: int = 6) -> ModelSpec:
    """Every third decoder layer sees the whole text."""
    model = small_model(num_layers=num_layers)
    blocks = model.indices("language", "block")
    layers = [
        replace(x, attention=replace(x.attention, window=window)) if i in blocks and (i - blocks[0]) % 3 < 2 else x
        for i, x in enumerate(model.layers)
    ]
    return replace(model, layers=tuple(layers))
