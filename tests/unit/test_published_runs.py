"""bench/published.py: rows can be read, their constants are what the sources give, and sources left out stay near."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.curves import efficiency_of
from trimtab.costs.formula.host import HOSTS
from trimtab.plan.given import GivenRun

sys.path.append(str(Path(__file__).parents[2] / "bench"))

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
    rows = [row for row in ROWS if row.regime == "short passes" and row.settings.get("pp", 1) == 1]
    found = [published.evaluate(row).defaults for row in rows]
    assert len(found) == 3
    assert max(map(abs, found)) <= 0.25
    assert all(published.predict(row, stated=False).notes for row in rows), "the host is said to decide"


def test_constants_of_the_curve_are_those_that_published_kernels_give():
    for name, found in curves.fitted_curves().items():
        e = efficiency_of(DEVICES[name])
        assert e.outputs == pytest.approx(found.outputs, rel=0.03)
        assert e.depth == pytest.approx(found.depth, rel=0.02)
        assert np.mean(np.abs(found.errors)) <= 0.05
        assert e.matmul < found.share  # a training step draws more power than one product
