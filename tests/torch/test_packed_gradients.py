"""Gradients of packs on two ranks equal those of samples alone in one process. Needs torch, gloo, Transformers."""

import contextlib
import copy
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from balanced_cases import tables_of
from gloo_ranks import on_ranks
from rounding import distance
from tiny_packs import CASES, Sample, TinyPacks, alone, make_tiny_packs, trainer_arguments
from torch.nn.functional import cross_entropy
from torch.utils.data import BatchSampler, DistributedSampler, SequentialSampler

from trimtab import Schedule, balanced
from trimtab.adapters.data_files import order_packs
from trimtab.balance.schedule import schedule_packs
from trimtab.runtime.data.collate import PackedCollator, packed_loss, step_denominator

DP, ACCUMULATION, RELATIVE = 2, 2, 1e-5
PACKS: list[list[list[int]]] = [[[0, 2], [1, 5]], [[3, 4, 6], []]]  # [rank][micro-batch]: one text-only, one empty
WEIGHTINGS = ("token", "sample")


def gradient_alone(packs: TinyPacks, samples: list[Sample], weighting: str) -> dict[str, torch.Tensor]:
    """One sample a forward, one process; the loss written out anew."""
    packs.model.zero_grad(set_to_none=True)
    counts = [int((sample["labels"][1:] != -100).sum()) for sample in samples]
    whole = sum(counts) if weighting == "token" else sum(count > 0 for count in counts)
    for sample, count in zip(samples, counts, strict=True):
        logits = packs.model(**alone(sample)).logits[0]
        cost = cross_entropy(logits[:-1], sample["labels"][1:], reduction="sum")
        (cost / (1 if weighting == "token" else max(count, 1)) / whole).backward()
    return gradients(packs.model)


