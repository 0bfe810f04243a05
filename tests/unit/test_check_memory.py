"""plan/file/check.py without torch: a plan replayed with bytes that were counted before."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from plan_cases import tile_samples

from refusals import refused
from trimtab.costs.bands import OUTSIDE, SLACK
from trimtab.costs.devices import parse_cluster
from trimtab.costs.measured.traced_fit import TracedProfile
from trimtab.costs.profile import profile_model
from trimtab.errors import PlanError
from trimtab.models.describe import describe, read_config
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.file.check import MemoryCheck, find_traced_model, replay_plan
from trimtab.plan.file.reload import reload_plan
from trimtab.plan.options import PlanOptions, VisionChoice
from trimtab.specs import DeviceSpec, Profile

CLUSTER = parse_cluster("16xA100")
OPTIONS = PlanOptions(
    schedule="1F1B",
    zero_stage=1,
    risk=0.05,
    pp=4,
    tp=2,
    num_microbatches=8,
    memory_bytes=57 * 2**30,
    max_patches=9225,
    max_tokens=4352,
    host="none",
)


@pytest.fixture(scope="module")
def planned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A plan of 16 devices whose stages recompute."""
    folder = tmp_path_factory.mktemp("planned")
    details = make_plan(describe("InternVL-Chat-V1-5"), tile_samples(), CLUSTER, OPTIONS)
    assert any(stage.recompute for stage in details.variants[-1].stages)
    write_plan(details, folder)
    return folder


def as_counted(factor: float, device: DeviceSpec = CLUSTER.device) -> TracedProfile:
    """Kept bytes `factor` times the formulas'."""
    formulas = profile_model(describe("InternVL-Chat-V1-5"), device)
    layers = tuple(
        dataclasses.replace(
            x,
            tiers=tuple(dataclasses.replace(t, saved_bytes=tuple(factor * b for b in t.saved_bytes)) for t in x.tiers),
        )
        for x in formulas.layers
    )
    profile: Profile = dataclasses.replace(formulas, layers=layers, method="traced")
    return TracedProfile(profile=profile, kinds=(), warnings=())


def replayed(folder: Path, factor: float = 1.0) -> MemoryCheck:
    found = reload_plan(folder)
    return replay_plan(found, as_counted(factor, found.case.cluster.device))


def test_the_packs_that_run_need_no_more_than_the_limits_allow(planned: Path) -> None:
    check = replayed(planned)
    assert check.problems == []
    assert check.budget.fill_bytes == pytest.approx(0.9454 * OPTIONS.memory_bytes, rel=1e-3)
    for rank in check.ranks:
        assert 0.9 * rank.planned.total_bytes < rank.peak.memory.total_bytes <= rank.planned.total_bytes * (1 + 1e-9)
        held = rank.peak.memory
        assert held.overhead_bytes == pytest.approx(SLACK * held.counted_bytes + OUTSIDE * OPTIONS.memory_bytes)


def test_a_plan_that_shares_images_is_replayed_with_the_whole_towers_of_its_ranks(tmp_path: Path) -> None:
    options = dataclasses.replace(OPTIONS, pp=1, tp=8, memory_bytes=120 * 2**30, vision=VisionChoice(group="tp"))
    cluster = parse_cluster("16xH200")
    write_plan(make_plan(describe("InternVL-Chat-V1-5"), tile_samples(), cluster, options), tmp_path)
    assert reload_plan(tmp_path).case.vision is not None
    (rank,) = replayed(tmp_path).ranks
    assert rank.peak.memory.state_bytes == pytest.approx(rank.planned.state_bytes)
    assert 0.9 * rank.planned.total_bytes < rank.peak.memory.total_bytes <= rank.planned.total_bytes * (1 + 1e-9)


