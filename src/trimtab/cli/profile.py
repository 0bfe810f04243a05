"""`trimtab profile`: seconds and bytes of a model's layers: by formula, counted, timed on a device, or from logs."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from trimtab.cli.data import ConfigArgument
from trimtab.cli.output import JsonOption, console, log, print_json
from trimtab.cli.settings import verb
from trimtab.errors import TrimtabError, join_problems
from trimtab.lora import Lora
from trimtab.options import Attention, DType, HostName, Option, Tower, option_problems
from trimtab.plan.options import FREEZE, LORA
from trimtab.runtime.training.settings import ProbeSettings, TrainSettings

if TYPE_CHECKING:
    from rich.console import Console

    from trimtab.costs.measured.fitted import Calibration
    from trimtab.costs.measured.timed_fit import TimedProfile
    from trimtab.costs.measured.traced_fit import TracedProfile
    from trimtab.runtime.probe.run import ProbeResult
    from trimtab.specs import ModelSpec, Profile

_ROWS = 1024  # of the table, where nothing was timed


def parse_sizes(text: str) -> tuple[int, ...]:
    """Return numbers of rows from "1024,4096"."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TrimtabError(f"sizes {text!r} are not numbers of rows: write them as 1024,4096") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class ProfileOptions:
    """How layers are priced; checks itself."""

    timed: Annotated[bool, Option("Time the real layers on --device (cpu, cuda).", common=True)] = False
    traced: Annotated[
        bool, Option("Count the bytes of the real layers, without weights; seconds by formula.", common=True)
    ] = False
    from_logs: Annotated[Path | None, Option("Fit the formulas to these logged runs (JSON).", common=True)] = None
    device: Annotated[
        str | None, Option("cpu or cuda with --timed (default: what is there); else a device as in H200.", common=True)
    ] = None
    dtype: Annotated[DType, Option("Of weights and activations.", common=True)] = "bf16"
    attention: Annotated[
        Attention | None, Option("Attention; default flash, with --timed sdpa where flash is not installed.")
    ] = None
    sizes: Annotated[
        tuple[int, ...] | None, Option("Rows to time, as in 1024,4096; default: by device.", read=parse_sizes)
    ] = None
    repeats: Annotated[int | None, Option("Times each size is timed; default 9.", least=1)] = None
    tp: Annotated[int, Option("Tensor-parallel degree; layers are timed at 1.", least=1, common=True)] = 1
    host: Annotated[HostName, Option("Whose seconds the formulas take, and which logged runs are fitted to.")] = "eager"
    fused_kernels: Annotated[bool, Option("Norms, rotary and gates as single kernels (TE, Liger).")] = False
    frozen_towers: Annotated[tuple[Tower, ...], FREEZE] = ()
    lora: Annotated[Lora | None, LORA] = None

    def __post_init__(self) -> None:
        given = {"--timed": self.timed, "--traced": self.traced, "--from-logs": self.from_logs is not None}
        sources = [flag for flag, asked in given.items() if asked]
        refused = (
            (len(sources) > 1, f"{' and '.join(sources)} exclude each other: give one of them"),
            (self.timed and self.tp > 1, "layers are timed at tp 1: leave --tp out, `trimtab plan` divides"),
            (self.traced and self.tp > 1, "layers are traced at tp 1: leave --tp out, `trimtab plan` divides"),
            (self.timed and self.fused_kernels, "Transformers' own layers are timed: leave fused_kernels out"),
            (self.timed and self.lora is not None, "Transformers' own layers are timed: leave --lora out"),
            (not self.timed and self.device is None, "no device was named: give --device, as in H200, or --timed"),
            (not self.timed and self.sizes is not None, f"--set sizes={self.sizes} needs --timed"),
            (not self.timed and self.repeats is not None, f"--set repeats={self.repeats} needs --timed"),
        )
        problems = [*option_problems(self), *(sentence for wrong, sentence in refused if wrong)]
        if problems:
            raise TrimtabError(join_problems(problems))

    @property
    def given(self) -> dict[str, Any]:
        """Return what formulas and counts both take."""
        return {
            "dtype": self.dtype,
            "attention": self.attention or "flash",
            "host": self.host,
            "fused_kernels": self.fused_kernels,
            "frozen_towers": frozenset(self.frozen_towers),
            "lora": self.lora,
        }


