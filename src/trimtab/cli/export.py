"""`trimtab export TARGET SOURCE`: a plan, or a placed model, in the words of another framework."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, cast

import typer

from trimtab.adapters.frameworks import FRAMEWORKS
from trimtab.cli.output import JsonOption, log, print_json
from trimtab.cli.settings import verb
from trimtab.errors import ConfigError, PlanError
from trimtab.options import Option

if TYPE_CHECKING:
    from trimtab.adapters.data_files import WrittenData


@dataclass(frozen=True, slots=True, kw_only=True)
class ExportOptions:
    """Where to write, and what single targets take."""

    out: Annotated[
        Path | None, Option("File or folder to write; needed but for frameworks and engines.", common=True)
    ] = None
    fit: Annotated[
        Path | None,
        Option("Frameworks: folder for the best plan that TARGET can run, with the same packs.", common=True),
    ] = None
    data: Annotated[
        tuple[Path, ...],
        Option(
            "Packs: a data file that was planned, in order; default: the files the plan names. Repeatable.",
            read=tuple,
            typed=list[Path],
            common=True,
        ),
    ] = ()
    map: Annotated[Path | None, Option("torchserve: device map as JSON, from `trimtab map --json`.", common=True)] = (
        None
    )
    setup: Annotated[
        Path | None, Option("torchserve: setup_config.json of its recipe for large models.", common=True)
    ] = None
    name: Annotated[str | None, Option("torchserve: name of the model; else the recipe's, or the folder's.")] = None
    ranks: Annotated[
        int | None, Option("energon-packs: data-parallel ranks of the run; default: the plan's.", least=1)
    ] = None
    media_root: Annotated[
        Path | None, Option("energon-packs: folder that image paths start from; else the data file's.")
    ] = None
    allow_outside: Annotated[bool, Option("energon-packs: read images outside of named folders.")] = False
    allow_remote: Annotated[bool, Option("energon-packs: open addresses that records name.")] = False

    def refuse_others(self, target: str, taken: set[str]) -> None:
        """Raise an error if an option was given that `target` does not take."""
        plain = ExportOptions()
        given = [one.name for one in fields(self) if getattr(self, one.name) != getattr(plain, one.name)]
        wrong = [name for name in given if name not in taken]
        if wrong:
            raise PlanError(f"{wrong[0]} was given, and {target} does not take it: leave it out")

    def path(self, target: str) -> Path:
        """Return --out, which has to be given."""
        if self.out is None:
            raise PlanError(f"{target} writes files, and --out is missing: name a file or folder")
        return self.out


@verb
def export(
    target: Annotated[str, typer.Argument(help="What to write it for: one of the targets below.")],
    options: ExportOptions,
    source: Annotated[
        Path | None,
        typer.Argument(metavar="SOURCE", help="PLAN: plan.yaml or its folder; PLACED or MODEL_DIR where it says so."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Write a plan's decisions, or a placed model, in another framework's words."""
    if target in FRAMEWORKS:
        options.refuse_others(target, {"out", "fit"})
        if source is None:
            raise PlanError(f"{target} was asked for without a plan: name plan.yaml or its folder")
        _export_framework(target, source, options.out, options.fit, as_json)
        return
    if target not in _WRITERS:
        raise PlanError(f"target {target!r} is unknown: choose one of {', '.join(targets())}")
    _, taken, write = _WRITERS[target]
    options.refuse_others(target, taken)
    write(target, source, options, as_json)


def targets() -> Mapping[str, str]:
    """Help of each target by name."""
    return {
        **{name: framework.help for name, framework in FRAMEWORKS.items()},
        **{name: text for name, (text, _, _) in _WRITERS.items()},
    }


export.sections = {"Targets": targets}  # type: ignore[attr-defined]


# -- training frameworks ----------------------------------------------------------------------------------------------


def _export_framework(name: str, plan: Path, out: Path | None, fit: Path | None, as_json: bool) -> None:
    from trimtab.adapters.frameworks import find_target
    from trimtab.adapters.running import cost_of_running, export_plan, fit_plan
    from trimtab.files import refuse_folder, write_atomically
    from trimtab.plan.build import write_plan
    from trimtab.plan.decide.stages import relative_time
    from trimtab.plan.file.check import refuse_broken
    from trimtab.plan.file.reload import reload_plan

    if out is not None:
        refuse_folder(out)
    target, found = find_target(name), reload_plan(plan)
    notes: list[str] = []
    if fit is not None:
        _refuse_own_folder(plan, fit)
        write_plan(fit_plan(found, target), fit)
        refuse_broken(fit)
        fitted = reload_plan(fit)
        ratio = relative_time(found.case, fitted.stages, found.stages)
        notes.append(f"the best plan found for {target.title} is in {fit}: a step takes {ratio:.3f} x that of {plan}")
        found = fitted
    exported = export_plan(found, target)
    warnings = [*exported.warnings, *cost_of_running(found, exported)]
    if out is not None:
        write_atomically(out, exported.text + "\n")
    if as_json:
        written = {} if out is None else {"file": str(out)}
        said = {"packs": target.packs, "checked_with": target.checked_with, "warnings": warnings, "notes": notes}
        print_json({**exported.fields, **written, **said})
        return
    for note in (*notes, *(f"warning: {sentence}" for sentence in warnings)):
        log(note)
    log(f"checked with {target.checked_with}")
    if target.packs is not None:
        log(f"the plan's packs: {target.packs}")
    if exported.also is not None:
        log(exported.also)
    print(exported.text if out is None else out)


