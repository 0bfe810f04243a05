"""A plan whose weights repeat and leave out samples, through sampler, loader and resume. Needs torch."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from trimtab.costs.devices import parse_cluster
from trimtab.models.describe import describe
from trimtab.plan.build import make_plan, write_plan
from trimtab.plan.decide.mixture import draw_epoch
from trimtab.plan.options import PlanOptions
from trimtab.runtime.data.dataset import PlanBatchSampler, PlanDataLoader, PlanDataset
from trimtab.runtime.data.missing import MissingSample
from trimtab.specs import SampleTable

WEIGHTS = (("often", 3.0), ("seldom", 1.0))


@pytest.fixture(scope="module")
def samples() -> SampleTable:
    tokens = np.arange(60, dtype=np.int64) * 7 % 50 + 20
    return SampleTable.of(
        0 * tokens,
        tokens,
        source=(np.arange(60) % 3 > 0).astype(np.int32),
        source_names=("often", "seldom"),
    )


@pytest.fixture(scope="module")
def folder(samples: SampleTable, tmp_path_factory: pytest.TempPathFactory) -> Path:
    options = PlanOptions(dp=4, pp=2, num_microbatches=2, max_tokens=400, weights=WEIGHTS, num_drawn=100)
    made = make_plan(describe("Qwen2.5-VL-7B"), samples, parse_cluster("8xA100-80GB"), options)
    out = tmp_path_factory.mktemp("mixed") / "plan"
    write_plan(made, out)
    return out


def run(
    folder: Path, *, dp: int, num_batches: int | None = None, state: dict[str, str | int] | None = None
) -> list[int]:
    rows = []
    for rank in range(dp):
        loader = PlanDataLoader(list(range(60)), PlanBatchSampler(folder, dp=dp, rank=rank), collate_fn=list)
        if state is not None:
            loader.load_state_dict(state)
        for number, batch in enumerate(loader):
            if number == num_batches:
                break
            rows += batch
    return rows


@pytest.mark.parametrize("dp", [2, 4])
def test_the_ranks_see_every_row_as_often_as_it_is_drawn(folder: Path, samples: SampleTable, dp: int) -> None:
    times = draw_epoch(samples, WEIGHTS, num_drawn=100).times
    assert times.max() == 4
    assert times.min() == 0
    assert np.bincount(run(folder, dp=dp), minlength=60).tolist() == times.tolist()


def test_a_resumed_epoch_sees_the_rest_of_the_repeats(folder: Path, samples: SampleTable) -> None:
    times = draw_epoch(samples, WEIGHTS, num_drawn=100).times
    state = PlanBatchSampler(folder, dp=4, rank=0).state_dict(num_batches=2)
    seen = np.bincount(run(folder, dp=4, num_batches=2), minlength=60)
    rest = np.bincount(run(folder, dp=2, state=state), minlength=60)
    assert seen.sum() > 0
    assert rest.sum() > 0
    assert (seen + rest).tolist() == times.tolist()


def test_a_bad_sample_is_replaced_and_counted_each_time_it_is_drawn(folder: Path, samples: SampleTable) -> None:
    times = draw_epoch(samples, WEIGHTS, num_drawn=100).times
    bad = int(times.argmax())

    class Data:
        def __getitem__(self, row: int) -> int:
            if row == bad:
                raise OSError("gone")
            return row

    def filler(missing: MissingSample) -> int:
        return -missing.row

    dataset = PlanDataset(Data(), dataclasses.replace(samples), on_error="filler", make_filler=filler)
    sampler = PlanBatchSampler(folder, dp=1, rank=0)
    rows = [row for batch in PlanDataLoader(dataset, sampler, collate_fn=list) for row in batch]
    assert len(rows) == 100
    assert rows.count(-bad) == dataset.num_fillers == times[bad]
