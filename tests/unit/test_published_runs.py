"""bench/published.py: rows can be read, their constants are what the sources give, and sources left out stay near."""

import json
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from trimtab.costs.bands import TIME_BANDS
from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.curves import efficiency_of
from trimtab.costs.formula.host import HOSTS
from trimtab.plan.options import GivenRun

sys.path.append(str(Path(__file__).parents[2] / "bench"))

import decisions
import published
import published_curves as curves

ROWS = published.read_rows()


@pytest.mark.parametrize("source", sorted({row.source for row in ROWS}))
def test_every_row_is_a_run_or_says_why_not(source):
    for row in (row for row in ROWS if row.source == source):
        if row.left_out:
            continue
        assert row.host in HOSTS
        assert row.model_spec.layers
        assert published.cluster_of(row).num_devices == int(row.cluster.partition("x")[0])
        assert len(published.samples_of(row)) == row.samples["n"]
        assert set(row.settings) | set(row.stated) <= {*GivenRun.__dataclass_fields__, "adapter_weights"}
        assert row.measured.keys() & {"step_s", "memory_gb", "relative", "out_of_memory"}


def test_no_constant_came_from_a_source_that_is_held_out():
    assert not set(published.CONSTANTS) & set(published.HELD_OUT)


def test_the_sweep_of_degrees_is_met_and_its_best_is_found():
    found = [published.evaluate(row) for row in ROWS if row.source == "nanotron"]
    assert np.median([abs(x.defaults) for x in found]) <= 0.08
    measured = min(found, key=lambda x: x.row.step_s)
    ours = min(found, key=lambda x: x.row.step_s * (1 + x.defaults))
    assert ours.row.name == measured.row.name
    assert max(abs(x.left_out) for x in found) > max(abs(x.defaults) for x in found)  # its sends gave a constant


def test_short_passes_wait_for_the_host():
    rows = [row for row in ROWS if row.source in ("loongforge", "mindspeed-mm") and row.settings.get("pp", 1) == 1]
    found = [x for x in map(published.evaluate, rows) if x.regime == "short passes"]
    assert len(found) == 3
    assert max(abs(x.defaults) for x in found) <= 0.25
    assert all("host decides" in " ".join(published.predict(x.row, stated=False).notes) for x in found)


def test_a_band_is_that_of_the_regime_and_held_by_sources_that_did_not_ask_for_it():
    rows = [row for row in ROWS if row.source in ("megatron-2022", "experts-automodel", "hf-moe-prs")]
    found = [published.evaluate(row) for row in rows if not row.left_out]
    assert {x.regime for x in found} == {"dense models", "experts", "pipelines over nodes", "short passes"}
    assert all(x.band == TIME_BANDS[x.regime] for x in found)
    for band in published.bands(found):
        assert band.inside == 1.0


def test_constants_of_the_curve_are_those_that_published_kernels_give():
    for name, found in curves.fitted_curves().items():
        e = efficiency_of(DEVICES[name])
        assert e.outputs == pytest.approx(found.outputs, rel=0.03)
        assert e.depth == pytest.approx(found.depth, rel=0.02)
        assert np.mean(np.abs(found.errors)) <= 0.05
        assert e.matmul < found.share  # a training step draws more power than one product


def test_rows_of_a_sweep_are_one_model_on_the_same_devices():
    rows = {row.name: row for row in ROWS}
    for sweep in json.loads((published.DATA / "decisions.json").read_text()):
        own = [rows[name] for name in sweep["rows"] or ()]
        assert {(row.source, row.model, row.cluster) for row in own} <= {
            (sweep["source"], row.model, row.cluster) for row in own[:1]
        }


def test_a_sweep_counts_pairs_and_what_the_pick_costs():
    def ran(measured, ours, pp):
        return decisions.Outcome(row=replace(ROWS[0], settings={"pp": pp}), measured=measured, ours=ours)

    outcomes = (ran(1.0, 3.0, 1), ran(1.01, 2.5, 2), ran(1.2, 2.0, 4), ran(2.0, 4.0, 8))
    found = decisions.Sweep(name="x", what="degrees", source="x", outcomes=outcomes, edges=())
    again = replace(found, outcomes=(*outcomes, ran(1.5, 2.0, 4)))  # 1.2 measured once more
    assert len(again.pairs) == len(found.pairs) + 3
    assert (len(found.pairs), found.in_order) == (5, 3)  # 1.0 and 1.01 are no pair; 1.2 is put before both
    assert found.regret == pytest.approx(1.2)
    score = decisions.Score.of([found])
    assert (score.first, score.near) == (0, 0)
