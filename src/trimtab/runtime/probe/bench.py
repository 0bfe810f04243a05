"""A plan's stages, packs and schedule, ready to run under any recompute choice: `open_bench`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch.distributed as dist

from trimtab.costs.profile import with_tiers
from trimtab.errors import UnsupportedPlanError
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.probed import heaviest_packs
from trimtab.plan.file.reload import ReloadedPlan
from trimtab.plan.plan import Plan
from trimtab.runtime.layout import SPLIT_BACKWARD
from trimtab.runtime.pipeline import PipelineLayout, read_layout
from trimtab.runtime.pipeline.flow import Batch
from trimtab.runtime.probe.meter import meter_of
from trimtab.runtime.probe.settings import ProbeSettings
from trimtab.runtime.probe.trial import ProbedRank, Reading, gather_readings, run_trial
from trimtab.runtime.recompute.apply import Granularity
from trimtab.runtime.training.loop import autocast, open_run
from trimtab.runtime.training.ranks import Ranks
from trimtab.runtime.training.settings import TrainSettings
from trimtab.specs import Stage
from trimtab.units import format_bytes

_OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "sgd_momentum": ("SGD", {"momentum": 0.9}),
    "sgd": ("SGD", {}),
}
"""What the plan counts, in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRun:
    """One run of the pipeline on one pack."""

    what: str
    pack: int
    failed_devices: tuple[int, ...]  # whose peak was above the limit
    peak_bytes: tuple[int, ...]  # of each device


@dataclass(kw_only=True, eq=False)
class Bench:
    """A plan's stages ready to run under any recompute choice, and the log of what has run."""

    case: Case
    stages: tuple[Stage, ...]
    rank: ProbedRank
    batches: Mapping[int, Batch]  # of the heaviest packs
    num_steps: int
    tell: Callable[[str], None]
    runs: list[ProbeRun] = field(default_factory=list)

    @property
    def limit_bytes(self) -> int:
        return int(self.case.budget.fill_bytes)

    def run(self, what: str, stages: Sequence[Stage], pack: int, *, whole: bool = True) -> tuple[Reading, ...]:
        """What each device held; not `whole`: one step, and the optimizer is left out."""
        names = [layer.name for layer in self.case.model.layers]
        choice: dict[str, Granularity] = {
            names[i]: entry.tier for stage in stages for entry in stage.recompute for i in entry.layers
        }
        reading = run_trial(
            self.rank,
            choice,
            self.batches[pack],
            num_steps=self.num_steps if whole else 1,
            update=whole,
        )
        readings = gather_readings(reading, self.rank)
        peaks = tuple(x.peak_bytes for x in readings)
        failed = self.above_limit(readings)
        self.runs.append(ProbeRun(what=what, pack=pack, failed_devices=failed, peak_bytes=peaks))
        above = f", above the limit on device {', '.join(map(str, failed))}" if failed else ""
        self.tell(f"{what}, pack {pack}: at most {format_bytes(max(peaks))}{above}")
        return readings

    def above_limit(self, readings: Sequence[Reading]) -> tuple[int, ...]:
        return tuple(device for device, x in enumerate(readings) if x.peak_bytes > self.limit_bytes)


def open_bench(
    settings: ProbeSettings, found: ReloadedPlan, case: Case, ranks: Ranks, tell: Callable[[str], None]
) -> Bench:
    training = _training(settings, found.plan)
    run = open_run(training, found.plan, ranks, layout=_layout(found.plan, case))
    for group in run.optimizer.param_groups:
        group["lr"] = 0.0  # every run is of the same weights
    packing = case.packing
    batches = {}
    for pack in heaviest_packs(case, found.stages):
        rows = packing.indices[packing.offsets[pack] : packing.offsets[pack + 1]].tolist()
        batches[pack] = run.loader.collate_fn([run.data[row] for row in rows])
    return Bench(
        case=_in_reach(case),
        stages=found.stages,
        rank=ProbedRank(
            pipeline=run.pipeline,
            optimizer=run.optimizer,
            meter=meter_of(ranks.device),
            autocast=partial(autocast, training, ranks.device),
        ),
        batches=batches,
        num_steps=settings.num_steps,
        tell=tell if dist.get_rank() == 0 else lambda _: None,
    )


def _training(settings: ProbeSettings, plan: Plan) -> TrainSettings:
    planned = plan.inputs.training.optimizer
    if planned not in _OPTIMIZERS:
        raise UnsupportedPlanError(
            f"the plan counts the state of {planned}, which torch.optim has not: plan with --set optimizer "
            f"{', '.join(_OPTIMIZERS)}"
        )
    name, options = _OPTIMIZERS[planned]
    return TrainSettings(
        plan=settings.plan,
        model=settings.model,
        out=settings.plan,
        reading=settings.reading,
        optimizer=name,
        optimizer_options=options,
        dtype="float32" if plan.inputs.training.dtype == "fp32" else "bfloat16",
        random_weights=not any(settings.model.glob("*.safetensors")),
        device=settings.device,
        save=False,
        verify_packing=False,
        seed=settings.seed,
    )


def _layout(plan: Plan, case: Case) -> PipelineLayout:
    """The plan's stages without recompute; of 1F1B's micro-batches only as many as fill it, and one more.

    The one more meets gradients that are there already, as most do.
    """
    layout = replace(read_layout(plan), recompute=())
    if layout.schedule != "1F1B":
        return layout
    return replace(layout, num_microbatches=min(layout.num_microbatches, case.setting.dims.pp + 1))


def _in_reach(case: Case) -> Case:
    """The case without tiers that torch's schedule of this name cannot run; `_with_all_tiers` gives them back."""
    tiers = (lambda _: ("full",)) if case.problem.schedule in SPLIT_BACKWARD else None
    return replace(case, setting=replace(case.setting, profile=with_tiers(case.setting.profile, case.model, tiers)))
