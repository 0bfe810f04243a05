"""plan/decide/ (apart, towers): a tower on every device of a replica or on its own: seconds, memory, the choice."""

import dataclasses
import tempfile
from pathlib import Path

import numpy as np
import pytest
from plan_cases import read_back, write_checked
from vision_cases import CLUSTER, OPTIONS, QWEN, image_samples, table_of

from trimtab import PlanDetails, SampleTable, check_plan, describe, make_plan, parse_cluster, simulate, write_plan
from trimtab.adapters.frameworks import find_target
from trimtab.adapters.running import export_plan
from trimtab.errors import PartitionError, PlanError, UnsupportedPlanError
from trimtab.plan.decide.apart import bubble_bounds_s, tower_alone, without_tower
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.compare import _columns
from trimtab.plan.decide.exchange import feature_values
from trimtab.plan.decide.stages import epoch_s
from trimtab.plan.decide.towers import MUST_GAIN, decoder_only
from trimtab.plan.decide.work import rank_step_s, times_of
from trimtab.plan.file.reload import reload_plan
from trimtab.plan.options import PlanOptions, VisionChoice
from trimtab.report.html import html_report
from trimtab.specs import LayerCost, Stage, recomputing

PIPELINE = dataclasses.replace(
    OPTIONS, tp=2, pp=2, num_microbatches=4, host="none", max_patches=6000, max_tokens=6000, global_batch=None
)


def plan_of(group: str, **changes: object) -> PlanDetails:
    options = dataclasses.replace(PIPELINE, vision=VisionChoice(group=group), **changes)  # type: ignore[arg-type]
    return make_plan(QWEN, image_samples(160, largest=2048), CLUSTER, options)


@pytest.fixture(scope="module")
def apart() -> PlanDetails:
    return plan_of("replica")


def test_a_step_is_its_phases_around_a_pipeline_without_a_tower(apart):
    """By hand: of every replica the slowest share's seconds, then the decoder's pipeline; the slowest one counts."""
    case, stages = read_case(apart)
    table = case.schedule.table
    towers = [x for x in tower_alone(case.without_vision(), 8).layers if x.tower != "language"]
    assert case.apart is not None
    times = times_of(case.work, stages, case.setting.profile, case.cluster)
    step, ends = 1, []
    for rank in range(table.shape[1]):
        packs = table[step, rank]
        pipeline = simulate(_columns(times, packs), num_devices=2).makespan_s
        images = case.without_vision().work[packs[packs >= 0]].sum(axis=0)
        images[0], images[4:] = 1.0, 0.0
        images[1:4] /= 4  # devices of a replica: no share is smaller than the mean
        whole = sum(float(images @ (np.array(x.forward_s) + np.array(x.backward_s))) for x in towers)
        assert whole <= case.apart.seconds[step, rank] <= 1.1 * whole
        ends.append(pipeline + case.apart.step_s[step, rank])
    update_s = rank_step_s(case.problem, stages)
    assert apart.variants[-1].step_s[step] == pytest.approx(max(ends) + update_s, rel=1e-9)
    assert apart.variants[-1].step_s.sum() == pytest.approx(epoch_s(case, stages))


def test_features_and_the_tower_are_counted_where_they_lie(apart):
    case, stages = read_case(apart)
    memory = case.problem.assess(stages).memory
    alone = tower_alone(case.without_vision(), 8)
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
    write_checked(apart, tmp_path)
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


# A tower on devices of its own.


def own_case(dp: int, devices: int, **changes: object) -> tuple[PlanDetails, Case, tuple[Stage, ...]]:
    """A plan whose decoder has dp x pp 2 x tp 1, with the case and the stages that it reads back as."""
    choice = VisionChoice(group="own", devices=devices)
    options = dataclasses.replace(PIPELINE, dp=dp, tp=1, vision=choice, **changes)  # type: ignore[arg-type]
    needed = 2 * dp + devices
    cluster = parse_cluster(f"{needed if needed <= 8 else 16}xH100-80GB")
    made = make_plan(describe("Qwen2.5-VL-3B"), image_samples(160, largest=2048), cluster, options)
    return made, *read_case(made)


