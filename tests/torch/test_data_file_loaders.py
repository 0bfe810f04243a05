"""Which rank reads which line of a file of packs: the loaders' own dealing against the schedule. Needs torch.

What data_files.py says of PyTorch's DistributedSampler and of Accelerate is asked of them here.
"""

from __future__ import annotations

import numpy as np
import pytest
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from trimtab.adapters.data_files import order_packs
from trimtab.balance.schedule import schedule_packs
from trimtab.specs import Schedule

DP, NUM_MICROBATCHES, NUM_PACKS = 4, 3, 44  # 11 rows: the last step has two rows instead of three


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    columns = np.random.default_rng(0).random((NUM_PACKS, 3))
    return schedule_packs(columns, dp=DP, num_microbatches=NUM_MICROBATCHES, order="sorted", seed=1)


def planned(schedule: Schedule, rank: int) -> list[int]:
    packs = schedule.table[:, rank, :].reshape(-1)
    return packs[packs >= 0].tolist()


def test_a_distributed_sampler_deals_each_rank_its_packs_in_order(schedule: Schedule) -> None:
    order = order_packs(schedule, NUM_PACKS)
    for rank in range(DP):
        sampler = DistributedSampler(range(NUM_PACKS), num_replicas=DP, rank=rank, shuffle=False)
        assert order[list(sampler)].tolist() == planned(schedule, rank)


def test_accelerate_deals_each_rank_its_packs_in_order(schedule: Schedule) -> None:
    shard = pytest.importorskip("accelerate.data_loader", reason="asks Accelerate").BatchSamplerShard
    order = order_packs(schedule, NUM_PACKS)
    for rank in range(DP):
        batches = BatchSampler(SequentialSampler(range(NUM_PACKS)), batch_size=1, drop_last=False)
        dealt = shard(batches, num_processes=DP, process_index=rank)
        assert [order[line] for (line,) in dealt] == planned(schedule, rank)
