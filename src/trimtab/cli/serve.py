"""`trimtab serve`: Transformers' own serving application over a placed model."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import log
from trimtab.cli.settings import verb
from trimtab.errors import UnsupportedPlanError


@verb
def serve(
    *,
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder of a saved model.")],
    device_map: Annotated[
        Path | None,
        typer.Option("--map", help="Device map as JSON, from trimtab map --json; without it one device holds all."),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port on 127.0.0.1; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests; by default the folder's.")] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 1024,
    allow_remote: Annotated[bool, typer.Option("--allow-remote", help="Fetch images from http addresses.")] = False,
    offload_folder: Annotated[
        Path | None, typer.Option(help="Folder for modules on disk that the model's own files cannot stand in for.")
    ] = None,
) -> None:
    """Serve MODEL_DIR on this machine by Transformers' own OpenAI application, one request at a time.

    Prints also what vLLM and SGLang need for the same placement: use them for throughput and for other machines.
    """
    from trimtab.placement.placed import WrittenMap, read_device_map
    from trimtab.runtime.placing.load import load_placed
    from trimtab.serve.application import build_application, load_processor, open_port, run_application

    written = WrittenMap(None, {}) if device_map is None else read_device_map(device_map)
    name = name or model_dir.resolve().name
    with open_port(port) as opened:
        processor = load_processor(model_dir)  # first, because it is refused sooner
        model = load_placed(model_dir, written.device_map, runs_on=written.runs_on, offload_folder=offload_folder)
        app = build_application(name, model, processor, max_new_tokens=max_new_tokens, allow_remote=allow_remote)
        log(_engines(model_dir, model.config.model_type, written.device_map))
        run_application(app, opened, lambda url: log(f"serving {name} on {url}/v1"))


def _engines(model_dir: Path, family: str, device_map: Mapping[str, int | str] | None) -> str:
    """Return what starts vLLM and SGLang with the same placement."""
    from trimtab.adapters.servers import engine_commands

    try:
        commands = engine_commands(str(model_dir), family, device_map)
    except UnsupportedPlanError as error:
        return f"vLLM and SGLang do not run this placement: {error}"
    return "\n".join(["for throughput the same placement by vLLM or SGLang:", *(f"  {x}" for x in commands)])
