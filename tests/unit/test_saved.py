"""costs/measured/saved.py, plan/decide/setting.py: plans made from a saved profile."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from cost_models import small_model
from plan_cases import tile_samples, write_checked

from refusals import refused
from trimtab import PlanOptions, describe, make_plan, profile_model, write_plan
from trimtab.costs.devices import DEVICES, find_device, parse_cluster
from trimtab.costs.measured.saved import carry_bytes, carry_seconds
from trimtab.errors import PlanError, TrimtabError
from trimtab.plan.file.reload import load_details
from trimtab.specs import DeviceSpec, ParallelDims, Profile

A100 = DEVICES["A100-80GB"]
MODEL = small_model()
TERMS = ("forward_s", "backward_s", "weight_s")


def slower(profile: Profile, factor: float, **changes: object) -> Profile:
    """As if it had been timed: every second of computing `factor` times the formula's."""

    def times(terms: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factor * x for x in terms)

    layers = tuple(
        dataclasses.replace(
            x,
            **{name: times(getattr(x, name)) for name in TERMS},
            tiers=tuple(dataclasses.replace(t, extra_backward_s=times(t.extra_backward_s)) for t in x.tiers),
        )
        for x in profile.layers
    )
    said = ("Seconds were measured.", *profile.assumptions[1:])
    fields = {"layers": layers, "method": "timed", "time_error": 0.05, "assumptions": said, **changes}
    return dataclasses.replace(profile, **fields)


def carry(
    saved: Profile, dims: ParallelDims, *, by: Callable[..., Profile] = carry_seconds, zero_stage: int = 1
) -> Profile:
    def formulas(device: DeviceSpec, dims: ParallelDims, zero_stage: int = min(zero_stage, 2)) -> Profile:
        return profile_model(MODEL, device, dims=dims, zero_stage=zero_stage)

    return by(
        saved,
        base=formulas(A100, saved.dims),
        target=formulas(A100, dims, zero_stage),
        linkless=formulas(dataclasses.replace(A100, link_bytes_per_s=math.inf), dims),
    )


def test_at_its_own_degrees_a_profile_keeps_its_seconds_to_the_bit() -> None:
    for dims in (ParallelDims(), ParallelDims(tp=2)):
        saved = slower(profile_model(MODEL, A100, dims=dims), 1.7)
        carried = carry(saved, dataclasses.replace(dims, pp=2, dp=4), zero_stage=1)
        for ours, theirs in zip(carried.layers, saved.layers, strict=True):
            assert [getattr(ours, name) for name in TERMS] == [getattr(theirs, name) for name in TERMS]
            assert [t.extra_backward_s for t in ours.tiers] == [t.extra_backward_s for t in theirs.tiers]
        assert (carried.method, carried.time_error, carried.dims.dp) == ("timed", 0.05, 4)
        by_formula = profile_model(MODEL, A100, dims=carried.dims, zero_stage=1)
        assert [x.state_bytes for x in carried.layers] == [x.state_bytes for x in by_formula.layers]


def test_tp_divides_what_was_measured_and_adds_the_formula_s_traffic() -> None:
    one, two = ParallelDims(), ParallelDims(tp=2)
    saved = slower(profile_model(MODEL, A100, dims=one), 3.0)
    carried = carry(saved, two)
    linkless = profile_model(MODEL, dataclasses.replace(A100, link_bytes_per_s=math.inf), dims=two)
    target = profile_model(MODEL, A100, dims=two)
    for ours, alone, with_links in zip(carried.layers, linkless.layers, target.layers, strict=True):
        expected = 3.0 * np.array(alone.forward_s) + np.array(with_links.forward_s) - np.array(alone.forward_s)
        np.testing.assert_allclose(ours.forward_s, expected, rtol=1e-9)
    assert any("Seconds measured at tp 1 were divided for tp 2" in said for said in carried.assumptions)
    assert carried.assumptions[0] == "Seconds were measured."


