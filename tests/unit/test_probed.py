"""plan/decide/probed.py: what a probe measured, in a plan's profile."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from partition_cases import constant
from plan_cases import tile_samples

from refusals import refused
from trimtab import PlanOptions, describe, make_plan, parse_cluster, write_plan
from trimtab.costs.bands import SLACK, SLACK_ERROR
from trimtab.costs.profile import profile_bytes, profile_from_bytes
from trimtab.errors import PlanError
from trimtab.partition.published import full_recompute
from trimtab.partition.stages import recompute_stages
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.probed import (
    DeviceProbe,
    KeptProbe,
    add_transient,
    freed_bytes,
    heaviest_packs,
    probed_profile,
    with_budget,
    with_profile,
)
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.file.reload import ReloadedPlan, reload_plan
from trimtab.specs import LayerCost, ParallelDims, Profile
from trimtab.units import GIB

MODEL = describe("InternVL-Chat-V1-5")


def reloaded(folder: Path, **more: Any) -> ReloadedPlan:
    options = PlanOptions(
        zero_stage=1,
        risk=0.05,
        dp=2,
        pp=8,
        tp=1,
        num_microbatches=16,
        max_patches=9225,
        max_tokens=4096,
        oversize="skip",
        **more,
    )
    write_plan(make_plan(MODEL, tile_samples(), parse_cluster("16xH200"), options), folder)
    return reload_plan(folder)


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> ReloadedPlan:
    return reloaded(tmp_path_factory.mktemp("plan"), schedule="1F1B")


def truth_of(profile: Profile, *, blocks: float, state: float, more: float) -> Profile:
    """A device on which recompute frees `blocks` x the formulas', and a backward takes `more` bytes beside."""

    def change(layer: LayerCost) -> LayerCost:
        full = layer.tiers[-1]
        tiers = tuple(
            replace(
                t, saved_bytes=tuple(f + blocks * (x - f) for x, f in zip(t.saved_bytes, full.saved_bytes, strict=True))
            )
            for t in layer.tiers
        )
        transient = (layer.transient_bytes[0] + more, *layer.transient_bytes[1:])
        other = layer.other_transient_bytes
        return replace(
            layer,
            tiers=tiers,
            state_bytes=layer.state_bytes * state,
            transient_bytes=transient,
            other_transient_bytes=(other[0] + more, *other[1:]) if other else (),
        )

    return replace(profile, layers=tuple(map(change, profile.layers)))


def probes_of(case: Case, found: ReloadedPlan, truth: Profile) -> tuple[list[KeptProbe], list[DeviceProbe]]:
    """What a probe would have measured on that device."""
    problem = replace(case.problem, profile=truth, overhead_bytes=0.0, overhead_share=0.0)
    kept, devices = [], []
    groups = {layer.group: i for i, layer in enumerate(truth.layers) if len(layer.tiers) > 1}
    for pack in heaviest_packs(case, found.stages):
        work = case.work[pack]
        kept += [
            KeptProbe(layer=i, tier=tier.name, pack=pack, num_bytes=freed_bytes(truth.layers[i], tier.name, work))
            for i in groups.values()
            for tier in truth.layers[i].tiers[:-1]
        ]
        full = full_recompute(truth, found.stages)
        result = replace(problem, work_max=work).assess(full)
        devices += [
            DeviceProbe(
                device=device,
                pack=pack,
                state_bytes=round(held.state_bytes),
                kept_bytes=round(held.saved_bytes),
                peak_bytes=round(held.total_bytes),
                in_flight=tuple(n for n, x in zip(result.in_flight, problem.order.device, strict=True) if x == device),
            )
            for device, held in enumerate(result.memory)
        ]
    return kept, devices


@pytest.mark.parametrize("blocks", [0.6, 1.0, 1.7])
@pytest.mark.parametrize("more", [0.0, 3.0 * GIB])
def test_a_device_that_keeps_otherwise_is_predicted_to_the_byte(found, blocks, more):
    """On every device, for full recompute and for none, at the pack of the highest peak."""
    case = found.case
    truth = truth_of(case.setting.profile, blocks=blocks, state=0.9, more=more)
    kept, devices = probes_of(case, found, truth)
    probed = probed_profile(case, found.stages, kept, devices, where="a device")
    assert "state (0.9 x the formulas')" in probed.profile.assumptions[-1]
    full, none = full_recompute(truth, found.stages), tuple(replace(x, recompute=()) for x in found.stages)
    for device in range(8):
        heaviest = max((x for x in devices if x.device == device), key=lambda x: x.peak_bytes)
        problem = replace(case.problem, work_max=case.work[heaviest.pack], overhead_bytes=0.0, overhead_share=0.0)
        for stages in (full, none):
            ours = replace(problem, profile=probed.profile).assess(stages).memory[device]
            theirs = replace(problem, profile=truth).assess(stages).memory[device]
            # each device's own layers carry its correction
            assert ours.total_bytes == pytest.approx(theirs.total_bytes, abs=64)
    assert max(probed.correction_bytes) == pytest.approx(more, abs=64)
    assert profile_from_bytes(profile_bytes(probed.profile), origin="file") == probed.profile


