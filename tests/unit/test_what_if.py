"""What the report's sliders are given: exact splits under smaller caps, and numbers that a page can read."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import pytest
from plan_cases import tile_samples

from trimtab.costs.devices import parse_cluster
from trimtab.models.describe import describe
from trimtab.partition.schedules import peak_saved_bytes
from trimtab.partition.stages import split_stages
from trimtab.plan.build import make_plan
from trimtab.plan.decide.what_if import CappedSplit, capped_splits
from trimtab.plan.file.details import PlanDetails
from trimtab.plan.options import PlanOptions
from trimtab.report.html import html_report


@pytest.fixture(scope="module")
def made() -> PlanDetails:
    options = PlanOptions(pp=4, tp=2, num_microbatches=8, max_patches=5125, max_tokens=8192)
    return make_plan(describe("InternVL-Chat-V1-5"), tile_samples(200), parse_cluster("16xA100-80GB"), options)


def peaks(split: CappedSplit, made: PlanDetails) -> list[float]:
    saved = peak_saved_bytes(split.saved_bytes, "1F1B", num_devices=4, num_microbatches=8)
    problem = made.case.problem
    counted = split.state_bytes + saved + split.transient_bytes
    return (counted * (1 + problem.overhead_share) + problem.overhead_bytes).tolist()


def test_the_first_split_is_the_plans_and_the_others_are_exact_under_their_caps(made: PlanDetails) -> None:
    plan, problem = made.variants[-1], made.case.problem
    first, *others = capped_splits(made.case, plan.stages)
    assert peaks(first, made) == pytest.approx([memory.total_bytes for memory in plan.memory])
    assert first.seconds[0] == pytest.approx(plan.stage_forward_s)
    assert first.seconds[1] == pytest.approx(plan.stage_backward_s)
    assert len(others) > 1
    for split in others:
        assert max(peaks(split, made)) <= split.cap_bytes
        exact = split_stages(replace(problem, memory_bytes=split.cap_bytes))
        assert split.seconds[:2].sum(axis=0).max() == pytest.approx(exact.bottleneck_s)
    slowest = [split.seconds.sum(axis=0).max() for split in others]
    assert slowest == sorted(slowest), "less memory, more recompute"


def test_the_page_holds_the_numbers_and_two_sliders(made: PlanDetails) -> None:
    html = html_report(made)
    data = json.loads(re.search(r'<script type="application/json">(.*?)</script>', html)[1])
    splits = capped_splits(made.case, made.variants[-1].stages)
    assert len(data["splits"]) == len(splits)
    assert np.allclose(data["splits"][-1]["seconds"], splits[-1].seconds, rtol=1e-6)
    assert (data["schedule"], data["num_devices"], data["num_microbatches"]) == ("1F1B", 4, 8)
    assert data["samples_per_s"] == pytest.approx(len(made.packing.indices) / made.variants[-1].epoch_s)
    sliders = re.findall(r'<input type="range" min="(\d+)" max="(\d+)"[^>]* value="(\d+)"', html)
    assert sliders == [("1", "32", "8"), ("0", str(len(splits) - 1), str(len(splits) - 1))]
    assert "What if" not in html_report(replace(made, case=None))
