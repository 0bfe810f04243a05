"""Pipelines on four gloo ranks beside the model in one process. Needs torch and Transformers."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pipeline_runs
import pytest
import torch
from covering import covering, others_integration
from gloo_ranks import on_ranks
from pipeline_cases import CASES
from pipeline_runs import WORLD
from rounding import BOUNDS

RELATIVE = BOUNDS[torch.float32]
PLAIN = covering(CASES, ("schedule", "ranks", "dp", "frozen", "shared", "replica"))
CASES_BY_NAME = others_integration(CASES, PLAIN, lambda case: case.name)


@pytest.fixture(scope="module")
def chosen(request: pytest.FixtureRequest) -> list[Any]:
    """Cases that the tests to be run have."""
    cases: list[Any] = []
    for item in request.session.items:
        case = item.callspec.params.get("case") if hasattr(item, "callspec") else None
        if item.path == request.path and case is not None and case not in cases:
            cases.append(case)
    return cases


@pytest.fixture(scope="module")
def found(chosen: list[Any], tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each rank found: one launch for everything, since starting the processes takes most of the time."""
    folder = tmp_path_factory.mktemp("ranks")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on_ranks(pipeline_runs.run_all, str(folder), chosen, num_ranks=WORLD)
    return [json.loads(Path(folder, f"found{rank}.json").read_text()) for rank in range(WORLD)]


@pytest.fixture(scope="module")
def errors(found: list[dict[str, Any]], chosen: list[Any]) -> dict[str, list[dict[str, Any]]]:
    """Case name -> errors of each rank that ran it."""
    names = [case.name for case in chosen]
    return {name: [rank["errors"][name] for rank in found if name in rank["errors"]] for name in names}


def test_every_case_has_a_name_of_its_own_and_ran_on_its_ranks(errors, chosen):
    assert len({case.name for case in CASES}) == len(CASES)
    assert {name: len(ranks) for name, ranks in errors.items()} == {x.name: x.ranks * x.dp for x in chosen}


@pytest.mark.parametrize("case", CASES_BY_NAME)
def test_a_step_has_the_loss_and_gradients_of_one_process(case, errors):
    for rank in errors[case.name]:
        assert rank["loss"] <= RELATIVE
        for which in ("gradients", "again"):
            assert max(rank[which]) <= RELATIVE


@pytest.mark.parametrize("case", CASES_BY_NAME)
def test_gradients_are_clipped_by_the_norm_of_the_whole_model(case, errors):
    for rank in errors[case.name]:
        assert rank["norm"] <= RELATIVE
        assert rank["clipped"][1] <= (RELATIVE if case.dtype == "float32" else 2**-8)  # rounded once


@pytest.mark.parametrize("case", CASES_BY_NAME)
def test_the_ranks_hold_the_whole_model_once(case, errors):
    for rank in errors[case.name]:
        assert rank["names"] == []
        strange, dropped = rank["held"]
        assert strange == 0
        assert dropped > 0


def test_ranks_that_are_given_other_micro_batches_are_told_so(found):
    assert all("unlike micro-batches" in rank["told"] for rank in found)
