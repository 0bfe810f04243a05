"""Tests of plan/decide/ (setting, simplest, search): open degrees and schedules, and what the plan says of them."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_cases import tile_samples, write_checked

from trimtab import PlanOptions, describe, make_plan, parse_cluster
from trimtab.adapters.running import full_blocks
from trimtab.plan.decide.case import MemoryBudget
from trimtab.plan.decide.search import choose_setting
from trimtab.plan.decide.setting import ChosenSetting, complexity, profile_setting
from trimtab.plan.decide.stages import Expressible
from trimtab.plan.plan import SettingEstimate
from trimtab.specs import ClusterSpec, ParallelDims, SampleTable

MODEL = describe("InternVL-Chat-V1-5")
SAMPLES = tile_samples(300)


def choose(options: PlanOptions, cluster: ClusterSpec):
    return choose_setting(MODEL, SAMPLES, cluster, options, MemoryBudget.of(cluster, options))


def test_auto_takes_the_fastest_of_all_schedules_that_fit() -> None:
    cluster, asked = parse_cluster("16xA100-80GB"), PlanOptions(tp=2, pp=4, num_microbatches=8)
    auto = choose(asked, cluster)
    speeds = {
        name: choose(replace(asked, schedule=name, num_chunks=chunks), cluster).considered[0].samples_per_s
        for name, chunks in (("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2))
    }
    assert auto.considered[0].samples_per_s == max(speeds.values())
    assert [x.samples_per_s for x in auto.considered] == sorted(
        (x.samples_per_s for x in auto.considered), reverse=True
    )
    for found in auto.considered:
        if found.options.sharding == auto.best.options.sharding:
            assert found.samples_per_s <= speeds[found.options.schedule] * (1 + 1e-9)


def test_packs_are_no_larger_than_the_recompute_of_a_framework_can_hold() -> None:
    cluster, options = parse_cluster("16xA100-80GB"), PlanOptions(dp=2, pp=4, tp=2, host="none")
    budget = MemoryBudget.of(cluster, options)
    free = choose(options, cluster).best
    bare = choose_setting(MODEL, SAMPLES, cluster, options, budget, tiers=lambda layer: ()).best
    assert bare.setting.max_patches < free.setting.max_patches
    assert bare.samples_per_s < free.samples_per_s
    assert bare.setting.profile == free.setting.profile  # with every tier: the plan prices others by it
    # what a provider of Qwen2.5-VL runs: no recompute in the tower
    model = describe("Qwen2.5-VL-7B")
    tower = Expressible(tiers=lambda layer: full_blocks(layer) if layer.tower == "language" else ())
    patches = np.tile([1024, 4096, 9000], 60)
    samples = SampleTable.of(patches, patches // 4 + 200)
    made = make_plan(model, samples, parse_cluster("8xA100-80GB"), PlanOptions(tp=2), within=lambda *_: tower)
    recomputed = {tier.stage: tier for tier in made.plan.decisions.recompute}
    assert made.variants[-1].fits
    assert not any("visual" in module for tier in recomputed.values() for module in tier.modules)


def test_of_settings_alike_in_speed_the_simplest_is_taken() -> None:
    found = choose(PlanOptions(global_batch=64), parse_cluster("16xA100-80GB"))
    unlike = {complexity(x.estimate): x for x in found.considered}
    complex_first = [unlike[key] for key in sorted(unlike, reverse=True)]
    assert len(complex_first) > 4

    def with_speeds(speeds: list[float], prefer: str = "fastest") -> ChosenSetting:
        given = (replace(x, samples_per_s=speed) for x, speed in zip(complex_first, speeds, strict=False))
        return replace(found, considered=tuple(given), prefer=prefer)

    assert with_speeds([100.0, 99.6, 99.1, 98.9, 94.0]).best.samples_per_s == 99.1
    simplest = with_speeds([100.0, 99.6, 99.1, 96.0, 94.0], prefer="simplest")
    assert simplest.best is simplest.considered[3]
    assert simplest.listed[0] == simplest.best.estimate
    assert [x.samples_per_s for x in simplest.listed[1:]] == [100.0, 99.6, 99.1, 94.0]
    assert {x.kind for x in found.listed} == {x.estimate.kind for x in found.considered}


def test_kinds_sort_by_what_they_ask_of_a_launcher() -> None:
    order = [
        ({"dp": 8}, "data parallel"),
        ({"dp": 8, "ep": 2}, "data parallel, expert parallel"),
        ({"dp": 8, "ep": 4}, "data parallel, expert parallel"),
        ({"dp": 4, "cp": 2}, "data parallel, context parallel"),
        ({"dp": 2, "cp": 4}, "data parallel, context parallel"),
        ({"dp": 8, "zero_stage": 2}, "data parallel, ZeRO-2"),
        ({"dp": 8, "zero_stage": 3}, "data parallel, ZeRO-3"),
        ({"dp": 4, "tp": 2}, "tensor parallel"),
        ({"dp": 1, "tp": 8}, "tensor parallel"),
        ({"dp": 4, "pp": 2}, "pipeline"),
        ({"dp": 1, "pp": 8}, "pipeline"),
        ({"dp": 4, "pp": 2, "schedule": "ZBH1"}, "pipeline"),
        ({"dp": 4, "pp": 2, "ep": 2}, "pipeline, expert parallel"),
        ({"dp": 2, "pp": 2, "cp": 2}, "pipeline, context parallel"),
        ({"dp": 2, "pp": 2, "tp": 2}, "pipeline and tensor parallel"),
    ]
    given = {"dp": 1, "pp": 1, "tp": 1, "zero_stage": 0, "schedule": "1F1B", "num_chunks": 1, "num_microbatches": 1}
    rest = {"step_ms": 1.0, "samples_per_s": 1.0, "peak_memory_gib": 1.0}
    ranks = [complexity(SettingEstimate(kind=kind, **{**given, **rest, **own})) for own, kind in order]
    assert ranks == sorted(ranks)
    assert len(set(ranks)) == len(ranks)


@pytest.mark.parametrize(("steps", "most"), [("exact", 256.0), ("filled", 1.25 * 256)])
def test_no_setting_looks_faster_by_larger_steps(steps: str, most: float) -> None:
    found = choose(PlanOptions(steps=steps), parse_cluster("32xA100-80GB"))
    assert any(x.options.zero_stage == 3 for x in found.considered)
    for x in found.considered:
        assert x.samples_per_s * x.step_s <= most * (1 + 1e-9), x.estimate.label


def test_weights_are_gathered_by_all_ports_of_a_node() -> None:
    def gather_s(cluster: ClusterSpec, dims: ParallelDims) -> float:
        def per_microbatch_s(zero_stage: int) -> float:
            profile = profile_setting(MODEL, cluster, PlanOptions(zero_stage=zero_stage), dims)
            return float(profile.matrix("forward_s")[:, 0].sum())

        return per_microbatch_s(3) - per_microbatch_s(2)

    wide, narrow = ParallelDims(dp=32), ParallelDims(dp=8, tp=4)
    cluster = parse_cluster("32xA100-80GB")
    weights_bytes = sum(layer.num_params for layer in MODEL.layers) * 2
    assert gather_s(cluster, wide) == pytest.approx(weights_bytes * 31 / 32 / (8 * 25e9 * 0.80))
    # a group of every fourth device has two members on a node; each holds a fourth of the products' weights
    share = profile_setting(MODEL, cluster, PlanOptions(), narrow)
    held_bytes = sum(layer.num_params for layer in share.layers) * 2
    assert gather_s(cluster, narrow) == pytest.approx(held_bytes * 7 / 8 / (2 * 25e9 * 0.80))


def test_every_divisor_of_the_devices_is_considered() -> None:
    cluster = parse_cluster("12xA100-80GB", devices_per_node=6)
    found = choose(PlanOptions(tp=2), cluster)
    tried = {x.setting.dims.pp for x in found.considered}
    assert tried <= {1, 2, 3, 6}
    assert {3, 6} <= tried
    assert len(tried) + found.num_misfits == 4


def test_without_a_choice_nothing_is_said() -> None:
    found = choose(
        PlanOptions(max_patches=5125, max_tokens=8192, tp=2, pp=4, num_microbatches=8, schedule="1F1B", zero_stage=1),
        parse_cluster("16xA100-80GB"),
    )
    assert found.sentences() == ()


@pytest.mark.parametrize(("schedule", "chunks"), [("ZBH1", 1), ("ZBVZeroBubble", 2), ("auto", 1)])
def test_zero_bubble_plans_check(schedule: str, chunks: int, tmp_path: Path) -> None:
    options = PlanOptions(pp=4, tp=2, schedule=schedule, num_chunks=chunks, global_batch=64)
    made = make_plan(MODEL, SAMPLES, parse_cluster("16xA100-80GB"), options)
    decided = made.plan.decisions.schedule
    assert decided.name != "auto"
    assert schedule in (decided.name, "auto")
    assert made.variants[-1].fits
    assert len(made.plan.decisions.stages) == 4 * decided.num_chunks
    assert any(text.startswith("Splits were simulated on sampled steps") for text in made.plan.assumptions)
    write_checked(made, tmp_path)
