"""Plans with all their details, made up but of realistic size, for the tests of the report."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from trimtab.partition.assess import DeviceMemory
from trimtab.plan.file.details import PlanDetails, Variant
from trimtab.plan.measured.run_log import RunHeader, RunLog, StepRecord
from trimtab.plan.plan import (
    BalanceEstimate,
    ClusterInput,
    DataFile,
    DataInput,
    Decisions,
    Estimates,
    Inputs,
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
)
from trimtab.specs import (
    DeviceSpec,
    ImageCounts,
    LayerSpec,
    ModelSpec,
    Packing,
    ParallelDims,
    Profile,
    RecomputeChoice,
    SampleTable,
    Schedule,
    Stage,
    Timeline,
)

GIB = 2**30
A100 = DeviceSpec(
    name="A100-80", memory_bytes=80 * GIB, peak_flops=312e12, memory_bytes_per_s=2e12, link_bytes_per_s=3e11, source="t"
)


class _Rule:
    name = "tiles"

    def count(self, width: int, height: int) -> ImageCounts:
        return ImageCounts(patches=1025, tokens=256, tiles=1, patches_sq=1025**2, patches_windowed=1025**2)


def make_model(num_vision: int = 45, num_language: int = 48, name: str = "InternVL-Chat-1.5-26B") -> ModelSpec:
    def layer(path: str, tower: str, kind: str, params: int) -> LayerSpec:
        return LayerSpec(
            name=path,
            tower=tower,
            kind=kind,
            hidden_size=3200,
            output_size=3200,
            num_params=params,
            num_matmul_params=params,
        )

    layers = [layer("vision_model.embeddings", "vision", "embed", 10_000_000)]
    layers += [layer(f"vision_model.encoder.layers.{i}", "vision", "block", 123_000_000) for i in range(num_vision)]
    layers += [layer("mlp1", "projector", "projector", 116_000_000)]
    layers += [layer("language_model.model.tok_embeddings", "language", "embed", 569_000_000)]
    layers += [layer(f"language_model.model.layers.{i}", "language", "block", 393_000_000) for i in range(num_language)]
    layers += [layer("language_model.model.norm", "language", "norm", 6144)]
    layers += [layer("language_model.output", "language", "head", 569_000_000)]
    return ModelSpec(name=name, family="internvl_chat", layers=tuple(layers), image_rule=_Rule(), vocab_size=92553)


def simulate_step(forward: np.ndarray, backward: np.ndarray, num_devices: int) -> Timeline:
    """Greedy backward-first pipeline over (num_stages, num_microbatches) seconds: legal, not claimed to be best."""
    S, M = forward.shape
    P = num_devices
    end = np.full((2, S, M), np.nan)
    free = np.zeros(P)
    next_f, next_b = np.zeros(S, int), np.zeros(S, int)
    rows: list[tuple[int, int, int, float, float]] = []
    for _ in range(2 * S * M):
        best: tuple[float, int, int, int] | None = None
        for s in range(S):
            d = s % P
            if (m := int(next_b[s])) < M and m < next_f[s]:
                ready = end[0, s, m] if s == S - 1 else end[1, s + 1, m]
                if not np.isnan(ready):
                    key = (max(free[d], ready), 0, -s, m)
                    best = key if best is None or key < best else best
            if (m := int(next_f[s])) < M and m - next_b[s] < S - s + (0 if S == P else P):
                ready = 0.0 if s == 0 else end[0, s - 1, m]
                if not np.isnan(ready):
                    key = (max(free[d], ready), 1, s, m)
                    best = key if best is None or key < best else best
        assert best is not None
        start, is_forward, s, m = best
        s = abs(s)
        took = (forward if is_forward else backward)[s, m]
        end[1 - is_forward, s, m] = free[s % P] = start + took
        (next_f if is_forward else next_b)[s] += 1
        rows.append((s, m, 1 - is_forward, start, start + took))
    stage, mb, kind, start_s, end_s = (np.array(c) for c in zip(*rows, strict=True))
    return Timeline(
        stage=stage.astype(np.int32),
        microbatch=mb.astype(np.int32),
        kind=kind.astype(np.int8),
        start_s=start_s.astype(float),
        end_s=end_s.astype(float),
        num_devices=P,
        makespan_s=float(end_s.max()),
    )


def even_stages(num_layers: int, num_stages: int) -> tuple[Stage, ...]:
    cuts = np.linspace(0, num_layers, num_stages + 1).round().astype(int).tolist()
    return tuple(Stage(index=i, start=cuts[i], stop=cuts[i + 1]) for i in range(num_stages))


def _recompute_third(stage: Stage) -> Stage:
    layers = tuple(range(stage.start, stage.start + (stage.stop - stage.start) // 3))
    return replace(stage, recompute=(RecomputeChoice(tier="full", layers=layers),))


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
    stages = even_stages(len(model.layers), S)
    if recompute:
        stages = tuple(_recompute_third(s) if s.index < S // 2 else s for s in stages)
    f = 0.036 / S * 4 * (1 + skew * np.linspace(1, -1, S)) if S > 1 else np.array([0.12])
    weight = np.resize(fill / fill.mean(), num_microbatches)
    line = simulate_step(f[:, None] * weight, 2.1 * f[:, None] * weight, pp)
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
        fits=max(device.total_bytes for device in memory) <= 80 * GIB,
        timeline=line,
    )


def _estimate(variant: Variant, num_samples: int) -> VariantEstimate:
    peak = max(m.total_bytes for m in variant.memory) / GIB
    return VariantEstimate(
        name=variant.name,
        packs=variant.packs,
        stages=variant.stages_rule,
        recompute=variant.recompute_rule,
        step_ms=round(1e3 * float(variant.step_s.mean()), 1),
        epoch_s=round(variant.epoch_s, 1),
        samples_per_s=round(num_samples / variant.epoch_s, 1),
        idle_share=round(variant.idle_share, 4),
        peak_memory_gib=round(peak, 2),
        fits=variant.fits,
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
    last, cap = variants[-1], 80 * GIB
    pp = last.timeline.num_devices
    rows = tuple(_estimate(v, num_samples) for v in variants)
    stages = tuple(
        StageEstimate(
            stage=s.index,
            forward_ms=round(1e3 * last.stage_forward_s[s.index], 2),
            backward_ms=round(1e3 * last.stage_backward_s[s.index], 2),
            memory_gib=round(last.memory[s.index % pp].total_bytes / GIB, 2),
            state_gib=31.2,
            activations_gib=20.0,
            transient_gib=3.4,
            reserve_gib=0.0,
        )
        for s in last.stages
    )
    num_packs = len(last.pack_tokens)
    table = TableFile(file="packs.npy", blake2b="5f1c0a7e")
    total = last.stage_forward_s + last.stage_backward_s
    estimates = Estimates(
        time_error=0.2,
        memory_error=0.1,
        step_ms=rows[-1].step_ms,
        epoch_s=rows[-1].epoch_s,
        samples_per_s=rows[-1].samples_per_s,
        stage_imbalance=float(total.max() / total.mean() - 1),
        stages=stages,
        balance=BalanceEstimate(
            pad_ratio=0.0,
            dist_ratio_vit=0.0055,
            dist_ratio_llm=0.016,
            dist_ratio_cost=0.005,
            utilisation=0.981,
            fill_patches=float(last.pack_patches.mean() / limits[0]),
            fill_tokens=float(last.pack_tokens.mean() / limits[1]),
            shuffle_chi2=1.003,
            lower_bound_packs=max(1, num_packs - 12),
        ),
        variants=rows,
    )
    decisions = Decisions(
        parallel=ParallelDecision(dp=8, pp=pp, tp=1, cp=1),
        schedule=ScheduleDecision(
            name="Interleaved1F1B" if num_chunks > 1 else "1F1B",
            num_microbatches=num_microbatches,
            num_chunks=num_chunks,
        ),
        stages=tuple(StageDecision(stage=s.index, modules=_ranges(model, s.start, s.stop)) for s in last.stages),
        recompute=tuple(
            RecomputeDecision(stage=s.index, granularity=c.tier, modules=_ranges(model, c.layers[0], c.layers[-1] + 1))
            for s in last.stages
            for c in s.recompute
            if c.layers
        ),
        packing=PackingDecision(
            method="balanced",
            order="random",
            max_patches=limits[0],
            max_tokens=limits[1],
            seed=0,
            oversize="error",
            num_packs=num_packs,
            num_steps=len(last.step_s),
            num_oversize=0,
            offsets=table,
            indices=table,
            schedule=table,
        ),
    )
    inputs = Inputs(
        model=ModelInput(
            name=model.name,
            family=model.family,
            config="internvl_chat_26b",
            preprocessor=None,
            max_pixels=None,
            max_tiles=None,
            num_layers=len(model.layers),
            num_params=model.num_params,
            layers_blake2b="aa11bb22",
            forbidden_cuts=(),
        ),
        data=DataInput(
            files=(DataFile(path=data, num_bytes=48_210_331, blake2b="01ab23cd"),),
            num_samples=num_samples,
            num_skipped=3,
            tokens_exact=False,
            table="samples.npy",
            table_blake2b="99",
        ),
        cluster=ClusterInput(
            device="A100-80",
            num_nodes=4,
            devices_per_node=8,
            device_blake2b="89abcdef89abcdef",
            node_link_bytes_per_s=25e9,
            latency_s=1e-5,
            memory_bytes=cap,
            reserve_bytes=4 * GIB,
        ),
        training=TrainingInput(
            dtype="bf16",
            optimizer="adamw",
            zero_stage=1,
            attention="flash",
            fused_kernels=False,
            frozen_towers=(),
            recompute="auto",
            costs="analytic",
        ),
    )
    plan = Plan(
        plan_version="1.0",
        created_by="trimtab 0.1.0",
        command="trimtab plan --model internvl-26b --out plan",
        summary=(
            f"{8 * pp} GPUs as dp 8 x pp {pp}. Slowest stage is {100 * estimates.stage_imbalance:.1f} % over the mean. "
            f"Expected step {rows[-1].step_ms:.0f} ms, equal layers per stage would take {rows[0].step_ms:.0f} ms."
        ),
        inputs=inputs,
        decisions=decisions,
        estimates=estimates,
        assumptions=(
            "Costs are analytic: floating-point operations over 52 % of the published peak of A100-80.",
            "Token counts are estimated without a tokenizer: 1.35 tokens per word.",
            "Sends between stages overlap with nothing.",
        ),
    )
    zeros = np.zeros(4, np.int64)
    return PlanDetails(
        plan=plan,
        model=model,
        memory_cap_bytes=float(cap),
        variants=variants,
        samples=SampleTable(
            num_images=zeros,
            num_patches=zeros,
            num_tokens=zeros,
            patches_sq=zeros,
            patches_windowed=zeros,
            source=np.zeros(4, np.int32),
        ),
        packing=Packing(offsets=np.array([0, 4]), indices=np.arange(4), limits=limits),
        schedule=Schedule(table=np.zeros((1, 1, 1), np.int64)),
        profile=Profile(
            layers=(),
            method="analytic",
            device=A100,
            dims=ParallelDims(dp=8, pp=pp),
            dtype="bfloat16",
            time_error=0.2,
            memory_error=0.1,
        ),
    )


def _ranges(model: ModelSpec, start: int, stop: int) -> tuple[str, ...]:
    runs: list[tuple[str, int, int]] = []
    for layer in model.layers[start:stop]:
        stem, _, number = layer.name.rpartition(".")
        if number.isdigit() and runs and runs[-1][0] == stem:
            runs[-1] = (stem, runs[-1][1], int(number))
        else:
            runs.append((stem, int(number), int(number)) if number.isdigit() else (layer.name, -1, -1))
    return tuple(name if a < 0 else f"{name}[{a}..{b}]" for name, a, b in runs)


def internvl_details() -> PlanDetails:
    """93 blocks over 4 stages, 16 micro-batches; the baseline does not fit in memory."""
    model = make_model()
    variants = (
        make_variant(
            "baseline",
            model,
            pp=4,
            spread=0.35,
            skew=0.55,
            recompute=False,
            seed=1,
            words=("random, padded", "equal layers", "none"),
        ),
        make_variant(
            "balanced packs",
            model,
            pp=4,
            spread=0.004,
            skew=0.5,
            recompute=False,
            words=("balanced, random order", "equal layers", "none"),
        ),
        make_variant(
            "balanced stages",
            model,
            pp=4,
            spread=0.004,
            skew=0.03,
            recompute=False,
            words=("balanced, random order", "balanced", "full"),
        ),
        make_variant("recompute as needed", model, pp=4, spread=0.004, skew=0.02),
    )
    details = make_details(model, variants)
    return _over_cap(details)


def _over_cap(details: PlanDetails) -> PlanDetails:
    first = details.variants[0]
    heavy = tuple(replace(m, saved_bytes=m.saved_bytes * 1.6) for m in first.memory)
    variants = (replace(first, memory=heavy, fits=False), *details.variants[1:])
    rows = details.plan.estimates.variants
    row = replace(rows[0], peak_memory_gib=round(max(m.total_bytes for m in heavy) / GIB, 2), fits=False)
    estimates = replace(details.plan.estimates, variants=(row, *rows[1:]))
    return replace(details, variants=variants, plan=replace(details.plan, estimates=estimates))


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