def test_a_pooled_call_is_held_whole(tmp_path: Path) -> None:
    model, cluster, peaks = describe("InternVL-Chat-V1-5"), parse_cluster("8xH200"), []
    for pooling in (1, 2, 4):
        options = PlanOptions(
            dp=8,
            pp=1,
            tp=1,
            num_microbatches=4,
            risk=0.05,
            zero_stage=3,
            max_patches=9225,
            max_tokens=4352,
            host="none",
            vision=VisionChoice(group="dp", pooling=pooling),
        )
        write_plan(make_plan(model, tile_samples(), cluster, options), tmp_path / str(pooling))
        found = reload_plan(tmp_path / str(pooling))
        none = tuple(dataclasses.replace(stage, recompute=()) for stage in found.stages)
        check = replay_plan(dataclasses.replace(found, stages=none), as_counted(1.0, cluster.device))
        peaks.append(check.ranks[0].peak.memory.saved_bytes)
        assert check.ranks[0].peak.memory.total_bytes <= check.ranks[0].planned.total_bytes * (1 + 1e-9)
    assert peaks == sorted(peaks)
    assert peaks[2] > 1.1 * peaks[0]


def test_a_stage_over_the_cap_is_named_with_what_it_needs_and_what_to_try(planned: Path) -> None:
    check = replayed(planned, 2.0)
    over = [rank for rank in check.ranks if rank.peak.memory.total_bytes > check.budget.fill_bytes]
    assert len(check.problems) == len(over) > 0
    for rank, problem in zip(over, check.problems, strict=True):
        assert problem.startswith(f"pipeline rank {rank.rank} needs ")
        assert " by counted bytes, of 53.9 GiB that may be expected of its 57.0 GiB, in step " in problem
        assert "or pack less into a micro-batch" in problem
        whole = all(len(stage.recompute) and stage.num_recomputed() for stage in rank.stages)
        assert ("recompute more of its layers (" in problem) or whole


def test_a_layer_taken_out_of_recompute_by_hand_is_caught(planned: Path, tmp_path: Path) -> None:
    """A cap that the plan needs all of: what one layer keeps is then too much."""
    text = (planned / "plan.yaml").read_text()
    check = replayed(planned)
    counted = max(rank.peak.memory.counted_bytes for rank in check.ranks)
    need = counted / check.budget.band.largest_counted(OPTIONS.risk)
    for name in ("samples.npz", "offsets.npy", "indices.npy", "schedule.npy"):
        (tmp_path / name).write_bytes((planned / name).read_bytes())
    tight = text.replace(f"memory_bytes: {OPTIONS.memory_bytes}", f"memory_bytes: {int(need) + 1}")
    (tmp_path / "plan.yaml").write_text(tight)
    assert replayed(tmp_path).problems == []
    found = reload_plan(tmp_path)
    fullest = max(replayed(tmp_path).ranks, key=lambda rank: rank.peak.memory.total_bytes).rank
    choice = found.stages[fullest].recompute[-1]
    changed = dataclasses.replace(choice, layers=choice.layers[1:])
    stages = list(found.stages)
    stages[fullest] = dataclasses.replace(stages[fullest], recompute=(*stages[fullest].recompute[:-1], changed))
    check = replay_plan(dataclasses.replace(found, stages=tuple(stages)), as_counted(1.0))
    (problem,) = check.problems
    assert problem.startswith(f"pipeline rank {fullest} needs ")


def test_the_configuration_is_the_plans_own_or_the_one_that_is_given(planned: Path, tmp_path: Path) -> None:
    assert find_traced_model(planned) == ("InternVL-Chat-V1-5", None)
    assert find_traced_model(planned, "InternVL-Chat-V1-5") == ("InternVL-Chat-V1-5", None)
    with refused(PlanError, "--config", "Qwen2.5-VL-7B", "65"):
        find_traced_model(planned, "Qwen2.5-VL-7B")
    moved = (planned / "plan.yaml").read_text().replace("config: InternVL-Chat-V1-5", "config: gone/config.json")
    (tmp_path / "plan.yaml").write_text(moved)
    with refused(PlanError, "gone/config.json", "--config"):
        find_traced_model(tmp_path)
    found = find_traced_model(tmp_path, "InternVL-Chat-V1-5")[1]
    assert found is not None
    assert found.layers == describe("InternVL-Chat-V1-5").layers


def test_a_model_described_from_python_needs_its_configuration(tmp_path: Path) -> None:
    model = describe(read_config("InternVL-Chat-V1-5"), name="mine")
    assert model.origin is None
    write_plan(make_plan(model, tile_samples(), CLUSTER, OPTIONS), tmp_path)
    with refused(PlanError, "--config"):
        find_traced_model(tmp_path)
    assert find_traced_model(tmp_path, "InternVL-Chat-V1-5")[1] is not None
