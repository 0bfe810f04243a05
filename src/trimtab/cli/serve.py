"""`trimtab serve`: Transformers' OpenAI application over a placed model."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from trimtab.cli.output import log
from trimtab.cli.settings import verb
from trimtab.errors import TrimtabError, UnsupportedPlanError
from trimtab.files import read_small
from trimtab.serve.limits import ServeLimits


@verb
def serve(
    *,
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder of a saved model.")],
    device_map: Annotated[
        Path | None,
        typer.Option("--map", help="Device map as JSON, from trimtab map --json; without it one device holds all."),
    ] = None,
    host: Annotated[str, typer.Option(help="Address to serve on; any but localhost needs a key.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = 8000,
    name: Annotated[str | None, typer.Option(help="Name of the model in requests; by default the folder's.")] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="File with the key that clients must send.")] = None,
    offload_folder: Annotated[
        Path | None, typer.Option(help="Folder for modules on disk that the model's own files cannot stand in for.")
    ] = None,
    limits: ServeLimits,
) -> None:
    """Serve MODEL_DIR by Transformers' own OpenAI application; SIGTERM finishes what was accepted.

    Prints also what vLLM and SGLang need for the same placement: use them for throughput.
    """
    from trimtab.runtime.placing.load import load_placed
    from trimtab.serve.config_check import check_config
    from trimtab.serve.device_map import WrittenMap, read_device_map
    from trimtab.serve.processor import load_processor
    from trimtab.serve.server import ModelServer, open_port

    key = None if api_key_file is None else _read_key(api_key_file)
    written = WrittenMap(None, {}) if device_map is None else read_device_map(device_map)
    check_config(model_dir)
    with open_port(host, port, api_key=key) as opened:
        processor = load_processor(model_dir)  # first, as it is refused sooner
        model = load_placed(model_dir, written.device_map, runs_on=written.runs_on, offload_folder=offload_folder)
        server = ModelServer(model, processor, opened, limits, name=name or model_dir.resolve().name, api_key=key)
        _log_requests()
        together = f"up to {limits.max_batch} requests together" if server.thread.together else "one request at a time"
        log(f"{together}; {_engines(model_dir, written.device_map)}")
        server.run(lambda url: log(f"serving {server.name} on {url}/v1"))
    log("stopped")


def _engines(model_dir: Path, device_map: Mapping[str, int | str] | None) -> str:
    """What vLLM and SGLang want to hear for the same placement."""
    from trimtab.adapters.engines import engine_commands

    try:
        commands = engine_commands(str(model_dir), device_map)
    except UnsupportedPlanError as error:
        return f"vLLM and SGLang do not run this placement: {error}"
    return "\n".join(["for throughput the same placement by vLLM or SGLang:", *(f"  {x}" for x in commands)])


def _log_requests() -> None:
    """One line for each request on stderr."""
    requests = logging.getLogger("uvicorn.access")
    requests.setLevel(logging.INFO)
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(asctime)s %(message)s"))
    requests.addHandler(handler)
    requests.propagate = False


def _read_key(path: Path) -> str:
    key = read_small(path).decode("utf-8", errors="replace").strip()
    if not key or not key.isascii() or not key.isprintable():
        raise TrimtabError(f"{path} holds no key: write one line of printable ASCII into it")
    return key
