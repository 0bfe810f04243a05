"""plan/decide/epoch.py: sources drawn by weight, in a plan and in what is read from it."""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import read_back, tile_samples, write_checked

from refusals import refused
from trimtab import PlanDetails, PlanOptions, SampleTable, describe, make_plan, parse_cluster, write_plan
from trimtab.errors import PackingError, PlanError
from trimtab.plan.decide.epoch import draw_epoch, share_exactly
from trimtab.plan.file.check import check_plan, refuse_broken
from trimtab.plan.file.reload import reload_plan, replan
from trimtab.plan.file.yaml import load_plan, plan_to_yaml

MODEL = describe("InternVL-Chat-V1-5")
CLUSTER = parse_cluster("32xA100-80GB")
OPTIONS = PlanOptions(pp=4, tp=2, num_microbatches=4, weights=(("images", 0.5), ("text", 2.0)))


@pytest.fixture(scope="module")
def samples() -> SampleTable:
    return dataclasses.replace(tile_samples(400), ids=tuple(f"s{i}" for i in range(400)))


@pytest.fixture(scope="module")
def made(samples: SampleTable) -> PlanDetails:
    return make_plan(MODEL, samples, CLUSTER, OPTIONS)


def of_sources(sizes: list[int]) -> SampleTable:
    """Sources one after the other, named a, b, c, ..."""
    source = np.repeat(np.arange(len(sizes), dtype=np.int32), sizes)
    numbers = np.arange(1, len(source) + 1)
    columns: dict[str, Any] = dict.fromkeys(("num_images", "num_patches", "patches_sq", "patches_windowed"), numbers)
    names = tuple("abcdefgh"[: len(sizes)])
    return SampleTable(**columns, num_tokens=numbers, source=source, source_names=names)


# -- drawing ----------------------------------------------------------------------------------------------------------


@given(
    parts=st.lists(st.tuples(st.integers(1, 12), st.integers(0, 5)), min_size=1, max_size=5),
    num_drawn=st.integers(1, 80),
    seed=st.integers(0, 9),
)
@settings(max_examples=60, deadline=None)
def test_shares_are_met_and_rows_of_a_source_are_drawn_evenly(parts, num_drawn, seed):
    if not any(weight for _, weight in parts):
        parts[0] = (parts[0][0], 1)
    samples = of_sources([size for size, _ in parts])
    weights = [(name, float(weight)) for name, (_, weight) in zip("abcdefgh", parts, strict=False)]
    draw = draw_epoch(samples, weights[::-1], num_drawn=num_drawn, seed=seed)
    assert draw.times.sum() == len(draw.rows) == num_drawn
    assert np.array_equal(np.bincount(draw.rows, minlength=len(samples)), draw.times)
    for number, source in enumerate(draw.sources):
        times = draw.times[samples.source == number]
        assert (source.name, source.weight) == weights[number]
        assert (source.num_rows, source.num_drawn) == (len(times), times.sum())
        assert times.max() - times.min() <= 1
        share = num_drawn * source.weight / sum(weight for _, weight in weights)
        assert abs(source.num_drawn - share) < 1
    again = draw_epoch(samples, weights, num_drawn=num_drawn, seed=seed)
    assert np.array_equal(again.times, draw.times)


def test_equal_remainders_go_to_the_first() -> None:
    assert share_exactly(5, np.array([0.25] * 4)).tolist() == [2, 1, 1, 1]
    assert share_exactly(3, np.array([0.0, 1.0])).tolist() == [0, 3]


# -- plans ------------------------------------------------------------------------------------------------------------


def test_packs_hold_rows_of_the_data_as_often_as_they_are_drawn(samples: SampleTable, made: PlanDetails) -> None:
    draw = draw_epoch(samples, OPTIONS.weights, seed=OPTIONS.seed)
    assert draw.times.max() > 1
    assert draw.times.min() == 0
    packing, decision = made.packing, made.plan.decisions.packing
    assert np.array_equal(np.bincount(packing.indices, minlength=len(samples)), draw.times)
    assert packing.sums(made.samples.num_patches).max() <= decision.max_patches
    assert packing.sums(made.samples.num_tokens).max() <= decision.max_tokens
    assert made.plan.inputs.data.num_samples == len(made.samples) == len(samples)
    assert made.plan.inputs.data.mixture == draw.sources


