"""Logged runs: reading them, fitting seconds through the simulated step, and saying what they do not settle."""

import json
from dataclasses import replace
from typing import Any

import pytest
from cost_models import small_model
from partition_cases import assess_stages

from trimtab import ParallelDims, profile_model
from trimtab.costs.bands import TIME_ERROR
from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.host import HOSTS
from trimtab.costs.measured.fitted import (
    LoggedRun,
    TermFit,
    apply_terms,
    fit_runs,
    place_blocks,
    predict_step,
    read_runs,
)
from trimtab.plan.runs import profile_from_logs, simulate_logged

A100 = DEVICES["A100-80GB"]
MODEL = small_model()  # 3 vision blocks, 4 language blocks
WORK = {"patches": 4096, "patches_per_image": 1024, "tokens": 2048, "tokens_per_sample": 512}
TRUTH = (TermFit(name="language", value=1.7, error=None), TermFit(name="vision", value=2.5, error=None))


def entry(*stages: tuple[int, int], **more: Any) -> dict[str, Any]:
    """Vision and language blocks of each stage."""
    counts = [{"vision": v, "language": n} for v, n in stages]
    return {"name": str(stages), "stages": counts, "num_microbatches": 8, "work": WORK, "iteration_s": 1.0} | more


def write(tmp_path: Any, *entries: Any) -> Any:
    path = tmp_path / "runs.json"
    path.write_text(json.dumps({"format": "trimtab-runs 1.0", "runs": list(entries)}))
    return path


def truthful(tmp_path: Any, *entries: dict[str, Any]) -> tuple[LoggedRun, ...]:
    """The runs, logged as if `TRUTH` held."""
    runs = read_runs(write(tmp_path, *entries), MODEL, A100)
    return tuple(replace(run, iteration_s=predict_step(run, TRUTH, simulate_logged)) for run in runs)


def values(terms: Any) -> dict[str, float]:
    return {term.name: term.value for term in terms}


# -- reading --------------------------------------------------------------------------------------------------------


def test_counted_blocks_take_what_is_no_block_along():
    _, stages = place_blocks(MODEL, [{"vision": 2}, {"vision": 1, "language": 1}, {"language": 3}])
    # patches v0 v1 | v2 projector embed l0 | l1 l2 l3 head
    assert [(s.start, s.stop) for s in stages] == [(0, 3), (3, 7), (7, 11)]


def test_a_partial_run_keeps_the_first_blocks_of_each_tower(tmp_path):
    runs = read_runs(write(tmp_path, entry((1, 2), (0, 1), partial=True)), MODEL, A100)
    names = [layer.name for layer in runs[0].profile.layers]
    assert names == ["patches", "vision.0", "projector", "embed", "language.0", "language.1", "language.2", "head"]
    assert [(s.start, s.stop) for s in runs[0].stages] == [(0, 6), (6, 8)]


def test_no_vision_block_leaves_no_vision_tower():
    model, stages = place_blocks(MODEL, [{"language": 2}, {"language": 2}])
    assert model.layers[0].name == "embed"
    assert [(s.start, s.stop) for s in stages] == [(0, 3), (3, 6)]


def test_work_fills_in_squares_and_repeats_the_mean(tmp_path):
    run = read_runs(write(tmp_path, entry((3, 0), (0, 4))), MODEL, A100)[0]
    assert run.work.shape == (8, 7)
    assert run.work[0].tolist() == [1, 4096, 4096 * 1024, 4096 * 1024, 2048, 2048 * 512, 2048 * 512]
    each = [{"patches": 100 * i, "tokens": 10} for i in range(1, 9)]
    varied = read_runs(write(tmp_path, entry((3, 0), (0, 4), work=each)), MODEL, A100)[0]
    assert varied.work[:, 1].tolist() == [100 * i for i in range(1, 9)]


def test_recompute_takes_the_first_blocks_of_a_stage_and_costs_time(tmp_path):
    plain, again = read_runs(
        write(tmp_path, entry((3, 0), (0, 4)), entry((3, 0), (0, 4), name="again", recompute=[2, 0])), MODEL, A100
    )
    assert [choice.layers for choice in again.stages[0].recompute] == [(1, 2)]
    assert again.stages[1].recompute == ()
    slower = predict_step(again, TRUTH, simulate_logged) / predict_step(plain, TRUTH, simulate_logged)
    assert slower > 1.005


# -- fitting --------------------------------------------------------------------------------------------------------


def test_the_truth_is_found_from_steps_that_bind_every_stage_kind(tmp_path):
    runs = truthful(
        tmp_path, entry((1, 0), (2, 4)), entry((3, 0), (0, 4)), entry((3, 3), (0, 1)), entry((3, 1), (0, 3))
    )
    found = fit_runs(runs[0].profile, runs, simulate_logged)
    assert values(found.terms) == pytest.approx(values(TRUTH), rel=1e-2)
    assert max(abs(run.error) for run in found.runs) < 1e-3
    assert found.profile.method == "logged"