@verb
def profile(
    config: ConfigArgument,
    options: ProfileOptions,
    out: Annotated[Path | None, typer.Option(help="Write the profile as JSON, for `trimtab plan --profile`.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Price every layer of CONFIG: forward and backward seconds, share, rate, and how far they may be off."""
    from trimtab.costs.devices import find_device
    from trimtab.costs.profile import profile_model, save_profile
    from trimtab.files import refuse_folder
    from trimtab.models.describe import describe, read_config
    from trimtab.specs import ParallelDims

    if out is not None:
        refuse_folder(out)  # before anything is timed
    model = describe(config)
    fits: TimedProfile | None = None
    counts: TracedProfile | None = None
    calibration: Calibration | None = None
    if options.timed:
        fits = _time(config, model, options)
        result = fits.profile
    else:
        device, given = find_device(options.device or ""), options.given
        if options.traced:
            from trimtab.costs.measured.traced import profile_traced

            counts = profile_traced(read_config(config), model, device, **given)
            result = counts.profile
        elif options.from_logs is not None:
            from trimtab.plan.runs import profile_from_logs

            calibration = profile_from_logs(options.from_logs, model, device, dims=ParallelDims(tp=options.tp), **given)
            result = calibration.profile
        else:
            result = profile_model(model, device, dims=ParallelDims(tp=options.tp), **given)
    if out is not None:
        save_profile(result, out)
    _show(model, result, options, fits, counts, calibration, out=out, as_json=as_json)


def _show(
    model: "ModelSpec",
    result: "Profile",
    options: ProfileOptions,
    fits: "TimedProfile | None",
    counts: "TracedProfile | None",
    calibration: "Calibration | None",
    *,
    out: Path | None,
    as_json: bool,
) -> None:
    from trimtab.costs.formula.settings import CostSettings
    from trimtab.report.tables import kept_rows, kind_rows, print_kept, print_kinds, print_runs

    given = options.given | {"attention": result.attention, "dtype": result.dtype}
    settings = CostSettings(dims=result.dims, **given)
    kinds = {} if fits is None else {kind.group: kind for kind in fits.kinds}
    rows = kind_rows(result, model, settings, size=_ROWS, fits=kinds)
    kept = () if counts is None else kept_rows(counts.kinds, model, settings, size=_ROWS)
    source = counts or calibration
    warnings = () if source is None else source.warnings
    if as_json:
        print_json(
            {
                "model": model.name,
                "method": result.method,
                "device": result.device,
                "dtype": result.dtype,
                "attention": result.attention,
                "time_error": result.time_error,
                "memory_error": result.memory_error,
                "kinds": rows,
                "kept": kept,
                "assumptions": result.assumptions,
                "runs": [] if calibration is None else calibration.runs,
                "terms": [] if calibration is None else calibration.terms,
                "warnings": warnings,
                "file": out,
            }
        )
        return
    print_kinds(rows, result, console())
    if kept:
        print_kept(kept, console())
    if calibration is not None:
        print_runs(calibration, console())
    print("\n".join(sentence for sentence in result.assumptions if sentence not in warnings))
    for warning in warnings:
        print(f"warning: {warning}")
    if out is not None:
        print(f"profile: {out}")


def _time(config: str, model: "ModelSpec", options: ProfileOptions) -> "TimedProfile":
    from trimtab.cli.output import progress
    from trimtab.costs.measured.timed import TimingOptions, open_device, profile_timed
    from trimtab.models.describe import read_config

    timing = TimingOptions(
        dtype=options.dtype,
        attention=options.attention,
        sizes=options.sizes,
        repeats=options.repeats or 9,
        frozen_towers=options.frozen_towers,
    )
    with progress("timing") as advance:
        return profile_timed(read_config(config), model, open_device(options.device), timing, progress=advance)


# -- trimtab train and probe: a plan carried out, alone or on the processes that torchrun started ----------------------


@verb
def train(settings: TrainSettings, as_json: JsonOption = False) -> None:
    """Train MODEL as PLAN says: `torchrun --nproc-per-node N --no-python trimtab train PLAN MODEL`, or alone."""
    from trimtab.runtime.training.loop import train as run

    records = run(settings)
    if as_json and os.environ.get("RANK", "0") == "0":
        loss = records[-1].loss if records else None
        print_json({"steps": len(records), "loss": loss, "log": settings.out / "run.jsonl"})


@verb
def probe(
    settings: ProbeSettings,
    out: Annotated[Path, typer.Option(help="Folder for the probed plan, its profile and tables.")] = Path("probed"),
    as_json: JsonOption = False,
) -> None:
    """Run PLAN's heaviest packs through MODEL, alone or under torchrun as `trimtab train`; choose recompute that fits.

    Everything recomputes first, then one layer of each kind does not, then the best choice runs. On the CPU the memory
    is a budget that is counted.
    """
    from trimtab.cli.report import plan_json, write_all
    from trimtab.plan.file.check import refuse_broken
    from trimtab.runtime.probe.run import probe as run  # torch: only for what can be run

    result = run(settings, progress=log)
    if os.environ.get("RANK", "0") != "0":
        return
    paths = write_all(result.details, out)
    refuse_broken(out)
    if as_json:
        print_json(
            {
                "limit_bytes": result.limit_bytes,
                "devices": result.devices,
                "steps": [device.steps(result.limit_bytes) for device in result.devices],
                "runs": result.runs,
                "num_step_backs": result.num_step_backs,
                "plan": plan_json(result.details, paths),
            }
        )
        return
    print_probe(result, console())
    print("\n".join(f"{name}: {path}" for name, path in paths.items()))


def print_probe(result: "ProbeResult", console: "Console") -> None:
    """The four steps of every device: its peak before and after each, and what that bought."""
    from rich.text import Text

    from trimtab.report.table import Column, Table, memory_scale, numeric, print_table
    from trimtab.units import format_bytes, format_seconds

    scale = memory_scale([result.limit_bytes, *(x.full_peak_bytes for x in result.devices)])
    columns = (Column("Step"), *numeric(f"Before,\n{scale.unit}", f"After,\n{scale.unit}"), Column("What it bought"))
    for device in result.devices:
        rows = [
            (x.what, scale.number(x.before_bytes), scale.number(x.after_bytes), x.bought)
            for x in device.steps(result.limit_bytes)
        ]
        print_table(Table(title=f"The four steps on device {device.device}", columns=columns, rows=rows), console)
    runs, backs = len(result.runs), result.num_step_backs
    console.print(
        Text(
            f"{runs} runs in {format_seconds(result.wall_s)}; {backs or 'no'} step{'' if backs == 1 else 's'} back; "
            f"limit {format_bytes(result.limit_bytes)}."
        )
    )
