"""Recompute in a share of the micro-batches: the law it stands on, the least choice, what a plan says of it."""

from __future__ import annotations

import itertools
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_cases import ONE, layer, profile_of, random_profile, with_tables
from plan_cases import tile_samples

from trimtab.adapters.running import cost_of_running, export_plan
from trimtab.adapters.targets import TARGETS
from trimtab.costs.devices import parse_cluster
from trimtab.errors import PartitionError, PlanError, TrimtabError
from trimtab.models.describe import describe
from trimtab.partition.assess import assess_stages
from trimtab.partition.microbatch_share import share_microbatches
from trimtab.partition.schedules import BACKWARD, FORWARD, block_order, peak_in_flight
from trimtab.partition.stages import SplitProblem, recompute_stages
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.check import check_plan
from trimtab.plan.options import PlanOptions
from trimtab.plan.plan import RecomputeDecision
from trimtab.plan.reload import load_details, reload_plan
from trimtab.report.words import describe_recompute
from trimtab.specs import MicrobatchShare, RecomputeChoice, Stage

# -- the law ----------------------------------------------------------------------------------------------------------


@given(of=st.integers(2, 12), data=st.data(), start=st.integers(0, 40), count=st.integers(0, 60))
@settings(max_examples=200, deadline=None)
def test_of_any_so_many_micro_batches_in_a_row_exactly_the_share_is_included(of, data, start, count):
    share = MicrobatchShare(num=data.draw(st.integers(1, of - 1)), of=of)
    assert sum(share.includes(i) for i in range(start, start + of)) == share.num
    assert sum(share.includes(i) for i in range(count)) == share.least_of(count)
    assert sum(share.includes(i) for i in range(start, start + count)) >= share.least_of(count)
    assert share.least_of(count) * of <= share.num * count  # never more time than num / of


@pytest.mark.parametrize("schedule", ["1F1B", "GPipe"])
@pytest.mark.parametrize(("P", "M"), [(2, 2), (3, 7), (4, 4), (4, 13), (5, 3)])
def test_the_peak_of_a_schedule_is_what_assess_says(schedule, P, M):
    """Every stage and share, by replaying what each block allocates and frees."""
    whole, less = 100.0, 30.0
    order = block_order(schedule, num_devices=P, num_microbatches=M)
    profile = profile_of([layer(i, saved=((0, whole), (1.0, less))) for i in range(P)])
    held = peak_in_flight(schedule, num_devices=P, num_microbatches=M)
    for s, of in itertools.product(range(P), range(2, 7)):
        for num in range(1, of):
            share = MicrobatchShare(num=num, of=of)
            live = peak = 0.0
            for microbatch, kind in zip(order.microbatch[s], order.kind[s], strict=True):
                size = less if share.includes(int(microbatch)) else whole
                live += {FORWARD: size, BACKWARD: -size}[int(kind)]
                peak = max(peak, live)
            choice = (RecomputeChoice(tier="full", layers=(s,), share=share),)
            stages = [Stage(index=i, start=i, stop=i + 1, recompute=choice if i == s else ()) for i in range(P)]
            result = assess_stages(profile, stages, work_mean=ONE, work_max=ONE, num_microbatches=M, schedule=schedule)
            saved = result.memory[s].saved_bytes
            assert peak <= saved + 1e-9
            # exact where the share's window is what the stage holds, as the planner chooses it
            if of == held[s]:
                assert saved == pytest.approx(peak)
                assert saved == pytest.approx(num * less + (of - num) * whole)
            assert result.recompute_s[s] == pytest.approx(num / of)


def test_where_micro_batches_are_held_out_of_order_a_share_frees_nothing():
    profile = profile_of([layer(i, saved=((0, 100.0), (1.0, 30.0))) for i in range(4)])
    choice = (RecomputeChoice(tier="full", layers=(0,), share=MicrobatchShare(num=1, of=2)),)
    for schedule, chunks in (("ZBH1", 1), ("Interleaved1F1B", 2)):
        memory = []
        for recompute in (choice, ()):
            stages = [Stage(index=i, start=i, stop=i + 1, recompute=recompute if i == 0 else ()) for i in range(4)]
            result = assess_stages(
                profile,
                stages,
                work_mean=ONE,
                work_max=ONE,
                num_microbatches=4,
                schedule=schedule,
                num_chunks=chunks,
            )
            memory.append(result.memory[0].saved_bytes)
        assert memory[0] == memory[1]


# -- the choice -------------------------------------------------------------------------------------------------------


