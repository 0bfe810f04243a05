"""`trimtab export`: a plan in another framework's own words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from trimtab.cli.check import PlanArgument
from trimtab.cli.frameworks import add_frameworks
from trimtab.cli.options import Verbs
from trimtab.cli.output import JsonOption, log, print_json
from trimtab.options import DType, MapRule

if TYPE_CHECKING:
    from trimtab.adapters.data_files import Field, WrittenData

app = typer.Typer(
    cls=Verbs,
    help="Write a plan's decisions, or a placed model, in another framework's words.",
    no_args_is_help=True,
)


add_frameworks(app)


# -- servers --------------------------------------------------------------------------------------------------------


@app.command("torchserve")
def torchserve(
    model_dir: Annotated[Path, typer.Argument(metavar="MODEL_DIR", help="Folder of a saved model.")],
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    device_map: Annotated[
        Path | None, typer.Option("--map", help="Device map as JSON, from trimtab map --json.")
    ] = None,
    rule: Annotated[MapRule | None, typer.Option("--device-map", help="Without --map: Accelerate's own rule.")] = None,
    setup: Annotated[
        Path | None, typer.Option(help="setup_config.json of TorchServe's recipe; options given here override it.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="Name of the model; by default the folder's.")] = None,
    version: Annotated[str, typer.Option(help="Version of the archive.")] = "1.0",
    max_memory: Annotated[
        list[str] | None, typer.Option(help="Without --map: what a device may hold, as in 0=20GiB or cpu=64GiB.")
    ] = None,
    offload_folder: Annotated[str | None, typer.Option(help="Folder for modules that the map places on disk.")] = None,
    dtype: Annotated[DType | None, typer.Option(help="Type of the weights; by default the model's own.")] = None,
    workers: Annotated[int, typer.Option(min=1, help="Processes, each with the whole model.")] = 1,
    batch_size: Annotated[int, typer.Option(min=1, help="Requests that are answered together.")] = 1,
    max_batch_delay: Annotated[int, typer.Option(min=1, help="Milliseconds to wait for a batch to fill.")] = 100,
    max_new_tokens: Annotated[int | None, typer.Option(min=1, help="Tokens of an answer; else 256.")] = None,
    pack_weights: Annotated[bool, typer.Option("--pack-weights", help="Copy the weights into the archive.")] = False,
    port: Annotated[int, typer.Option(min=1, max=65533, help="Inference port; the next two are taken too.")] = 8080,
    as_json: JsonOption = False,
) -> None:
    """Write MODEL_DIR as a TorchServe 0.12 archive. TorchServe is archived: prefer trimtab serve."""
    from trimtab.adapters.torchserve import TorchServeOptions, export_torchserve, parse_max_memory, read_recipe
    from trimtab.serve.device_map import WrittenMap, read_device_map

    written = WrittenMap(None, {}) if device_map is None else read_device_map(device_map)
    given: dict[str, Any] = {
        "device_map": written.device_map or rule,
        "runs_on": written.runs_on,
        "dtype": dtype,
        "max_memory": parse_max_memory(max_memory) if max_memory else None,
        "offload_folder": offload_folder,
        "max_new_tokens": max_new_tokens,
    }
    recipe = {} if setup is None else read_recipe(setup)
    exported = export_torchserve(
        model_dir,
        out,
        TorchServeOptions(
            name=name or model_dir.resolve().name,
            version=version,
            num_workers=workers,
            batch_size=batch_size,
            max_batch_delay_ms=max_batch_delay,
            pack_weights=pack_weights,
            port=port,
            **{**recipe, **{key: value for key, value in given.items() if value is not None}},
        ),
    )
    if as_json:
        print_json(exported)
        return
    for note in exported.notes:
        log(f"note: {note}")
    print(exported.archive)
    print(exported.command)


# -- serving engines -------------------------------------------------------------------------------------------------

PlacedArgument = Annotated[Path, typer.Argument(help="Folder that `trimtab map --out` wrote, or its placement.yaml.")]


@app.command("vllm")
def vllm(placed: PlacedArgument, as_json: JsonOption = False) -> None:
    """Print VLLM_PP_LAYER_PARTITION for PLACED: decoder layers of each pipeline rank."""
    _print_stages(placed, "vllm", as_json)


@app.command("sglang")
def sglang(placed: PlacedArgument, as_json: JsonOption = False) -> None:
    """Print SGLANG_PP_LAYER_PARTITION for PLACED: decoder layers of each pipeline rank."""
    _print_stages(placed, "sglang", as_json)


def _print_stages(placed: Path, engine: Literal["vllm", "sglang"], as_json: bool) -> None:
    from trimtab.adapters.engines import count_placed_layers
    from trimtab.plan.file.placement import load_placement

    stages = count_placed_layers(load_placement(placed).device_map)
    if as_json:
        print_json({"environment": stages.environment(engine), "layers": stages.layers, "gpus": stages.gpus})
        return
    print(stages.shell(engine))


# -- data files -----------------------------------------------------------------------------------------------------

DataOption = Annotated[
    list[Path] | None,
    typer.Option(help="A data file that was planned, in order; by default the files the plan names."),
]


@app.command("jsonl")
def jsonl(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(help="File to write.")],
    data: DataOption = None,
    field: Annotated[
        list[str] | None, typer.Option(help="Added to each record: length, num_tokens, num_patches or pack.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the records of PLAN in its order as JSON Lines, with exact lengths in every record."""
    from trimtab.adapters.data_files import write_jsonl

    fields = cast("list[Field]", field or ["length", "num_tokens"])
    _tell(write_jsonl(plan, out, data=data, fields=fields), as_json)