def gradients(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def step_of_one_rank(model: Any, batches: list[dict[str, Any]], *, naive: bool) -> None:
    """Forward and backward of a step; `naive` takes each pack's mean, and the mean of those."""
    denominator = step_denominator(batches)
    for number, batch in enumerate(batches):
        last = number == len(batches) - 1
        with contextlib.nullcontext() if last else model.no_sync():
            logits = model(**{k: v for k, v in batch.items() if k not in ("labels", "loss_weights")}).logits
            if naive:
                labels = batch["labels"][0, 1:]
                loss = cross_entropy(logits[0, :-1], labels, reduction="sum") / max(int((labels != -100).sum()), 1)
                loss = loss / len(batches)
            else:
                loss = packed_loss(logits, batch, denominator=denominator, num_ranks=DP)
            loss.backward()


def one_rank(rank: int, folder: str, cases: list[str]) -> None:
    errors: dict[str, float] = {}
    for case in cases:
        packs = make_tiny_packs(case)
        wanted = {i for packs_of_rank in PACKS for pack in packs_of_rank for i in pack}
        samples = [packs.samples[i] for i in sorted(wanted) if i < len(packs.samples)]
        reference = copy.deepcopy(packs)
        for weighting in WEIGHTINGS:
            expected = gradient_alone(reference, samples, weighting)
            for name, parameter in packs.model.named_parameters():
                parameter.requires_grad_(name in expected)  # DDP refuses what no sample ever uses
            collator = PackedCollator(packs.model.config, loss_weighting=weighting)
            batches = [collator([packs.samples[i] for i in p if i < len(packs.samples)]) for p in PACKS[rank]]
            for naive in (False, True):
                packs.model.zero_grad(set_to_none=True)
                model = torch.nn.parallel.DistributedDataParallel(packs.model)  # every parameter, every time
                step_of_one_rank(model, batches, naive=naive)
                found = distance(gradients(packs.model), expected)
                errors[f"{case} {weighting} {'naive' if naive else 'packed'}"] = found
    Path(folder, f"errors{rank}.json").write_text(json.dumps(errors))


@pytest.fixture(scope="module")
def errors(request, tmp_path_factory) -> list[dict[str, float]]:
    """Of the cases that the tests to be run have."""
    given = [x.callspec.params for x in request.session.items if x.path == request.path and hasattr(x, "callspec")]
    cases = list(dict.fromkeys(x["case"] for x in given if "case" in x))
    folder = tmp_path_factory.mktemp("ranks")
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    on_ranks(one_rank, str(folder), cases, num_ranks=DP)
    return [json.loads((folder / f"errors{rank}.json").read_text()) for rank in range(DP)]


@pytest.mark.parametrize("weighting", WEIGHTINGS)
@pytest.mark.parametrize("case", CASES)
def test_two_ranks_with_accumulation_have_the_gradient_of_one_process_unpacked(case, weighting, errors):
    for of_rank in errors:
        assert of_rank[f"{case} {weighting} packed"] <= RELATIVE
        assert of_rank[f"{case} {weighting} naive"] > 0.05


# -- from a plan's tables through loader, collator and Trainer to one step --------------------------------------------


@pytest.fixture(scope="module")
def packs() -> TinyPacks:
    return make_tiny_packs("qwen2_5_vl")


@pytest.mark.parametrize("weighting", ["token", "sample"])
def test_a_planned_step_of_the_trainer_goes_along_the_gradient_of_the_samples_alone(packs, weighting, tmp_path):
    tables = tables_of([[4, 1, 0, 6], [5, 2, 3]])
    expected = gradient_alone(packs, packs.samples, weighting)
    packs.model.zero_grad(set_to_none=True)
    before = {name: p.detach().clone() for name, p in packs.model.named_parameters()}
    trainer = transformers.Trainer(
        model=packs.model,
        args=trainer_arguments(tmp_path, gradient_accumulation_steps=2, max_steps=1),
        train_dataset=packs.samples,
        data_collator=PackedCollator(packs.model.config, loss_weighting=weighting),
    )
    assert balanced(trainer, tables) is trainer
    trainer.train()
    with torch.no_grad():
        for name, parameter in packs.model.named_parameters():
            if name in expected:
                step = before[name] - parameter
                assert float((step - expected[name]).abs().max()) <= 1e-5 * max(1.0, float(expected[name].abs().max()))
            parameter.copy_(before[name])


# -- which rank reads which line of a file of packs: the loaders' own dealing against the schedule --------------------


DP_DATA, NUM_MICROBATCHES, NUM_PACKS = 4, 3, 44  # 11 rows: the last step has two rows instead of three


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    columns = np.random.default_rng(0).random((NUM_PACKS, 3))
    return schedule_packs(columns, dp=DP_DATA, num_microbatches=NUM_MICROBATCHES, order="sorted", seed=1)


def planned(schedule: Schedule, rank: int) -> list[int]:
    packs = schedule.table[:, rank, :].reshape(-1)
    return packs[packs >= 0].tolist()


def test_a_distributed_sampler_deals_each_rank_its_packs_in_order(schedule: Schedule) -> None:
    order = order_packs(schedule, NUM_PACKS)
    for rank in range(DP_DATA):
        sampler = DistributedSampler(range(NUM_PACKS), num_replicas=DP_DATA, rank=rank, shuffle=False)
        assert order[list(sampler)].tolist() == planned(schedule, rank)


def test_accelerate_deals_each_rank_its_packs_in_order(schedule: Schedule) -> None:
    shard = pytest.importorskip("accelerate.data_loader", reason="asks Accelerate").BatchSamplerShard
    order = order_packs(schedule, NUM_PACKS)
    for rank in range(DP_DATA):
        batches = BatchSampler(SequentialSampler(range(NUM_PACKS)), batch_size=1, drop_last=False)
        dealt = shard(batches, num_processes=DP_DATA, process_index=rank)
        assert [order[line] for (line,) in dealt] == planned(schedule, rank)
