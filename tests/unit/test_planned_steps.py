"""Planned times of a run's steps: the plan's own for the plan's own steps, and of any other dealing of its packs."""

from __future__ import annotations

import numpy as np
import pytest
from plan_cases import tile_samples

import trimtab
from trimtab.plan.decide.work import rank_step_s
from trimtab.plan.file.reload import planned_steps


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plan")
    options = trimtab.PlanOptions(dp=2, pp=2, tp=4, num_microbatches=4, max_patches=9 * 1025, max_tokens=4096)
    model = trimtab.describe("InternVL-Chat-V1-5")
    cluster = trimtab.parse_cluster("16xA100-80GB")
    details = trimtab.make_plan(model, tile_samples(), cluster, options)
    trimtab.write_plan(details, folder)
    return folder, details


def test_the_plans_own_steps_take_what_the_plan_says(written):
    folder, details = written
    planned = planned_steps(folder)
    found = [planned.step_s(packs) for packs in details.schedule.table]
    assert found == pytest.approx(details.variants[-1].step_s.tolist(), rel=1e-12)
    assert len(set(found)) > 1


def test_a_step_on_one_rank_of_twice_as_many_microbatches_takes_longer(written):
    folder, details = written
    planned = planned_steps(folder)
    packs = details.schedule.table[0]
    together = packs.T.reshape(1, -1)  # as the loader deals them to one rank
    assert planned.step_s(together) > 1.5 * planned.step_s(packs)
    empty = np.full_like(packs, -1)
    assert planned.step_s(empty) == pytest.approx(rank_step_s(planned.problem, planned.stages))
