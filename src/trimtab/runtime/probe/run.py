"""OmniBal's measuring steps on the device itself (arXiv 2407.20761, section 4.3); read `probe`.

The paper: recompute everything and see what is left; switch some layers off and see what they take; set as many as fit.
"""

from __future__ import annotations

import platform
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
import torch.distributed as dist

from trimtab.errors import PartitionError, PlanError, TrimtabError, UnsupportedPlanError
from trimtab.partition.stages import recompute_stages
from trimtab.plan.case import Case
from trimtab.plan.details import PlanDetails
from trimtab.plan.expressible import replan
from trimtab.plan.plan import Plan
from trimtab.plan.probed import (
    ABOUT_BYTES,
    DeviceProbe,
    KeptProbe,
    ProbedProfile,
    add_transient,
    freed_bytes,
    full_recompute,
    heaviest_packs,
    probed_profile,
    tier_of,
    with_budget,
    with_profile,
)
from trimtab.plan.reload import ReloadedPlan, reload_plan
from trimtab.runtime.collate import PackedCollator
from trimtab.runtime.conversations import ReadingOptions, open_conversations
from trimtab.runtime.pipeline import PipelineLayout, build_pipeline, read_layout
from trimtab.runtime.pipeline.flow import Batch
from trimtab.runtime.pipeline.layout import SPLIT_BACKWARD
from trimtab.runtime.probe.meter import meter_of
from trimtab.runtime.probe.trial import ProbedRank, Reading, frozen_heap, gather_readings, run_trial
from trimtab.runtime.ranks import device_mesh, on_first_rank, process_group
from trimtab.runtime.recompute import Granularity
from trimtab.runtime.train import autocast, load_model, make_optimizer
from trimtab.runtime.train_settings import TrainSettings
from trimtab.runtime.verify import verify_plan
from trimtab.specs import Profile, RecomputeChoice, RecomputedTier, Stage, Tower
from trimtab.units import format_bytes

_OPTIMIZERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "adamw": ("AdamW", {}),
    "sgd_momentum": ("SGD", {"momentum": 0.9}),
    "sgd": ("SGD", {}),
}
"""What the plan counts, in torch."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings:
    """What is probed, and within which memory; checks itself."""

    plan: Path
    model: Path  # folder as for `train`; where it holds no weights they are drawn
    memory_bytes: int | None = None  # of one device; None: the plan's
    reserve: float | None = None  # share of it that stays free; None: the plan's
    num_steps: int = 2  # whole training steps of a run; the first makes the optimizer's state
    reading: ReadingOptions = field(default_factory=ReadingOptions)
    device: Literal["cpu", "cuda"] | None = None  # None: cuda where there is one
    seed: int = 0

    def __post_init__(self) -> None:
        if self.num_steps < 2:
            raise TrimtabError(
                f"{self.num_steps} steps a run were asked for, and the optimizer's state is there from the second on: "
                "give 2 or more"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeRun:
    """One run of the pipeline on one pack."""

    what: str
    pack: int
    failed_devices: tuple[int, ...]  # that ran out of memory
    peak_bytes: tuple[int, ...]  # of each device; of a run that failed, up to there


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedKind:
    """What recompute of one layer frees, for one micro-batch of the heaviest pack."""

    tower: Tower
    layer: str  # one of its kind
    tier: str  # that it was measured on, against full recompute
    measured_bytes: float
    predicted_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbedDevice:
    """One device of the pipeline, as it was measured."""

    device: int
    full_peak_bytes: int  # everything recomputed
    kinds: tuple[ProbedKind, ...]
    correction_bytes: int  # context, workspaces, rounding: what was there and is priced nowhere else
    recompute: Mapping[str, int]  # chosen layers of each tier
    peak_bytes: int  # with the choice
    predicted_bytes: int  # the same, by the probed profile on the same pack


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbeResult:
    """The plan with the recompute that ran, and what was seen on the way; the same on every rank."""

    details: PlanDetails
    limit_bytes: int  # memory less its reserve
    devices: tuple[ProbedDevice, ...]
    runs: tuple[ProbeRun, ...]
    wall_s: float

    @property
    def num_step_backs(self) -> int:
        return sum(run.what == CHOICE and bool(run.failed_devices) for run in self.runs)


FULL, CHOICE = "everything recomputed", "the choice"


def probe(settings: ProbeSettings, *, progress: Callable[[str], None] | None = None) -> ProbeResult:
    """Measure, choose, run: the plan's stages and packs with the recompute that fits this device.

    Alone or on torchrun's ranks, as `train` runs the plan; collective. Every run is of whole training steps, learning
    rate 0, on the heaviest packs. First everything recomputes, without a limit. Then, kind by kind and tier by tier,
    one layer a stage keeps more, which tells its bytes. The choice is the exact one at the plan's own limits with the
    probed profile, and has run within memory less reserve; a choice that runs out of memory is stepped back from.
    Raises `PlanError` where not even full recompute fits, with the bytes that are missing. Writes nothing.
    """
    started = time.perf_counter()
    found = reload_plan(settings.plan)
    case = with_budget(found.case, memory_bytes=settings.memory_bytes, reserve=settings.reserve)
    with process_group(settings.device) as device:
        bench = open_bench(settings, found, case, device, progress or (lambda _: None))
        with frozen_heap():
            full = _measure_full(bench)
            kept = tuple(_measure_kinds(bench, full))
            where = _name_of(device)
            measured = probed_profile(bench.case, bench.stages, kept, full, where=where)
            settled = settle(bench, with_profile(bench.case, measured.profile))
        result = _result(bench, found, measured, settled, kept, full, where)
    return replace(result, wall_s=time.perf_counter() - started)


# -- what is run ------------------------------------------------------------------------------------------------------


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
        return self.case.budget.total_bytes - self.case.budget.reserve_bytes

    def run(
        self, what: str, stages: Sequence[Stage], pack: int, *, limited: bool = True, whole: bool = True
    ) -> tuple[Reading, ...]:
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
            limit_bytes=self.limit_bytes if limited else None,
            update=whole,
        )
        readings = gather_readings(reading, self.rank)
        failed = tuple(device for device, x in enumerate(readings) if x.failed)
        self.runs.append(
            ProbeRun(what=what, pack=pack, failed_devices=failed, peak_bytes=tuple(x.peak_bytes for x in readings))
        )
        most = format_bytes(max(x.peak_bytes for x in readings))
        self.tell(f"{what}, pack {pack}: {f'out of memory on {_listed(failed)}' if failed else f'at most {most}'}")
        return readings


def open_bench(
    settings: ProbeSettings, found: ReloadedPlan, case: Case, device: torch.device, tell: Callable[[str], None]
) -> Bench:
    plan = found.plan
    conversations = open_conversations(settings.plan, settings.model, settings.reading)
    on_first_rank(lambda: verify_plan(settings.plan, conversations.model), device)
    training = _training(settings, plan)
    mesh = device_mesh(case.setting.dims.pp, device)
    layout = _layout(plan, case)
    torch.manual_seed(settings.seed)  # the same weights on every rank, where they are drawn
    pipeline = build_pipeline(
        load_model(training, plan, device),
        layout,
        device=device,
        pp_group=mesh.get_group("pp"),
        dp_group=mesh.get_group("dp"),
    )
    optimizer = make_optimizer(training, list(pipeline.parameters()))
    for group in optimizer.param_groups:
        group["lr"] = 0.0  # every run is of the same weights
    config: Any = pipeline.stages[0].model.config
    collate = PackedCollator(config, attention=config._attn_implementation, vision_in_every_pack=False)
    packing = case.packing
    batches = {}
    for pack in heaviest_packs(case, found.stages):
        rows = packing.indices[packing.offsets[pack] : packing.offsets[pack + 1]].tolist()
        batches[pack] = collate([conversations[row] for row in rows])
    return Bench(
        case=_in_reach(case),
        stages=found.stages,
        rank=ProbedRank(
            pipeline=pipeline,
            optimizer=optimizer,
            meter=meter_of(device),
            autocast=partial(autocast, training, device),
        ),
        batches=batches,
        num_steps=settings.num_steps,
        tell=tell if dist.get_rank() == 0 else lambda _: None,
    )


def _training(settings: ProbeSettings, plan: Plan) -> TrainSettings:
    planned = plan.inputs.training.optimizer
    if planned not in _OPTIMIZERS:
        raise UnsupportedPlanError(
            f"the plan counts the state of {planned}, which torch.optim has not: plan with --optimizer "
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
    if case.problem.schedule not in SPLIT_BACKWARD:
        return case
    profile = case.setting.profile
    layers = tuple(
        replace(layer, tiers=tuple(tier for tier in layer.tiers if tier.name in ("none", "full")))
        for layer in profile.layers
    )
    return replace(case, setting=replace(case.setting, profile=replace(profile, layers=layers)))


def _with_all_tiers(profile: Profile, offered: Profile) -> Profile:
    """The profile with the tiers that it lacks as `offered` has them: a saved profile is asked for each."""
    layers = tuple(
        replace(layer, tiers=tuple(tier_of(layer, tier.name) or tier for tier in other.tiers))
        for layer, other in zip(profile.layers, offered.layers, strict=True)
    )
    return replace(profile, layers=layers)


# -- steps 1 to 3: measure --------------------------------------------------------------------------------------------


def _measure_full(bench: Bench) -> tuple[DeviceProbe, ...]:
    """Everything recomputed, and what is left; without a limit but the device's own, to say what is missing."""
    stages = full_recompute(bench.case.setting.profile, bench.stages)
    found = []
    for pack in bench.batches:
        readings = bench.run(FULL, stages, pack, limited=False)
        failed = [device for device, reading in enumerate(readings) if reading.failed]
        if failed:
            raise PlanError(
                f"pack {pack} was run with everything recomputed, and the memory of {_listed(failed)} does not last: "
                f"{_CURES}"
            )
        found += [
            DeviceProbe(
                device=device,
                pack=pack,
                state_bytes=reading.state_bytes,
                kept_bytes=reading.kept_bytes,
                peak_bytes=reading.peak_bytes,
                in_flight=reading.in_flight,
            )
            for device, reading in enumerate(readings)
        ]
    fullest = max(found, key=lambda x: x.peak_bytes)
    missing = fullest.peak_bytes - bench.limit_bytes
    if missing > 0:
        raise PlanError(
            f"{_budget_words(bench.case)} was to hold the plan's heaviest packs, and with everything recomputed "
            f"device {fullest.device} needs {format_bytes(fullest.peak_bytes)}, {format_bytes(missing)} "
            f"({missing} bytes) more: {_CURES}"
        )
    return tuple(found)


