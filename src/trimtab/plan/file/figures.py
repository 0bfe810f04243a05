"""What stands behind a plan's figures: the tables, timelines and pack sizes that the report draws."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from trimtab import __version__
from trimtab.balance.packing import PackResult, report_packing
from trimtab.costs.bands import MemoryBand
from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.adapters import count_adapters
from trimtab.costs.profile import profile_bytes
from trimtab.files import blake2b
from trimtab.options import same_fields
from trimtab.partition.assess import SplitResult
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.compare import Variant
from trimtab.plan.decide.sharing import with_memory
from trimtab.plan.decide.work import Lanes, price_samples, with_band
from trimtab.plan.file.yaml import name_table, pack_contents
from trimtab.plan.options import PlanOrigin
from trimtab.plan.plan import (
    BASELINE,
    PLAN_VERSION,
    BalanceEstimate,
    ClusterInput,
    DataInput,
    Decisions,
    Estimates,
    FormEstimate,
    Inputs,
    MixedSource,
    ModelInput,
    PackingDecision,
    ParallelDecision,
    Plan,
    RecomputeDecision,
    ScheduleDecision,
    SearchedSplit,
    SettingEstimate,
    StageDecision,
    StageEstimate,
    TableFile,
    TipEstimate,
    TrainingInput,
    VariantEstimate,
    find_baseline,
)
from trimtab.samples.table import table_bytes
from trimtab.specs import DeviceSpec, ModelSpec, Packing, Profile, SampleTable, Schedule, Stage
from trimtab.units import (
    fold_modules,
    format_count,
    format_degrees,
    format_number,
    format_ratio,
    format_seconds,
    round_digits,
    round_gib,
)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanDetails:
    """A plan with everything it was computed from; what `make_plan` returns and `write_plan` saves.

    Use `plan` for the decisions and `variants` for the figures next to the baseline; `make_plan` has an example.
    """

    plan: Plan
    model: ModelSpec
    samples: SampleTable
    packing: Packing
    schedule: Schedule
    profile: Profile
    memory_cap_bytes: float  # per device: what it may be expected to hold
    variants: tuple[Variant, ...]  # other baselines, the baseline, decisions one by one, the plan last
    # file name -> content of what lies next to the plan file, as its hashes name it
    tables: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"PlanDetails: {self.plan!r}"

    @property
    def baseline(self) -> Variant:
        """Return what the plan is compared with."""
        return self.variants[find_baseline([variant.name for variant in self.variants])]


# What was decided and expected, as the plan file says it: names, exact integers, rounded estimates, sentences.


_LONGER = 1.01  # a step that takes less above the baseline's is as long
SAMPLES_FILE = "samples.npz"
PROFILE_FILE = "profile.json"


def model_fingerprint(model: ModelSpec) -> str:
    """Changes when a layer's name, widths or parameters change, or the image rule does."""
    return blake2b(repr((model.layers, model.image_rule, model.tied)).encode())


def device_fingerprint(device: DeviceSpec) -> str:
    """Changes when one of the device's figures does."""
    return blake2b(repr(device).encode())


def assemble_plan(
    case: Case,
    split: SplitResult,
    variants: tuple[Variant, ...],
    *,
    origin: PlanOrigin,
    assumptions: Sequence[str],
    mixture: tuple[MixedSource, ...] = (),
    searched: tuple[SearchedSplit, ...] = (),
    settings: tuple[SettingEstimate, ...] = (),
    setting_error: float = 0.0,
    tips: tuple[TipEstimate, ...] = (),
    forms: tuple[FormEstimate, ...] = (),
) -> PlanDetails:
    """The plan of a decided case, and its tables: their bytes are hashed here and written by `write_plan`."""
    tables = case_tables(case)
    files = {name: name_table(name, content) for name, content in tables.items()}
    inputs = describe_inputs(case, origin, files=files, mixture=mixture)
    decisions = describe_decisions(case, split.stages, files=files)
    estimates = replace(
        describe_estimates(case, split, variants),
        searched=searched,
        settings=settings,
        setting_error=setting_error,
        tips=tips,
        forms=forms,
    )
    plan = Plan(
        plan_version=PLAN_VERSION,
        created_by=f"trimtab {__version__}",
        command=origin.command,
        summary=summarise(inputs, decisions, estimates, trained=say_trained(case)),
        inputs=inputs,
        decisions=decisions,
        estimates=estimates,
        assumptions=tuple(dict.fromkeys((*origin.assumptions, *assumptions))),
    )
    return plan_details(plan, case, variants, tables=tables)


def plan_details(plan: Plan, case: Case, variants: tuple[Variant, ...], *, tables: Mapping[str, bytes]) -> PlanDetails:
    return PlanDetails(
        plan=plan,
        model=case.model,
        samples=case.samples,
        packing=case.packing,
        schedule=case.schedule,
        profile=case.setting.profile,
        memory_cap_bytes=case.budget.fill_bytes,
        variants=variants,
        tables=tables,
    )


