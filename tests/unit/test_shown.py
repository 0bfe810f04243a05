"""Specs and results at a prompt: three lines; and one sentence for a value of a wrong type."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import trimtab
import trimtab.placement
from trimtab.plan.file.figures import PlanDetails
from trimtab.samples.table import SizingResult


@pytest.fixture(scope="module")
def details() -> PlanDetails:
    samples = trimtab.SampleTable.of(np.full(64, 1025), np.full(64, 400))
    model, cluster = trimtab.describe("InternVL-Chat-V1-5"), trimtab.parse_cluster("8xA100-80GB")
    return trimtab.make_plan(model, samples, cluster, trimtab.PlanOptions(pp=4, tp=2))


def test_specs_and_results_are_three_lines(details: PlanDetails) -> None:
    packed = trimtab.pack_samples(details.samples, limits=details.packing.limits, oversize="skip")
    placed = trimtab.place(details.model, trimtab.placement.parse_machine("2x80GiB"), trimtab.placement.Workload())
    shown = (details.model, details.samples, details.profile, details.packing, details.schedule, details, packed)
    shown += (details.plan, placed)
    for value in (*shown, SizingResult(table=details.samples)):
        lines = repr(value).splitlines()
        assert len(lines) == 3, lines
        assert max(map(len, lines)) < 500
    assert f"{len(details.model.layers)} layers" in repr(details.model)
    assert f"{details.packing.num_packs:,} packs" in repr(details.packing)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda _: trimtab.PlanOptions(pp="2"), "pp '2' was asked for, which is a str: give a whole number"),
        (lambda _: trimtab.PlanOptions(global_batch=2.5), "global_batch 2.5 was asked for, which is a float: give"),
        (lambda _: trimtab.PlanOptions(tp=True), "tp True was asked for, which is a bool: give a whole number"),
        (lambda x: trimtab.make_plan("m", x.samples, None), "model was given as str, and a ModelSpec is wanted: give"),
        (lambda x: trimtab.make_plan(x.model, [1], None), "samples was given as list, and a SampleTable is wanted"),
        (lambda x: trimtab.make_plan(x.model, x.samples, "8xH100"), "cluster was given as str, and a ClusterSpec is"),
        (lambda _: trimtab.pack_samples([1], limits=(3, 4)), "samples was given as list, and a SampleTable is wanted"),
        (lambda x: trimtab.write_plan(x.plan, "out"), "details was given as Plan, and a PlanDetails is wanted"),
        (lambda _: trimtab.parse_cluster(8), 'cluster was given as int, and a str is wanted: give one as in "32x'),
        (lambda x: trimtab.profile_model("m", None), "model was given as str, and a ModelSpec is wanted"),
        (lambda x: trimtab.place(x.model, "2x24GiB", None), "machine was given as str, and a Machine is wanted"),
        (lambda x: trimtab.split_stages(x.model), "problem was given as ModelSpec, and a SplitProblem is wanted"),
        (lambda x: trimtab.save_profile(x.model, "p"), "profile was given as ModelSpec, and a Profile is wanted"),
        (lambda x: trimtab.report_packing(x.samples, 2), "result was given as int, and a PackResult is wanted"),
        (lambda _: trimtab.placement.parse_machine(2), "machine was given as int, and a str is wanted"),
        (lambda _: trimtab.find_device(8), "name was given as int, and a str is wanted"),
        (lambda _: trimtab.load_plan(3), "plan was given as int, and a Path or str is wanted: give the path of a"),
        (
            lambda x: trimtab.size_samples(3, image_rule=x.model.image_rule, tokenizer=None),
            "data was given as int, and",
        ),
        (lambda x: trimtab.size_samples([3], image_rule=x.model.image_rule, tokenizer=None), "data was given as int"),
        (lambda _: trimtab.describe(8), "int does not describe a model: give a config.json, its folder or its content"),
    ],
)
def test_a_wrong_type_is_one_sentence(call: Callable[[Any], object], message: str, details: PlanDetails) -> None:
    with pytest.raises(trimtab.TrimtabError) as caught:
        call(details)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_numbers_of_numpy_are_numbers() -> None:
    assert trimtab.PlanOptions(pp=np.int64(2), risk=np.float64(0.1)).pp == 2
