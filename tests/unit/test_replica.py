"""plan/decide/ (replica, towers): a tower on every device of a replica: phases, memory, the choice and its degrees."""

import dataclasses
from pathlib import Path

import numpy as np
import pytest
from plan_cases import read_back
from vision_cases import CLUSTER, OPTIONS, QWEN, image_samples, table_of

from trimtab.models.describe import describe
from trimtab.partition.simulate import simulate
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.decide.compare import _columns
from trimtab.plan.decide.exchange import feature_values
from trimtab.plan.decide.replica import tower_alone
from trimtab.plan.decide.stages import epoch_s
from trimtab.plan.decide.towers import MUST_GAIN, decoder_only
from trimtab.plan.decide.work import rank_step_s, times_of
from trimtab.plan.file.check import check_plan
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.file.reload import reload_plan
from trimtab.plan.options import PlanOptions, VisionChoice

PIPELINE = dataclasses.replace(
    OPTIONS, tp=2, pp=2, num_microbatches=4, host="none", max_patches=6000, max_tokens=6000, global_batch=None
)


def plan_of(group: str, **changes: object) -> PlanDetails:
    options = dataclasses.replace(PIPELINE, vision=VisionChoice(group=group), **changes)  # type: ignore[arg-type]
    return make_plan(QWEN, image_samples(160, largest=2048), CLUSTER, options)


@pytest.fixture(scope="module")
def apart() -> PlanDetails:
    return plan_of("replica")


def test_a_step_is_its_phases_around_a_pipeline_without_a_tower(apart, tmp_path):
    """By hand: of every replica the slowest share's seconds, then the decoder's pipeline; the slowest one counts."""
    write_plan(apart, tmp_path)
    found = reload_plan(tmp_path)
    case, table = found.case, found.case.schedule.table
    towers = [x for x in tower_alone(case.without_vision()).layers if x.tower != "language"]
    assert case.phases is not None
    times = times_of(case.work, found.stages, case.setting.profile, case.cluster)
    step, ends = 1, []
    for rank in range(table.shape[1]):
        packs = table[step, rank]
        pipeline = simulate(_columns(times, packs), num_devices=2).makespan_s
        images = case.without_vision().work[packs[packs >= 0]].sum(axis=0)
        images[0], images[4:] = 1.0, 0.0
        images[1:4] /= 4  # devices of a replica: no share is smaller than the mean
        whole = sum(float(images @ (np.array(x.forward_s) + np.array(x.backward_s))) for x in towers)
        assert whole <= case.phases.seconds[step, rank] <= 1.1 * whole
        ends.append(pipeline + case.phases.step_s[step, rank])
    update_s = rank_step_s(case.problem, found.stages)
    assert apart.variants[-1].step_s[step] == pytest.approx(max(ends) + update_s, rel=1e-9)
    assert apart.variants[-1].step_s.sum() == pytest.approx(epoch_s(case, found.stages))


def test_features_and_the_tower_are_counted_where_they_lie(apart, tmp_path):
    write_plan(apart, tmp_path)
    found = reload_plan(tmp_path)
    case, stages = found.case, found.stages
    memory = case.problem.assess(stages).memory
    alone = tower_alone(case.without_vision())
    state = sum(x.state_bytes for x in alone.layers if x.tower != "language")
    assert all(x.overhead_bytes >= state for x in memory), "every device holds the tower"
    tower = [x for x in case.setting.profile.layers if x.tower != "language"]
    patches = case.without_vision().work[:, 1]
    table = case.schedule.table
    most = max(patches[row[row >= 0]].sum() for row in table.reshape(-1, table.shape[2]))
    held = sum(x.state_bytes for x in tower)
    assert held >= 2 * most * feature_values(QWEN) * 2, "features of a step and their gradients, on the first stage"
    assert all(not np.any(x.forward_s) and not x.num_params for x in tower)
    assert stages[0].stop > max(QWEN.indices("projector"))


def test_a_plan_with_its_tower_on_the_replica_checks_and_reads_back(apart, tmp_path):
    write_plan(apart, tmp_path)
    assert check_plan(tmp_path) == []
    read_back(apart, tmp_path)
    path = Path(tmp_path) / "plan.yaml"
    text = path.read_text()
    for before, after, said in (
        ("pooling: 4", "pooling: 2", "encodes the 4 micro-batches of a step at once"),
        ("group: replica, degree: 4", "group: replica, degree: 8", "has pp 2 x tp 2 x cp 1"),
    ):
        path.write_text(text.replace(before, after))
        assert any(said in problem for problem in check_plan(tmp_path)), before


def test_a_frozen_tower_has_one_phase_and_no_gradients_of_features(apart):
    frozen = plan_of("replica", frozen_towers=("vision", "projector"))
    ours, theirs = (x.plan.estimates.vision_data_parallel for x in (frozen, apart))
    assert ours.tower_ms < 0.6 * theirs.tower_ms
    assert ours.exchange_mib < 0.6 * theirs.exchange_mib


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_recompute_of_the_tower_trades_its_activations_for_its_forward(recompute):
    found = plan_of("replica", recompute=recompute)
    decision = found.plan.decisions.vision_data_parallel
    assert decision.recompute == (None if recompute == "none" else "full")
    assert any(
        f"over replica 4{', its forward again' if recompute == 'full' else ' '}" in x for x in found.plan.assumptions
    )


def test_auto_takes_the_replica_only_for_two_percent():
    epochs = {group: plan_of(group).variants[-1].epoch_s for group in ("one-grid", "tp", "dp", "replica", "auto")}
    best = min(epochs[group] for group in ("one-grid", "tp", "dp"))
    decided = plan_of("auto").plan.decisions.vision_data_parallel
    if epochs["replica"] * MUST_GAIN <= best:
        assert decided.group == "replica"
        assert epochs["auto"] <= 1.005 * epochs["replica"]
    else:
        assert decided is None or decided.group != "replica"
    text = table_of([np.array([4], np.int64)] * 160, np.random.default_rng(0))  # images of one patch: nothing to gain
    small = make_plan(QWEN, text, CLUSTER, dataclasses.replace(PIPELINE, vision=VisionChoice(group="auto")))
    decided = small.plan.decisions.vision_data_parallel
    assert decided is None or decided.group != "replica"


def test_the_decoder_alone_keeps_its_layers_and_cuts():
    for name in ("Qwen3-VL-8B", "InternVL3-8B", "Qwen2.5-VL-7B"):
        model = describe(name)
        alone = decoder_only(model)
        assert [x.name for x in alone.layers] == [x.name for x in model.layers if x.tower == "language"]
        first = min(model.indices("language"))
        assert alone.forbidden_cuts == {cut - first for cut in model.forbidden_cuts if cut > first}


def test_degrees_are_searched_again_without_a_tower_in_the_pipeline():
    options = PlanOptions(schedule="1F1B", zero_stage=1, risk=0.05, global_batch=64, host="none")
    samples = image_samples(192, most=8)
    found = {
        group: make_plan(QWEN, samples, CLUSTER, dataclasses.replace(options, vision=VisionChoice(group=group)))
        for group in ("one-grid", "auto")
    }
    assert found["auto"].variants[-1].epoch_s <= 1.005 * found["one-grid"].variants[-1].epoch_s
