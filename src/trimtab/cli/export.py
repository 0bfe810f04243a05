"""`trimtab export`: a plan in another framework's own words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from trimtab.cli.check import PlanArgument
from trimtab.cli.frameworks import add_frameworks
from trimtab.cli.options import Verbs, verb
from trimtab.cli.output import JsonOption, log, print_json
from trimtab.errors import ConfigError

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
@verb
def torchserve(
    *,
    model_dir: Annotated[Path | None, typer.Argument(metavar="MODEL_DIR", help="Folder of a saved model.")] = None,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    placed: Annotated[Path | None, typer.Option("--map", help="Device map as JSON, from trimtab map --json.")] = None,
    setup: Annotated[
        Path | None, typer.Option(help="setup_config.json of TorchServe's recipe for large models.")
    ] = None,
    name: Annotated[
        str | None, typer.Option(help="Name of the model; by default the recipe's or the folder's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Pack MODEL_DIR for TorchServe 0.12 by torch-model-archiver. TorchServe is archived: prefer trimtab serve."""
    from trimtab.adapters.servers import Recipe, export_torchserve, read_recipe
    from trimtab.placement.placed import read_device_map

    fields: dict[str, Any] = {} if setup is None else read_recipe(setup)
    if model_dir is not None:
        fields["model_path"] = str(model_dir.resolve())
    if "model_path" not in fields:
        raise ConfigError("MODEL_DIR is missing: name the folder of a saved model, or a --setup with a model_path")
    if placed is not None:
        written = read_device_map(placed)
        fields |= {"device_map": written.device_map, "runs_on": written.runs_on}
    given = name or fields.get("model_name") or Path(fields["model_path"]).name
    archive = export_torchserve(Recipe(**{**fields, "model_name": given}), out)
    command = f"torchserve --start --ncs --foreground --model-store {out} --models {given}={archive.name}"
    command += f" --ts-config {out / 'config.properties'}"
    if as_json:
        print_json({"archive": archive, "command": command})
        return
    log("note: TorchServe is archived and gets no security fixes: prefer trimtab serve, or vLLM and SGLang")
    log("note: the archive names the model's folder and does not hold it: keep the folder where it is")
    print(archive)
    print(command)


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
    from trimtab.adapters.servers import count_placed_layers
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
    media_root: Annotated[
        Path | None, typer.Option(help="Folder that image paths start from; else the data file's.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write the packs of PLAN as WebDataset shards, one pack a sample, in the order in which Megatron-Energon reads."""
    from trimtab.adapters.host_packs import write_energon_packs
    from trimtab.options import ReadingOptions

    reading = ReadingOptions(media_root=media_root)
    _tell(write_energon_packs(plan, out, data=data, ranks=ranks, reading=reading), as_json)


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
