"""`trimtab describe` and `trimtab image-size`: a model's layers, and what an image costs its two towers."""

from __future__ import annotations

import re
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.data import ConfigArgument, ImageOptions
from trimtab.cli.output import JsonOption, console, print_json
from trimtab.cli.settings import verb
from trimtab.errors import ConfigError, ImageError

OutOption = Annotated[
    Path | None, typer.Option(help="Write a description file here: every verb takes it as CONFIG, without torch.")
]


@verb
def describe(
    config: ConfigArgument,
    images: ImageOptions,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print layers in forward order, parameters per tower, tied weights and forbidden cuts."""
    from trimtab.models.description import save_description

    model = images.describe(config)
    if out is not None:
        save_description(model, out)
    towers = {tower: model.num_tower_params(tower) for tower in ("audio", "vision", "projector", "language")}
    if not towers["audio"]:
        del towers["audio"]
    if as_json:
        print_json(
            {
                "name": model.name,
                "family": model.family,
                "num_params": {**towers, "total": model.num_params},
                "num_layers": len(model.layers),
                "layers": model.layers,
                "tied": model.tied,
                "forbidden_cuts": sorted(model.forbidden_cuts),
                "forbidden_cut_reason": model.forbidden_cut_reason,
                "image_rule": model.image_rule.name,
                "vocab_size": model.vocab_size,
                "notes": model.notes,
            }
        )
        return
    from trimtab.report.tables import print_model

    print_model(model, console())


@verb
def image_size(
    config: ConfigArgument,
    size: Annotated[str, typer.Argument(help="Width and height in pixels, as in 1920x1080.")],
    images: ImageOptions,
    frames: Annotated[int | None, typer.Option(min=1, help="Of a clip: how many frames it has.")] = None,
    fps: Annotated[float, typer.Option(min=0.01, help="Of a clip: its frames a second.")] = 24.0,
    as_json: JsonOption = False,
) -> None:
    """Print ViT patches and LLM tokens of an image of SIZE pixels, or of a clip of --frames such images."""
    from trimtab.models.images.asked import NO_CLIPS
    from trimtab.specs import Clip

    width, height = read_size(size)
    model = images.describe(config)
    if frames is None:
        counts = model.image_rule.count(width, height)
    else:
        if model.clip_rule is None:
            raise ConfigError(f"videos of {model.name} cannot be counted: {NO_CLIPS}")
        counts = model.clip_rule.count_clip(Clip(width=width, height=height, num_frames=frames, fps=fps)).image
    if as_json:
        print_json({"model": model.name, "rule": model.image_rule.name, **asdict(counts)})
        return
    tiles = "1 tile" if counts.tiles == 1 else f"{counts.tiles} tiles"
    print(
        f"{model.name}: {counts.patches:,} ViT patches in {tiles}, "
        f"{counts.tokens:,} LLM tokens ({model.image_rule.name})"
    )


def read_size(text: str) -> tuple[int, int]:
    """Width and height of "1920x1080"."""
    match = re.fullmatch(r"([0-9]{1,7})[xX]([0-9]{1,7})", text.strip())
    if match is None:
        raise ImageError(f"{text!r} is not an image size: write width x height in pixels, as in 1920x1080")
    return int(match[1]), int(match[2])