_CURES = "give more memory (--budget) or a smaller reserve, or plan with more stages or smaller packs"


def _measure_kinds(bench: Bench, full: Sequence[DeviceProbe]) -> Iterator[KeptProbe]:
    """One run for each of a device's kinds of layers and each tier, on all devices at once: one layer keeps more.

    What is kept then differs from full recompute by micro-batches in flight x what the layer keeps more: exact. A
    device that runs out of memory, or whose pack asks nothing of the layer, tells nothing.
    """
    profile = bench.case.setting.profile
    layout = bench.rank.pipeline.layout
    before = {(x.device, x.pack): x for x in full}
    of_device = [_kinds_of(bench, layout.stages_of(device)) for device in range(layout.num_devices)]
    tiers = ("none", "selective", "attention") if bench.case.problem.recompute == "auto" else ("none",)
    for number in range(max(map(len, of_device))):
        for tier in tiers:
            layers = {device: kinds[number] for device, kinds in enumerate(of_device) if number < len(kinds)}
            layers = {device: i for device, i in layers.items() if tier_of(profile.layers[i], tier) is not None}
            if not layers:
                continue
            stages = tuple(
                _move(stage, i, tier) if (i := layers.get(layout.device_of(stage.index))) is not None else stage
                for stage in full_recompute(profile, bench.stages)
            )
            for pack in bench.batches:
                readings = bench.run(f"one layer of a kind on {tier}", stages, pack, whole=False)
                for device, i in layers.items():
                    reference, reading = before[device, pack], readings[device]
                    place = next(k for k, s in enumerate(layout.stages_of(device)) if _lies_in(bench.stages[s], i))
                    more, held = reading.kept_bytes - reference.kept_bytes, reference.in_flight[place]
                    if not reading.failed and held > 0 and more > 0:
                        yield KeptProbe(layer=i, tier=tier, pack=pack, num_bytes=more / held)


