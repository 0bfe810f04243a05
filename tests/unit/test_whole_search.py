"""The search over settings is whole: no forced option is faster than the automatic choice by more than 1 %."""

from dataclasses import replace

import numpy as np
import pytest

from trimtab import Lora, SampleTable, describe, make_plan, parse_cluster
from trimtab.errors import PartitionError, PlanError
from trimtab.plan.decide.case import MemoryBudget
from trimtab.plan.decide.members import list_members
from trimtab.plan.decide.search import choose_setting, price_members
from trimtab.plan.decide.setting import parallel_dims
from trimtab.plan.options import PlanOptions, VisionChoice

NAMES = ("Qwen2.5-VL-3B", "Qwen2.5-VL-7B", "InternVL2-8B", "LLaVA-OneVision-7B", "InternVL3-1B")
CLUSTERS = ("4xA100-80GB", "8xH100-80GB", "8xA100-80GB", "16xA100-80GB")
MOST = 1.01


def drawn_case(seed: int) -> tuple[str, SampleTable, str, PlanOptions]:
    """A model, long-tailed data, a cluster and a batch."""
    rng = np.random.default_rng(seed)
    count, spread = int(rng.integers(60, 400)), float(rng.uniform(0.2, 1.1))
    patches = 4 * np.round(np.exp(rng.normal(rng.uniform(4.0, 6.5), spread, count))).astype(np.int64)
    tokens = patches // 4 + np.round(np.exp(rng.normal(rng.uniform(4.0, 6.5), spread, count))).astype(np.int64) + 1
    batch = int(rng.choice([8, 16, 32, 64, 100, 128]))
    options = PlanOptions(
        global_batch=min(batch, count),
        fused_kernels=bool(rng.integers(2)),
        frozen_towers=("vision",) if rng.integers(3) == 0 else (),
        seed=seed,
    )
    return str(rng.choice(NAMES)), SampleTable.of(patches, tokens), str(rng.choice(CLUSTERS)), options


@pytest.mark.parametrize("seed", range(8))
def test_pruning_loses_less_than_one_per_cent(seed: int) -> None:
    """The whole space, every member priced."""
    compare_with_all(seed)


@pytest.mark.integration
@pytest.mark.parametrize("seed", range(8, 200))
def test_pruning_loses_less_than_one_per_cent_of_many(seed: int) -> None:
    compare_with_all(seed)


def compare_with_all(seed: int) -> None:
    name, samples, devices, options = drawn_case(seed)
    model, cluster = describe(name), parse_cluster(devices)
    budget = MemoryBudget.of(cluster, options)
    try:
        found = choose_setting(model, samples, cluster, options, budget)
    except PartitionError:
        found = None
    dims = list(parallel_dims(model, cluster, options, longest=int(samples.num_tokens.max())))
    members, _ = list_members(model, samples, cluster, options, budget, dims)
    priced, _ = price_members(members, model, cluster, budget, prune=False)
    if not priced:
        return
    assert found is not None
    assert priced[0].samples_per_s <= MOST * found.best.samples_per_s, (
        priced[0].estimate.label,
        priced[0].setting.num_microbatches,
        found.best.estimate.label,
    )


@pytest.mark.parametrize("seed", range(3))
def test_no_forced_option_makes_a_faster_plan(seed: int) -> None:
    name, samples, devices, options = drawn_case(seed)
    model, cluster = describe(name), parse_cluster(devices)
    auto = make_plan(model, samples, cluster, options).variants[-1].epoch_s
    forced = [{"zero_stage": 0}, {"zero_stage": 1}, {"zero_stage": 3}, {"tp": 2}, {"pp": 2}, {"pp": 1}, {"dp": 1}]
    for one in forced:
        try:
            other = make_plan(model, samples, cluster, replace(options, **one)).variants[-1].epoch_s
        except PartitionError:
            continue
        assert auto <= MOST * other, one


def test_sharing_images_is_never_worse_than_not_sharing() -> None:
    rng = np.random.default_rng(1)
    patches = 4 * np.round(np.exp(rng.normal(7.0, 1.0, 300))).astype(np.int64)
    samples = SampleTable.of(patches, patches // 4 + 100)
    model, cluster = describe("Qwen2.5-VL-7B"), parse_cluster("16xA100-80GB")
    off = make_plan(model, samples, cluster, PlanOptions(global_batch=64))
    auto = make_plan(model, samples, cluster, PlanOptions(global_batch=64, vision=VisionChoice(group="auto")))
    assert auto.variants[-1].epoch_s <= off.variants[-1].epoch_s * (1 + 1e-9)


BATCHES, DEVICES = (8, 16, 32, 64, 100, 256, 1000), (1, 2, 8, 24, 64, 512)


def steps_hold_what_was_asked(name: str, batch: int, devices: int) -> None:
    """Every step but the last; refused only where a rank would have no sample. One device or two train adapters."""
    rng = np.random.default_rng(batch * devices)
    patches = 4 * np.round(np.exp(rng.normal(5.5, 0.8, 2 * batch + 5))).astype(np.int64)
    samples = SampleTable.of(patches, patches // 4 + rng.integers(20, 2000, len(patches)))
    cluster = parse_cluster(f"{devices}xH200")
    try:
        options = PlanOptions(global_batch=batch, lora=Lora(r=16) if devices < 8 else None)
        made = make_plan(describe(name), samples, cluster, options)
    except (PartitionError, PlanError):
        assert devices > 128 * len(samples) or devices > 8 * 16 * batch, "tp 8 x pp 16 leave each rank a sample"
        return
    packing, table = made.packing, made.schedule.table
    held = np.append(np.diff(packing.offsets), 0)[table].sum(axis=(1, 2))
    assert held.tolist() == [batch, batch, 5]
    assert made.plan.decisions.parallel.dp <= batch


@pytest.mark.parametrize(
    ("name", "batch", "devices"),
    [("Qwen2.5-VL-3B", 8, 8), ("Qwen2.5-VL-7B", 100, 24), ("InternVL3-1B", 8, 512), ("InternVL2-8B", 1000, 1)],
)
def test_a_global_batch_is_exact(name: str, batch: int, devices: int) -> None:
    steps_hold_what_was_asked(name, batch, devices)


@pytest.mark.integration
@pytest.mark.parametrize("devices", DEVICES)
@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("name", NAMES)
def test_a_global_batch_is_exact_everywhere(name: str, batch: int, devices: int) -> None:
    steps_hold_what_was_asked(name, batch, devices)
