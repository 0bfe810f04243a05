"""torch's schedules run the blocks that we simulate, in our order, each within its dependencies. Needs torch, gloo."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import injected_stages
from trimtab.partition.schedules import BACKWARD, FORWARD, WEIGHT, block_order
from trimtab.partition.simulate import BlockCosts

CASES = [("1F1B", 1, 3), ("GPipe", 1, 3), ("Interleaved1F1B", 2, 4), ("ZBH1", 1, 4), ("ZBVZeroBubble", 2, 4)]


def run_all(rank, runs):
    return [injected_stages.run_steps(run, rank, 1)[0] for run in runs]


@pytest.fixture(scope="module")
def ran():
    """(makespan, blocks of all ranks) of one step of every case on two gloo processes, and what was run."""
    runs = [
        injected_stages.Run(
            schedule=name,
            num_devices=2,
            num_chunks=V,
            num_microbatches=M,
            costs=BlockCosts(
                seconds=np.random.default_rng(M).uniform(0.001, 0.004, (3, 2 * V, M)), sends=np.zeros((2, 2 * V, M))
            ),
        )
        for name, V, M in CASES
    ]
    ranks = injected_stages.spawn(run_all, 2, runs)
    return {run.schedule: (run, [rank[i] for rank in ranks]) for i, run in enumerate(runs)}


@pytest.mark.parametrize("name", [name for name, _, _ in CASES])
def test_torch_runs_our_blocks_in_our_order(ran, name):
    run, ranks = ran[name]
    order = block_order(
        name, num_devices=run.num_devices, num_chunks=run.num_chunks, num_microbatches=run.num_microbatches
    )
    for device, (_, blocks) in enumerate(ranks):
        expected = np.stack([order.stage[device], order.microbatch[device], order.kind[device]], axis=1)
        found = injected_stages.order_of(blocks)
        if not (order.kind == WEIGHT).any():  # a whole backward is both of its parts, one behind the other
            found = found[found[:, 2] != WEIGHT]
        assert sorted(map(tuple, found.tolist())) == sorted(map(tuple, expected.tolist()))
        # torch runs both parts of the first stage's backward together, in an order of its own
        own = (found[:, 0] > 0) | (found[:, 2] == FORWARD)
        assert found[own].tolist() == expected[(expected[:, 0] > 0) | (expected[:, 2] == FORWARD)].tolist()


@pytest.mark.parametrize("name", [name for name, _, _ in CASES])
def test_blocks_keep_their_dependencies_and_take_their_seconds(ran, name):
    run, ranks = ran[name]
    blocks = {(x.stage, x.microbatch, x.kind): x for _, rank in ranks for x in rank}
    last = run.num_devices * run.num_chunks - 1
    for (stage, microbatch, kind), block in blocks.items():
        assert block.end_s - block.start_s >= run.costs.seconds[kind, stage, microbatch]
        before = None
        if kind == FORWARD and stage > 0:
            before = stage - 1, microbatch, FORWARD
        if kind == BACKWARD:
            before = (stage, microbatch, FORWARD) if stage == last else (stage + 1, microbatch, BACKWARD)
        if before is not None:
            assert blocks[before].end_s <= block.start_s
    for _, rank in ranks:
        spans = sorted((x.start_s, x.end_s) for x in rank)
        assert all(a[1] <= b[0] for a, b in itertools.pairwise(spans))
