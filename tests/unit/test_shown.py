"""Specs and results at a prompt: three lines; and one sentence for a value of a wrong type."""

import functools

import numpy as np

import trimtab
import trimtab.placement
from trimtab.plan.file.figures import PlanDetails
from trimtab.samples.table import SizingResult


@functools.cache
def details() -> PlanDetails:
    samples = trimtab.SampleTable.of(np.full(64, 1025), np.full(64, 400))
    model, cluster = trimtab.describe("InternVL-Chat-V1-5"), trimtab.parse_cluster("8xA100-80GB")
    return trimtab.make_plan(model, samples, cluster, trimtab.PlanOptions(pp=4, tp=2))


def test_specs_and_results_are_three_lines() -> None:
    made = details()
    packed = trimtab.pack_samples(made.samples, limits=made.packing.limits, oversize="skip")
    placed = trimtab.place(made.model, trimtab.placement.parse_machine("2x80GiB"), trimtab.placement.Workload())
    shown = (made.model, made.samples, made.profile, made.packing, made.schedule, made, packed)
    shown += (made.plan, placed)
    for value in (*shown, SizingResult(table=made.samples)):
        lines = repr(value).splitlines()
        assert len(lines) == 3, lines
        assert max(map(len, lines)) < 500
    assert f"{len(made.model.layers)} layers" in repr(made.model)
    assert f"{made.packing.num_packs:,} packs" in repr(made.packing)


def test_numbers_of_numpy_are_numbers() -> None:
    assert trimtab.PlanOptions(pp=np.int64(2), risk=np.float64(0.1)).pp == 2