def least_time(problem: SplitProblem, stage: Stage, k: int) -> float:
    """By complete enumeration of every layer's tier and at most one layer's share; infinite if nothing fits."""
    tiers = [[t.name for t in problem.profile.layers[i].tiers] for i in range(stage.start, stage.stop)]
    best = np.inf
    shares = [None, *(MicrobatchShare(num=m, of=k) for m in range(1, k))]
    for names in itertools.product(*tiers):
        for part, share in itertools.product(range(len(names)), shares):
            if share is None and part > 0:
                continue
            choices = tuple(
                RecomputeChoice(tier=name, layers=(stage.start + j,), share=share if j == part else None)
                for j, name in enumerate(names)
                if name != "none"
            )
            if share is not None and names[part] in ("none", "offload"):
                continue
            whole = [replace(stage, recompute=choices)]
            # stage 0 of k stages holds k micro-batches; the others hold nothing
            memory = assess_stages(
                problem.profile,
                whole,
                work_mean=ONE,
                work_max=ONE,
                num_microbatches=k,
                schedule="GPipe",
            )
            if memory.memory[0].total_bytes <= problem.memory_bytes:
                best = min(best, memory.recompute_s[0])
    return best


def test_the_choice_is_the_least_of_all_with_one_layer_in_part():
    rng = np.random.default_rng(3)
    finer = num_infeasible = 0
    for _ in range(40):
        profile = random_profile(rng, int(rng.integers(2, 4)), 3, num_tiers=3, offload=bool(rng.random() < 0.4))
        k = int(rng.integers(2, 5))
        free = assess_stages(
            profile,
            [Stage(index=0, start=0, stop=len(profile.layers))],
            work_mean=ONE,
            work_max=ONE,
            num_microbatches=k,
            schedule="GPipe",
        )
        problem = SplitProblem(
            profile=profile,
            num_stages=1,
            work_mean=ONE,
            work_max=ONE,
            memory_bytes=float(int(rng.uniform(0.4, 1.0) * free.memory[0].total_bytes)) + 1.0,
            num_microbatches=k,
            schedule="GPipe",
        )
        stage = Stage(index=0, start=0, stop=len(profile.layers))
        expected = least_time(problem, stage, k)
        if expected == np.inf:
            num_infeasible += 1
            with pytest.raises(PartitionError, match="does not fit the memory, whatever it recomputes: cut the model"):
                share_microbatches(problem, [stage])
            continue
        result = share_microbatches(problem, [stage])
        assert result.recompute_s[0] == pytest.approx(expected, abs=1e-9)
        assert result.memory[0].total_bytes <= problem.memory_bytes
        try:
            whole = recompute_stages(problem, [stage])
        except PartitionError:
            continue
        assert result.recompute_s[0] <= whole.recompute_s[0] + 1e-9
        finer += result.recompute_s[0] < whole.recompute_s[0] - 1e-9
    assert finer > 5
    assert num_infeasible < 30


def test_tables_that_a_stage_enters_with_are_held_by_every_micro_batch():
    rng = np.random.default_rng(5)
    finer = 0
    for _ in range(60):
        profile = with_tables(random_profile(rng, 6, 3, num_tiers=3), rng)
        stages = [Stage(index=0, start=0, stop=3), Stage(index=1, start=3, stop=6)]
        given = {"profile": profile, "num_stages": 2, "work_mean": ONE, "work_max": ONE, "schedule": "GPipe"}
        free = SplitProblem(memory_bytes=1e15, num_microbatches=4, **given).assess(stages)
        cap = float(int(rng.uniform(0.5, 1.0) * max(x.total_bytes for x in free.memory))) + 1.0
        problem = SplitProblem(memory_bytes=cap, num_microbatches=4, **given)
        try:
            result = share_microbatches(problem, stages)
        except PartitionError:
            continue
        assert max(x.total_bytes for x in result.memory) <= cap
        finer += any(choice.share is not None for stage in result.stages for choice in stage.recompute)
    assert finer > 5


def test_a_stage_in_part_may_fit_where_whole_layers_do_not():
    # one micro-batch recomputed frees 90, two free 180: 110 are asked for, and whole layers would take three seconds
    profile = profile_of([layer(0, saved=((0, 100.0), (3.0, 10.0)))])
    ask = {"profile": profile, "num_stages": 1, "work_mean": ONE, "work_max": ONE, "schedule": "GPipe"}
    problem = SplitProblem(memory_bytes=400.0 - 110.0 + 90.0, num_microbatches=4, **ask)
    (stage,) = share_microbatches(problem, [Stage(index=0, start=0, stop=1)]).stages
    # the layer that is computed again has to have room beside: 90
    assert stage.recompute == (RecomputeChoice(tier="full", layers=(0,), share=MicrobatchShare(num=2, of=4)),)
    assert share_microbatches(problem, [stage]).recompute_s == (1.5,)


