"""Tests of plan/predict.py: a run that somebody else decided, priced as a plan's own rows are."""

from dataclasses import replace

import numpy as np
import pytest
from plan_cases import tile_samples

from trimtab import GivenRun, PlanOptions, SampleTable, describe, make_plan, parse_cluster
from trimtab.plan.predict import parse_stages, predict_run

MODEL = describe("InternVL-Chat-V1-5")
CLUSTER = parse_cluster("16xA100-80GB")
SAMPLES = tile_samples(300)
VISION, LANGUAGE = len(MODEL.indices("vision", "block")), len(MODEL.indices("language", "block"))


def run_of(**given) -> GivenRun:
    return GivenRun(**{"pp": 4, "tp": 2, "batch": 2, "num_microbatches": 8, **given})


@pytest.mark.parametrize(("batch", "recompute"), [(1, "none"), (4, "full")])
def test_a_baseline_that_is_predicted_alone_takes_what_it_takes_beside_a_plan(batch, recompute):
    asked = f"random,batch={batch},padded,equal-layers,{recompute}-recompute".replace("none", "no")
    made = make_plan(
        MODEL,
        SAMPLES,
        CLUSTER,
        PlanOptions(pp=4, tp=2, num_microbatches=8, schedule="1F1B", zero_stage=1, baselines=(asked,)),
    )
    baseline = made.variants[0]
    per_pack = len(SAMPLES) / made.packing.num_packs  # steps of a baseline hold as many samples as the plan's
    run = run_of(batch=batch, num_microbatches=round(8 * per_pack / batch), recompute=recompute)
    alone = predict_run(MODEL, SAMPLES, CLUSTER, run).variant
    np.testing.assert_array_equal(alone.step_s, baseline.step_s)
    assert (alone.stages, alone.fits, alone.memory) == (baseline.stages, baseline.fits, baseline.memory)


@pytest.mark.parametrize("name", ["Llama-3.1-8B", "Qwen2.5-7B", "Qwen3-4B", "Qwen3-30B-A3B"])
def test_a_model_of_text_alone_is_planned_and_predicted(name):
    model, tokens = describe(name), SAMPLES.num_tokens
    assert not model.indices("vision")
    texts, cluster = SampleTable.of(0 * tokens, tokens), parse_cluster("8xA100-80GB")
    options = PlanOptions(dp=1, pp=4, tp=2, num_microbatches=8, max_patches=None, schedule="1F1B", zero_stage=1)
    made = make_plan(model, texts, cluster, options)
    assert len(made.packing.indices) == len(texts)
    found = predict_run(model, texts, cluster, run_of(batch=None, max_tokens=int(made.packing.limits[1]))).variant
    assert found.pack_tokens.sum() == tokens.sum()
    assert 0 < found.epoch_s < np.inf


def test_stages_hold_the_blocks_that_are_named():
    assert parse_stages("24v | 8v+10l|18l") == [{"vision": 24}, {"vision": 8, "language": 10}, {"language": 18}]
    half, quarter = VISION // 2, LANGUAGE // 4
    text = f"{half}v|{VISION - half}v+{quarter}l|{quarter}l|{LANGUAGE - 2 * quarter}l"
    found = predict_run(MODEL, SAMPLES, CLUSTER, run_of(stages=text)).variant.stages
    held = [[MODEL.layers[i] for i in range(stage.start, stage.stop)] for stage in found]
    counts = [
        tuple(sum(x.kind == "block" and x.tower == t for x in own) for t in ("vision", "language")) for own in held
    ]
    assert counts == [(half, 0), (VISION - half, quarter), (0, quarter), (0, LANGUAGE - 2 * quarter)]
    alone = predict_run(MODEL, SAMPLES, CLUSTER, run_of(stages=f"{VISION}v|20l|28l|0l")).variant.stages[-1]
    assert MODEL.layers[alone.stop - 1].kind == "head"
    assert all(MODEL.layers[i].kind != "block" for i in range(alone.start, alone.stop))
    first = predict_run(MODEL, SAMPLES, CLUSTER, run_of(stages="vision-first")).variant.stages[0]
    assert first.stop > max(MODEL.indices("vision"))


def test_the_first_blocks_of_stages_recompute():
    found = predict_run(MODEL, SAMPLES, CLUSTER, run_of(recompute="3,0,1,0")).variant
    assert [sum(len(x.layers) for x in stage.recompute) for stage in found.stages] == [3, 0, 1, 0]
    none, some, full = (
        predict_run(MODEL, SAMPLES, CLUSTER, run_of(recompute=x)).variant for x in ("none", "3,0,1,0", "full")
    )
    assert none.epoch_s < some.epoch_s < full.epoch_s
    assert none.memory[0].total_bytes > some.memory[0].total_bytes > full.memory[0].total_bytes


def test_packs_are_not_padded_and_a_batch_can_be_joined():
    padded, joined = (predict_run(MODEL, SAMPLES, CLUSTER, run_of(no_padding=x)).variant for x in (False, True))
    assert joined.pack_tokens.sum() == SAMPLES.num_tokens.sum() < padded.pack_tokens.sum()
    packs = predict_run(MODEL, SAMPLES, CLUSTER, run_of(batch=None, max_tokens=9000)).variant
    assert packs.pack_tokens.max() <= 9000
    assert packs.pack_tokens.sum() == SAMPLES.num_tokens.sum()


def test_a_global_batch_gives_the_micro_batches():
    found = predict_run(MODEL, SAMPLES, CLUSTER, run_of(num_microbatches=None, global_batch=64))
    assert (found.dims.dp, found.num_microbatches) == (2, 16)
    assert found.samples_per_s == pytest.approx(300 / found.variant.step_s.sum())
    assert found.variant.step_s.min() <= found.mean_step_s <= found.p95_step_s <= found.variant.step_s.max()


def test_a_profile_that_was_given_is_predicted_with():
    formulas = predict_run(MODEL, SAMPLES, CLUSTER, run_of())
    slower = replace(
        formulas.profile,
        method="logged",
        time_error=0.05,
        layers=tuple(
            replace(x, forward_s=tuple(2 * s for s in x.forward_s), backward_s=tuple(2 * s for s in x.backward_s))
            for x in formulas.profile.layers
        ),
    )
    found = predict_run(MODEL, SAMPLES, CLUSTER, run_of(profile=slower))
    assert found.profile.time_error == 0.05
    assert found.mean_step_s == pytest.approx(2 * formulas.mean_step_s, rel=0.05)
