"""plan/decide/ (advice, case, compare, exchange, search, sharing, simplest, steps, work): rules as rows of tables."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cost_models import small_model
from vision_cases import QWEN, image_samples, table_of

from trimtab import Lora, ParallelDims, SampleTable, Schedule, parse_cluster, split_stages
from trimtab.balance.images import share_images, tower_bytes, tower_seconds
from trimtab.costs.profile import mean_seconds, profile_model
from trimtab.partition.published import even_stages
from trimtab.partition.simulate import StageTimes
from trimtab.plan.decide import advice
from trimtab.plan.decide.advice import describe_tie, explain_misfit, find_tips, possible_changes, tied_settings
from trimtab.plan.decide.case import Case, MemoryBudget, Setting, pack_case, pair_sentences, tower_cuts
from trimtab.plan.decide.compare import _balanced_stages, _baseline, _columns, _moved, compare_variants, explain_losses
from trimtab.plan.decide.epoch import open_epoch
from trimtab.plan.decide.exchange import image_sizes, pool_packs, price_exchange
from trimtab.plan.decide.members import (
    _filled_packs,
    _microbatch_counts,
    _schedules,
    _zero_stages,
    default_global_batch,
    list_members,
)
from trimtab.plan.decide.setting import ChosenSetting, Priced, profile_setting
from trimtab.plan.decide.sharing import share_vision
from trimtab.plan.decide.steps import (
    candidate_limits,
    even_steps,
    fill_epoch,
    fill_tried,
    group_tried,
    open_steps,
    refuse_over,
)
from trimtab.plan.decide.work import in_lockstep, limit_work, rank_step_s, steps_of
from trimtab.plan.options import PlanOptions, parse_baseline
from trimtab.plan.plan import SettingEstimate, TipEstimate, VisionDecision

MODEL, CLUSTER = small_model(), parse_cluster("8xA100-80GB")
ALIKE = SampleTable.of(np.full(100, 1000), np.full(100, 500))
TEXT = SampleTable.of(np.zeros(8), np.full(8, 500))


def dims_of(**degrees: int) -> ParallelDims:
    return ParallelDims(**degrees)


def case_of(options: PlanOptions, dims: ParallelDims, samples: SampleTable = ALIKE, **given: Any) -> Case:
    model, count = given.get("model", MODEL), given.get("num_microbatches", 4)
    profile = profile_setting(model, CLUSTER, options, dims)
    setting = Setting(
        dims=dims,
        max_patches=options.max_patches or int(4 * samples.num_patches.sum()),
        max_tokens=options.max_tokens or int(4 * samples.num_tokens.sum()),
        num_microbatches=count,
        profile=profile,
    )
    budget = MemoryBudget.of(CLUSTER, options)
    return pack_case(model, open_epoch(model, samples, options), CLUSTER, budget, setting, options)


# -- steps ----------------------------------------------------------------------------------------------------------

SIZES = (1, 1.5, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
LIMITS = [
    ({"max_patches": 7, "max_tokens": 9}, [(7, 9)]),
    ({"max_patches": 4000}, [(4000, 2080)]),  # four samples a pack, and 4 % room in tokens
    ({"max_tokens": 1000}, [(2000, 1000)]),
    ({}, [(math.ceil(x) * 1000, math.ceil(1.04 * x * 500)) for x in SIZES]),  # whole tiles of 1000 patches
]


@pytest.mark.parametrize(("options", "expected"), LIMITS)
def test_limits_grow_in_the_ratio_of_the_mean_sample(options, expected):
    assert list(candidate_limits(ALIKE.work(), PlanOptions(**options))) == expected


@pytest.mark.parametrize(
    ("oversize", "least"), [("error", (9000, 4000)), ("alone", (1000, 520)), ("skip", (1000, 520))]
)
def test_limits_hold_the_largest_sample_or_99_of_100(oversize, least):
    one_large = SampleTable.of(np.r_[np.full(299, 1000), 9000], np.r_[np.full(299, 500), 4000])
    first = next(candidate_limits(one_large.work(), PlanOptions(oversize=oversize)))
    assert first[0] in (least[0], 2000)
    assert least[1] <= first[1] <= 1.1 * least[1]


@pytest.mark.parametrize(
    ("batch", "dp", "per_pack", "is_refused"),
    [(None, 64, 100.0, False), (100, 4, 31.25, False), (100, 4, 31.5, True), (100, 8, 15.6, False), (100, 8, 16, True)],
)
def test_filled_packs_hold_at_most_a_quarter_more_than_the_batch(batch, dp, per_pack, is_refused):
    error = refuse_over(PlanOptions(global_batch=batch, steps="filled"), dims_of(dp=dp), per_pack)
    assert (error is not None) == is_refused


@pytest.mark.parametrize(
    ("rows", "M", "steps"), [(8, 4, [4, 4]), (9, 4, [5, 4]), (11, 4, [4, 4, 3]), (1, 4, [1]), (6, 4, [3, 3])]
)
def test_rows_are_cut_into_steps_of_equal_length(rows, M, steps):
    table = np.full((-(-rows // M) * M,), -1)
    table[:rows] = np.arange(rows)
    made = even_steps(Schedule(table=table.reshape(-1, 1, M)), M)
    assert [int((x >= 0).sum()) for x in made.table] == steps


def test_few_filled_packs_run_several_times_in_a_tried_step():
    tried = open_steps(ALIKE, PlanOptions(steps="filled"), global_batch=8, cost=np.ones(100), token_window=None)
    per_pack, packed, extremes = list(fill_tried(tried, dims_of()))[-1]
    made = group_tried(tried, packed, extremes, dims_of(dp=4), 5)
    packs = packed.packing.num_packs
    assert made.packed.schedule.table.shape == (1, 4, 5)
    often = np.bincount(made.packed.schedule.table.reshape(-1))
    assert (len(often), int(np.ptp(often))) == (packs, 1)
    assert made.samples_per_step == pytest.approx(per_pack * 20)
    assert made.mean_work[4] == pytest.approx(500 * per_pack, rel=0.02)
    by_rank = np.asarray(packed.packing.sums(np.ones(100)))[made.packed.schedule.table].sum(axis=2)
    assert made.slowest_over_mean == pytest.approx(by_rank.max() / by_rank.mean())


@pytest.mark.parametrize(("asked", "steps"), [({}, [5, 4]), ({"num_microbatches": 4}, [4, 4, 1])])
def test_steps_of_filled_packs_are_even_where_their_number_was_left_open(asked, steps):
    options = PlanOptions(steps="filled", **asked)
    nine = SampleTable.of(np.full(9, 1000), np.full(9, 500))
    packed = fill_epoch(nine, options, dims_of(), num_microbatches=4, limits=(1000, 500), cost=np.ones(9))
    assert [int((x >= 0).sum()) for x in packed.schedule.table] == steps


# -- the space ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "dims", "batch", "expected"),
    [
        ({"num_microbatches": 7}, {"dp": 2}, 8, [7]),
        ({"schedule": "1F1B"}, {"dp": 2}, 16, [1, 2, 3, 4, 6, 8]),
        ({"schedule": "1F1B"}, {"dp": 2}, 11, [1, 2, 3, 4, 5, 6]),  # one for each sample of the fullest rank
        ({"schedule": "GPipe"}, {"dp": 1, "pp": 4}, 5, [1, 2, 3, 4, 5]),
        ({"schedule": "1F1B", "fills_pipeline": True}, {"dp": 1, "pp": 4}, 9, [4, 6, 8, 9]),
        ({"schedule": "Interleaved1F1B", "num_chunks": 2}, {"dp": 1, "pp": 4}, 13, [4, 8, 12]),
        ({"schedule": "ZBVZeroBubble", "num_chunks": 2}, {"dp": 1, "pp": 4}, 7, [4, 6, 7]),
    ],
)
def test_packs_a_rank_and_step_that_are_tried(options, dims, batch, expected):
    assert _microbatch_counts(PlanOptions(**options), dims_of(**dims), batch) == expected


@pytest.mark.parametrize(
    ("options", "dims", "stages"),
    [
        ({"zero_stage": 0}, {"dp": 4}, (0,)),
        ({}, {"dp": 4}, (1, 2, 3)),
        ({}, {"dp": 4, "pp": 2}, (1, 3)),  # ZeRO-2 would exchange gradients once a micro-batch
        ({}, {"cp": 4}, (1, 2, 3)),
        ({}, {"tp": 4}, (1,)),
        ({"zero_stages": (0, 1)}, {"dp": 4}, (1,)),
        ({"zero_stages": (0,)}, {"dp": 4}, (0,)),
        ({"zero_stages": (2,)}, {"dp": 4, "pp": 2}, (2,)),
        ({"zero_stages": (0, 3)}, {"dp": 4}, (0, 3)),
    ],
)
def test_zero_stages_that_are_tried(options, dims, stages):
    assert _zero_stages(PlanOptions(**options), dims_of(**dims)) == stages


@pytest.mark.parametrize(
    ("options", "pp", "expected"),
    [
        ({"schedule": "ZBH1"}, 4, [("ZBH1", 1)]),
        ({"schedule": "Interleaved1F1B", "num_chunks": 3}, 4, [("Interleaved1F1B", 3)]),
        ({}, 1, [("1F1B", 1)]),
        ({}, 4, [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)]),
        ({"schedules": ("GPipe",)}, 4, [("GPipe", 1)]),
    ],
)
def test_schedules_that_are_tried(options, pp, expected):
    assert list(_schedules(PlanOptions(**options), dims_of(pp=pp))) == expected


@pytest.mark.parametrize(
    ("batch", "devices", "samples", "expected"),
    [(100, 8, 50, 100), (None, 8, 9999, 256), (None, 32, 9999, 256), (None, 64, 9999, 512), (None, 64, 300, 300)],
)
def test_the_batch_is_256_or_8_a_device_up_to_the_data(batch, devices, samples, expected):
    assert default_global_batch(parse_cluster(f"{devices}xH200"), PlanOptions(global_batch=batch), samples) == expected


def test_members_are_the_divisions_that_model_and_batch_allow():
    def members(*dims: ParallelDims, **options: object):
        own = PlanOptions(**{"global_batch": 8, **options})
        budget = MemoryBudget.of(CLUSTER, own)
        found, refused = list_members(MODEL, ALIKE, CLUSTER, own, budget, dims)
        kinds = {(x.profile.dims.pp, x.options.sharding, x.options.schedule, x.options.num_chunks) for x in found}
        return kinds, [x.dims for x in refused]

    assert members(dims_of(dp=16)) == (set(), [dims_of(dp=16)])  # a rank without a sample
    assert members(dims_of(pp=8)) == (set(), [])  # seven blocks
    assert members(dims_of(dp=2, pp=4))[0] == {
        (4, stage, name, 1) for stage in (1, 3) for name in ("1F1B", "GPipe")
    }  # two chunks on four stages are more than seven blocks
    chunked = members(dims_of(dp=4, pp=2), zero_stage=1)[0]
    assert {("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)} < {x[2:] for x in chunked}
    assert members(dims_of(dp=4, pp=2), zero_stage=2) == (set(), [dims_of(dp=4, pp=2)])


@pytest.mark.parametrize(
    ("schedule", "chunks", "P"),
    [("1F1B", 1, 1), ("1F1B", 1, 2), ("GPipe", 1, 2), ("ZBVZeroBubble", 2, 2), ("Interleaved1F1B", 2, 2)],
)
@pytest.mark.parametrize("M", [1, 2, 8])
def test_a_members_bound_is_the_formula(schedule, chunks, P, M):
    options = PlanOptions(schedule=schedule, num_chunks=chunks, zero_stage=1, global_batch=16, num_microbatches=M)
    dims = dims_of(dp=2, pp=P)
    budget = MemoryBudget.of(CLUSTER, options)
    try:
        (member,) = list_members(MODEL, ALIKE, CLUSTER, options, budget, [dims])[0]
    except ValueError:  # fewer micro-batches than this schedule runs
        assert M < P
        return
    packs, M = member.packs, member.packs.num_microbatches
    T = float(sum(mean_seconds(member.profile, packs.mean_work)).sum())
    S = sum(x.step_s for x in member.profile.layers) / P
    u, even = packs.slowest_over_mean, T * M / P
    in_turn = T / (1 - (1 - 1 / M) ** P)
    if schedule in ("1F1B", "GPipe"):
        expected = u * in_turn + S
    elif schedule == "Interleaved1F1B":
        expected = max(u * (even + (in_turn - even) / chunks), T) + S
    else:
        expected = max(u * even, T * 2 / 3) + S
    assert member.bound_s(slowest_over_mean=u) == pytest.approx(expected / packs.samples_per_step)
    assert member.bound_s() <= member.bound_s(slowest_over_mean=u)
    assert member.bound_s(again=0.1) > member.bound_s()


def test_filled_packs_end_where_steps_would_be_larger_than_others():
    options = PlanOptions(steps="filled", schedule="1F1B", zero_stage=1)
    tried = open_steps(ALIKE, options, global_batch=16, cost=np.ones(100), token_window=None)
    made = list(fill_tried(tried, dims_of(dp=4)))
    packs = list(_filled_packs(options, dims_of(dp=4), tried, made, 16))
    assert 1 < len(packs) < len(made)
    assert all(x.samples_per_step <= 1.25 * 16 for x in packs)
    largest = list(_filled_packs(replace(options, num_microbatches=3), dims_of(dp=4), tried, made, 16))
    assert {x.num_microbatches for x in largest} == {3}
    assert len(largest) == len(made)  # as many as were asked for


# -- the choice -----------------------------------------------------------------------------------------------------


def priced(speed: float, *, schedule: str = "1F1B", zero_stage: int = 1, **degrees: int) -> Priced:
    dims = dims_of(**degrees)
    setting = Setting(
        dims=dims, max_patches=1, max_tokens=1, num_microbatches=4, profile=profile_model(MODEL, CLUSTER.device)
    )
    options = PlanOptions(schedule=schedule, zero_stage=zero_stage)
    return Priced(setting=setting, options=options, step_s=1.0, samples_per_s=speed, peak_bytes=2.0**30)


def test_ties_are_other_divisions_within_5_percent():
    best, near, far = priced(100.0, dp=8), priced(95.5, dp=4, tp=2), priced(94.0, dp=4, pp=2)
    same, third, fourth = priced(99.0, dp=8, zero_stage=3), priced(97.0, dp=2, tp=4), priced(96.0, tp=8)
    assert tied_settings(ChosenSetting(considered=(best, near, far), num_misfits=0)) == (best, near)
    assert tied_settings(ChosenSetting(considered=(best, same), num_misfits=0)) == (best,)
    assert tied_settings(ChosenSetting(considered=(best, third, fourth, near), num_misfits=0)) == (best, third, fourth)
    assert describe_tie((best,), ()) == ()
    label = near.estimate.label
    first, last = describe_tie((best, near), (TipEstimate(changed="half the batch", fastest=label, ahead=0.021),))
    assert best.estimate.label in first
    assert label in first
    assert "half the batch" in last
    assert "2.1" in last
    mine = (TipEstimate(changed="half the batch", fastest=best.estimate.label, ahead=0.1),)
    assert "half the batch" not in describe_tie((best, near), mine)[1]


def test_settings_that_do_not_fit_are_counted():
    plain = priced(50.0, dp=8)
    assert ChosenSetting(considered=(plain,), num_misfits=0).sentences() == ()
    (counted,) = ChosenSetting(considered=(plain,), num_misfits=3).sentences()
    assert "3" in counted


def test_a_setting_that_won_on_the_epochs_own_steps_is_not_called_the_simplest():
    fast, slow = priced(100.0, dp=8), priced(98.0, dp=4, pp=2)
    near, other = (ChosenSetting(considered=(fast, slow), num_misfits=0, taken=x).sentences()[0] for x in (fast, slow))
    assert near.partition(": of")[2] != other.partition(": of")[2]
    assert "1 %" not in other


def test_the_fastest_and_one_of_each_kind_are_listed():
    many = [priced(100.0 - i, dp=8) for i in range(8)]
    slow = priced(10.0, dp=4, pp=2)
    listed = ChosenSetting(considered=(*many, slow), num_misfits=0).listed
    assert [x.samples_per_s for x in listed] == [100.0, 99.0, 98.0, 97.0, 96.0, 95.0, 10.0]
    assert ChosenSetting(considered=(slow,), num_misfits=0).listed == ()


# -- advice ---------------------------------------------------------------------------------------------------------

LEFT, MORE = ["--set optimizer=adamw_8bit", "--lora r=16", "--lora r=16,bits=4"], ["16 devices", "32 devices"]
HALF = "images of half the size"
CHANGES = [
    ({}, ALIKE, [*LEFT, HALF, *MORE]),
    ({}, TEXT, [*LEFT, *MORE]),
    ({"zero_stage": 2}, TEXT, ["--zero-stage 3", *LEFT, *MORE]),
    ({"zero_stage": 3}, TEXT, [*LEFT, *MORE]),
    ({"recompute": "none"}, TEXT, ["--recompute auto", *LEFT, *MORE]),
    ({"dp": 4, "tp": 2}, TEXT, ["leave --dp, --tp open", *LEFT, *MORE]),
    ({"optimizer": "sgd"}, TEXT, [*LEFT[1:], *MORE]),
    ({"lora": Lora(r=8)}, TEXT, ["--lora r=8,bits=4", *MORE]),
    ({"lora": Lora(r=8, bits=4)}, TEXT, MORE),
    ({"frozen_towers": ("language",)}, TEXT, [LEFT[0], *MORE]),
    ({"tp_degrees": (1,), "zero_stage": 1}, TEXT, MORE),  # a framework has no other
]


@pytest.mark.parametrize(("options", "samples", "expected"), CHANGES)
def test_changes_that_are_tried_the_cheapest_first(options, samples, expected):
    found = list(possible_changes(samples, CLUSTER, PlanOptions(**options)))
    assert [x.said for x in found] == expected
    assert [x.cluster.num_devices for x in found[-2:]] == [16, 32]
    assert [x.options.dp for x in found[-2:]] == [8, 16] if "dp" in options else [None, None]


@pytest.mark.parametrize("asked", [{"max_tokens": 10_000}, {"max_patches": 10_000}, {"num_microbatches": 4}])
def test_limits_that_were_asked_for_may_be_left_open(asked):
    first = next(iter(possible_changes(TEXT, CLUSTER, PlanOptions(**asked))))
    assert (first.options.max_tokens, first.options.max_patches, first.options.num_microbatches) == (None,) * 3


def test_images_of_half_the_size_have_a_quarter_of_the_pairs():
    found = {x.said: x for x in possible_changes(ALIKE, CLUSTER, PlanOptions())}[HALF].samples
    assert found.num_patches.tolist() == [500] * 100
    assert found.patches_sq.tolist() == [1000 * 1000 // 4] * 100
    assert found.num_tokens.tolist() == [500 - 500 // 4] * 100


def test_a_misfit_names_the_setting_that_needs_least():
    options = PlanOptions(global_batch=8, schedule="1F1B", zero_stage=3)
    budget = replace(MemoryBudget.of(CLUSTER, options), fill_bytes=1e6)
    said = explain_misfit(MODEL, ALIKE, CLUSTER, options, budget)
    assert "ZeRO-3" in said
    assert "No single change" in said or "first:" in said


def test_tips_are_tried_at_half_and_twice_the_batch(monkeypatch):
    batches = []
    choose = advice.choose_setting

    def noted(model, samples, cluster, options, budget):
        batches.append(options.global_batch)
        return choose(model, samples, cluster, options, budget)

    monkeypatch.setattr(advice, "choose_setting", noted)
    tied = (priced(100.0, dp=8), priced(99.0, dp=4, tp=2))
    options = PlanOptions(global_batch=32, schedule="1F1B", zero_stage=1)
    two_nodes = parse_cluster("8xA100-80GB", devices_per_node=4)
    labels = {x.estimate.label for x in tied}
    for cluster, batch, expected in (
        (CLUSTER, 32, ["fused kernels", "half the batch", "twice the batch"]),
        (CLUSTER, 64, ["fused kernels", "half the batch"]),  # 128 samples are more than there are
        (two_nodes, 32, ["fused kernels", "half the network", "half the batch", "twice the batch"]),
    ):
        found = find_tips(MODEL, ALIKE, cluster, replace(options, global_batch=batch), tied)
        assert [x.changed for x in found] == expected
        assert {x.fastest for x in found} <= labels
        assert all(x.ahead >= 0 for x in found)
        assert sorted({*batches}) == [x for x in (batch // 2, batch, 2 * batch) if x <= 100]
        batches.clear()


# -- the comparison -------------------------------------------------------------------------------------------------


def estimate_of(**given: object) -> SettingEstimate:
    degrees = {"dp": 1, "pp": 1, "tp": 1, "zero_stage": 1, "schedule": "1F1B", "num_chunks": 1, "num_microbatches": 1}
    rest = {"kind": "", "step_ms": 1.0, "samples_per_s": 1.0, "peak_memory_gib": 1.0}
    return SettingEstimate(**{**degrees, **rest, **given})  # type: ignore[arg-type]


def test_a_baseline_on_other_degrees_is_taken_where_it_is_faster():
    options = PlanOptions(global_batch=32, schedule="1F1B", zero_stage=1, pp=4)
    case = case_of(options, dims_of(dp=2, pp=4))
    stages = split_stages(case.problem).stages
    alone = compare_variants(case, stages)
    assert alone[0].name == "baseline"
    for elsewhere, is_moved in ((estimate_of(dp=8), True), (estimate_of(dp=2, pp=4), False)):
        rows = compare_variants(case, stages, elsewhere=[elsewhere])
        assert (rows[1].name == "the plan's degrees") == is_moved
        assert rows[0].epoch_s <= alone[0].epoch_s
        if is_moved:
            assert rows[0].epoch_s < rows[1].epoch_s == alone[0].epoch_s


@pytest.mark.parametrize(
    ("to", "count"),
    [
        ({"dp": 8}, 1),
        ({"dp": 4, "pp": 2}, 2),
        ({"dp": 1, "pp": 8}, 8),
        ({"dp": 4, "pp": 2, "schedule": "Interleaved1F1B", "num_chunks": 2}, 2),
        ({"dp": 2, "pp": 4, "schedule": "Interleaved1F1B", "num_chunks": 2, "zero_stage": 3}, 4),
        ({"dp": 1, "pp": 3, "schedule": "Interleaved1F1B", "num_chunks": 2}, 9),  # whole rounds of the pipeline
    ],
)
def test_a_run_on_other_degrees_holds_as_many_samples_a_step(to, count):
    case = case_of(PlanOptions(global_batch=32, schedule="1F1B", zero_stage=1), dims_of(dp=2, pp=4))
    asked = estimate_of(**to)
    moved = _moved(case, asked)
    assert moved.setting.num_microbatches == count
    assert (moved.setting.dims.dp, moved.setting.dims.pp) == (asked.dp, asked.pp)
    assert (moved.options.schedule, moved.options.zero_stage) == (asked.schedule, asked.zero_stage)
    assert moved.setting.profile.dims == moved.setting.dims


def test_a_baseline_holds_what_the_plan_packs_in_batches_as_asked():
    sizes = np.where(np.arange(100) % 10 == 0, 9000, 500)
    options = PlanOptions(
        global_batch=30, schedule="1F1B", zero_stage=1, oversize="skip", max_tokens=8000, max_patches=100_000
    )
    case = case_of(options, dims_of(dp=2), SampleTable.of(np.full(100, 1000), sizes))
    balanced = _balanced_stages(case, None)
    assert balanced.rules == ("balanced", "none")  # all fits, and recompute would be slower
    run = _baseline(case, parse_baseline("random,batch=2"), balanced)
    assert run.work[:, 4].sum() == 90 * 500
    assert _baseline(case, parse_baseline("random,batch=2,padded"), balanced).work[:, 1].max() == 2000


def test_a_row_that_is_slower_is_explained():
    case = case_of(PlanOptions(global_batch=32, schedule="1F1B", zero_stage=1), dims_of(dp=8))
    rows = compare_variants(case, split_stages(case.problem).stages)
    slower = replace(rows[1], step_s=1.006 * rows[0].step_s)
    assert len(explain_losses([rows[0], slower])) == 1
    assert explain_losses([rows[0], replace(slower, step_s=1.004 * rows[0].step_s)]) == ()
    assert explain_losses([replace(rows[0], name="other baseline"), slower]) == ()


def test_under_zero_3_every_rank_waits_for_the_slowest_in_each_tower():
    samples = image_samples(96, seed=5)
    case = case_of(PlanOptions(global_batch=24, zero_stage=3, schedule="1F1B", host="none"), dims_of(dp=4), samples)
    stages, table, work = even_stages(case.setting.profile, 1), case.schedule.table, case.work
    found = steps_of(work, table, stages, case.problem, CLUSTER)
    # by hand: of each micro-batch the longest tower of any rank, then the longest language model of any rank
    layers, expected = case.setting.profile.layers, np.zeros(len(table))
    seconds = {
        tower: sum(np.array(x.forward_s) + np.array(x.backward_s) for x in layers if (x.tower == "language") == tower)
        for tower in (False, True)
    }
    for step, ranks in enumerate(table):
        for microbatch in ranks.T:
            packs = work[microbatch[microbatch >= 0]]
            images, texts = packs.copy(), packs.copy()
            images[:, 4:] = texts[:, 1:4] = 0.0
            expected[step] += (images @ seconds[False]).max(initial=0) + (texts @ seconds[True]).max(initial=0)
    assert found == pytest.approx(expected + rank_step_s(case.problem, stages))
    alone = steps_of(work, table, stages, replace(case.problem, lockstep=False), CLUSTER)
    assert (found >= alone).all()
    assert (found > alone).any()


def test_a_slot_that_no_rank_fills_stays_empty():
    case = case_of(PlanOptions(global_batch=24, zero_stage=3), dims_of(dp=4), image_samples(24, seed=5))
    table = np.array([[[0, 1, -1], [2, -1, -1]]])
    work, slots = in_lockstep(case.work, table, case.setting.profile)
    assert slots.tolist() == [[[0, 1, -1]]]
    np.testing.assert_array_equal(work[1], case.work[1])


def test_an_empty_slot_takes_no_time():
    ones = np.ones((2, 3))
    times = StageTimes(
        forward_s=ones, backward_s=2 * ones, weight_s=3 * ones, send_forward_s=4 * ones, send_backward_s=5 * ones
    )
    found = _columns(times, np.array([2, -1]))
    for name, one in zip(("forward", "backward", "weight", "send_forward", "send_backward"), range(1, 6), strict=True):
        assert getattr(found, f"{name}_s").tolist() == [[one, 0], [one, 0]]


@pytest.mark.parametrize(("attention", "pairs"), [("flash", 2 * 500**2), ("sdpa", 1000**2), ("eager", 1000**2)])
def test_scores_and_masks_of_a_pack_are_those_of_one_long_sample(attention, pairs):
    options = PlanOptions(attention=attention, global_batch=8, schedule="1F1B", zero_stage=1)
    case = case_of(replace(options, max_tokens=1000, max_patches=2000), dims_of(), num_microbatches=4)
    assert case.work[:, 5].max() == case.held_work[:, 5].max() == pairs
    assert case.problem.work_max[5] == pairs


@pytest.mark.parametrize(("attention", "num_sentences"), [("flash", 0), ("sdpa", 1)])
def test_a_plan_says_what_pairs_between_the_samples_of_packs_take(attention, num_sentences):
    options = PlanOptions(attention=attention, global_batch=64, schedule="1F1B", zero_stage=1)
    case = case_of(replace(options, max_tokens=32_000, max_patches=64_000), dims_of(), num_microbatches=1)
    assert len(pair_sentences(case)) == num_sentences


# -- shared images --------------------------------------------------------------------------------------------------


def shared_case(**given: object) -> tuple[Case, Case]:
    """A case of Qwen2.5-VL whose images are shared as decided, and the case without."""
    rule = {"group": "tp", "degree": 4, "pooling": 1, "exchange": "gather", "objective": "time", "rule": "balanced"}
    rule["reduction"] = "mean" if given.get("group", "tp") == "tp" else None
    decision = VisionDecision(**{**rule, **given})  # type: ignore[arg-type]
    options = PlanOptions(schedule="1F1B", zero_stage=1, global_batch=32)
    degrees = dims_of(dp=2, tp=4) if decision.group == "tp" else dims_of(dp=4, tp=2)
    case = case_of(options, degrees, image_samples(64, most=8, largest=2048), model=QWEN)
    return share_vision(case, decision), case


@pytest.mark.parametrize("objective", ["time", "memory"])
def test_time_is_that_of_the_slowest_share_and_memory_that_of_the_largest_term_by_term(objective):
    found, plain = shared_case(objective=objective)
    assert found.vision is not None
    time = tower_seconds(found.setting.profile)
    weight = time if objective == "time" else tower_bytes(found.setting.profile)
    sizes, differ = image_sizes(plain.samples, QWEN), 0
    for pack in range(plain.packing.num_packs):
        atoms = sizes.atoms_of(plain.packing.indices[plain.packing.offsets[pack] : plain.packing.offsets[pack + 1]])
        shares = share_images(weight.of_images(atoms), 4, rule="balanced")
        parts = np.array([atoms[shares.atoms_of(rank)].sum(axis=0) for rank in range(4)])
        slowest, largest = parts[time.of_images(parts).argmax()], parts.max(axis=0)
        np.testing.assert_allclose(found.work[pack, 1:4], slowest)
        np.testing.assert_allclose(found.vision.held[pack, 1:4], largest)
        differ += not np.allclose(slowest, largest)
    assert differ
    np.testing.assert_array_equal(found.vision.work, plain.work)
    np.testing.assert_array_equal(found.vision.held[:, 4:], plain.work[:, 4:])
    limits = (plain.setting.max_patches, plain.setting.max_tokens)
    margin = limit_work(plain.work, *limits)[1:4] / plain.work[:, 1:4].max(axis=0)
    np.testing.assert_allclose(found.vision.largest, found.vision.held[:, 1:4].max(axis=0) * np.maximum(margin, 1.0))
    np.testing.assert_allclose(found.problem.work_max[1:4], found.vision.largest)


def test_no_cut_lies_in_front_of_the_last_layer_of_what_is_shared():
    assert tower_cuts(MODEL) == {1, 2, 3, 4}  # patches, three blocks, projector
    language = replace(MODEL, layers=tuple(x for x in MODEL.layers if x.tower == "language"))
    assert tower_cuts(language) == frozenset()


def test_a_dispatch_sends_the_pixels_of_images_that_move_and_their_rows_back():
    """Four equal images on one of four ranks: three of them move."""
    images = table_of([np.full(4, 400), *[np.array([], np.int64)] * 3], np.random.default_rng(0))
    options = PlanOptions(schedule="1F1B", zero_stage=1, global_batch=4)
    case = case_of(options, dims_of(dp=4, tp=2), images, model=QWEN, num_microbatches=1)
    rule = {"group": "dp", "degree": 4, "pooling": 1, "exchange": "dispatch", "objective": "time", "rule": "balanced"}
    decision = VisionDecision(**rule, reduction=None)
    sizes, pools = image_sizes(case.samples, QWEN), pool_packs(case.schedule.table, decision)
    assert pools.shape == (1, 4)
    row, pixel = 3584 / 4 * 2, 3 * 2 * 14 * 14 * 4  # bytes of a patch: bf16 features, fp32 pixels of two frames
    for frozen, back in (((), 1), (("vision", "projector"), 0)):
        own = replace(case, options=replace(case.options, frozen_towers=frozen))
        found = price_exchange(own, decision, sizes, pools, margin=1.5)
        assert found.received_bytes == pytest.approx(1600 / 4 * 3 / 4 * ((1 + back) * row + pixel))
        assert found.rows_sent == pytest.approx(1600 / 4 * row)
        assert found.largest_rows == pytest.approx(1600 * row * 1.5)
        seconds = 1600 / 4 * 3 / 4 * (row + pixel) / (CLUSTER.device.link_bytes_per_s * 0.8)
        assert found.forward_s == pytest.approx(seconds + 2 * CLUSTER.latency_s)
        assert (found.backward_s > 0) == bool(back)
    shared = share_vision(case, decision)
    assert shared.vision is not None
    assert [x.tower_ms > 0 for x in shared.vision.estimate.ranks] == [True] * 4
    assert shared.work[:, 1].sum() == pytest.approx(4 * 400)
