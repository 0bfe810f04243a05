"""Offload as a tier: its price, where it pays, what a plan records of it, and what other frameworks make of it."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from partition_cases import ONE, assess_stages, constant, layer, profile_of, split
from plan_cases import tile_samples

from trimtab.adapters.frameworks import find_target
from trimtab.adapters.running import cost_of_running, export_plan, fit_plan
from trimtab.costs.devices import DEVICES, parse_cluster
from trimtab.costs.offload import LINK_SHARE, with_offload
from trimtab.costs.profile import load_profile, profile_model, save_profile
from trimtab.errors import PartitionError, PlanError
from trimtab.models.describe import describe
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.decide.expressible import recompute_offloaded
from trimtab.plan.file.details import PlanDetails
from trimtab.plan.file.reload import load_details, reload_plan
from trimtab.plan.measured.check import check_plan
from trimtab.plan.options import PlanOptions
from trimtab.report.html import html_report
from trimtab.report.words import describe_recompute
from trimtab.specs import RecomputeChoice, Stage

MODEL = describe("InternVL-Chat-V1-5")
OPTIONS = PlanOptions(pp=4, tp=2, global_batch=64, max_patches=20500, max_tokens=16384)
OFFLOAD = replace(OPTIONS, offload=True, host_memory_bytes=128 * 10**9)


@pytest.fixture(scope="module")
def made() -> PlanDetails:
    return make_plan(MODEL, tile_samples(200), parse_cluster("8xH20"), OFFLOAD)


@pytest.fixture(scope="module")
def folder(made: PlanDetails, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    write_plan(made, folder)
    return folder


# -- the price --------------------------------------------------------------------------------------------------------


def tier_of(cost, name):
    return next((tier for tier in cost.tiers if tier.name == name), None)


@pytest.mark.parametrize(("rate", "extra"), [(1000.0, 0.0), (100.0, 0.0), (50.0, 1.0), (25.0, 3.0 + 1.0)])
def test_what_a_copy_exceeds_forward_and_backward_by_is_its_price(rate, extra):
    # 100 bytes to move under a forward of 1 s and a backward of 3 s
    profile = profile_of([layer(0, forward=1.0, backward=3.0, saved=((0, 110.0), (0.5, 40.0), (1.0, 10.0)))])
    offload = tier_of(with_offload(profile, host_bytes_per_s=rate / LINK_SHARE).layers[0], "offload")
    assert offload.extra_backward_s == pytest.approx(constant(extra))
    assert offload.saved_bytes == constant(10.0)


def test_the_price_is_never_below_what_the_whole_copy_exceeds_them_by():
    device = DEVICES["H100-80GB"]
    profile = with_offload(profile_model(describe("Qwen2.5-VL-7B"), device), host_bytes_per_s=2e11)
    rng = np.random.default_rng(0)
    seen = 0
    for cost in profile.layers:
        offload = tier_of(cost, "offload")
        assert (offload is None) == (tier_of(cost, "full") is None)
        for _ in range(5 if offload else 0):
            p, t = rng.integers(1, 30000, 2).astype(float)
            work = np.array([1, p, p * p / 4, p * 64, t, t * t / 4, t * t / 4])
            moved = np.dot(np.subtract(cost.tiers[0].saved_bytes, offload.saved_bytes), work) / (LINK_SHARE * 2e11)
            least = max(0.0, moved - np.dot(cost.forward_s, work)) + max(0.0, moved - np.dot(cost.backward_s, work))
            assert np.dot(offload.extra_backward_s, work) >= least * (1 - 1e-12)
            seen += least > 0
    assert seen > 10
    assert with_offload(profile, host_bytes_per_s=2e11).layers == profile.layers  # not twice


def test_a_link_that_moves_nothing_is_refused():
    with pytest.raises(PartitionError, match=r"host link of 0 bytes/s was given, and nothing would ever arrive: give"):
        with_offload(profile_of([layer(0)]), host_bytes_per_s=0)


def test_the_tier_is_taken_where_the_link_pays_and_only_there():
    model = describe("Qwen2.5-VL-7B")
    chosen = {}
    for name, rate in (("H20", 63e9), ("H200", 63e9), ("H200", 450e9)):
        profile = with_offload(profile_model(model, DEVICES[name]), host_bytes_per_s=rate)
        work = np.array([1, 16384, 16384**2 / 4, 16384 * 64, 8192, 8192**2 / 4, 8192**2 / 4])
        result = split(profile, 4, memory=60 * 2**30, microbatches=16, forbidden_cuts=model.forbidden_cuts, work=work)
        chosen[name, rate] = sum(stage.num_offloaded() for stage in result.stages)
    assert chosen["H200", 63e9] == 0  # the copies take many times a layer's forward
    assert chosen["H20", 63e9] > 3
    assert chosen["H200", 450e9] > 5


def test_memory_counts_two_layers_in_the_backward_and_the_host_every_micro_batch():
    saved, offload = ((0, 100.0), (1.0, 10.0)), (0.5, 10.0)
    profile = profile_of([layer(i, state=5.0, saved=saved, transient=7.0, offload=offload) for i in range(4)])
    stages = [
        Stage(index=0, start=0, stop=2, recompute=(RecomputeChoice(tier="offload", layers=(0, 1)),)),
        Stage(index=1, start=2, stop=4, recompute=(RecomputeChoice(tier="full", layers=(2,)),)),
    ]
    ask = {"work_mean": ONE, "work_max": ONE, "num_microbatches": 8}
    first, second = assess_stages(profile, stages, **ask).memory
    assert (first.saved_bytes, first.transient_bytes, first.host_bytes) == (2 * 20.0, 7.0 + 2 * 90.0, 2 * 180.0)
    assert first.total_bytes == 10.0 + 40.0 + 187.0
    assert (second.transient_bytes, second.host_bytes) == (7.0 + 90.0, 0.0)
    # with weight gradients apart the micro-batches whose backward has begun are held whole
    apart = assess_stages(profile, stages, schedule="ZBH1", **ask).memory[0]
    assert (apart.transient_bytes, apart.host_bytes) == (7.0, 2 * 180.0)


# -- plans ------------------------------------------------------------------------------------------------------------


def test_a_plan_with_offload_is_faster_fits_and_checks(made: PlanDetails, folder: Path):
    plain = make_plan(MODEL, tile_samples(200), parse_cluster("8xH20"), OPTIONS)
    assert made.variants[-1].epoch_s < 0.97 * plain.variants[-1].epoch_s
    assert sum(stage.num_offloaded() for stage in made.variants[-1].stages) > 10
    assert 0 < max(device.host_bytes for device in made.variants[-1].memory) <= 128e9
    assert check_plan(folder) == []
    again = load_details(folder)
    assert again.variants[-1].epoch_s == made.variants[-1].epoch_s
    assert again.variants[-1].memory == made.variants[-1].memory
    assert made.plan.inputs.cluster.host_memory_bytes == 128 * 10**9
    assert plain.plan.inputs.cluster.host_bytes_per_s is None
    assert not any("ffload" in sentence for sentence in plain.plan.assumptions)
    assert any("Offloaded layers are copied at 49.2 GB/s each way" in x for x in made.plan.assumptions)
    assert any("offload" in describe_recompute(stage) for stage in made.variants[-1].stages)
    assert "Offload</" in html_report(made)
    assert "Offload</" not in html_report(plain)


def test_check_names_a_host_that_is_too_small_and_a_plan_that_may_not_offload(folder: Path, tmp_path: Path):
    text = (folder / "plan.yaml").read_text()
    for name in ("samples.npz", "offsets.npy", "indices.npy", "schedule.npy"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "plan.yaml").write_text(
        text.replace("host_memory_bytes: 128000000000", "host_memory_bytes: 1000000000")
    )
    problems = check_plan(tmp_path)
    assert re.search(r"rank 0 would offload .* to host memory, of which the plan has 954 MiB for a device", problems[0])
    without = re.sub(r"\n    host_bytes_per_s: .*\n    host_memory_bytes: .*", "", text)
    (tmp_path / "plan.yaml").write_text(without)
    assert any("is to take the tier 'offload', which its profile does not offer" in x for x in check_plan(tmp_path))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_memory_bytes": 10**9}, r"host_memory_bytes 1000000000 was given without offload.*give --offload too"),
        ({"host_bytes_per_s": 1e9}, "host_bytes_per_s 1000000000.0 was given without offload"),
        ({"offload": True, "host_bytes_per_s": 0.0}, "host_bytes_per_s 0.0 was asked for, and no machine has that"),
        ({"offload": True, "recompute": "full"}, "offload was asked for with recompute full, which leaves no choice"),
    ],
)
def test_options_that_make_no_sense_are_refused(options, message):
    with pytest.raises(PlanError, match=message):
        PlanOptions(**options)


def test_hosts_that_nobody_published_have_to_be_given():
    with pytest.raises(PlanError, match=r"how much host memory servers with H20 have: give --host-memory"):
        make_plan(MODEL, tile_samples(20), parse_cluster("8xH20"), PlanOptions(offload=True))
    cluster = parse_cluster("8xH20")
    cluster = replace(cluster, device=replace(cluster.device, host_bytes_per_s=None))
    with pytest.raises(PlanError, match=r"no link of H20 to host memory is known: give --host-link"):
        make_plan(MODEL, tile_samples(20), cluster, PlanOptions(offload=True, host_memory_bytes=10**9))


def test_profiles_from_before_offload_load_and_null_stands_for_unknown(tmp_path: Path):
    path = tmp_path / "profile.json"
    for name in ("H200", "H20"):
        profile = profile_model(describe("Qwen2.5-VL-7B"), DEVICES[name])
        save_profile(profile, path)
        assert load_profile(path) == profile
    data = json.loads(path.read_text())
    del data["device"]["host_bytes_per_s"], data["device"]["host_memory_bytes"]
    path.write_text(json.dumps(data))
    assert load_profile(path).device.host_bytes_per_s is None


# -- exports ----------------------------------------------------------------------------------------------------------


def test_exports_recompute_what_they_cannot_offload_and_say_the_price(folder: Path):
    found = reload_plan(folder)
    number = sum(stage.num_offloaded() for stage in found.stages)
    for name in ("deepspeed", "torch-pipelining"):
        exported = export_plan(found, find_target(name))
        assert exported.warnings[0].startswith(f"{number} layers are planned with offload to host memory, and are")
        assert all(stage.num_offloaded() == 0 for stage in exported.runs)
        assert any(
            re.search(r"a step is predicted to take 1\.\d+ x as long", x) for x in cost_of_running(found, exported)
        )
    fitted = fit_plan(found, find_target("deepspeed"))
    assert all(stage.num_offloaded() == 0 for stage in fitted.variants[-1].stages)
    assert fitted.variants[-1].fits


def test_recomputed_instead_of_offloaded_a_device_holds_no_more(folder: Path):
    found = reload_plan(folder)
    problem = found.case.problem
    before, after = problem.assess(found.stages).memory, problem.assess(recompute_offloaded(found.stages)).memory
    for a, b in zip(before, after, strict=True):
        assert b.saved_bytes <= a.saved_bytes * (1 + 1e-12)
        assert b.transient_bytes <= a.transient_bytes
        assert b.host_bytes == 0