def coupled_s(case: Case, stages: tuple[Stage, ...], step: int) -> float:
    """By hand: one step of all ranks, block by block; a lane encodes for all of its ranks at once, as they do not."""
    lanes = case.apart
    table, times = case.schedule.table[step], times_of(case.work, stages, case.setting.profile, case.cluster)
    dp, M = table.shape
    num_lanes, P = lanes.forward_s.shape[1], len(stages) + 1
    k, ends = dp // num_lanes, dict[tuple[object, ...], float]()

    def order(device: int) -> list[tuple[str, int]]:  # 1F1B
        ahead = min(M, P - device - 1)
        steady = [block for m in range(M - ahead) for block in (("F", ahead + m), ("B", m))]
        return [("F", m) for m in range(ahead)] + steady + [("B", m) for m in range(M - ahead, M)]

    def seconds(rank: int, s: int, kind: str, m: int) -> float:
        pack = table[rank, m]
        return 0.0 if pack < 0 else float((times.forward_s if kind == "F" else times.backward_s)[s, pack])

    def send(rank: int, s: int, m: int, sends: np.ndarray) -> float:
        return 0.0 if table[rank, m] < 0 else float(sends[s, table[rank, m]])

    def ready(who: tuple[str, int], device: int, kind: str, m: int) -> float | None:
        """When what the block waits for has arrived; None: not known yet."""
        if who[0] == "lane":
            if kind == "F":
                return 0.0
            ranks = range(who[1] * k, (who[1] + 1) * k)
            known = [ends.get(("rank", r, 1, "B", m)) for r in ranks]
            return None if None in known else max(known) + float(lanes.return_s[step, who[1], m])
        if kind == "F" and device == 1:
            done = ends.get(("lane", who[1] // k, 0, "F", m))
            return None if done is None else done + float(lanes.send_s[step, who[1] // k, m])
        if kind == "B" and device == P - 1:
            return ends.get((*who, device, "F", m))
        other = device - 1 if kind == "F" else device + 1
        done = ends.get((*who, other, kind, m))
        arrays = times.send_forward_s if kind == "F" else times.send_backward_s
        return None if done is None else done + send(who[1], other - 1, m, arrays)

    devices = [("lane", x, 0) for x in range(num_lanes)] + [("rank", r, d) for r in range(dp) for d in range(1, P)]
    at, free = dict.fromkeys(devices, 0), dict.fromkeys(devices, 0.0)
    while any(at[x] < 2 * M for x in devices):
        moved = False
        for x in devices:
            if at[x] == 2 * M:
                continue
            kind, m = order(x[2])[at[x]]
            start = ready(x[:2], x[2], kind, m)
            if start is None:
                continue
            if x[0] == "lane":
                took = float((lanes.forward_s if kind == "F" else lanes.backward_s)[step, x[1], m])
            else:
                took = seconds(x[1], x[2] - 1, kind, m)
            free[x] = max(start, free[x]) + took
            ends[(*x, kind, m)] = free[x]
            at[x] += 1
            moved = True
        assert moved, "no deadlock"
    return max(ends.values())


@pytest.mark.parametrize(("dp", "devices"), [(2, 2), (2, 4), (1, 3), (4, 1), (4, 2)])
def test_steps_are_those_of_lanes_in_front_of_the_pipelines(dp, devices):
    """Exactly where no ranks share a lane; else an upper bound, near."""
    made, case, stages = own_case(dp, devices)
    update_s = max(rank_step_s(case.problem, stages), case.apart.update_s)
    for step in range(min(3, len(case.schedule.table))):
        true, ours = coupled_s(case, stages, step), made.variants[-1].step_s[step] - update_s
        if dp <= devices:
            assert ours == pytest.approx(true, rel=1e-9)
        else:
            assert true * (1 - 1e-9) <= ours <= 1.1 * true


def test_the_longer_update_counts_and_calls_in_flight_are_held():
    made, case, stages = own_case(2, 2, frozen_towers=("language",))
    assert case.apart.update_s > rank_step_s(case.problem, stages)
    assert made.variants[-1].step_s[0] - case.apart.update_s == pytest.approx(coupled_s(case, stages, 0), rel=1e-9)
    # one more micro-batch in flight than the pipelines have stages, where a step has as many
    cases = [own_case(2, 2, num_microbatches=num, global_batch=4 * num)[1] for num in (2, 4)]
    assert cases[0].vision.decision.recompute == cases[1].vision.decision.recompute
    assert cases[1].apart.saved_bytes / cases[0].apart.saved_bytes == pytest.approx(3 / 2, rel=0.02)


def test_a_lane_encodes_what_its_ranks_hold():
    _, case, _ = own_case(4, 2)
    whole = sum(np.array(x.forward_s) for x in tower_alone(case.without_vision(), 2).layers if x.tower != "language")
    table, held = case.schedule.table, case.without_vision().work
    images = held[table[0, :2, 1]].sum(axis=0)  # micro-batch 1 of the ranks of the first lane
    images[0], images[4:] = 1.0, 0.0
    assert case.apart.forward_s[0, 0, 1] == pytest.approx(float(images @ whole), rel=1e-9)
    _, shared, _ = own_case(2, 4)
    alone = np.array([x.sum() for x in (case.apart.forward_s, shared.apart.forward_s)])
    assert alone[1] < alone[0], "two devices share the images of a micro-batch"


def test_devices_of_the_tower_are_checked_and_counted():
    made, case, stages = own_case(2, 2)
    assert made.plan.decisions.vision_data_parallel.exchange == "send"
    assert any("for each device in use" in x for x in made.plan.assumptions)
    with tempfile.TemporaryDirectory() as folder:
        write_plan(made, folder)
        path = Path(folder) / "plan.yaml"
        text = path.read_text()
        for degree, word in (("3", "multiple"), ("4", "devices")):
            path.write_text(text.replace("group: own, degree: 2", f"group: own, degree: {degree}"))
            assert any(word in problem for problem in check_plan(folder)), degree
    # the file's first stage is the tower's, its figures too; in the case it is none
    decided, figures = made.plan.decisions.stages, made.plan.estimates.stages
    assert (len(decided), len(figures), len(stages)) == (3, 3, 2)
    assert all("language" not in name for name in decided[0].modules)
    assert figures[0].state_gib == pytest.approx(case.apart.state_bytes / 2**30, abs=0.01)
    # the tower's own devices hold its state and the calls in flight; the pipelines hold none of it
    assert case.apart.state_bytes > 0
    assert all(not x.num_params for x in case.setting.profile.layers if x.tower != "language")
    with pytest.raises(PartitionError):
        own_case(2, 2, memory_bytes=12 * 2**30)


def test_the_decoder_has_what_the_tower_leaves():
    samples, model = image_samples(192, most=8), describe("Qwen2.5-VL-3B")
    options = PlanOptions(risk=0.05, global_batch=32, host="none", vision=VisionChoice(group="own"))
    for cluster in ("8xH100-80GB", "16xH100-80GB"):
        made = make_plan(model, samples, parse_cluster(cluster), options)
        parallel, num = made.plan.decisions.parallel, made.plan.decisions.vision_data_parallel.degree
        assert max(num, parallel.dp) % min(num, parallel.dp) == 0
        assert parallel.dp * parallel.pp * parallel.tp * parallel.cp + num <= int(cluster.split("x")[0])
    for wrong in ({"zero_stage": 3}, {"schedule": "GPipe"}):
        with pytest.raises(PlanError):
            make_plan(model, samples, CLUSTER, dataclasses.replace(options, **wrong))


def test_bridge_gets_both_grids_and_other_frameworks_refuse(tmp_path):
    samples, choice = image_samples(100, most=2), VisionChoice(group="own", devices=1)
    options = PlanOptions(dp=2, pp=2, tp=4, global_batch=32, risk=0.05, vision=choice)
    write_plan(make_plan(describe("Qwen3.5-27B"), samples, parse_cluster("24xH100-80GB"), options), tmp_path)
    found = reload_plan(tmp_path)
    fields = export_plan(found, find_target("megatron-bridge")).fields
    language = {"tensor_model_parallel_size": 4, "pipeline_model_parallel_size": 2, "data_parallel_size": 2}
    assert {name: fields[f"language.{name}"] for name in language} == language
    assert (fields["images.data_parallel_size"], fields["images.rank_offset"]) == (1, 16)
    assert (fields["cfg.train.micro_batch_size"], fields["cfg.train.global_batch_size"]) == (2, 32)
    for name in ("megatron", "deepspeed"):
        with pytest.raises(UnsupportedPlanError, match="megatron-bridge"):
            export_plan(found, find_target(name))
    more = dataclasses.replace(options, vision=VisionChoice(group="own", devices=4))
    write_plan(make_plan(describe("Qwen3.5-27B"), samples, parse_cluster("24xH100-80GB"), more), tmp_path)
    with pytest.raises(UnsupportedPlanError, match="tower_devices=2"):
        export_plan(reload_plan(tmp_path), find_target("megatron-bridge"))


def test_every_form_that_was_simulated_has_its_row(apart, tmp_path):
    for made, names in ((apart, ["one-grid", "replica"]), (plan_of("own"), ["one-grid", "own"])):
        forms = made.plan.estimates.forms
        assert [x.form for x in forms] == names
        for x in forms:
            assert x.bound_s is not None
            assert 0 < x.bound_s <= x.epoch_s
            assert 0 < x.busy_share < 1
        assert forms[1].epoch_s == pytest.approx(made.variants[-1].epoch_s, rel=1e-3)
        assert (forms[1].tower_gib is None) == (forms[1].form != "own")
        page = html_report(made)
        assert all(x.hosts in page for x in forms)
        read_back(made, tmp_path)
    assert plan_of("one-grid").plan.estimates.forms == ()


def test_auto_takes_devices_of_the_towers_own_where_they_gain():
    tiles = 40 + np.arange(128) % 8
    squares = 1025**2 * tiles
    samples = SampleTable.of(
        1025 * tiles, 256 * tiles + 20_000, num_images=tiles, patches_sq=squares, patches_windowed=squares
    )
    options = PlanOptions(vision=VisionChoice(group="auto"))
    made = make_plan(describe("InternVL-Chat-V1-5"), samples, parse_cluster("16xH100-80GB"), options)
    epochs = {x.form: x.epoch_s for x in made.plan.estimates.forms}
    assert made.plan.decisions.vision_data_parallel.group == "own"
    assert epochs["own"] == min(epochs.values()) < epochs["one-grid"] / MUST_GAIN


def test_the_timeline_shows_every_device_encode_before_and_after_its_pipeline(apart):
    line, decided = apart.variants[-1].timeline, apart.plan.decisions
    images = line.microbatch == decided.schedule.num_microbatches
    before, after = (images & (line.kind == kind) for kind in (0, 1))
    assert sorted(line.device[before]) == sorted(line.device[after]) == list(range(decided.parallel.pp))
    assert line.end_s[before].max() <= line.start_s[~images].min()
    assert line.start_s[after].min() == pytest.approx(line.end_s[~images].max())
    assert line.end_s[after].max() == pytest.approx(line.makespan_s)


# Encoding in the bubbles.


def test_the_bound_of_encoding_in_bubbles_is_below_every_form_that_runs():
    grid = plan_of("one-grid")
    case, stages = read_case(grid)
    as_it_is, ordered = bubble_bounds_s(case, stages)
    assert ordered <= as_it_is <= grid.variants[-1].epoch_s
    # by hand: one step of one micro-batch with images can hide neither of its phases
    bare, update_s = without_tower(case.setting.profile), rank_step_s(case.problem, stages)
    work = case.work.copy()
    work[:, 1:4] = 0.0
    times = times_of(work, stages, bare, case.cluster)
    tower = [x for x in tower_alone(case, 8).layers if x.tower != "language"]
    expected = 0.0
    for packs in case.schedule.table:
        seconds = []
        for row in packs:
            pipeline_s = simulate(_columns(times, row), num_devices=2).makespan_s
            first, last = (
                float(case.work[x, 1:4] @ whole_s) / 4 if x >= 0 else 0.0
                for x, whole_s in zip(row[[0, -1]], tower_terms(tower), strict=True)
            )
            held = row[row >= 0]
            busy = (times.forward_s + times.backward_s)[:, held].sum() / 2
            busy += sum(float((case.work[held, 1:4] @ x).sum()) / 4 for x in tower_terms(tower))
            seconds.append(max(busy, pipeline_s + first + last))
        expected += max(seconds) + update_s
    assert as_it_is == pytest.approx(expected, rel=1e-9)


def test_the_bound_holds_what_the_decoder_recomputes():
    case, stages = read_case(plan_of("one-grid"))
    decoder = [i for i in case.model.indices("language") if case.setting.profile.layers[i].tier("full") is not None]
    again = tuple(recomputing(x, dict.fromkeys(decoder, "full")) for x in stages)
    none = tuple(recomputing(x, {}) for x in stages)
    assert bubble_bounds_s(case, again)[0] > 1.1 * bubble_bounds_s(case, none)[0]


def test_text_first_and_last_hides_what_images_there_cannot():
    rng = np.random.default_rng(1)
    images = [np.full(int(i % 8 == 0), 2048, np.int64) for i in range(160)]
    options = dataclasses.replace(PIPELINE, max_patches=2048, max_tokens=1400)
    case, stages = read_case(make_plan(QWEN, table_of(images, rng), CLUSTER, options))
    as_it_is, ordered = bubble_bounds_s(case, stages)
    texts = (case.work[np.maximum(case.schedule.table, 0), 1] == 0) & (case.schedule.table >= 0)
    assert (texts.sum(axis=2) >= 2).any()
    assert ordered < as_it_is


def tower_terms(tower: list[LayerCost]) -> tuple[np.ndarray, np.ndarray]:
    """Seconds of a whole tower's passes for each image term."""
    return tuple(np.sum([getattr(x, name)[1:4] for x in tower], axis=0) for name in ("forward_s", "backward_s"))


def read_case(made: PlanDetails) -> tuple[Case, tuple[Stage, ...]]:
    with tempfile.TemporaryDirectory() as folder:
        found = write_checked(made, Path(folder))
    return found.case, found.stages