@pytest.mark.parametrize(("schedule", "chunks"), [("ZBH1", 1), ("Interleaved1F1B", 2)])
def test_schedules_without_micro_batches_in_a_row_are_refused(schedule, chunks):
    profile = profile_of([layer(i) for i in range(4)])
    problem = SplitProblem(
        profile=profile,
        num_stages=2,
        work_mean=ONE,
        work_max=ONE,
        memory_bytes=1e9,
        num_microbatches=4,
        schedule=schedule,
        num_chunks=chunks,
    )
    with pytest.raises(PartitionError, match=rf"under {schedule} .*are no micro-batches in a row: take 1F1B or GPipe"):
        share_microbatches(problem, [Stage(index=0, start=0, stop=4)])


# -- plans ------------------------------------------------------------------------------------------------------------

MODEL = describe("Qwen2.5-VL-7B")
OPTIONS = PlanOptions(pp=4, tp=2, global_batch=64, max_patches=12300, max_tokens=8192, memory_bytes=36 * 2**30)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    samples, cluster = tile_samples(200), parse_cluster("8xA100-80GB")
    made = make_plan(MODEL, samples, cluster, replace(OPTIONS, per_microbatch=True))
    plain = make_plan(MODEL, samples, cluster, OPTIONS)
    assert made.variants[-1].epoch_s <= plain.variants[-1].epoch_s
    write_plan(made, folder)
    return folder


def test_a_plan_with_shares_is_read_back_checked_and_described(folder: Path):
    found = reload_plan(folder)
    shares = [choice for stage in found.stages for choice in stage.recompute if choice.share is not None]
    assert shares
    assert all(len(choice.layers) == 1 for choice in shares)
    assert check_plan(folder) == []
    rows = [x for x in found.plan.decisions.recompute if x.every is not None]
    assert [(x.num_microbatches, x.every) for x in rows] == [(x.share.num, x.share.of) for x in shares]
    assert re.search(
        r"granularity: \w+, modules: \[.*\], num_microbatches: \d, every: \d\}",
        folder.joinpath("plan.yaml").read_text(),
    )
    words = [describe_recompute(stage) for stage in found.stages]
    assert any(re.search(r" 1 \(in \d of \d packs\)", word) for word in words), words
    again = load_details(folder)
    assert f"{again.variants[-1].epoch_s:.4g}" == f"{found.plan.estimates.epoch_s:.4g}"


def test_a_share_that_is_none_is_refused_with_its_place(folder: Path, tmp_path: Path):
    text = (folder / "plan.yaml").read_text()
    for name in ("samples.npz", "offsets.npy", "indices.npy", "schedule.npy"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    for spoilt, message in (
        (re.sub(r"every: \d", "every: 1", text, count=1), r"a share of \d in 1 micro-batches was asked for"),
        (re.sub(r", every: \d", "", text, count=1), r"names num_microbatches or every alone: give both, as in"),
    ):
        (tmp_path / "plan.yaml").write_text(spoilt)
        assert any(re.search(message, problem) for problem in check_plan(tmp_path))
    with pytest.raises(TrimtabError, match="a share of 0 in 4 micro-batches"):
        MicrobatchShare(num=0, of=4)
    with pytest.raises(PlanError, match="give both"):
        _ = RecomputeDecision(stage=0, granularity="full", modules=("a",), every=3).share


def test_options_without_micro_batches_in_a_row_are_refused():
    for more in ({"schedule": "ZBH1"}, {"schedule": "auto"}, {"recompute": "full"}):
        with pytest.raises(
            PlanError, match=r"recompute per micro-batch was asked for with .*: give --schedule 1F1B or"
        ):
            PlanOptions(per_microbatch=True, **more)


def test_exports_round_up_and_say_the_price(folder: Path):
    found = reload_plan(folder)
    exported = export_plan(found, TARGETS["torch-pipelining"])
    assert re.match(r"\d layers are planned with recompute in a share of the micro-batches, and", exported.warnings[0])
    assert all(choice.share is None for stage in exported.runs for choice in stage.recompute)
    before = found.case.problem.assess(found.stages)
    after = found.case.problem.assess(exported.runs)
    assert all(b.saved_bytes <= a.saved_bytes for a, b in zip(before.memory, after.memory, strict=True))
    assert max(after.recompute_s) > max(before.recompute_s)
    assert isinstance(cost_of_running(found, exported), list)
