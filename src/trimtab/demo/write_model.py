"""A model folder small enough to train on a laptop's CPU, for the demo's data: no network, no torch, no weights."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from trimtab.files import write_atomically


def write_model(folder: Path, drawn: Path) -> Path:
    """Writes config.json and preprocessor_config.json of 1.0 M parameters, and the tokenizer in the folder `drawn`.

    Use it where a model should train on a laptop, as examples/train_on_two_stages.py does. `drawn` is the folder that
    `draw_dataset` wrote.

    `trimtab train --random-weights` draws its weights; its names and layers are those of Qwen2.5-VL in Transformers.
    """
    for file in resources.files("trimtab.demo").joinpath("tiny_model").iterdir():
        write_atomically(folder / file.name, file.read_bytes())
    for name in ("tokenizer.json", "tokenizer_config.json"):
        write_atomically(folder / name, (drawn / name).read_bytes())
    return folder