def case_tables(case: Case) -> dict[str, bytes]:
    """Return file name -> content of what lies next to the plan."""
    tables = {SAMPLES_FILE: table_bytes(case.samples), **pack_contents(case.packing, case.schedule)}
    if case.options.profile is not None:
        tables[PROFILE_FILE] = profile_bytes(case.options.profile)
    return tables


def describe_inputs(
    case: Case, origin: PlanOrigin, *, files: Mapping[str, TableFile], mixture: tuple[MixedSource, ...]
) -> Inputs:
    model, samples, cluster, options, budget = case.model, case.samples, case.cluster, case.options, case.budget
    source = dict.fromkeys(("config", "preprocessor", "max_pixels", "max_tiles"))
    published = DEVICES.get(cluster.device.name) == cluster.device
    if model.origin is not None:
        source = same_fields(model.origin, ModelInput)
    return Inputs(
        model=ModelInput(
            name=model.name,
            family=model.family,
            **source,
            num_layers=len(model.layers),
            num_params=model.num_params,
            layers_blake2b=model_fingerprint(model),
            forbidden_cuts=tuple(sorted(model.forbidden_cuts)),
        ),
        data=DataInput(
            files=origin.data_files,
            num_samples=len(samples),
            num_skipped=origin.num_skipped,
            tokens_exact=samples.tokens_exact,
            table=files[SAMPLES_FILE].file,
            table_blake2b=files[SAMPLES_FILE].blake2b,
            mixture=mixture,
        ),
        cluster=ClusterInput(
            **same_fields(cluster, ClusterInput)
            | {
                "device": cluster.device.name,
                "device_blake2b": device_fingerprint(cluster.device),
                "device_figures": None if published or PROFILE_FILE in files else cluster.device,
                "memory_bytes": budget.total_bytes,
                "risk": options.risk if options.reserve_bytes is None else None,
                "reserve_bytes": options.reserve_bytes,
            }
        ),
        training=TrainingInput(
            **same_fields(options, TrainingInput)
            | {"zero_stage": options.sharding, "costs": case.setting.profile.method, "profile": files.get(PROFILE_FILE)}
        ),
    )


def describe_decisions(case: Case, stages: Sequence[Stage], *, files: Mapping[str, TableFile]) -> Decisions:
    options, setting, packing, schedule = case.options, case.setting, case.packing, case.schedule
    assert options.schedule != "auto", "it was chosen before"
    names = [layer.name for layer in case.model.layers]
    if isinstance(case.apart, Lanes):
        stages = case.apart.with_own(stages, setting.profile)
    return Decisions(
        parallel=ParallelDecision(**same_fields(setting.dims, ParallelDecision)),
        schedule=ScheduleDecision(
            name=options.schedule, num_microbatches=setting.num_microbatches, num_chunks=options.num_chunks
        ),
        stages=tuple(
            StageDecision(stage=stage.index, modules=fold_modules(names[stage.start : stage.stop])) for stage in stages
        ),
        recompute=tuple(
            RecomputeDecision(
                stage=stage.index,
                granularity=choice.tier,
                modules=fold_modules([names[i] for i in choice.layers]),
            )
            for stage in stages
            for choice in stage.recompute
            if choice.layers
        ),
        packing=PackingDecision(
            **same_fields(options, PackingDecision)
            | same_fields(setting, PackingDecision)
            | {
                "global_batch": None if options.fills_packs else options.global_batch,
                "num_packs": packing.num_packs,
                "num_steps": schedule.num_steps,
                "num_oversize": len(packing.oversize),
                **{name: files[f"{name}.npy"] for name in ("offsets", "indices", "schedule")},
            }
        ),
        vision_data_parallel=None if case.vision is None else case.vision.decision,
    )


def describe_estimates(case: Case, split: SplitResult, variants: Sequence[Variant]) -> Estimates:
    """Return every figure of the simulation, rounded: times to 4 digits, memory to 0.01 GiB, shares to 4 decimals."""
    ours, profile, band = variants[-1], case.setting.profile, case.budget.band
    share = split.peak_bytes / case.budget.total_bytes
    cost = price_samples(case.without_vision().setting.profile, case.samples_work)
    balance = report_packing(case.samples, PackResult(packing=case.packing, schedule=case.schedule), cost=cost)
    num_packed, chi2 = balance.num_packed, balance.shuffle_chi2

    shares = {
        name: round(value, 4) for name, value in same_fields(balance, BalanceEstimate).items() if value is not None
    }
    return Estimates(
        time_error=with_band(profile, case.model, case.problem.work_mean, case.cluster).time_error,
        memory_error=round(band.half_width, 4),
        memory_share=round(share, 4),
        misfit_chance=float(f"{band.misfit_chance(share):.2g}"),
        step_ms=round_digits(ours.step_s.mean() * 1e3),
        epoch_s=round_digits(ours.epoch_s),
        samples_per_s=round_digits(num_packed / ours.epoch_s),
        stage_imbalance=round(split.imbalance, 4),
        step_p95_ms=round_digits(float(np.quantile(ours.step_s, 0.95)) * 1e3),
        stages=tuple(
            StageEstimate(
                stage=stage.index,
                forward_ms=round_digits(float(ours.stage_forward_s[stage.index]) * 1e3),
                backward_ms=round_digits(float(ours.stage_backward_s[stage.index]) * 1e3),
                memory_gib=round_gib(held.total_bytes),
                state_gib=round_gib(held.state_bytes),
                activations_gib=round_gib(held.saved_bytes),
                transient_gib=round_gib(held.transient_bytes),
                reserve_gib=round_gib(held.overhead_bytes),
            )
            for stage, held in ((x, ours.memory[ours.timeline.device_of(x.index)]) for x in ours.stages)
        ),
        balance=BalanceEstimate(**shares | {"shuffle_chi2": None if chi2 is None else round(chi2, 3)}),
        variants=tuple(describe_variant(variant, num_packed) for variant in variants),
        vision_data_parallel=with_memory(case, ours.stages, variants[-2].stages),
    )


