"""Small plans with all their details, and a run's log, for the tests of the report."""

import io
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
from plan_cases import tile_samples
from rich.console import Console

from trimtab import Timeline, describe, make_plan, parse_cluster
from trimtab.plan.file.figures import PlanDetails, describe_variant
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.plan.plan import DataFile
from trimtab.plan.runs import RunHeader, RunLog, StepRecord
from trimtab.report.plan_tables import print_plan
from trimtab.specs import SampleTable, stages_between

GIB = 2**30
ORIGIN = PlanOrigin(
    command="trimtab plan config.json llava_mix.jsonl",
    data_files=(DataFile(path="llava_mix.jsonl", num_bytes=48_210_331, blake2b="01"),),
)


def plan_text(details: PlanDetails, *, width: int = 100) -> str:
    """What `print_plan` shows, without colours."""
    stream = io.StringIO()
    print_plan(details, Console(file=stream, width=width, color_system=None))
    return "\n".join(line.rstrip() for line in stream.getvalue().splitlines()) + "\n"


def _plan(model: str, cluster: str, samples: SampleTable, **options: Any) -> PlanDetails:
    options = {"max_patches": 36864, "max_tokens": 8192, **options}
    return make_plan(
        describe(model),
        samples,
        parse_cluster(cluster),
        PlanOptions(**{"schedule": "1F1B", "zero_stage": 1, "risk": 0.05} | options),
        origin=ORIGIN,
    )


@cache
def internvl_details() -> PlanDetails:
    """73 layers over 4 stages, 16 micro-batches; the baseline does not fit in memory."""
    options = {"pp": 4, "tp": 2, "num_microbatches": 16, "memory_bytes": 60 * GIB}
    return _plan("InternVL-Chat-V1-5", "16xA100-80GB", tile_samples(400), **options)


@cache
def tiny_details() -> PlanDetails:
    """One stage, one device, one micro-batch; the plan is its own baseline, so nothing is gained."""
    details = _plan("InternVL3_5-1B", "1xA100-80GB", tile_samples(4), num_microbatches=1)
    same = (replace(details.variants[-1], name="baseline"), details.variants[-1])
    return _with_variants(details, same)


@cache
def interleaved_details() -> PlanDetails:
    """4 devices with 2 chunks each, 8 micro-batches."""
    options = {"pp": 4, "tp": 2, "num_microbatches": 8, "schedule": "Interleaved1F1B", "num_chunks": 2}
    return _plan("InternVL-Chat-V1-5", "16xA100-80GB", tile_samples(300), **options)


@cache
def text_only_details() -> PlanDetails:
    """No images: 0 patches in every pack."""
    tokens = tile_samples(200).num_tokens
    return _plan("Qwen2.5-VL-7B", "8xA100-80GB", SampleTable.of(0 * tokens, tokens), dp=4, pp=2, max_patches=None)


@cache
def hostile_details() -> PlanDetails:
    """Markup, terminal escapes and lone surrogates in every name a stranger can choose."""
    bad = "<script>alert('x')</script>\"&\x1b[31mred\u202e\ud800 [bold]" + "y" * 5000
    details = text_only_details()
    words = {"name": bad, "packs": bad, "stages_rule": bad, "recompute_rule": bad}
    details = _with_variants(details, tuple(replace(variant, **words) for variant in details.variants[-2:]))
    inputs = details.plan.inputs
    inputs = replace(
        inputs,
        model=replace(inputs.model, name=bad),
        data=replace(inputs.data, files=(replace(inputs.data.files[0], path=bad),)),
    )
    plan = replace(details.plan, inputs=inputs, summary=bad, command=bad, assumptions=(bad,) * 3, created_by=bad)
    return replace(details, plan=plan, model=replace(details.model, name=bad))


def _with_variants(details: PlanDetails, variants: tuple[Any, ...]) -> PlanDetails:
    rows = tuple(describe_variant(variant, 1) for variant in variants)
    plan = replace(details.plan, estimates=replace(details.plan.estimates, variants=rows))
    return replace(details, plan=plan, variants=variants)


@cache
def crowded_details(num_stages: int = 64, num_microbatches: int = 256, num_packs: int = 300_000) -> PlanDetails:
    """64 stages x 256 micro-batches, 1.2 M samples.

    The timelines are random, not simulated: gaps of all widths are harder to draw in little space than a real step.
    """
    details = internvl_details()
    cuts = np.linspace(0, len(details.model.layers), num_stages + 1).round().astype(int).tolist()
    crowd = {"stages": stages_between(cuts), "memory": details.variants[-1].memory[:1] * num_stages}
    crowd |= {"stage_forward_s": np.full(num_stages, 0.01), "stage_backward_s": np.full(num_stages, 0.02)}
    variants = tuple(
        replace(
            variant,
            **crowd,
            pack_patches=np.resize(variant.pack_patches, num_packs),
            pack_tokens=np.resize(variant.pack_tokens, num_packs),
            timeline=_random_timeline(num_stages, num_microbatches, idle),
        )
        for variant, idle in zip((details.variants[0], details.variants[-1]), (0.3, 0.01), strict=True)
    )
    return _with_variants(details, variants)


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
        "peak_memory_bytes": (27 * GIB, 22 * GIB),
    }
    return StepRecord(step=step, step_s=step_s, **{**values, **change})


def make_run(num_steps: int = 40, **change) -> RunLog:
    """Steps of 0.9 to 1.1 planned seconds that take 5 % more; the first pays for warming up."""
    planned = [0.9 + 0.2 * ((7 * i) % num_steps) / num_steps for i in range(num_steps)]
    steps = [make_step(i + 1, 1.05 * p + 4.0 * (i == 0)) for i, p in enumerate(planned)]
    return RunLog(header=make_header(**change), steps=tuple(steps), starts=(1,))


MAKERS = {
    "internvl": internvl_details,
    "tiny": tiny_details,
    "interleaved": interleaved_details,
    "text_only": text_only_details,
    "hostile": hostile_details,
}
