"""What was decided and expected, as the plan file says it: names, exact integers, rounded estimates, sentences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from trimtab import __version__
from trimtab.balance.metrics import BalanceReport
from trimtab.files import blake2b
from trimtab.partition.assess import SplitResult
from trimtab.plan.case import Case
from trimtab.plan.decide.budget import host_bytes_per_s, host_memory_bytes
from trimtab.plan.file.details import Variant
from trimtab.plan.file.modules import fold_modules
from trimtab.plan.options import PlanOrigin
from trimtab.plan.plan import (
    PLAN_VERSION,
    BalanceEstimate,
    ClusterInput,
    DataInput,
    Decisions,
    Estimates,
    Inputs,
    MixedSource,
    ModelInput,
    PackingDecision,
    ParallelDecision,
    Plan,
    RecomputeDecision,
    ScheduleDecision,
    StageDecision,
    StageEstimate,
    TableFile,
    TrainingInput,
    VariantEstimate,
    VisionEstimate,
    VisionRankEstimate,
)
from trimtab.plan.sharing.decision import tower_memory
from trimtab.specs import DeviceSpec, ModelSpec, Stage
from trimtab.units import GIB, MIB, format_seconds


def model_fingerprint(model: ModelSpec) -> str:
    """Changes when a layer's name, widths or parameters change, or the image rule does."""
    return blake2b(repr((model.layers, model.image_rule, model.tied)).encode())


def device_fingerprint(device: DeviceSpec) -> str:
    """Changes when one of the device's figures does."""
    return blake2b(repr(device).encode())


def describe_inputs(
    case: Case,
    origin: PlanOrigin,
    *,
    table: TableFile,
    profile: TableFile | None = None,
    mixture: tuple[MixedSource, ...] = (),
) -> Inputs:
    model, samples, cluster, options, budget = case.model, case.samples, case.cluster, case.options, case.budget
    source = model.origin
    return Inputs(
        model=ModelInput(
            name=model.name,
            family=model.family,
            config=None if source is None else source.config,
            preprocessor=None if source is None else source.preprocessor,
            max_pixels=None if source is None else source.max_pixels,
            max_tiles=None if source is None else source.max_tiles,
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
            table=table.file,
            table_blake2b=table.blake2b,
            mixture=mixture,
        ),
        cluster=ClusterInput(
            device=cluster.device.name,
            num_nodes=cluster.num_nodes,
            devices_per_node=cluster.devices_per_node,
            device_blake2b=device_fingerprint(cluster.device),
            node_link_bytes_per_s=cluster.node_link_bytes_per_s,
            latency_s=cluster.latency_s,
            memory_bytes=budget.total_bytes,
            reserve_bytes=budget.reserve_bytes,
            host_bytes_per_s=host_bytes_per_s(cluster.device, options) if options.offload else None,
            host_memory_bytes=host_memory_bytes(cluster.device, options) if options.offload else None,
        ),
        training=TrainingInput(
            dtype=options.dtype,
            optimizer=options.optimizer,
            zero_stage=options.zero_stage,
            attention=options.attention,
            fused_kernels=options.fused_kernels,
            frozen_towers=options.frozen_towers,
            recompute=options.recompute,
            costs=case.setting.profile.method,
            profile=profile,
        ),
    )


def describe_decisions(case: Case, stages: Sequence[Stage], *, files: Mapping[str, TableFile]) -> Decisions:
    options, setting, packing, schedule = case.options, case.setting, case.packing, case.schedule
    assert options.schedule != "auto", "it was chosen before"
    names, dims = [layer.name for layer in case.model.layers], setting.dims
    return Decisions(
        parallel=ParallelDecision(dp=dims.dp, pp=dims.pp, tp=dims.tp, cp=dims.cp),
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
            method=options.method,
            order=options.order,
            max_patches=setting.max_patches,
            max_tokens=setting.max_tokens,
            seed=options.seed,
            oversize=options.oversize,
            num_packs=packing.num_packs,
            num_steps=schedule.num_steps,
            num_oversize=len(packing.oversize),
            offsets=files["offsets.npy"],
            indices=files["indices.npy"],
            schedule=files["schedule.npy"],
        ),
        vision_data_parallel=None if case.vision is None else case.vision.decision,
    )


def describe_estimates(
    case: Case, balance: BalanceReport, split: SplitResult, variants: Sequence[Variant]
) -> Estimates:
    """Every figure of the simulation, rounded: times to 4 digits, memory to 0.01 GiB, shares to 4 decimals."""
    ours, profile = variants[-1], case.setting.profile
    num_packed = balance.num_packed
    return Estimates(
        time_error=profile.time_error,
        memory_error=profile.memory_error,
        step_ms=_digits(ours.step_s.mean() * 1e3),
        epoch_s=_digits(ours.epoch_s),
        samples_per_s=_digits(num_packed / ours.epoch_s),
        stage_imbalance=round(split.imbalance, 4),
        stages=tuple(
            StageEstimate(
                stage=stage.index,
                forward_ms=_digits(split.forward_s[stage.index] * 1e3),
                backward_ms=_digits(split.backward_s[stage.index] * 1e3),
                memory_gib=_gib(held.total_bytes),
                state_gib=_gib(held.state_bytes),
                activations_gib=_gib(held.saved_bytes),
                transient_gib=_gib(held.transient_bytes),
                reserve_gib=_gib(held.overhead_bytes),
                host_gib=_gib(held.host_bytes),
            )
            for stage, held in ((stage, split.memory[split.devices[stage.index]]) for stage in split.stages)
        ),
        balance=BalanceEstimate(
            pad_ratio=round(balance.pad_ratio, 4),
            dist_ratio_vit=round(balance.dist_ratio_vit, 4),
            dist_ratio_llm=round(balance.dist_ratio_llm, 4),
            dist_ratio_cost=round(balance.dist_ratio_cost, 4),
            utilisation=round(balance.utilisation, 4),
            fill_patches=round(balance.fill_patches, 4),
            fill_tokens=round(balance.fill_tokens, 4),
            shuffle_chi2=None if balance.shuffle_chi2 is None else round(balance.shuffle_chi2, 3),
            lower_bound_packs=balance.lower_bound_packs,
        ),
        variants=tuple(_describe_variant(variant, num_packed) for variant in variants),
        vision_data_parallel=_describe_vision(case, ours.stages, variants[-2].stages),
    )


