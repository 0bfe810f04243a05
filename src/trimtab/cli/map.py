"""`trimtab map` and `trimtab serve`: which device holds which module, and a model served that way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trimtab.cli.data import ConfigArgument, ImageOptions
from trimtab.cli.output import JsonOption, console, given_command, log, print_json
from trimtab.cli.settings import verb
from trimtab.errors import PartitionError, TrimtabError, UnsupportedPlanError
from trimtab.placement.machine import Workload

if TYPE_CHECKING:
    from trimtab.placement.bytes import DeviceUse
    from trimtab.placement.engines import Engine
    from trimtab.placement.machine import Machine
    from trimtab.placement.placed import Assessed, Placement
    from trimtab.specs import ModelSpec


@verb
def map_model(
    *,
    context: typer.Context,
    config: ConfigArgument,
    gpus: Annotated[
        str, typer.Option(help="GPUs and what is free on them: 4x24GiB, 40GiB,80GiB, 2xA100-80GB or A100-80GB:31GiB.")
    ],
    cpu: Annotated[str | None, typer.Option(help="Host memory for weights that no GPU holds, as in 128GiB.")] = None,
    disk: Annotated[
        Path | None,
        typer.Option(
            help="Folder, of the machine that serves, where weights may stay that not even host memory holds."
        ),
    ] = None,
    workload: Workload,
    objective: Annotated[
        Literal["auto", "memory", "latency", "pipeline"],
        typer.Option(
            "--for",
            help="memory: the lowest peak on any GPU; latency: fewest and fastest GPUs; pipeline: stages of a "
            "serving engine; auto: few GPUs where they stay roomy, else memory.",
        ),
    ] = "auto",
    reserve: Annotated[float, typer.Option(min=0, max=90, help="Per cent of each GPU to keep free.")] = 3,
    trace: Annotated[
        Path | None,
        typer.Option(
            help="Requests that an engine serves, one JSON object a line: arrival_s, prompt_tokens (text; images come "
            "on top), output_tokens, images as [[height, width]]. Needs --serve-with."
        ),
    ] = None,
    serve_with: Annotated[
        Literal["vllm", "sglang"] | None, typer.Option(help="Engine that serves --trace: its layout and commands.")
    ] = None,
    compare: Annotated[bool, typer.Option("--compare", help="Compare with the maps of public tools.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder for placement.yaml and map.json.")] = None,
    counting: ImageOptions,
    as_json: JsonOption = False,
) -> None:
    """Place CONFIG on GPUs for inference: device map, and the bytes of each device by kind."""
    from trimtab.placement.machine import parse_machine, stored_workload

    model = counting.describe(config)
    workload = stored_workload(model, workload)
    machine = parse_machine(gpus, cpu=cpu, disk=disk is not None, kept_share=reserve / 100)
    if trace is not None or serve_with is not None:
        places = bool(cpu or disk or out or compare or objective != "auto")
        _lay_out(config, model, machine, workload, trace, serve_with, places=places, as_json=as_json)
        return
    placement = _placement(model, machine, workload, objective)
    compared = compare_maps(config, model, machine, workload) if compare else []
    if out is not None:
        from trimtab.plan.file.placement import placement_file, write_placement

        command = given_command(context, without=("out", "as_json"))
        write_placement(out, placement_file(model, machine, workload, placement, compared, command), placement)
    if as_json:
        print_json(_as_json(placement, compared))
        return
    from trimtab.report.tables import print_placement

    print_placement(placement, compared, console())
    if out is not None:
        log(f"wrote {out / 'placement.yaml'} and {out / 'map.json'}")


def _placement(
    model: ModelSpec, machine: Machine, workload: Workload, objective: Literal["auto", "memory", "latency", "pipeline"]
) -> Placement:
    from trimtab.placement.place import place, place_unasked

    if objective == "auto":
        return place_unasked(model, machine, workload)
    return place(model, machine, workload, objective=objective)


def _lay_out(
    config: str,
    model: ModelSpec,
    machine: Machine,
    workload: Workload,
    trace: Path | None,
    engine: Engine | None,
    *,
    places: bool,
    as_json: bool,
) -> None:
    """Print what equal GPUs do to serve a trace, and the commands that start it; `places`: a map was asked for too."""
    from trimtab.adapters.servers import serving_commands
    from trimtab.costs.devices import find_device
    from trimtab.placement.engines import offer_layouts, read_trace

    if trace is None or engine is None:
        raise PartitionError("a trace is laid out for an engine: give --trace and --serve-with, or neither")
    if places or workload != replace(
        Workload(), dtype=workload.dtype, quant=workload.quant, attention=workload.attention
    ):
        raise PartitionError("--trace says what is served: give it with --gpus, --reserve, --dtype and --quant alone")
    first = machine.gpus[0]
    if first.name is None or len({(gpu.name, gpu.free_bytes) for gpu in machine.gpus}) > 1:
        raise PartitionError("a trace is served by equal GPUs of a known kind: give --gpus as in 8xH100-80GB")
    requests, free = read_trace(trace), round(first.free_bytes * (1 - machine.kept_share))
    offers, bound = offer_layouts(
        model, find_device(first.name), len(machine.gpus), requests, engine=engine, workload=workload, free_bytes=free
    )
    commands = serving_commands(config, engine, offers[0].layout)
    if as_json:
        print_json({"requests": len(requests), "bound": bound, "layouts": offers, "commands": commands})
        return
    from trimtab.report.tables import print_layouts

    print_layouts(offers, bound, console(), title=f"{model.name}, {len(requests)} requests by {engine}")
    for command in commands:
        typer.echo(command)


def compare_maps(config: str, model: ModelSpec, machine: Machine, workload: Workload) -> list[Assessed]:
    """Return the maps of InternVL's rule, and of Accelerate and Transformers where they know the model."""
    from trimtab.placement.placed import Assessed, assess_map, split_model_map

    rule = "InternVL split_model(0.5)"
    found = [assess_map(model, machine, workload, split_model_map(model, len(machine.gpus)), rule=rule)]
    from trimtab.models.describe import read_config

    try:
        if workload.quant is not None:
            raise UnsupportedPlanError("libraries size quantised weights by the quantiser: compare without --quant")
        from trimtab.runtime.placing.load import auto_map, build_on_meta

        real = build_on_meta(read_config(config), tied=bool(model.tied), dtype=workload.dtype)
        maps = {library: auto_map(real, machine, library=library) for library in ("accelerate", "transformers")}
    except (TrimtabError, ModuleNotFoundError) as error:
        reason = str(error)
        if isinstance(error, ModuleNotFoundError):
            reason = f"{error.name} is not installed: pip install 'trimtab[torch]'"
        return [*found, Assessed(rule="Accelerate and Transformers auto", placement=None, problems=(reason,))]
    return found + [
        assess_map(model, machine, workload, chosen, rule=f"{library.capitalize()} auto")
        for library, chosen in maps.items()
    ]


def _as_json(placement: Placement, compared: list[Assessed]) -> Mapping[str, Any]:
    shown = ("model", "objective", "arrangement", "runs_on", "run_on_cpu", "notes")
    return {
        **{name: getattr(placement, name) for name in shown},
        **_map_json(placement),
        "compared": [
            {"rule": other.rule, "fits": other.fits, "problems": other.problems, **_map_json(other.placement)}
            for other in compared
        ],
    }


def _numbers(use: DeviceUse) -> dict[str, Any]:
    return {name: value for name, value in asdict(use).items() if name != "modules"}


def _map_json(placement: Placement | None) -> dict[str, Any]:
    if placement is None:
        return dict.fromkeys(("device_map", "devices", "fullest", "moved_bytes"))
    return {
        "device_map": dict(placement.device_map),
        "devices": [
            {**_numbers(use), "total_bytes": use.total_bytes, "fraction": use.fraction} for use in placement.uses
        ],
        "fullest": placement.fullest,
        "moved_bytes": placement.moved_bytes,
    }


# -- trimtab serve -----------------------------------------------------------------------------------------------------


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