def test_one_run_that_waits_for_its_host_settles_the_host(tmp_path):
    """A run of small layers; the others are predicted by what it says of the host."""
    splits = [entry((3, a), (0, 4 - a)) for a in (0, 1, 2)]
    runs = read_runs(write(tmp_path, *splits), MODEL, A100, host="eager")
    slow = [TermFit(name="host", value=4.5, error=None)]
    logged = [replace(run, iteration_s=predict_step(run, slow, simulate_logged)) for run in runs]
    found = fit_runs(runs[0].profile, logged[:1], simulate_logged)
    assert values(found.terms) == pytest.approx({"host": 4.5}, rel=1e-3)
    for run in logged[1:]:
        assert predict_step(run, found.terms, simulate_logged) == pytest.approx(run.iteration_s, rel=1e-3)
    assert found.profile.layers[1].host_forward_s == pytest.approx(4.5 * HOSTS["eager"].block_s, rel=1e-3)


def test_one_run_that_no_host_explains_settles_the_device(tmp_path):
    (run,) = read_runs(write(tmp_path, entry((2, 0), (1, 4))), MODEL, A100)  # a host that takes no time
    fast = replace(
        run, iteration_s=predict_step(run, [TermFit(name="language", value=0.5, error=None)], simulate_logged)
    )
    found = fit_runs(run.profile, [fast], simulate_logged)
    assert values(found.terms) == pytest.approx({"language": 0.5}, rel=1e-3)
    scaled = [b.forward_s[0] / a.forward_s[0] for a, b in zip(run.profile.layers, found.profile.layers, strict=True)]
    assert scaled == pytest.approx([found.terms[0].value] * len(scaled))  # both towers


def test_stage_times_alone_are_fitted(tmp_path):
    (run,) = read_runs(write(tmp_path, entry((2, 0), (1, 2), (0, 2))), MODEL, A100)
    mean = run.work.mean(axis=0)
    split = assess_stages(
        apply_terms(run.profile, TRUTH), run.stages, work_mean=mean, work_max=mean, num_microbatches=8
    )
    seconds = tuple(f + b for f, b in zip(split.forward_s, split.backward_s, strict=True))
    found = fit_runs(run.profile, [replace(run, iteration_s=None, stage_s=seconds)], simulate_logged)
    assert values(found.terms) == pytest.approx(values(TRUTH), rel=1e-2)
    assert found.warnings == ()
    assert found.profile.time_error < TIME_ERROR


def test_a_factor_that_no_run_settles_is_named(tmp_path):
    heavy = [replace(t, value=40.0) if t.name == "vision" else t for t in TRUTH]
    runs = read_runs(write(tmp_path, entry((3, 1), (0, 3)), entry((3, 2), (0, 2)), entry((3, 3), (0, 1))), MODEL, A100)
    runs = tuple(replace(run, iteration_s=predict_step(run, heavy, simulate_logged)) for run in runs)
    found = fit_runs(runs[0].profile, runs, simulate_logged)
    assert any("'language'" in warning for warning in found.warnings)
    assert found.profile.time_error >= TIME_ERROR
    assert set(found.warnings) <= set(found.profile.assumptions)


def test_runs_that_stage_times_cannot_explain_are_named(tmp_path):
    runs = truthful(
        tmp_path, entry((3, 0), (0, 4)), entry((3, 1), (0, 3)), entry((3, 2), (0, 2)), entry((1, 0), (2, 4))
    )
    odd = (replace(runs[0], iteration_s=runs[0].iteration_s * 2), *runs[1:])
    found = fit_runs(runs[0].profile, odd, simulate_logged)
    worst = max(found.runs, key=lambda run: abs(run.error))
    assert any(repr(worst.name) in warning for warning in found.warnings)


def test_the_calibrated_profile_predicts_what_the_factors_predict(tmp_path):
    (run,) = truthful(tmp_path, entry((2, 0), (1, 4)))
    scaled = replace(run, profile=apply_terms(run.profile, TRUTH))
    assert predict_step(scaled, (), simulate_logged) == pytest.approx(run.iteration_s, rel=1e-12)


def test_a_profile_comes_from_a_file_for_other_degrees(tmp_path):
    runs = truthful(tmp_path, entry((1, 0), (2, 4)), entry((3, 0), (0, 4)), entry((3, 3), (0, 1)))
    entries = [
        entry(*stages, iteration_s=run.iteration_s)
        for stages, run in zip((((1, 0), (2, 4)), ((3, 0), (0, 4)), ((3, 3), (0, 1))), runs, strict=True)
    ]
    found = profile_from_logs(write(tmp_path, *entries), MODEL, A100, dims=ParallelDims(dp=4, tp=2))
    assert found.profile.dims == ParallelDims(dp=4, tp=2)
    plain = profile_model(MODEL, A100, dims=ParallelDims(dp=4, tp=2))
    assert found.profile.layers[-1].forward_s[4] / plain.layers[-1].forward_s[4] == pytest.approx(1.7, rel=1e-3)
    assert any(
        sentence.startswith("Seconds come from formulas fitted to 3 logged runs")
        for sentence in found.profile.assumptions
    )
    assert not any("of peak flop/s" in sentence for sentence in found.profile.assumptions)