def test_a_mixed_plan_checks_and_simulates_to_the_same_figures(made: PlanDetails, tmp_path: Path) -> None:
    path = write_plan(made, tmp_path)
    read_back(made, tmp_path)
    text = path.read_text(encoding="utf-8")
    assert "- {name: images, weight: 0.5, num_rows: " in text
    num_drawn = made.plan.inputs.data.mixture[0].num_drawn
    path.write_text(text.replace(f"num_drawn: {num_drawn}}}", f"num_drawn: {num_drawn + 1}}}"), encoding="utf-8")
    problems = check_plan(tmp_path)
    assert "the mixture has other counts in the plan than its weights give: run `trimtab plan` again" in problems


def test_a_plan_split_again_keeps_its_mixture(made: PlanDetails, tmp_path: Path) -> None:
    """With its own split: nothing may change but what is said of where that comes from."""
    write_plan(made, tmp_path / "made")
    found = reload_plan(tmp_path / "made")
    again = replan(found, found.stages, forbidden_cuts=frozenset(), note="Split again, for a test.")
    assert made.plan.inputs.data.mixture
    for part in ("inputs", "decisions", "estimates", "summary"):
        assert getattr(again.plan, part) == getattr(made.plan, part), part
    old = [said for said in made.plan.assumptions if said.startswith("Splits were simulated")]
    assert len(old) == 1
    kept = tuple(said for said in made.plan.assumptions if said not in old)
    assert again.plan.assumptions == (*kept, "Split again, for a test.")
    write_checked(again, tmp_path / "again")
    refuse_broken(tmp_path / "again")
    without = dataclasses.replace(
        again.plan,
        inputs=dataclasses.replace(again.plan.inputs, data=dataclasses.replace(again.plan.inputs.data, mixture=())),
    )
    write_plan(dataclasses.replace(again, plan=without), tmp_path / "without")
    with refused(PlanError) as error:
        refuse_broken(tmp_path / "without")
    assert "samples are packed more than once" in str(error.value)


def test_a_pack_too_many_of_a_sample_is_found(made: PlanDetails, tmp_path: Path) -> None:
    indices = made.packing.indices.copy()
    left_out = int(np.flatnonzero(np.bincount(indices, minlength=len(made.samples)) == 0)[0])
    indices[0] = left_out
    packing = dataclasses.replace(made.packing, indices=indices)
    from trimtab.plan.file.yaml import name_table, pack_contents

    contents = pack_contents(packing, made.schedule)
    table = name_table("indices.npy", contents["indices.npy"])
    decision = dataclasses.replace(made.plan.decisions.packing, indices=table)
    decisions = dataclasses.replace(made.plan.decisions, packing=decision)
    plan, tables = dataclasses.replace(made.plan, decisions=decisions), {**made.tables, **contents}
    write_plan(dataclasses.replace(made, plan=plan, tables=tables), tmp_path)
    problems = "\n".join(check_plan(tmp_path))
    assert "1 samples are packed more often than the weights draw them: run `trimtab plan` again" in problems
    assert "1 samples are in no pack" in problems


def test_oversize_samples_of_a_mixture_are_left_out_as_often_as_they_are_drawn(samples, tmp_path):
    limits = {"max_patches": 3075, "max_tokens": 4096}
    options = dataclasses.replace(OPTIONS, **limits, oversize="skip", num_drawn=900)
    made = make_plan(MODEL, samples, CLUSTER, options)
    draw = draw_epoch(samples, options.weights, num_drawn=900, seed=options.seed)
    over = (samples.num_patches > 3075) | (samples.num_tokens > 4096)
    expected = np.where(over, draw.times, 0)
    assert expected.sum() > 0
    assert made.plan.decisions.packing.num_oversize == expected.sum()
    assert np.array_equal(np.bincount(made.packing.oversize, minlength=400), expected)
    write_checked(made, tmp_path)
    assert np.array_equal(np.sort(made.packing.oversize), reload_plan(tmp_path).case.packing.oversize)
    with pytest.raises(PackingError) as error:
        make_plan(MODEL, samples, CLUSTER, dataclasses.replace(options, oversize="error"))
    first = str(error.value).splitlines()[0]
    assert first.startswith(f"{int((over & (draw.times > 0)).sum())} of ")


def test_a_plan_without_weights_has_no_such_key(samples: SampleTable, tmp_path: Path) -> None:
    made = make_plan(MODEL, samples, CLUSTER, dataclasses.replace(OPTIONS, weights=()))
    assert "mixture" not in plan_to_yaml(made.plan)
    write_plan(made, tmp_path)
    assert load_plan(tmp_path).inputs.data.mixture == ()
