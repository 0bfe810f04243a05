"""Plans with all their details, made up but of realistic size, for the tests of the report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from plan_cases import tile_samples
from plans import small_plan

import export_cases
from trimtab.costs.devices import find_device
from trimtab.partition.assess import DeviceMemory
from trimtab.partition.simulate import StageTimes, simulate
from trimtab.partition.timeline import Timeline
from trimtab.plan.decide.assemble import describe_variant
from trimtab.plan.file.details import IdleParts, PlanDetails, Variant
from trimtab.plan.file.modules import fold_modules
from trimtab.plan.measured.run_log import RunHeader, RunLog, StepRecord
from trimtab.plan.plan import DataFile, ParallelDecision, ScheduleDecision, StageDecision
from trimtab.specs import ModelSpec, Packing, ParallelDims, Profile, Schedule, recomputing, stages_between

GIB = 2**30


def make_model(num_vision: int = 45, num_language: int = 48, name: str = "InternVL-Chat-1.5-26B") -> ModelSpec:
    return replace(export_cases.make_model(num_vision, num_language), name=name)


def make_variant(
    name: str,
    model: ModelSpec,
    *,
    pp: int,
    chunks: int = 1,
    num_microbatches: int = 16,
    num_packs: int = 4096,
    spread: float,
    skew: float,
    limits: tuple[int, int] = (36864, 8192),
    text_only: bool = False,
    recompute: bool = True,
    words: tuple[str, str, str] = ("balanced, random order", "balanced", "as needed"),
    seed: int = 0,
) -> Variant:
    """A variant whose micro-batches vary by `spread` and whose stages by `skew`, each a relative figure."""
    rng = np.random.default_rng(seed)
    fill = np.clip(1 - np.abs(rng.normal(0, spread, num_packs)), 0.05, 1.0)
    patches = np.zeros(num_packs) if text_only else np.floor(limits[0] * np.clip(fill - 0.02, 0, 1))
    tokens = np.floor(limits[1] * np.clip(1 - np.abs(rng.normal(0, spread, num_packs)), 0.05, 1.0))
    S = pp * chunks
    stages = stages_between(np.linspace(0, len(model.layers), S + 1).round().astype(int).tolist())
    if recompute:  # a third of every early stage
        thirds = {i: "full" for s in stages[: S // 2] for i in range(s.start, s.start + (s.stop - s.start) // 3)}
        stages = tuple(recomputing(stage, thirds) for stage in stages)
    f = 0.036 / S * 4 * (1 + skew * np.linspace(1, -1, S)) if S > 1 else np.array([0.12])
    weight = np.resize(fill / fill.mean(), num_microbatches)
    forward, none = f[:, None] * weight, np.zeros((S, num_microbatches))
    times = StageTimes(forward_s=forward, backward_s=2.1 * forward, send_forward_s=none, send_backward_s=none)
    line = simulate(times, schedule="Interleaved1F1B" if chunks > 1 else "1F1B", num_devices=pp)
    in_flight = np.arange(pp, 0, -1)
    memory = tuple(
        DeviceMemory(
            state_bytes=31.2 * GIB,
            saved_bytes=float(22 * GIB * n / pp * (1 + skew)),
            transient_bytes=3.4 * GIB,
            overhead_bytes=4.0 * GIB,
        )
        for n in in_flight
    )
    steps = max(1, num_packs // (8 * num_microbatches))
    return Variant(
        name=name,
        packs=words[0],
        stages_rule=words[1],
        recompute_rule=words[2],
        pack_patches=patches,
        pack_tokens=tokens,
        stages=stages,
        stage_forward_s=f,
        stage_backward_s=2.1 * f,
        memory=memory,
        step_s=np.full(steps, line.makespan_s * 1.04),
        idle_share=line.bubble_ratio,
        idle=IdleParts(bubble=line.bubble_ratio / 2, stages=line.bubble_ratio / 2, packs=0.0, ranks=0.0),
        rank_s=line.makespan_s * np.outer([0.98, 1.0, 1.02], 1 + skew * np.linspace(0, 0.1, 8)),
        fits=max(device.total_bytes for device in memory) <= 80 * GIB,
        timeline=line,
    )


def make_details(
    model: ModelSpec,
    variants: tuple[Variant, ...],
    *,
    num_microbatches: int = 16,
    num_samples: int = 21_000,
    limits: tuple[int, int] = (36864, 8192),
    num_chunks: int = 1,
    data: str = "llava_mix.jsonl",
) -> PlanDetails:
    """The small plan with these variants, on as many stages as the last of them has."""
    last, plan, cap = variants[-1], small_plan(), 80 * GIB
    pp, rows = last.timeline.num_devices, tuple(describe_variant(v, num_samples) for v in variants)
    names, total = [layer.name for layer in model.layers], last.stage_forward_s + last.stage_backward_s
    inputs = replace(
        plan.inputs,
        model=replace(plan.inputs.model, name=model.name, family=model.family, num_layers=len(names)),
        data=replace(
            plan.inputs.data, files=(DataFile(path=data, num_bytes=48_210_331, blake2b="01"),), num_samples=num_samples
        ),
    )
    decisions = replace(
        plan.decisions,
        parallel=ParallelDecision(dp=8, pp=pp, tp=1, cp=1),
        schedule=ScheduleDecision(
            name="Interleaved1F1B" if num_chunks > 1 else "1F1B",
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
        ),
        stages=tuple(StageDecision(stage=s.index, modules=fold_modules(names[s.start : s.stop])) for s in last.stages),
        packing=replace(plan.decisions.packing, max_patches=limits[0], max_tokens=limits[1]),
    )
    estimates = replace(
        plan.estimates,
        time_error=0.2,
        stage_imbalance=float(total.max() / total.mean() - 1),
        balance=replace(plan.estimates.balance, shuffle_chi2=1.003),
        variants=rows,
    )
    plan = replace(plan, inputs=inputs, decisions=decisions, estimates=estimates)
    return PlanDetails(
        plan=plan,
        model=model,
        memory_cap_bytes=float(cap),
        variants=variants,
        samples=tile_samples(4),
        packing=Packing(offsets=np.array([0, 4]), indices=np.arange(4), limits=limits),
        schedule=Schedule(table=np.zeros((1, 1, 1), np.int64)),
        profile=Profile(
            layers=(),
            method="analytic",
            device=find_device("A100-80GB"),
            dims=ParallelDims(dp=8, pp=pp),
            dtype="bf16",
            time_error=0.2,
            memory_error=0.1,
        ),
    )


def internvl_details() -> PlanDetails:
    """93 blocks over 4 stages, 16 micro-batches; the baseline does not fit in memory."""
    model = make_model()
    packs, shape = "balanced, random order", {"pp": 4, "recompute": False}
    first = make_variant(
        "baseline", model, **shape, spread=0.35, skew=0.55, seed=1, words=("random, padded", "equal layers", "none")
    )
    heavy = tuple(replace(m, saved_bytes=m.saved_bytes * 1.6) for m in first.memory)
    even, balanced = (packs, "equal layers", "none"), (packs, "balanced", "full")
    variants = (
        replace(first, memory=heavy, fits=False),
        make_variant("balanced packs", model, **shape, spread=0.004, skew=0.5, words=even),
        make_variant("balanced stages", model, **shape, spread=0.004, skew=0.03, words=balanced),
        make_variant("recompute as needed", model, pp=4, spread=0.004, skew=0.02),
    )
    return make_details(model, variants)


def tiny_details() -> PlanDetails:
    """One stage, one device, one micro-batch, one pack."""
    model = make_model(2, 2, name="tiny")
    variants = tuple(
        make_variant(n, model, pp=1, num_microbatches=1, num_packs=1, spread=0.1, skew=0.0, recompute=False)
        for n in ("baseline", "plan")
    )
    return make_details(model, variants, num_microbatches=1, num_samples=4)


def crowded_details(num_stages: int = 64, num_microbatches: int = 256, num_packs: int = 300_000) -> PlanDetails:
    """64 stages x 256 micro-batches, 1.2 M samples.

    The timelines are random, not simulated: gaps of all widths are harder to draw in little space than a real step.
    """
    model = make_model(60, 140, name="crowded")
    variants = tuple(
        replace(
            make_variant(n, model, pp=num_stages, num_microbatches=1, num_packs=num_packs, spread=s, skew=k),
            timeline=_random_timeline(num_stages, num_microbatches, s),
        )
        for n, s, k in (("baseline", 0.3, 0.4), ("plan", 0.01, 0.02))
    )
    return make_details(model, variants, num_microbatches=num_microbatches, num_samples=1_240_000)


def _random_timeline(num_devices: int, num_microbatches: int, idle: float) -> Timeline:
    rng = np.random.default_rng(0)
    blocks = 2 * num_microbatches
    took = rng.gamma(2.0, 0.005, (num_devices, blocks))
    gap = rng.exponential(0.01, (num_devices, blocks)) * (rng.random((num_devices, blocks)) < idle)
    end = np.cumsum(took + gap, axis=1)
    kind = rng.permuted(np.tile(np.arange(blocks) % 2, (num_devices, 1)), axis=1)
    number = np.where(kind == 0, np.cumsum(kind == 0, axis=1), np.cumsum(kind == 1, axis=1)) - 1
    return Timeline(
        stage=np.repeat(np.arange(num_devices), blocks).astype(np.int32),
        microbatch=number.ravel().astype(np.int32),
        kind=kind.ravel().astype(np.int8),
        start_s=(end - took).ravel(),
        end_s=end.ravel(),
        num_devices=num_devices,
        makespan_s=float(end.max()),
    )


def interleaved_details() -> PlanDetails:
    """4 devices with 2 chunks each, 8 micro-batches."""
    model = make_model()
    variants = tuple(
        make_variant(n, model, pp=4, chunks=2, num_microbatches=8, spread=s, skew=k)
        for n, s, k in (("baseline", 0.3, 0.4), ("plan", 0.01, 0.02))
    )
    return make_details(model, variants, num_microbatches=8, num_chunks=2)


def text_only_details() -> PlanDetails:
    """No images: 0 patches in every pack."""
    model = make_model()
    variants = tuple(
        make_variant(n, model, pp=2, spread=s, skew=k, text_only=True)
        for n, s, k in (("baseline", 0.3, 0.3), ("plan", 0.01, 0.0))
    )
    return make_details(model, variants)


def hostile_details() -> PlanDetails:
    """Markup, terminal escapes and lone surrogates in every name a stranger can choose."""
    bad = "<script>alert('x')</script>\"&\x1b[31mred\u202e\ud800 [bold]" + "y" * 5000
    model = make_model(4, 4, name=bad)
    variants = tuple(
        make_variant(bad, model, pp=2, num_microbatches=2, num_packs=32, spread=0.1, skew=0.1, words=(bad, bad, bad))
        for _ in range(2)
    )
    details = make_details(model, variants, num_microbatches=2, data=bad)
    plan = replace(details.plan, summary=bad, command=bad, assumptions=(bad,) * 3, created_by=bad)
    return replace(details, plan=plan)


# -- runs -----------------------------------------------------------------------------------------------------------


def make_header(**change) -> RunHeader:
    """Of a run on the plan's device."""
    values = {
        "plan": "",
        "device": "NVIDIA A100-SXM4-80GB",
        "planned_device": "A100-80GB",
        "dp": 1,
        "pp": 2,
        "schedule": "1F1B",
        "num_microbatches": 4,
        "dtype": "bfloat16",
        "attention": "sdpa",
        "optimizer": "AdamW",
        "planned_step_s": 1.0,
        "planned_memory_bytes": (30 * GIB, 20 * GIB),
        "versions": "trimtab 0",
    }
    return RunHeader(**{**values, **change})


def make_step(step: int, step_s: float, **change) -> StepRecord:
    values = {
        "epoch": 0,
        "loss": 3.0 / step,
        "learning_rate": 1e-5,
        "grad_norm": 1.0,
        "num_tokens": 1000,
        "data_s": 0.1 * step_s,
        "planned_s": 1.0,
        "peak_memory_bytes": (27 * GIB, 22 * GIB),
    }
    return StepRecord(step=step, step_s=step_s, **{**values, **change})


def make_run(num_steps: int = 40, **change) -> RunLog:
    """Steps of 0.9 to 1.1 planned seconds that take 5 % more; the first pays for warming up."""
    planned = [0.9 + 0.2 * ((7 * i) % num_steps) / num_steps for i in range(num_steps)]
    steps = [make_step(i + 1, 1.05 * p + 4.0 * (i == 0), planned_s=p) for i, p in enumerate(planned)]
    return RunLog(header=make_header(**change), steps=tuple(steps), starts=(1,))