def _kinds_of(bench: Bench, stages: Sequence[int]) -> list[int]:
    """The last layer of each group that can recompute."""
    layers = bench.case.setting.profile.layers
    held = [i for s in stages for i in range(bench.stages[s].start, bench.stages[s].stop)]
    return sorted({layers[i].group: i for i in held if tier_of(layers[i], "full") is not None}.values())


def _lies_in(stage: Stage, layer: int) -> bool:
    return stage.start <= layer < stage.stop


def _move(stage: Stage, layer: int, tier: str) -> Stage:
    """The stage, all of which recomputes in full, with this layer on another tier, if it holds it."""
    if not _lies_in(stage, layer):
        return stage
    choices = [RecomputeChoice(tier=x.tier, layers=tuple(i for i in x.layers if i != layer)) for x in stage.recompute]
    moved = [RecomputeChoice(tier=how, layers=(layer,)) for how in get_args(RecomputedTier) if how == tier]
    return replace(stage, recompute=(*choices, *moved))


# -- step 4: choose and run -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Settled:
    """A choice that has run."""

    case: Case  # with the profile that it is the best choice for
    stages: tuple[Stage, ...]
    readings: Mapping[int, tuple[Reading, ...]]  # of each pack, device by device


def settle(bench: Bench, case: Case) -> Settled:
    """The best recompute by the case's profile that runs within the limit; `PlanError` if none does.

    Where a device runs out of memory its layers' transients are raised, first by as much as changes its choice, then by
    half of the way to full recompute each time, and the exact choice is made anew. What was raised stays in the
    profile: it was needed.
    """
    problem = case.problem
    P = problem.num_stages
    everything = full_recompute(case.setting.profile, bench.stages)
    raised, tries = [0.0] * P, [0] * P
    try:
        most = [problem.memory_bytes - held.total_bytes for held in problem.assess(everything).memory]
        while True:
            priced = _raise_transients(case, bench, raised)
            split = recompute_stages(priced.problem, bench.stages)
            readings = {pack: bench.run(CHOICE, split.stages, pack) for pack in bench.batches}
            failed = {d for found in readings.values() for d, reading in enumerate(found) if reading.failed}
            if not failed:
                return Settled(case=priced, stages=split.stages, readings=readings)
            for device in failed:
                left = problem.memory_bytes - split.memory[device].total_bytes
                step = left + 1 if tries[device] == 0 else max(left + 1, (most[device] - raised[device]) / 2)
                tries[device] += 1
                raised[device] = raised[device] + step
                if raised[device] > most[device]:
                    raise PlanError(
                        f"recompute was stepped back on device {device} {tries[device]} times, and its memory does not "
                        f"last with everything recomputed either: {_CURES}"
                    )
    except PartitionError as error:
        raise PlanError(f"the stages run, but not all that the plan's limits on packs allow fits: {error}") from error


def _raise_transients(case: Case, bench: Bench, raised: Sequence[float]) -> Case:
    layout, profile = bench.rank.pipeline.layout, case.setting.profile
    for device, num_bytes in enumerate(raised):
        if num_bytes:
            profile = add_transient(profile, [bench.stages[s] for s in layout.stages_of(device)], num_bytes)
    return with_profile(case, profile)


