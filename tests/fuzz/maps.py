"""Device maps that `trimtab serve` and `load_placed` read."""

import functools
import json
import random
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from tests.fuzz.damage import damaged, reshaped

from trimtab.errors import TrimtabError
from trimtab.placement.placed import read_device_map

Try = Callable[[int], None]


@functools.cache
def _saved(folder: Path) -> Path:
    sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))
    from tiny_chat import save_chat_model

    return save_chat_model(folder / "tiny")


def device_maps(folder: Path) -> Try:
    """Maps of modules to devices: a model that answers as it does unplaced, or a `TrimtabError`."""
    import torch

    from trimtab.runtime.placing.load import load_placed

    saved, tokens = _saved(folder), torch.tensor([[5, 6, 7]])
    alone = load_placed(saved)(input_ids=tokens).logits
    layers = [f"model.language_model.layers.{n}" for n in range(len(load_placed(saved).model.language_model.layers))]
    modules = ["model.visual", "model.language_model.embed_tokens", *layers, "model.language_model.norm", "lm_head"]
    written = {
        "device_map": dict.fromkeys(modules, "cpu") | {layers[0]: "disk"},
        "runs_on": {layers[0]: "cpu"},
        "run_on_cpu": ["lm_head"],
    }
    names = (*modules, "", "model", "model.language_model", "model.language_model.rotary_emb", "x")

    def try_seed(seed: int) -> None:
        draw = random.Random(seed)
        content = json.dumps(reshaped(written, draw, names)).encode()
        (folder / "map.json").write_bytes(damaged(content, draw) if draw.random() < 0.2 else content)
        with suppress(TrimtabError), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = read_device_map(folder / "map.json")
            model = load_placed(saved, read.device_map, runs_on=read.runs_on)
            assert torch.equal(model(input_ids=tokens).logits, alone)

    return try_seed


TARGETS: dict[str, Callable[[Path], Try]] = {"device_maps": device_maps}
