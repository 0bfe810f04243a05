"""`trimtab predict`: time, memory and idle of a run that the user already has, and what a plan would change."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from trimtab.cli.data import ClusterOptions, ConfigArgument, DataArgument, ImageOptions, SizingOptions, size_data
from trimtab.cli.output import JsonOption, console, print_json
from trimtab.cli.settings import verb
from trimtab.options import Option
from trimtab.plan.given import GivenRun

if TYPE_CHECKING:
    from trimtab.plan.predict import Prediction
    from trimtab.specs import ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class LauncherOptions:
    """A launcher's flags that say what the run is; options given here override them."""

    from_megatron: Annotated[
        str | None,
        Option("Megatron's flags, in quotes or in a file (Pai-Megatron-Patch's and ms-swift's too).", common=True),
    ] = None

    def completing(self, run: GivenRun, model: "ModelSpec") -> GivenRun:
        """Return `run` with what the flags say of the rest."""
        if self.from_megatron is None:
            return run
        from trimtab.adapters.launch_files import completed, from_megatron

        return completed(run, from_megatron(self.from_megatron, model))


@verb
def predict(
    *,
    config: ConfigArgument,
    data: DataArgument,
    cluster: ClusterOptions,
    profile: Annotated[
        Path | None,
        typer.Option(
            help="Predict with the seconds (traced, probed: bytes) of this profile, from `trimtab profile --out`.",
        ),
    ] = None,
    beside_plan: Annotated[bool, typer.Option("--beside-plan", help="Plan too, and say what it changes.")] = False,
    as_json: JsonOption = False,
    run: GivenRun,
    launcher: LauncherOptions,
    sizing: SizingOptions,
    images: ImageOptions,
) -> None:
    """Predict step time, memory and idle of a run you already have on DATA; nothing is decided."""
    from trimtab.plan.predict import predict_run

    model = images.describe(config)
    run = launcher.completing(run, model)
    if profile is not None:
        from trimtab.costs.profile import load_profile

        run = replace(run, profile=load_profile(profile))
    devices = cluster.parsed()
    sized = size_data(model, data, sizing)
    found = predict_run(model, sized.table, devices, run)
    change = None
    if beside_plan:
        from trimtab.cli.show import plan_with_progress
        from trimtab.plan.options import PlanOrigin

        options = run.open_options(global_batch=round(found.num_samples / len(found.variant.step_s)))
        details = plan_with_progress(model, sized.table, devices, options, PlanOrigin())
        change = details.plan.summary, found.variant.epoch_s / details.variants[-1].epoch_s
    if as_json:
        print_json(_figures(found) | ({"plan": change[0], "plan_gain": change[1]} if change else {}))
        return
    from trimtab.report.text import print_prediction

    print_prediction(found, console())
    if change is not None:
        summary, gain = change
        print(f"\nA plan of trimtab's with the same samples a step: {gain:.2f} x the samples/s. {summary}")


def _figures(found: "Prediction") -> dict[str, object]:
    ran = found.variant
    peak = max(memory.total_bytes for memory in ran.memory)
    return {
        "dp": found.dims.dp,
        "pp": found.dims.pp,
        "tp": found.dims.tp,
        "cp": found.dims.cp,
        "ep": found.dims.ep,
        "etp": found.dims.expert_tp,
        "num_microbatches": found.num_microbatches,
        "num_steps": len(ran.step_s),
        "mean_step_s": found.mean_step_s,
        "expected_step_s": found.expected_step_s,
        "p95_step_s": found.p95_step_s,
        "samples_per_s": found.samples_per_s,
        "epoch_s": ran.epoch_s,
        "fits": ran.fits,
        "peak_bytes": [memory.total_bytes for memory in ran.memory],
        "memory_bytes": found.budget.total_bytes,
        "misfit_chance": found.budget.band.misfit_chance(peak / found.budget.total_bytes),
        "stage_forward_s": ran.stage_forward_s.tolist(),
        "stage_backward_s": ran.stage_backward_s.tolist(),
        "stage_layers": [stage.stop - stage.start for stage in ran.stages],
        "idle_share": ran.idle_share,
        "idle": ran.idle,
        "time_error": found.profile.time_error,
        "memory_error": found.budget.band.half_width,
    }