def _result(
    bench: Bench,
    found: ReloadedPlan,
    measured: ProbedProfile,
    settled: Settled,
    kept: Sequence[KeptProbe],
    full: Sequence[DeviceProbe],
    where: str,
) -> ProbeResult:
    layout, problem = bench.rank.pipeline.layout, settled.case.problem
    devices = []
    for device in range(layout.num_devices):
        stages = [settled.stages[s] for s in layout.stages_of(device)]
        peaks = {pack: readings[device].peak_bytes for pack, readings in settled.readings.items()}
        heaviest = max(peaks, key=lambda pack: peaks[pack])
        there = replace(problem, work_max=bench.case.work[heaviest], overhead_bytes=0.0).assess(settled.stages)
        counts: Counter[str] = Counter(
            choice.tier for stage in stages for choice in stage.recompute for _ in choice.layers
        )
        devices.append(
            ProbedDevice(
                device=device,
                full_peak_bytes=max(x.peak_bytes for x in full if x.device == device),
                kinds=tuple(_compare(bench, stages, kept)),
                correction_bytes=measured.correction_bytes[device],
                recompute=dict(counts),
                peak_bytes=peaks[heaviest],
                predicted_bytes=int(there.memory[device].total_bytes),
            )
        )
    off = max(abs(x.predicted_bytes / x.peak_bytes - 1.0) for x in devices)
    profile = _with_all_tiers(settled.case.setting.profile, found.case.setting.profile)
    profile = replace(profile, memory_error=max(_LEAST_ERROR, off))
    plan = replace(
        found.plan,
        assumptions=(
            *(said for said in found.plan.assumptions if not said.startswith((_ABOUT, ABOUT_BYTES))),
            *(said for said in measured.profile.assumptions if said.startswith(ABOUT_BYTES)),
        ),
    )
    backs = sum(run.what == CHOICE and bool(run.failed_devices) for run in bench.runs)
    note = (
        f"{_ABOUT}{where}, {len(bench.runs)} runs of the heaviest packs: the choice ran within "
        f"{format_bytes(bench.limit_bytes)} on every device, after {backs} that did not; predictions for it are within "
        f"{off:.1%} of its peaks."
    )
    details = replan(
        replace(found, plan=plan, case=with_profile(settled.case, profile)),
        settled.stages,
        forbidden_cuts=frozenset(),
        note=note,
    )
    return ProbeResult(
        details=details, limit_bytes=bench.limit_bytes, devices=tuple(devices), runs=tuple(bench.runs), wall_s=0.0
    )


_ABOUT = "Recompute was probed on "
_LEAST_ERROR = 0.005  # of a prediction; one that was exact once may not be so the next time


def _compare(bench: Bench, stages: Sequence[Stage], kept: Sequence[KeptProbe]) -> Iterator[ProbedKind]:
    """Each kind of the device's layers, and tier, at the pack where it frees most; measured on any device."""
    profile = bench.case.setting.profile
    groups = {profile.layers[i].group for stage in stages for i in range(stage.start, stage.stop)}
    most: dict[tuple[int, str], KeptProbe] = {}
    for probe in kept:
        key = (profile.layers[probe.layer].group, probe.tier)
        if key[0] in groups and (key not in most or probe.num_bytes > most[key].num_bytes):
            most[key] = probe
    for _, probe in sorted(most.items()):
        layer = profile.layers[probe.layer]
        yield ProbedKind(
            tower=layer.tower,
            layer=layer.name,
            tier=probe.tier,
            measured_bytes=probe.num_bytes,
            predicted_bytes=freed_bytes(layer, probe.tier, bench.case.work[probe.pack]),
        )


# -- words ------------------------------------------------------------------------------------------------------------


def _name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else f"CPU {platform.machine()}"


def _budget_words(case: Case) -> str:
    budget = case.budget
    return f"memory of {format_bytes(budget.total_bytes)}, {format_bytes(budget.reserve_bytes)} of it reserve,"


def _listed(devices: Sequence[int]) -> str:
    return f"device{'s' if len(devices) > 1 else ''} {', '.join(map(str, devices))}"
