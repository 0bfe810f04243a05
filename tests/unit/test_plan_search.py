"""Tests of `plan --set search=omnibal`: the published search as a plan's own, its table, and what it refuses."""

from dataclasses import replace
from pathlib import Path

import pytest
from plan_cases import tile_samples
from report_fixtures import plan_text

from trimtab.costs.devices import parse_cluster
from trimtab.models.describe import describe
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.file.check import check_plan
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.file.reload import reload_plan
from trimtab.plan.options import PlanOptions
from trimtab.report.html import html_report

MODEL, CLUSTER = describe("InternVL-Chat-V1-5"), parse_cluster("32xA100-80GB")
OPTIONS = PlanOptions(
    schedule="1F1B", zero_stage=1, risk=0.05, pp=4, tp=2, num_microbatches=8, search="omnibal", radius=2, top=6
)


@pytest.fixture(scope="module")
def made() -> PlanDetails:
    return make_plan(MODEL, tile_samples(), CLUSTER, OPTIONS)


def sizes(stages):
    return tuple(stage.stop - stage.start for stage in stages)


def test_the_fastest_of_the_best_ranked_is_the_plan_and_the_optimum_stands_beside_them(made: PlanDetails) -> None:
    *listed, exact = made.plan.estimates.searched
    fitting = [row for row in listed if row.step_ms is not None]
    assert len(fitting) == OPTIONS.top
    best = min(fitting, key=lambda row: row.step_ms)
    fastest = [row.stages for row in fitting if row.step_ms == best.step_ms]  # of four digits: more may be equal
    assert sizes(made.variants[-1].stages) in fastest
    assert exact.step_ms <= best.step_ms
    plain = make_plan(MODEL, tile_samples(), CLUSTER, replace(OPTIONS, search="exact"))
    assert exact.stages == sizes(plain.variants[-1].stages)
    assert made.variants[-1].epoch_s >= plain.variants[-1].epoch_s * (1 - 1e-9)
    assert "searched as OmniBal published it: 125 within 2 layers of the anchor" in " ".join(made.plan.assumptions)


def test_the_plan_says_how_it_was_searched(made: PlanDetails, tmp_path: Path) -> None:
    write_plan(made, tmp_path)
    assert check_plan(tmp_path) == []
    found = reload_plan(tmp_path)
    assert (found.plan.inputs.training.search, found.plan.inputs.training.radius) == ("omnibal", 2)
    assert "OmniBal's search" in plan_text(made)
    assert "exact optimum" in html_report(made)