def test_chunks_that_peak_lower_together_lower_no_transient(tmp_path: Path) -> None:
    found = reloaded(tmp_path, schedule="Interleaved1F1B", num_chunks=2)
    case = found.case
    assert case.problem.num_chunks > 1
    truth = truth_of(case.setting.profile, blocks=1.0, state=1.0, more=-0.1 * GIB)
    probed = probed_profile(case, found.stages, *probes_of(case, found, truth), where="a device")
    assert not any(probed.correction_bytes[1:7])  # the first and the last device lack what the ends hold beside
    inner = [i for s in found.stages if s.index % 8 in range(1, 7) for i in range(s.start, s.stop)]
    assert all(
        probed.profile.layers[i].transient_bytes == case.setting.profile.layers[i].transient_bytes for i in inner
    )


def test_a_plan_read_back_has_the_probed_bytes_and_other_degrees_scale_them(found: ReloadedPlan) -> None:
    case = found.case
    truth = truth_of(case.setting.profile, blocks=1.3, state=1.1, more=GIB)
    probed = probed_profile(case, found.stages, *probes_of(case, found, truth), where="a device").profile
    options = replace(case.options, profile=probed)
    same = profile_setting(case.model, case.cluster, options, case.setting.dims)
    assert same.layers == probed.layers
    assert same.method == "probed"
    for changed in ({"optimizer": "sgd"}, {"zero_stage": 3}):
        with refused(PlanError):
            profile_setting(case.model, case.cluster, replace(options, **changed), case.setting.dims)
    other = ParallelDims(dp=4, pp=4)
    carried = profile_setting(case.model, case.cluster, options, other)
    formulas = profile_setting(case.model, case.cluster, case.options, other)
    for i in (5, 50):
        ours, theirs = carried.layers[i], formulas.layers[i]
        assert ours.state_bytes == pytest.approx(1.1 * theirs.state_bytes, rel=1e-6)
        assert ours.tiers == probed.layers[i].tiers  # tp is the same
        assert ours.transient_bytes[0] - theirs.transient_bytes[0] == pytest.approx(GIB, rel=1e-3)
    halved = profile_setting(case.model, case.cluster, options, ParallelDims(dp=2, pp=4, tp=2))
    by_two = profile_setting(case.model, case.cluster, case.options, ParallelDims(dp=2, pp=4, tp=2))
    work = case.work.max(axis=0)
    assert freed_bytes(halved.layers[50], "none", work) == pytest.approx(
        1.3 * freed_bytes(by_two.layers[50], "none", work), rel=0.02
    )


def test_more_in_the_backward_of_a_stage_makes_it_recompute_more(found: ReloadedPlan) -> None:
    problem = found.case.problem
    before = recompute_stages(problem, found.stages)
    tight = max(range(8), key=lambda d: before.memory[d].total_bytes)
    left = problem.memory_bytes - before.memory[tight].total_bytes
    raised = add_transient(problem.profile, [found.stages[tight]], left + 1)
    after = recompute_stages(with_profile(found.case, raised).problem, found.stages)
    assert after.memory[tight].saved_bytes < before.memory[tight].saved_bytes
    assert after.memory[tight].total_bytes <= problem.memory_bytes
    others = [d for d in range(8) if d != tight]
    assert [after.stages[d] for d in others] == [before.stages[d] for d in others]


def test_heaviest_packs_are_those_that_any_device_keeps_most_of(found: ReloadedPlan) -> None:
    case = found.case
    packs = heaviest_packs(case, found.stages)
    assert 1 <= len(packs) <= 2 * 8
    assert case.work[list(packs), 1].max() == case.work[:, 1].max()
    assert case.work[list(packs), 4].max() == case.work[:, 4].max()
    several = np.diff(case.packing.offsets)[list(packs)] > 1
    assert several.any()


def test_a_probe_fills_more_where_more_is_risked_and_where_no_allocator_has_slack(found: ReloadedPlan) -> None:
    case = with_budget(found.case, memory_bytes=80 * GIB, risk=None, allocator=True)
    assert (found.case.options.risk, case.budget.total_bytes) == (0.05, 80 * GIB)
    assert case.problem.memory_bytes == pytest.approx(80 * GIB / (1 + math.hypot(0.01, SLACK_ERROR)) / (1 + SLACK))
    assert case.problem.overhead_bytes == case.problem.overhead_share == 0
    plain = with_budget(found.case, memory_bytes=None, risk=0.5, allocator=False)
    assert plain.problem.memory_bytes == plain.budget.total_bytes == found.case.budget.total_bytes
    with refused(PlanError, "1.5", "0", "1"):
        with_budget(found.case, memory_bytes=None, risk=1.5, allocator=True)


def test_counted_tables_and_outputs_outlive_a_probe(found: ReloadedPlan) -> None:
    case = found.case
    counted = replace(
        case.setting.profile,
        layers=tuple(
            replace(x, entry_bytes=constant(64.0), output_bytes=tuple(2 * b for b in x.output_bytes))
            for x in case.setting.profile.layers
        ),
    )
    traced = replace(case, setting=replace(case.setting, profile=counted))
    probed = probed_profile(traced, found.stages, *probes_of(traced, found, counted), where="a device").profile
    same = profile_setting(case.model, case.cluster, replace(case.options, profile=probed), case.setting.dims)
    assert same.layers == probed.layers
    assert {layer.entry_bytes for layer in same.layers} == {constant(64.0)}
