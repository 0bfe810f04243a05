"""The column `video`: clips of random sizes counted by trimtab, against the real processor on real pixels.

    TORCHVISION=FOLDER PYTHONPATH=src python bench/columns/video.py [FAMILY ...]

As `sized.py`, which makes the processors: class defaults, saved as the Hub ships them. A cell is a yes where tokens are
equal on every clip, as many numbers of pixels stand behind each patch, and refusals are shared; a no with the reason
where a family takes no videos or its processor refuses all of them.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import sized  # first: it puts torchvision in its place
import torch
import transformers
from cell import Cell, sweep
from sized import Child, Real, save_folder
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from trimtab.models.asking.images import run_clip
from trimtab.models.images import asked as asked_clips
from trimtab.models.images.asked import ask_clips
from trimtab.specs import Clip

NUM_CLIPS = 8
RATES = (5.0, 24.0, 25.0, 30000 / 1001)


def check(family: str) -> Cell:
    """Tokens and rows of files and of frames given as images."""
    if family not in transformers.CONFIG_MAPPING:
        return Cell(yes=False, note="no configuration class")
    if "video_processor" not in sized._processor_class(transformers.CONFIG_MAPPING[family], family).get_attributes():
        return Cell(yes=False, note="takes no videos")
    with tempfile.TemporaryDirectory() as name:
        files = save_folder(family, Path(name))
        config = json.loads((Path(name) / "config.json").read_text())
    real = Real(family, files)
    if real.looker.processor_token("video") is None:
        return Cell(yes=False, note="its processor names no token of a video")
    rule = ask_clips(config, files)
    assert rule is not None
    clips = list(_draw(real))
    rule.prepare(clips)
    found, first = [], ""
    for clip in clips:
        own, tokens, pixels = rule._known[clip], None, 0
        try:
            tokens, pixels = _real_clip(real, clip)
        except Exception as error:  # what it takes no clips for
            first = first or " ".join(str(error).split())
        if isinstance(own, str):
            first = first or own
        counted = None if isinstance(own, str) else own.image.tokens
        if counted != tokens:
            return Cell(yes=False, note=f"{clip}: {counted} tokens, its processor writes {tokens}"[:160])
        if not isinstance(own, str):
            found.append((own.image, pixels))
    if not found:
        return Cell(yes=False, note=f"its processor refuses every clip: {first}"[:160])
    if not sized._in_proportion(found):
        return Cell(yes=False, note="its patches do not follow its pixels")
    return Cell(yes=True, note="" if len(found) == len(clips) else f"{len(clips) - len(found)} of {len(clips)} refused")


def _draw(real: Real) -> Any:
    draw = real.random
    for number in range(NUM_CLIPS):
        width, height, frames = draw.randint(60, 300), draw.randint(60, 300), draw.randint(4, 60)
        if number % 4 == 3:
            yield Clip(
                width=width, height=height, num_frames=min(frames, 16), fps=draw.choice((None, 2.0)), listed=True
            )
        else:
            yield Clip(width=width, height=height, num_frames=frames, fps=draw.choice(RATES))


def _real_clip(real: Real, clip: Clip) -> tuple[int, int]:
    pixels = torch.zeros(clip.num_frames, 3, clip.height, clip.width, dtype=torch.uint8)
    output, _ = run_clip(real.looker, clip, lambda *_: pixels)
    return real.measure(output)


if __name__ == "__main__":
    assert set(sys.argv[1:]) <= set(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES), "names families"
    asked_clips.ask = Child().ask
    sweep(check, "video")