@app.command("qwen-packs")
def qwen_packs(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(help="File to write, ending in .jsonl.")],
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the packs of PLAN as JSON Lines, each line a list of records: Qwen-VL's finetuning code reads it."""
    from trimtab.adapters.data_files import write_nested_packs

    _tell(write_nested_packs(plan, out, data=data), as_json)


@app.command("npy")
def npy(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write packs, schedule and the places of the records of PLAN as NumPy arrays."""
    from trimtab.adapters.data_files import write_arrays

    _tell(write_arrays(plan, out, data=data), as_json)


@app.command("energon-packs")
def energon_packs(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    data: DataOption = None,
    ranks: Annotated[
        int | None, typer.Option(min=1, help="Data-parallel ranks of the run; by default the plan's.")
    ] = None,
    layout: Annotated[
        Literal["records", "llava-ov"],
        typer.Option(help="Records as they are, or as LLaVA-OneVision-1.5 packs offline."),
    ] = "records",
    media_root: Annotated[
        Path | None, typer.Option(help="Folder that image paths start from; else the data file's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the packs of PLAN as WebDataset shards, one pack a sample, in the order in which Megatron-Energon reads."""
    from trimtab.adapters.host_packs import write_energon_packs
    from trimtab.options import ReadingOptions

    reading = ReadingOptions(media_root=media_root)
    _tell(write_energon_packs(plan, out, data=data, ranks=ranks, layout=layout, reading=reading), as_json)


@app.command("swift-packs")
def swift_packs(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    data: DataOption = None,
    as_json: JsonOption = False,
) -> None:
    """Write the records of PLAN in order, and a plug-in that makes ms-swift's --packing give exactly these packs."""
    from trimtab.adapters.host_packs import write_swift_packs

    _tell(write_swift_packs(plan, out, data=data), as_json)


def _tell(exported: WrittenData, as_json: bool) -> None:
    if as_json:
        print_json(exported)
        return
    for note in exported.notes:
        log(f"note: {note}")
    print(f"{exported.num_records} records in {exported.num_packs} packs")
    print("\n".join(map(str, exported.files)))