def describe_variant(variant: Variant, num_samples: int) -> VariantEstimate:
    peak = max(device.total_bytes for device in variant.memory)
    return VariantEstimate(
        name=variant.name,
        packs=variant.packs,
        stages=variant.stages_rule,
        recompute=variant.recompute_rule,
        step_ms=round_digits(variant.step_s.mean() * 1e3),
        epoch_s=round_digits(variant.epoch_s),
        samples_per_s=round_digits(num_samples / variant.epoch_s),
        idle_share=round(variant.idle_share, 4),
        peak_memory_gib=round_gib(peak),
        fits=variant.fits,
    )


def summarise(inputs: Inputs, decisions: Decisions, estimates: Estimates, *, trained: str = "") -> str:
    """Say what runs in one sentence, then three figures: speed, gain over the baseline, memory.

    A baseline that does not fit is no measure: the first row that fits is. A simpler setting that was preferred to the
    fastest, and a step that is longer than the baseline's, are named. `trained`: what is trained, with a comma before
    it, if not all that is not frozen.
    """
    cluster, packing = inputs.cluster, decisions.packing
    base, ours = estimates.basis, estimates.compared[-1]
    sharded = ", ZeRO-3" if inputs.training.zero_stage == 3 else ""
    num_drawn = sum(source.num_drawn for source in inputs.data.mixture) or inputs.data.num_samples
    exact, mean = packing.global_batch, num_drawn / packing.num_steps
    batch = f"about {format_number(mean)}" if exact is None else f"{exact:,}"
    rate = f"{ours.samples_per_s:,.0f}" if ours.samples_per_s >= 1000 else f"{ours.samples_per_s:.4g}"
    against = f"the baseline ({base.packs}; {base.stages}; recompute {base.recompute})"
    if base.name != BASELINE and len(estimates.compared) > 1:
        against = f"{base.name} (the baseline does not fit the memory)"
    slower = ours.step_ms / base.step_ms
    sentences = [
        f"{cluster.num_nodes * cluster.devices_per_node} {cluster.device} as {format_degrees(decisions.parallel)}"
        f"{sharded}{trained} train {batch} samples a step.",
        f"Speed: {rate} samples/s, {format_seconds(ours.step_ms / 1e3)} a step.",
        f"Gain: {format_ratio(estimates.gain(ours))} {against}"
        + (f", with steps {format_ratio(slower)} as long." if slower > _LONGER else "."),
        _memory(cluster, estimates),
        _faster(estimates),
    ]
    return " ".join(filter(None, sentences))


def _memory(cluster: ClusterInput, estimates: Estimates) -> str:
    """Say what the fullest device holds; nothing for an older plan, whose file does not say."""
    if estimates.memory_share is None:
        return ""
    band, total = MemoryBand(half_width=estimates.memory_error), cluster.memory_bytes
    return f"Memory: {band.verdict(estimates.memory_share * total, total)}."


def say_trained(case: Case) -> str:
    """Write ", LoRA r 16 on 252 matrices, 40.4 M trainable, 4-bit base"; nothing without adapters."""
    lora = case.options.lora
    if lora is None:
        return ""
    count = count_adapters(case.model, lora)
    base = f", {lora.bits}-bit base" if lora.bits < 16 else ""
    return f", LoRA r {lora.r} on {count.num_matrices} matrices, {format_count(count.num_params)} trainable{base}"


def _faster(estimates: Estimates) -> str:
    """Name the fastest setting where a simpler one was preferred."""
    if not estimates.settings:
        return ""
    ours, fastest = estimates.settings[0], max(estimates.settings, key=lambda setting: setting.samples_per_s)
    if fastest.samples_per_s <= ours.samples_per_s:
        return ""
    more = 100 * (fastest.samples_per_s / ours.samples_per_s - 1)
    if more > 100 * estimates.setting_error:  # what was asked for is not the fastest, or won on the epoch's own steps
        if estimates.vision_data_parallel is None:
            return ""
        return f"Fastest: {fastest.label} with the tower on its grid, {more:.1f} % faster by prediction."
    return (
        f"Fastest: {fastest.label}, {more:.1f} % faster by prediction, within the error band of "
        f"{100 * estimates.setting_error:g} %; this plan is simpler."
    )
