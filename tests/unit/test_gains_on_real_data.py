"""No plan is slower than the run it is told against, and a row of its table that is slower says why."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab import PlanOptions, SampleTable, describe, make_plan, parse_cluster
from trimtab.plan.decide.work import select_rows
from trimtab.samples.lengths import read_lengths

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench"))

import lengths  # noqa: E402

SETS = ("ai2d_train_12k", "chartqa_train_18k", "docvqa_train_10k", "three", "drawn")


def real_lengths(name: str) -> SampleTable:
    """A fifth of a set's rows; "drawn": of distributions that were fitted to the three, which the project holds."""
    if name == "drawn":
        table = lengths.draw_lengths("real")
    else:
        files = sorted(lengths.DEFAULT_DATA.glob("*_lengths.json" if name == "three" else f"{name}_lengths.json"))
        if not files:
            pytest.skip("the length files are not in ../shared/data")
        table = read_lengths(files)
    return select_rows(table, np.arange(0, len(table), 5))


@pytest.mark.parametrize("degrees", [{"pp": 4, "tp": 2}, {"pp": 1, "tp": 4}, {"pp": 8, "tp": 1}], ids=str)
@pytest.mark.parametrize("name", SETS)
def test_no_plan_is_slower_than_its_baseline_and_a_slower_row_says_why(name: str, degrees: dict[str, Any]) -> None:
    options = PlanOptions(**degrees, global_batch=208, fused_kernels=True)
    model, cluster = describe("InternVL-Chat-V1-5", max_tiles=4), parse_cluster("32xA100-80GB")
    plan = make_plan(model, real_lengths(name), cluster, options).plan
    rows = {row.name: row for row in plan.estimates.variants}
    baseline, packs, ours = rows["baseline"], rows["balanced packs"], plan.estimates.variants[-1]
    assert ours.epoch_s <= baseline.epoch_s * 1.005
    said = [x for x in plan.assumptions if x.startswith('The row "balanced packs" takes')]
    assert len(said) == (packs.epoch_s > 1.005 * baseline.epoch_s)
    assert not said or (baseline.recompute, packs.recompute) == ("none", "full"), "packs that recompute, and no others"


@pytest.mark.parametrize("name", ["three", "drawn"])
def test_at_a_large_batch_a_pipeline_is_preferred_to_zero_3_as_published(name: str) -> None:
    """arXiv 2407.20761, Table 2: the pipeline takes 0.84 of ZeRO-3's time, on 32 A100."""
    model, cluster, data = describe("InternVL-Chat-V1-5"), parse_cluster("32xA100-80GB"), real_lengths(name)

    def epoch_s(**given: Any) -> tuple[float, Any]:
        plan = make_plan(model, data, cluster, PlanOptions(global_batch=1024, **given)).plan
        return plan.estimates.variants[-1].epoch_s, plan.decisions.parallel

    chosen_s, chosen = epoch_s()
    sharded_s, _ = epoch_s(zero_stage=3, pp=1, tp=1)
    published_s, _ = epoch_s(pp=4, tp=2, zero_stage=1)  # fits
    assert chosen.pp > 1
    assert 0.78 <= chosen_s / sharded_s <= 0.90
    assert 0.78 <= published_s / sharded_s <= 0.90