def _refuse_own_folder(plan: Path, fit: Path) -> None:
    from trimtab.plan.file.yaml import plan_folder

    if fit.resolve() == plan_folder(plan).resolve():
        raise PlanError(f"--fit {fit} was asked for, and the plan that it is made from lies there: name another folder")


# -- servers and engines ----------------------------------------------------------------------------------------------


def _torchserve(target: str, model_dir: Path | None, options: ExportOptions, as_json: bool) -> None:
    from trimtab.adapters.servers import Recipe, export_torchserve, read_recipe
    from trimtab.placement.placed import read_device_map

    out = options.path(target)
    found: dict[str, Any] = {} if options.setup is None else read_recipe(options.setup)
    if model_dir is not None:
        found["model_path"] = str(model_dir.resolve())
    if "model_path" not in found:
        raise ConfigError("MODEL_DIR is missing: name the folder of a saved model, or a --setup with a model_path")
    if options.map is not None:
        written = read_device_map(options.map)
        found |= {"device_map": written.device_map, "runs_on": written.runs_on}
    name = options.name or found.get("model_name") or Path(found["model_path"]).name
    archive = export_torchserve(Recipe(**{**found, "model_name": name}), out)
    command = f"torchserve --start --ncs --foreground --model-store {out} --models {name}={archive.name}"
    command += f" --ts-config {out / 'config.properties'}"
    if as_json:
        print_json({"archive": archive, "command": command})
        return
    log("note: TorchServe is archived and gets no security fixes: prefer trimtab serve, or vLLM and SGLang")
    log("note: the archive names the model's folder and does not hold it: keep the folder where it is")
    print(archive)
    print(command)


def _engine(target: str, placed: Path | None, _options: ExportOptions, as_json: bool) -> None:
    from trimtab.adapters.servers import count_placed_layers
    from trimtab.plan.file.placement import load_placement

    engine = cast('Literal["vllm", "sglang"]', target)
    if placed is None:
        raise PlanError(f"{target} was asked for without a placement: name the folder of `trimtab map --out`")
    found = load_placement(placed)
    stages = count_placed_layers(found.device_map)
    stages.refuse_stages(engine, found.inputs.model.family)
    if as_json:
        print_json({"environment": stages.environment(engine), "layers": stages.layers, "gpus": stages.gpus})
        return
    print(stages.shell(engine))
    log(f"or, on GPUs with as much free memory each: {stages.by_tensors(engine)}")


# -- packs as files ---------------------------------------------------------------------------------------------------


def _packs(target: str, plan: Path | None, options: ExportOptions, as_json: bool) -> None:
    from trimtab.adapters import data_files
    from trimtab.options import ReadingOptions

    if plan is None:
        raise PlanError(f"{target} needs a plan: name plan.yaml or its folder")
    names = ("media_root", "allow_outside", "allow_remote")
    reading = ReadingOptions(**{name: getattr(options, name) for name in names})
    more = {"ranks": options.ranks, "reading": reading}
    writers: dict[str, Callable[..., WrittenData]] = {
        "jsonl": data_files.write_jsonl,
        "qwen-packs": data_files.write_nested_packs,
        "swift-packs": data_files.write_swift_packs,
        "energon-packs": partial(data_files.write_energon_packs, **more),  # type: ignore[arg-type]  # by name
    }
    written = writers[target](plan, options.path(target), data=list(options.data) or None)
    if as_json:
        print_json(written)
        return
    for note in written.notes:
        log(f"note: {note}")
    print(f"{written.num_records} records in {written.num_packs} packs")
    print("\n".join(map(str, written.files)))


_Writer = Callable[[str, Path | None, ExportOptions, bool], None]
_WRITERS: Mapping[str, tuple[str, set[str], _Writer]] = {
    "torchserve": (
        "Pack MODEL_DIR for TorchServe 0.12 by torch-model-archiver. TorchServe is archived: prefer trimtab serve.",
        {"out", "map", "setup", "name"},
        _torchserve,
    ),
    "vllm": ("Print VLLM_PP_LAYER_PARTITION for PLACED, the folder of `trimtab map --out`.", set(), _engine),
    "sglang": ("Print SGLANG_PP_LAYER_PARTITION for PLACED, the folder of `trimtab map --out`.", set(), _engine),
    "jsonl": (
        "Write the records of PLAN in its order as JSON Lines, with exact lengths in every record.",
        {"out", "data"},
        _packs,
    ),
    "qwen-packs": (
        "Write the packs of PLAN as JSON Lines, a list of records a line: Qwen-VL's finetuning code reads it.",
        {"out", "data"},
        _packs,
    ),
    "energon-packs": (
        "Write the packs of PLAN as WebDataset shards, one pack a sample, in Megatron-Energon's order.",
        {"out", "data", "ranks", "media_root", "allow_outside", "allow_remote"},
        _packs,
    ),
    "swift-packs": (
        "Write the records of PLAN in order, and a plug-in that makes ms-swift's --packing give exactly these packs.",
        {"out", "data"},
        _packs,
    ),
}
"""Help, options taken and writer of each target that is no training framework."""
