"""`trimtab export`: a plan in another framework's own words."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, cast

import typer

from trimtab.cli.check import PlanArgument
from trimtab.cli.frameworks import add_frameworks
from trimtab.cli.output import JsonOption, log, print_json

if TYPE_CHECKING:
    from trimtab.adapters.data_files import Exported, Field

app = typer.Typer(help="Write a plan's decisions as flags or data files of another framework.", no_args_is_help=True)


add_frameworks(app)


# -- data files -----------------------------------------------------------------------------------------------------

DataOption = Annotated[
    list[Path] | None,
    typer.Option(help="A data file that was planned, in order; by default the files the plan names."),
]


@app.command("jsonl")
def jsonl(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(help="File to write; with --layout ranks a folder.")],
    data: DataOption = None,
    field: Annotated[
        list[str] | None, typer.Option(help="Added to each record: length, num_tokens, num_patches or pack.")
    ] = None,
    layout: Annotated[
        Literal["global", "ranks"], typer.Option(help="One file in the order of the packs, or one a rank.")
    ] = "global",
    as_json: JsonOption = False,
) -> None:
    """Write the records of PLAN in its order as JSON Lines, with exact lengths in every record."""
    from trimtab.adapters.data_files import write_jsonl

    fields = cast("list[Field]", field or ["length", "num_tokens"])
    _tell(write_jsonl(plan, out, data=data, fields=fields, layout=layout), as_json)


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


@app.command("xtuner")
def xtuner(
    plan: PlanArgument,
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    data: DataOption = None,
    allow_images: Annotated[
        bool, typer.Option("--allow-images", help="Write samples with images too; xtuner today drops their pixels.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Write the packs of PLAN in xtuner's preset format."""
    from trimtab.adapters.data_files import write_xtuner_packs

    _tell(write_xtuner_packs(plan, out, data=data, allow_images=allow_images), as_json)


def _tell(exported: Exported, as_json: bool) -> None:
    if as_json:
        print_json(
            {
                "files": [str(path) for path in exported.files],
                "num_records": exported.num_records,
                "num_packs": exported.num_packs,
                "notes": exported.notes,
            }
        )
        return
    for note in exported.notes:
        log(f"note: {note}")
    print(f"{exported.num_records} records in {exported.num_packs} packs")
    print("\n".join(map(str, exported.files)))
