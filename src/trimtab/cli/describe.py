"""`trimtab describe`: a model's layers and parameters from its config.json."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import JsonOption, console, print_json

ConfigArgument = Annotated[
    str, typer.Argument(help="config.json, a folder holding it, a description file, or a shipped one (Qwen2.5-VL-7B).")
]
OutOption = Annotated[
    Path | None, typer.Option(help="Write a description file here: every verb takes it as CONFIG, without torch.")
]


def describe(
    config: ConfigArgument,
    preprocessor: Annotated[
        Path | None, typer.Option(help="preprocessor_config.json, where it does not lie beside CONFIG.")
    ] = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Print layers in forward order, parameters per tower, tied weights and forbidden cuts."""
    from trimtab.models.describe import describe as describe_model
    from trimtab.models.description import save_description

    model = describe_model(config, preprocessor=preprocessor)
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
