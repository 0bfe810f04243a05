"""Published runs, predicted by bench/published_runs.py."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from trimtab.units import MIB

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    spec = importlib.util.spec_from_file_location("published_runs", ROOT / "bench" / "published_runs.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


def test_parameters_of_every_rank_are_exact(bench):
    runs = bench.h20_runs()
    assert {x.run.profile.dims.tp for x in runs} == {1, 2}
    for x in runs:
        assert bench.stage_params(x) == x.logged["params_per_rank_by_pp_stage"], x.run.name


def test_memory_of_middle_stages_needs_no_fit(bench):
    points = bench.middle_stages(bench.h20_runs())
    assert len(points) == 12
    for p in points:
        assert abs(p.activation_error) <= 0.01
        assert abs(p.peak_error) <= 0.01
        # what kept activations leave of the logged peak is the workspace, whatever the layers and those in flight
        left = p.logged_activation_bytes - p.kept_bytes
        assert abs(left - p.workspace_bytes) < 12 * MIB
        # the planner counts a whole block in its place: never too little
        assert 0 <= p.planned_bytes / p.logged_activation_bytes - 1 <= 0.05
        assert abs((p.state_bytes + p.planned_bytes) / p.logged_peak_bytes - 1) <= 0.015


def test_step_times_are_predicted_where_every_stage_kind_was_the_slowest(bench):
    runs = [x for x in bench.h20_runs() if x.group == (4096, 2)]
    found = bench.triples(runs)
    assert len(found) == 4
    for triple in found:
        # the run 4/24 alone is bound by its language stage
        settled = "4/24" in triple.names
        assert settled == (not triple.calibration.warnings), triple.names
        if settled:
            assert max(map(abs, triple.errors.values())) <= 0.02
            assert triple.calibration.profile.time_error <= 0.10
        else:
            assert any("bound by a language stage" in warning for warning in triple.calibration.warnings)
            assert abs(triple.errors["4/24"]) > 0.02


def test_runs_that_do_not_fit_together_are_never_passed_over_in_silence(bench):
    runs = [x for x in bench.h20_runs() if x.group == (1280, 1)]
    for triple in bench.triples(runs):
        assert triple.calibration.warnings, triple.names
        assert triple.calibration.profile.time_error >= 0.30


def test_gpu_days_of_table_9_follow_from_table_4(bench):
    found = bench.omnibal()
    tables = bench.load("omnibal_tables.json")
    errors = found.errors()
    assert len(errors) == len(tables["table_9_model_sizes"]) == 6
    assert np.mean(np.abs(errors)) <= 0.13
    spread = {row["method"]: row["var_forward_time"] for row in tables["table_4_model_balance"]}
    for name in ("parameter_based", "searched"):
        times = bench.stage_times(
            found.base.profile, found.base.stages(bench.TABLE_4_SPLITS[name]), bench.PACK[None]
        ).forward_s[:, 0]
        assert np.std(times) * 1e3 == pytest.approx(spread[name], rel=1e-9)


def test_our_splits_are_no_slower_than_the_papers_within_the_same_bytes(bench):
    found = bench.omnibal()
    for setting in found.rows:
        for selective in (False, True):
            compared = bench.compare_splits(found, setting, selective=selective)
            assert compared.ours_s <= compared.paper_s
            fullest = [max(x.total_bytes for x in split.memory) for split in (compared.ours, compared.paper)]
            assert fullest[0] <= fullest[1] * (1 + 1e-9)
