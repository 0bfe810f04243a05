"""The demo's data set on disk: drawn images, conversations about them, and a tokenizer trained on those."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from random import Random

from trimtab.demo.recipe import make_pictures
from trimtab.demo.samples import make_sample
from trimtab.demo.tokenizer import tokenizer_config, train_tokenizer
from trimtab.errors import TrimtabError
from trimtab.files import write_atomically

Progress = Callable[[str, int, int], None]  # what is being made, how many are done, how many there are


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoData:
    """Where the data set lies, and what it holds."""

    folder: Path
    data: Path  # one JSON record a line, in LLaVA's form; image paths are relative to `folder`
    images: Path
    tokenizer: Path
    tokenizer_config: Path
    num_samples: int
    num_pictures: int  # files; samples share them


def draw_dataset(folder: Path, *, num_samples: int = 2000, seed: int = 0, progress: Progress | None = None) -> DemoData:
    """Draws about one image per six samples, at most 320, and writes the conversations last.

    Use it to try something on data that is small and always the same, as examples/plan_a_run.py does.

    data.jsonl depends only on `num_samples` and `seed`; image bytes also on the versions of Pillow and numpy, the
    tokenizer also on that of `tokenizers`. A file of the same name is replaced, others in the folder stay.
    """
    if num_samples < 1:
        raise TrimtabError(f"a demo of {num_samples} samples was asked for, and holds nothing to plan: draw 1 or more")
    from trimtab.demo.pictures import encode

    report = progress or (lambda _what, _done, _total: None)
    rng = Random(seed)  # noqa: S311 - draws pictures, guards no secret
    pictures = make_pictures(rng, min(320, max(40, num_samples // 6)))
    samples = [make_sample(rng, number, pictures) for number in range(num_samples)]
    images = folder / "images"
    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        for done, (picture, content) in enumerate(zip(pictures, threads.map(encode, pictures), strict=True), 1):
            _write(images / picture.file, content)
            report("images", done, len(pictures))
    report("tokenizer", 0, 1)
    texts = (text for sample in samples for turn in sample.turns for text in turn)
    tokenizer, config, data = (folder / name for name in ("tokenizer.json", "tokenizer_config.json", "data.jsonl"))
    _write(tokenizer, train_tokenizer(texts).encode())
    _write(config, tokenizer_config().encode())
    report("tokenizer", 1, 1)
    _write(data, "".join(sample.line() for sample in samples).encode())
    return DemoData(
        folder=folder,
        data=data,
        images=images,
        tokenizer=tokenizer,
        tokenizer_config=config,
        num_samples=num_samples,
        num_pictures=len(pictures),
    )


def _write(path: Path, content: bytes) -> None:
    """A demo can be drawn again, and hundreds of images need not wait for the disk."""
    write_atomically(path, content, sync=False)


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