def _describe_vision(case: Case, stages: Sequence[Stage], without: Sequence[Stage]) -> VisionEstimate | None:
    """Of a case whose images are shared, which runs on `stages`; it would run on `without` if they were not."""
    if case.vision is None:
        return None
    loads = case.vision.loads
    ours, others = tower_memory(case, stages), tower_memory(case.without_vision(), without)
    return VisionEstimate(
        tower_ms=_digits((loads.slowest_s + loads.exchange_s) * 1e3),
        tower_without_ms=_digits(loads.slowest_without_s * 1e3),
        ideal_ms=_digits(loads.ideal_s * 1e3),
        exchange_ms=_digits(loads.exchange_s * 1e3),
        update_ms=_digits(loads.update_s * 1e3),
        update_without_ms=_digits(loads.update_without_s * 1e3),
        exchange_mib=_digits(loads.exchange_bytes / MIB),
        features_mib=_digits(loads.feature_bytes / MIB),
        state_gib=_gib(ours.state_bytes),
        state_without_gib=_gib(others.state_bytes),
        activations_gib=_gib(ours.saved_bytes),
        activations_without_gib=_gib(others.saved_bytes),
        sizes_known=round(loads.sizes_known, 4),
        ranks=tuple(
            VisionRankEstimate(rank=rank, tower_ms=_digits(own * 1e3), tower_without_ms=_digits(before * 1e3))
            for rank, (own, before) in enumerate(zip(loads.rank_s.tolist(), loads.rank_without_s.tolist(), strict=True))
        ),
    )


def _describe_variant(variant: Variant, num_samples: int) -> VariantEstimate:
    peak = max(device.total_bytes for device in variant.memory)
    return VariantEstimate(
        name=variant.name,
        packs=variant.packs,
        stages=variant.stages_rule,
        recompute=variant.recompute_rule,
        step_ms=_digits(variant.step_s.mean() * 1e3),
        epoch_s=_digits(variant.epoch_s),
        samples_per_s=_digits(num_samples / variant.epoch_s),
        idle_share=round(variant.idle_share, 4),
        peak_memory_gib=_gib(peak),
        fits=variant.fits,
    )


def assemble_plan(
    *, inputs: Inputs, decisions: Decisions, estimates: Estimates, origin: PlanOrigin, assumptions: Sequence[str]
) -> Plan:
    return Plan(
        plan_version=PLAN_VERSION,
        created_by=f"trimtab {__version__}",
        command=origin.command,
        summary=summarise(inputs, decisions, estimates),
        inputs=inputs,
        decisions=decisions,
        estimates=estimates,
        assumptions=tuple(dict.fromkeys((*origin.assumptions, *assumptions))),
    )


def summarise(inputs: Inputs, decisions: Decisions, estimates: Estimates) -> str:
    """Two sentences: the shape, then the expectation beside the baseline and where the gain comes from."""
    parallel, cluster = decisions.parallel, inputs.cluster
    baseline, ours = estimates.variants[0], estimates.variants[-1]
    degrees = " x ".join(f"{axis} {getattr(parallel, axis)}" for axis in ("dp", "pp", "tp"))
    gains = [
        f"{later.name} {earlier.epoch_s / later.epoch_s:.2f}x"
        for earlier, later in zip(estimates.variants, estimates.variants[1:], strict=False)
    ]
    num_drawn = sum(source.num_drawn for source in inputs.data.mixture) or inputs.data.num_samples
    per_step = num_drawn / decisions.packing.num_steps
    recompute = {"none": "no", "full": "full"}.get(baseline.recompute, baseline.recompute)
    misfit = "" if baseline.fits else "; does not fit the memory"
    return (
        f"{cluster.num_nodes * cluster.devices_per_node} {cluster.device} as {degrees}, "
        f"about {per_step:.3g} samples a step; "
        f"the slowest stage is {100 * estimates.stage_imbalance:.1f} % above the mean. "
        f"Predicted {ours.samples_per_s:.4g} samples/s, {format_seconds(ours.epoch_s)} for the whole data set; "
        f"the baseline ({baseline.packs}; {baseline.stages}; {recompute} recompute{misfit}) would take "
        f"{baseline.epoch_s / ours.epoch_s:.2f}x as long: {', '.join(gains)}."
    )


def _digits(value: float) -> float:
    return float(f"{value:.4g}")


def _gib(num_bytes: float) -> float:
    return round(num_bytes / GIB, 2)
