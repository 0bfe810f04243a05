"""Tests of plan/decide/steps.py: steps of exactly the batch that was asked for, for any devices and model."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_cases import tile_samples, write_checked

from refusals import refused
from trimtab import PlanDetails, PlanOptions, check_plan, describe, make_plan, parse_cluster, write_plan
from trimtab.balance.packing import PackResult
from trimtab.errors import PartitionError, PlanError
from trimtab.plan.decide.case import MemoryBudget, Setting, pack_case
from trimtab.plan.decide.epoch import open_epoch
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.decide.steps import fill_slots, open_steps, share_tried
from trimtab.specs import Packing, ParallelDims, SampleTable, Schedule

MODEL = describe("InternVL-Chat-V1-5")
COUNTS = PlanOptions(global_batch=32)


def held(made: PlanDetails) -> list[int]:
    """Samples of each step."""
    sizes = np.append(np.diff(made.packing.offsets), 0)
    return sizes[made.schedule.table].sum(axis=(1, 2)).tolist()


def native_samples(count: int) -> SampleTable:
    """Heavy-tailed images at their own resolution, and text."""
    rng = np.random.default_rng(3)
    patches = 4 * np.round(np.exp(rng.normal(6.0, 0.8, count))).astype(np.int64)
    return SampleTable.of(patches, patches // 4 + np.round(np.exp(rng.normal(5.0, 0.8, count))).astype(np.int64))


@pytest.mark.parametrize("global_batch", [8, 100, 1000])
@pytest.mark.parametrize("devices", [1, 8, 64])
def test_every_step_holds_the_batch_that_was_asked_for(global_batch: int, devices: int, tmp_path: Path) -> None:
    samples = native_samples(1100)
    cluster = parse_cluster(f"{devices}xH200")
    options = PlanOptions(global_batch=global_batch, optimizer="sgd" if devices == 1 else "adamw")
    made = make_plan(describe("Qwen2.5-VL-7B"), samples, cluster, options)
    *full, last = held(made)
    assert set(full) <= {global_batch}
    assert last == 1100 - global_batch * len(full)
    assert made.plan.decisions.packing.global_batch == global_batch
    assert sorted(made.packing.indices.tolist()) == list(range(1100))
    write_checked(made, tmp_path)


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "InternVL-Chat-V1-5"])
def test_a_batch_is_refused_only_where_a_rank_has_no_sample(name: str) -> None:
    model = describe(name)
    samples = native_samples(64)
    cluster = parse_cluster("8xH200")
    made = make_plan(model, samples, cluster, PlanOptions(global_batch=8))
    assert set(held(made)) == {8}
    with refused(PartitionError, "8"):
        make_plan(model, samples, cluster, PlanOptions(global_batch=4, dp=8))


def test_data_smaller_than_the_default_batch_are_one_step() -> None:
    made = make_plan(MODEL, tile_samples(60), parse_cluster("16xA100-80GB"))
    assert held(made) == [60]
    assert any("60 samples" in text for text in made.plan.assumptions)
    with refused(PlanError, "61"):
        make_plan(MODEL, tile_samples(60), parse_cluster("16xA100-80GB"), PlanOptions(global_batch=61))


def test_packs_grow_in_number_where_the_batch_would_not_fit() -> None:
    options = PlanOptions(dp=2, pp=4, tp=2, global_batch=64, max_patches=5125, max_tokens=8192)
    made = make_plan(MODEL, tile_samples(300), parse_cluster("16xA100-80GB"), options)
    assert set(held(made)[:-1]) == {64}
    assert np.asarray(made.packing.sums(made.samples.num_patches)).max() <= 5125
    assert made.plan.decisions.schedule.num_microbatches > 8
    assert sorted(made.packing.indices.tolist()) == list(range(300))


def test_a_plan_with_another_number_of_samples_in_a_step_does_not_hold(tmp_path: Path) -> None:
    made = make_plan(MODEL, tile_samples(128), parse_cluster("8xA100-80GB"), COUNTS)
    write_plan(made, tmp_path)
    text = (tmp_path / "plan.yaml").read_text()
    assert "global_batch: 32" in text
    (tmp_path / "plan.yaml").write_text(text.replace("global_batch: 32", "global_batch: 31"))
    assert any("step 0 holds 32" in problem for problem in check_plan(tmp_path))


def test_limits_hold_in_every_step_of_the_epoch() -> None:
    samples = native_samples(2000)
    cost = samples.num_patches + 4.0 * samples.num_tokens
    tried = open_steps(samples, COUNTS, global_batch=32, cost=cost, token_window=None)
    found = share_tried(tried, ParallelDims(dp=4), 3)
    packs = found.packed.packing
    assert np.asarray(packs.sums(found.samples.num_patches)).max() <= found.limits[0]
    assert found.limits[0] >= samples.num_patches.max()
    assert found.limits[1] >= samples.num_tokens.max()


@pytest.mark.parametrize("count", [128, 20_000])
def test_tried_steps_are_steps_of_the_epoch(count: int) -> None:
    samples = native_samples(count)
    tried = open_steps(samples, COUNTS, global_batch=32, cost=np.ones(count), token_window=None)
    steps = tried.every.num_tokens[: count // 32 * 32].reshape(-1, 32).tolist()
    own = tried.samples.num_tokens.reshape(-1, 32).tolist()
    places = [steps.index(step) for step in own]
    assert (places[0], places[-1]) == (0, count // 32 - 1)
    assert places == sorted(set(places))
    assert len(places) == min(count // 32, 128)


def test_skipped_samples_count_in_no_price() -> None:
    """The mean and the largest pack are those of the samples that stay."""
    samples = native_samples(500)
    huge = replace(samples, num_tokens=np.where(np.arange(500) % 5 == 0, 90_000, samples.num_tokens))
    cost = huge.num_patches + 4.0 * huge.num_tokens
    for steps in ("exact", "filled"):
        options = PlanOptions(
            global_batch=32, oversize="skip", steps=steps, max_patches=60_000, max_tokens=20_000, dp=1, pp=1, tp=1
        )
        tried = open_steps(huge, options, global_batch=32, cost=cost, token_window=None)
        if steps == "exact":
            assert tried.samples.num_tokens.max() < 90_000
            assert tried.every.num_tokens.max() < 90_000
            found = share_tried(tried, ParallelDims(), 4)
            assert found.extremes[:, 4].max() < 90_000
            assert found.mean_work[4] < 90_000 / 4
    made = make_plan(describe("Qwen2.5-VL-3B"), huge, parse_cluster("1xH200"), replace(options, optimizer="sgd"))
    assert made.plan.decisions.packing.num_oversize == 100


def test_empty_slots_are_filled_where_there_are_samples() -> None:
    packing = Packing(offsets=np.array([0, 3, 4, 6, 7]), indices=np.array([5, 6, 0, 1, 2, 3, 4]), limits=(9, 9))
    table = np.array([[[0, -1], [1, 2]], [[-1, -1], [3, -1]]])
    filled = fill_slots(PackResult(packing=packing, schedule=Schedule(table=table)), np.array([3.0, 1, 1, 1, 1, 9, 2]))
    assert (filled.schedule.table[0] >= 0).all()
    assert filled.schedule.table[1].T.reshape(-1).tolist()[1:] == [-1, -1, -1]
    assert sorted(filled.packing.indices.tolist()) == list(range(7))
    assert np.diff(filled.packing.offsets).min() == 1


def test_open_limits_that_one_step_misses_grow_instead_of_the_micro_batches() -> None:
    """Eight samples of 300 tokens on two ranks: a pack of four holds 1,200."""
    samples = SampleTable.of(np.full(8, 1025), np.full(8, 300))
    options = PlanOptions(global_batch=8, schedule="1F1B", zero_stage=1, dp=2, pp=1, tp=1)
    dims, cluster = ParallelDims(dp=2), parse_cluster("2xH200")
    model = describe("Qwen2.5-VL-3B")
    setting = Setting(
        dims=dims,
        max_patches=4200,
        max_tokens=1199,
        num_microbatches=1,
        profile=profile_setting(model, cluster, options, dims),
    )

    def packed(given: PlanOptions, budget: MemoryBudget, max_tokens: int = 1199) -> Setting:
        own = replace(setting, max_tokens=max_tokens)
        return pack_case(model, open_epoch(model, samples, given), cluster, budget, own, given).setting

    budget = MemoryBudget.of(cluster, options)
    grown = packed(options, budget)
    assert (grown.num_microbatches, grown.max_patches, grown.max_tokens) == (1, 4242, 1211)  # 1 % more of each
    assert packed(options, budget, 1100).num_microbatches == 2  # 1,200 is above all of 5 % more
    assert packed(replace(options, max_tokens=1199), budget).num_microbatches == 2  # asked for
    assert packed(options, replace(budget, fill_bytes=1.0)).num_microbatches == 2  # larger packs do not fit
