"""A profile calibrated on the user's own runs: the fit of `costs.fit` through the pipeline simulator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.costs.fit import Calibration, fit_runs
from trimtab.costs.logs import LoggedRun, LoggedSchedule, read_runs
from trimtab.costs.observed import Term
from trimtab.costs.profile import profile_model
from trimtab.partition.assess import SplitProblem
from trimtab.partition.simulate import StageTimes, simulate
from trimtab.specs import DeviceSpec, FloatArray, ModelSpec, ParallelDims, Profile

TERMS_BY_NEED: tuple[Term, ...] = ("language", "vision", "first stage")
"""What is fitted, in the order in which few logged times are spent on it. "language" by itself scales both
towers."""


def profile_from_logs(
    path: Path | str,
    model: ModelSpec,
    device: DeviceSpec,
    *,
    dims: ParallelDims | None = None,
    **settings: Any,
) -> Calibration:
    """`Calibration.profile`: `model` at `dims` on `device`, its seconds fitted to the runs that `path` (JSON) lists.

    `settings` are the other keywords of `profile_model` (zero_stage, attention, fused_kernels, ...), the same for the
    runs and for the profile. Fitted are language, vision and the first stage's constant, as far as the runs
    hold them and are enough for them. `Calibration.warnings` are sentences to print: a stage kind that no run makes the
    slowest, a coefficient that the runs do not settle, a run that stage times do not explain.
    `Calibration.runs` holds each run's logged and fitted seconds, `Calibration.terms` each coefficient with its band.
    Raises `TrimtabError` with every problem of the file at once. Format of the file: `costs.logs.read_runs`.
    """
    runs = read_runs(path, model, device, **settings)
    target = profile_model(model, device, dims=dims or ParallelDims(), **settings)
    return calibrate_profile(target, runs)


def calibrate_profile(target: Profile, runs: Sequence[LoggedRun]) -> Calibration:
    """`target` calibrated on `runs`; its memory band is their largest error where peaks were logged."""
    calibration = fit_runs(target, runs, simulate_logged, terms=default_terms(runs))
    errors = [error for run in runs for error in peak_errors(run)]
    if not errors:
        return calibration
    band = max(map(abs, errors))
    said = (
        f"Peak memory by formula is {min(errors):+.1%} to {max(errors):+.1%} off what the runs logged; bytes are not "
        "fitted.",
    )
    profile = calibration.profile
    return replace(
        calibration,
        profile=replace(profile, memory_error=max(band, 0.01), assumptions=(*profile.assumptions, *said)),
    )


def default_terms(runs: Sequence[LoggedRun]) -> tuple[Term, ...]:
    """The terms that these runs hold, no more than there are logged times."""
    num_logged = sum((run.iteration_s is not None) + len(run.stage_s or ()) for run in runs)
    towers = {layer.tower for run in runs for layer in run.profile.layers}
    held: dict[Term, bool] = {
        "language": "language" in towers,
        "vision": bool(towers - {"language"}),
        "first stage": any(len(run.stages) > 1 for run in runs),
    }
    return tuple(name for name in TERMS_BY_NEED if held[name])[:num_logged]


def simulate_logged(forward_s: FloatArray, backward_s: FloatArray, *, schedule: LoggedSchedule) -> float:
    """Seconds of one step; sends take no time."""
    nothing = np.zeros_like(forward_s)
    times = StageTimes(forward_s=forward_s, backward_s=backward_s, send_forward_s=nothing, send_backward_s=nothing)
    return simulate(times, schedule=schedule).makespan_s


def peak_errors(run: LoggedRun) -> tuple[float, ...]:
    """Predicted over logged peak bytes - 1 of each stage; empty where none were logged."""
    if run.peak_bytes is None:
        return ()
    problem = SplitProblem(
        profile=run.profile,
        num_stages=len(run.stages),
        work_mean=run.work.mean(axis=0),
        work_max=run.work.max(axis=0),
        num_microbatches=len(run.work),
        schedule=run.schedule,
    )
    return tuple(
        x.total_bytes / peak - 1.0 for x, peak in zip(problem.assess(run.stages).memory, run.peak_bytes, strict=True)
    )