def test_a_profile_of_shared_layers_holds_its_own_traffic() -> None:
    two, four = ParallelDims(tp=2), ParallelDims(tp=4)
    carried = carry(slower(profile_model(MODEL, A100, dims=two), 1.5), four)
    target = profile_model(MODEL, A100, dims=four)
    for ours, formula in zip(carried.layers, target.layers, strict=True):
        np.testing.assert_allclose(ours.backward_s, 1.5 * np.array(formula.backward_s), rtol=1e-9)


def test_a_probed_profile_keeps_its_seconds_of_a_step() -> None:
    saved = profile_model(MODEL, A100)
    first = dataclasses.replace(saved.layers[0], step_s=saved.layers[0].step_s + 0.25)
    probed = dataclasses.replace(saved, layers=(first, *saved.layers[1:]), method="probed")
    carried, formula = carry(probed, ParallelDims(pp=2)), profile_model(MODEL, A100, dims=ParallelDims(pp=2))
    assert carried.layers[0].step_s == pytest.approx(formula.layers[0].step_s + 0.25)
    assert carried.layers[1].step_s == formula.layers[1].step_s


def counted(profile: Profile, factor: float, *, pair_bytes: float = 2.0) -> Profile:
    """As if its bytes had been traced: each `factor` times the formula's, and a mask of every pair."""

    def times(terms: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factor * x for x in terms)

    mask = (0.0, 0.0, 0.0, 0.0, 0.0, pair_bytes, 0.0)
    layers = tuple(
        dataclasses.replace(
            x,
            output_bytes=times(x.output_bytes),
            transient_bytes=times(x.transient_bytes),
            other_transient_bytes=(),
            entry_bytes=mask,
            tiers=tuple(
                dataclasses.replace(t, saved_bytes=tuple(map(sum, zip(times(t.saved_bytes), mask, strict=True))))
                for t in x.tiers
            ),
        )
        for x in profile.layers
    )
    said = (profile.assumptions[0], "Bytes were counted.", *profile.assumptions[1:])
    return dataclasses.replace(profile, layers=layers, method="traced", assumptions=said)


def test_at_its_own_degrees_a_profile_keeps_its_counted_bytes_to_the_bit() -> None:
    saved = counted(profile_model(MODEL, A100), 1.3)
    dims = ParallelDims(pp=2, dp=4)
    carried, formula = (
        carry(saved, dims, zero_stage=2, by=carry_bytes),
        profile_model(MODEL, A100, dims=dims, zero_stage=2),
    )
    for ours, theirs, priced in zip(carried.layers, saved.layers, formula.layers, strict=True):
        assert [t.saved_bytes for t in ours.tiers] == [t.saved_bytes for t in theirs.tiers]
        assert (ours.output_bytes, ours.transient_bytes) == (theirs.output_bytes, theirs.transient_bytes)
        assert ours.entry_bytes == theirs.entry_bytes
        assert [getattr(ours, name) for name in TERMS] == [getattr(priced, name) for name in TERMS]
        assert (ours.state_bytes, ours.step_s) == (priced.state_bytes, priced.step_s)
    assert (carried.method, carried.dims.dp) == ("traced", 4)
    assert carried.assumptions[0] == formula.assumptions[0]
    assert "Bytes were counted." in carried.assumptions


def test_tp_divides_counted_bytes_as_it_divides_the_formulas_and_leaves_masks_whole() -> None:
    saved, dims = counted(profile_model(MODEL, A100), 1.5), ParallelDims(tp=2)
    carried, formula = carry(saved, dims, by=carry_bytes), profile_model(MODEL, A100, dims=dims)
    for ours, priced in zip(carried.layers, formula.layers, strict=True):
        for tier, by_formula in zip(ours.tiers, priced.tiers, strict=True):
            expected = 1.5 * np.array(by_formula.saved_bytes)
            expected[5] += 2.0
            np.testing.assert_allclose(tier.saved_bytes, expected, rtol=1e-9)
    assert any("Bytes counted at tp 1 were divided for tp 2" in said for said in carried.assumptions)


