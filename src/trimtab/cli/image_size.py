"""`trimtab image-size`: what one image costs a model's two towers."""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated

import typer

from trimtab.cli.describe import ConfigArgument, MaxPixelsOption, MaxTilesOption, PreprocessorOption
from trimtab.cli.output import JsonOption, print_json
from trimtab.errors import ImageError


def image_size(
    config: ConfigArgument,
    size: Annotated[str, typer.Argument(help="Width and height in pixels, as in 1920x1080.")],
    preprocessor: PreprocessorOption = None,
    max_pixels: MaxPixelsOption = None,
    max_tiles: MaxTilesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print ViT patches and LLM tokens of an image of SIZE pixels."""
    from trimtab.models.describe import describe as describe_model

    match = re.fullmatch(r"([0-9]{1,7})[xX]([0-9]{1,7})", size.strip())
    if match is None:
        raise ImageError(f"{size!r} is not an image size: write width x height in pixels, as in 1920x1080")
    model = describe_model(config, preprocessor=preprocessor, max_pixels=max_pixels, max_tiles=max_tiles)
    counts = model.image_rule.count(int(match[1]), int(match[2]))
    if as_json:
        print_json({"model": model.name, "rule": model.image_rule.name, **asdict(counts)})
        return
    print(
        f"{model.name}: {counts.patches:,} ViT patches in {counts.tiles} tile(s), "
        f"{counts.tokens:,} LLM tokens ({model.image_rule.name})"
    )
