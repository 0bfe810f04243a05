"""Tests of `--baseline`: its words, the runs they stand for, and which one a plan is told against."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from plan_cases import tile_samples, write_checked

from trimtab import PlanDetails, describe, make_plan, parse_cluster, simulate
from trimtab.balance.packing import MOST_LIMIT, pack_samples
from trimtab.cli.plan import _narrowed
from trimtab.plan.decide import compare
from trimtab.plan.decide.compare import explain_losses
from trimtab.plan.decide.work import rank_step_s
from trimtab.plan.file.reload import load_details
from trimtab.plan.options import Baseline, PlanOptions, parse_baseline
from trimtab.report.html import html_report

PAPER = "random,batch=4,padded,equal-layers,full-recompute"  # OmniBal's own case
ASKED = (PAPER, "isf", "random,batch=1,no-recompute", "device-group, batch=2, balanced-stages")
OPTIONS = PlanOptions(pp=4, tp=2, num_microbatches=8)


def make(*baselines: str, **given: object) -> PlanDetails:
    options = dataclasses.replace(OPTIONS, baselines=baselines, **given)
    return make_plan(describe("InternVL-Chat-V1-5"), tile_samples(), parse_cluster("32xA100-80GB"), options)


@pytest.fixture(scope="module")
def made() -> PlanDetails:
    return make(*ASKED)


def test_words_in_any_order() -> None:
    assert parse_baseline(PAPER) == Baseline(batch=4.0, padded=True, recompute="full")
    assert parse_baseline(" full-recompute , batch=2.5,length-group") == Baseline(
        method="length_group", batch=2.5, recompute="full"
    )
    assert parse_baseline("balanced,balanced-stages") == Baseline(method="balanced", stages="balanced-stages")


def test_every_baseline_is_simulated_and_the_fastest_that_fits_is_the_baseline(made: PlanDetails) -> None:
    *others, baseline, packs, _stages, _plan = made.variants
    assert [x.name for x in (*others, baseline, packs)] == ["other baseline"] * 3 + ["baseline", "balanced packs"]
    assert baseline.fits
    assert baseline.epoch_s == min(x.epoch_s for x in (*others, baseline) if x.fits)
    assert made.baseline is baseline
    ratio = baseline.epoch_s / made.variants[-1].epoch_s
    assert f"{ratio:.2f}x" in made.plan.summary


def test_a_faster_baseline_that_does_not_fit_is_shown_and_not_compared_with() -> None:
    other, baseline, *_ = make("balanced,balanced-stages,no-recompute", PAPER, schedule="1F1B").variants
    assert (other.fits, baseline.fits) == (False, True)
    assert other.epoch_s < baseline.epoch_s
    assert (other.name, baseline.name) == ("other baseline", "baseline")


def test_the_pipeline_that_is_drawn_is_the_slowest_of_the_median_step(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = []
    monkeypatch.setattr(compare, "simulate", lambda *args, **given: drawn.append(args) or simulate(*args, **given))
    behind: list[float] = []  # the gradients' all-reduce, in every step
    monkeypatch.setattr(compare, "rank_step_s", lambda *args: behind.append(rank_step_s(*args)) or behind[-1])
    made = make(PAPER)
    assert len(drawn) == len(made.variants)  # one of each, however many ranks there are
    for variant, behind_s in zip(made.variants, behind[-len(made.variants) :], strict=True):
        step_s = np.sort(variant.step_s)[len(variant.step_s) // 2]
        assert variant.timeline.makespan_s == pytest.approx(step_s - behind_s, rel=1e-9)


def test_each_baseline_is_what_its_words_say(made: PlanDetails) -> None:
    by_packs = {x.packs: x for x in made.variants[:4]}
    paper = by_packs["random, padded, 4 a batch"]
    assert len(paper.pack_tokens) == 152  # 600 / 4 in whole rows of 4 ranks
    assert (paper.stages_rule, paper.recompute_rule) == ("equal layers", "full")
    assert all(stage.num_recomputed() for stage in paper.stages)
    assert paper.pack_tokens.sum() > 1.2 * made.samples.num_tokens.sum()  # padding is counted
    isf = by_packs["isf, packed"]
    assert isf.pack_tokens.sum() == made.samples.num_tokens.sum()
    assert isf.pack_tokens.max() <= made.plan.decisions.packing.max_tokens
    single = by_packs["random, padded, 1 a batch"]
    assert not any(stage.recompute for stage in single.stages)
    group = by_packs["device-group, padded, 2 a batch"]
    assert group.stages_rule == "balanced"
    assert [x.start for x in group.stages] != [x.start for x in paper.stages]


def test_a_plan_with_baselines_is_read_back_with_them(made: PlanDetails, tmp_path: Path) -> None:
    write_checked(made, tmp_path)
    loaded = load_details(tmp_path)
    assert loaded.plan.inputs.training.baselines == ASKED
    for before, after in zip(made.variants, loaded.variants, strict=True):
        assert (before.name, before.stages) == (after.name, after.stages)
        np.testing.assert_array_equal(before.step_s, after.step_s)
    assert html_report(made).count("other baseline") >= 3


def test_without_baselines_the_plan_and_its_file_are_as_they_were(made: PlanDetails) -> None:
    plain = make()
    assert plain.plan.decisions == made.plan.decisions
    assert plain.variants[0].name == "baseline"
    assert "baselines" not in plain.plan.summary


def test_a_row_that_loses_says_why(made: PlanDetails) -> None:
    first, second, *_ = [x for x in made.variants if not x.name.startswith("other")]
    slower = dataclasses.replace(second, step_s=1.2 * first.step_s, recompute_rule="full")
    faster = dataclasses.replace(slower, step_s=0.9 * first.step_s)
    for above, wanted in (("none", "one switch for all layers"), ("full", "its part is in the rows below")):
        (sentence,) = explain_losses([dataclasses.replace(first, recompute_rule=above), slower])
        assert sentence.startswith(f'The row "{second.name}" takes 1.20x as long')
        assert wanted in sentence
    assert not explain_losses([first, faster])


def test_without_words_it_is_the_faster_of_what_trainers_offer() -> None:
    options = {"pp": 4, "tp": 2, "num_microbatches": 8, "dp": 4, "schedule": "1F1B", "zero_stage": 1}
    alone = [make(name, **options).baseline.epoch_s for name in ("random", "length-group")]
    assert make(**options).baseline.epoch_s == min(alone)


def test_greedy_packs_are_filled_by_tokens_alone() -> None:
    samples = tile_samples()
    packing = pack_samples(samples, limits=(MOST_LIMIT, 4096), method="greedy").packing
    sizes = packing.sums(samples.num_tokens)
    assert sizes.max() <= 4096
    assert np.array_equal(np.sort(packing.indices), np.arange(len(samples)))
    # as best fit decreasing written out, for one buffer
    rests = list[int]()
    for tokens in sorted(samples.num_tokens.tolist(), reverse=True):
        found = min((p for p, rest in enumerate(rests) if rest >= tokens), key=rests.__getitem__, default=len(rests))
        rests[found:] = [4096] if found == len(rests) else rests[found:]
        rests[found] -= tokens
    assert sorted(4096 - rest for rest in rests) == sorted(sizes.tolist())
    largest = int(packing.sums(samples.num_patches).max())
    kept = pack_samples(samples, limits=(largest - 1, 4096), method="greedy").packing
    assert kept.sums(samples.num_patches).max() < largest  # a limit that is given holds


@pytest.mark.parametrize(("framework", "packs"), [("ms-swift", True), ("llama-factory", True), ("transformers", False)])
def test_a_host_that_packs_is_compared_as_it_packs(framework: str, packs: bool) -> None:
    model = describe("Qwen2.5-VL-7B")
    assert _narrowed(framework, model, PlanOptions())[0].baselines == (("greedy",) if packs else ())
    asked = PlanOptions(baselines=("isf",))
    assert _narrowed(framework, model, asked)[0].baselines == ("isf",)
