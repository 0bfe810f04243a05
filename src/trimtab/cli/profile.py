"""`trimtab profile`: seconds and bytes of a model's layers: by formula, counted, timed on a device, or from logs."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from trimtab.cli.describe import ConfigArgument
from trimtab.cli.output import JsonOption, console, print_json

if TYPE_CHECKING:
    from trimtab.costs.fit import Calibration
    from trimtab.costs.measured import TimedProfile
    from trimtab.costs.traced_fit import TracedProfile
    from trimtab.specs import ModelSpec, Tower

_ROWS = 1024  # of the table, where nothing was timed


def profile(
    config: ConfigArgument,
    timed: Annotated[bool, typer.Option("--timed", help="Time the real layers on --device (cpu, cuda).")] = False,
    traced: Annotated[
        bool, typer.Option("--traced", help="Count the bytes of the real layers, without weights; seconds by formula.")
    ] = False,
    from_logs: Annotated[Path | None, typer.Option(help="Fit the formulas to these logged runs (JSON).")] = None,
    device: Annotated[
        str | None, typer.Option(help="cpu or cuda with --timed (default: what is there); else a device as in H200.")
    ] = None,
    dtype: Annotated[Literal["bf16", "fp16", "fp32"], typer.Option(help="Of weights and activations.")] = "bf16",
    attention: Annotated[
        Literal["flash", "sdpa", "eager"] | None,
        typer.Option(help="Attention; default flash, with --timed sdpa where flash is not installed."),
    ] = None,
    sizes: Annotated[str | None, typer.Option(help="Rows to time, as in 1024,4096; default: by device.")] = None,
    repeats: Annotated[int | None, typer.Option(min=1, help="Times each size is timed; default 9.")] = None,
    tp: Annotated[int, typer.Option(min=1, help="Tensor-parallel degree; layers are timed at 1.")] = 1,
    fused_kernels: Annotated[
        bool, typer.Option("--fused-kernels", help="Norms, rotary and gates as single kernels (TE, Liger).")
    ] = False,
    freeze: Annotated[list[str] | None, typer.Option(help="Towers that are not trained, as in vision.")] = None,
    out: Annotated[Path | None, typer.Option(help="Write the profile as JSON, for `trimtab plan --profile`.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Price every layer of CONFIG: forward and backward seconds, share, rate, and how far they may be off."""
    from trimtab.cli.show import parse_towers
    from trimtab.costs.profile import profile_model, save_profile
    from trimtab.costs.settings import CostSettings
    from trimtab.errors import TrimtabError, join_problems
    from trimtab.files import refuse_folder
    from trimtab.models.describe import describe
    from trimtab.report.profile_table import kept_rows, kind_rows, print_kept, print_kinds, print_runs
    from trimtab.specs import ParallelDims

    if out is not None:
        refuse_folder(out)  # before anything is timed
    problems = []
    if timed and from_logs is not None:
        problems.append("--timed and --from-logs were both given, and each gives the seconds: give one of them")
    if timed and tp > 1:
        problems.append(f"tp {tp} was to be timed on one device: leave --tp out, `trimtab plan` divides what was timed")
    if timed and fused_kernels:
        problems.append("fused kernels were to be timed, and Transformers' own layers are: leave --fused-kernels out")
    if traced and timed:
        problems.append("--traced and --timed were both given, and each makes a profile of its own: give one of them")
    if traced and from_logs is not None:
        problems.append("--traced and --from-logs were both given, and each makes a profile of its own: give one")
    if traced and tp > 1:
        problems.append(f"tp {tp} was to be traced, and real layers are whole: leave --tp out, `trimtab plan` divides")
    if traced and sizes is not None:
        problems.append("--sizes were given with --traced, which chooses its own: leave them out")
    if not timed and device is None:
        problems.append("no device was named: give --device as in H200, or --timed to time the one that is here")
    if not timed and not traced and sizes is not None:
        problems.append("--sizes were given, and formulas need none: leave them out, or give --timed")
    if not timed and repeats is not None:
        problems.append(f"--repeats {repeats} was given, and nothing is timed: leave it out, or give --timed")
    if problems:
        raise TrimtabError(join_problems(problems))
    model = describe(config)
    frozen = parse_towers(freeze or [])
    given: dict[str, Any] = {"attention": attention or "flash", "fused_kernels": fused_kernels}
    fits: TimedProfile | None = None
    counts: TracedProfile | None = None
    calibration: Calibration | None = None
    if timed:
        fits = _time(config, model, device, dtype, attention, _parse_sizes(sizes), repeats or 9, frozen)
        result = fits.profile
    elif traced:
        assert device is not None
        counts = _trace(config, model, device, dtype, given, frozen)
        result = counts.profile
    else:
        assert device is not None
        from trimtab.costs.devices import find_device

        given |= {"dtype": dtype, "frozen_towers": frozenset(frozen), "dims": ParallelDims(tp=tp)}
        if from_logs is not None:
            from trimtab.plan.measured.calibrate import profile_from_logs

            calibration = profile_from_logs(from_logs, model, find_device(device), **given)
        result = profile_model(model, find_device(device), **given) if calibration is None else calibration.profile
    if out is not None:
        save_profile(result, out)
    settings = CostSettings(
        dims=result.dims,
        dtype=result.dtype,
        attention=result.attention,
        fused_kernels=fused_kernels,
        frozen_towers=frozenset(frozen),
    )
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
                "device": asdict(result.device),
                "dtype": result.dtype,
                "attention": result.attention,
                "time_error": result.time_error,
                "memory_error": result.memory_error,
                "kinds": [asdict(row) for row in rows],
                "kept": [{**asdict(row), "fused_share": row.fused_share} for row in kept],
                "assumptions": result.assumptions,
                "runs": [] if calibration is None else [asdict(run) for run in calibration.runs],
                "terms": [] if calibration is None else [asdict(term) for term in calibration.terms],
                "warnings": warnings,
                "file": None if out is None else str(out),
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


def _time(
    config: str,
    model: ModelSpec,
    device: str | None,
    dtype: str,
    attention: Literal["flash", "sdpa", "eager"] | None,
    sizes: tuple[int, ...] | None,
    repeats: int,
    frozen: tuple[Tower, ...],
) -> TimedProfile:
    from trimtab.cli.output import progress
    from trimtab.costs.timed import TimingOptions, open_device, profile_timed
    from trimtab.models.describe import read_config

    options = TimingOptions(dtype=dtype, attention=attention, sizes=sizes, repeats=repeats, frozen_towers=frozen)
    with progress("timing") as advance:
        return profile_timed(read_config(config), model, open_device(device), options, progress=advance)


def _trace(
    config: str,
    model: ModelSpec,
    device: str,
    dtype: str,
    given: dict[str, Any],
    frozen: tuple[Tower, ...],
) -> TracedProfile:
    from trimtab.costs.devices import find_device
    from trimtab.costs.traced import profile_traced
    from trimtab.models.describe import read_config

    known = find_device(device)
    return profile_traced(read_config(config), model, known, dtype=dtype, frozen_towers=frozenset(frozen), **given)


def _parse_sizes(text: str | None) -> tuple[int, ...] | None:
    if text is None:
        return None
    from trimtab.errors import TrimtabError

    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise TrimtabError(f"sizes {text!r} are not numbers of rows: write them as 1024,4096") from None