def test_weights_that_zero_3_gathers_come_on_top_of_counted_transients() -> None:
    saved, dims = counted(profile_model(MODEL, A100), 1.5), ParallelDims(dp=8)
    carried = carry(saved, dims, zero_stage=3, by=carry_bytes)
    for ours, theirs in zip(carried.layers, saved.layers, strict=True):
        gathered = np.array(ours.transient_bytes) - np.array(theirs.transient_bytes)
        assert gathered.tolist() == [2 * 2 * ours.num_params, 0, 0, 0, 0, 0, 0]  # two layers' weights of two bytes


# -- files and plans ------------------------------------------------------------------------------------------------


def test_a_measured_device_stands_beside_the_published_ones() -> None:
    cpu = dataclasses.replace(A100, name="cpu")
    assert find_device("CPU", also=cpu) == cpu
    assert parse_cluster("4xcpu", also=cpu).device == cpu
    assert find_device("H200", also=cpu) == DEVICES["H200"]
    with refused(TrimtabError, "cpu"):
        find_device("cpu")


def test_a_plan_keeps_the_profile_it_was_made_with(tmp_path: Path) -> None:
    internvl = describe("InternVL-Chat-V1-5")
    device = dataclasses.replace(A100, name="of my own")
    saved = slower(profile_model(internvl, device), 2.0)
    cluster = parse_cluster("16xof my own", also=device)
    options = PlanOptions(pp=4, tp=2, num_microbatches=8, host="none")
    samples = tile_samples()
    made = make_plan(internvl, samples, cluster, dataclasses.replace(options, profile=saved))
    formulas = make_plan(internvl, samples, cluster, options)
    assert made.plan.inputs.training.costs == "timed"
    assert made.plan.estimates.time_error == 0.05
    assert 1.3 < made.plan.estimates.step_ms / formulas.plan.estimates.step_ms < 2.1  # traffic and optimizer do not
    assert "Seconds were measured." in made.plan.assumptions

    write_checked(made, tmp_path)
    loaded = load_details(tmp_path)
    for before, after in zip(made.variants, loaded.variants, strict=True):
        np.testing.assert_array_equal(before.step_s, after.step_s)
    write_plan(loaded, tmp_path / "again")
    assert (tmp_path / "again" / "profile.json").read_bytes() == (tmp_path / "profile.json").read_bytes()

    content = json.loads((tmp_path / "profile.json").read_text())
    content["time_error"] = 0.01
    (tmp_path / "profile.json").write_text(json.dumps(content))
    with refused(PlanError):
        load_details(tmp_path)


def test_a_plan_from_a_traced_profile_reads_its_bytes(tmp_path: Path) -> None:
    """Half the bytes, so less recompute; seconds are the formulas'; what is read back is what was planned."""
    internvl, samples, cluster = describe("InternVL-Chat-V1-5"), tile_samples(), parse_cluster("16xA100")
    options = PlanOptions(pp=4, tp=2, num_microbatches=8, memory_bytes=50 * 2**30, host="none")
    formulas = make_plan(internvl, samples, cluster, options)
    limits = {"max_patches": formulas.packing.limits[0], "max_tokens": formulas.packing.limits[1]}
    saved = counted(profile_model(internvl, cluster.device), 0.5, pair_bytes=0.0)
    made = make_plan(internvl, samples, cluster, dataclasses.replace(options, profile=saved, **limits))
    assert made.plan.inputs.training.costs == "traced"
    backward_s = [x.variants[-1].stage_backward_s.sum() for x in (formulas, made)]
    assert backward_s[1] < 0.95 * backward_s[0]
    assert [x.forward_s for x in made.profile.layers] == [x.forward_s for x in formulas.profile.layers]
    write_checked(made, tmp_path)
    assert load_details(tmp_path).profile == made.profile


def test_a_plan_of_formulas_names_no_profile(tmp_path: Path) -> None:
    made = make_plan(describe("InternVL-Chat-V1-5"), tile_samples(), parse_cluster("16xA100"), PlanOptions(pp=4, tp=2))
    assert "profile" not in write_plan(made, tmp_path).read_text().split("decisions:")[0]
    assert not (tmp_path / "profile.json").exists()
