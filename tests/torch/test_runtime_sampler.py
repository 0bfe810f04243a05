"""The batch sampler, the loader and the Trainer's hook: needs torch, Transformers, Accelerate; gloo ranks on a CPU."""

import json
import logging
import random
from pathlib import Path
from typing import Any

import numpy as np
import plan_runs
import pytest
import torch
from gloo_ranks import on_ranks
from torch.utils.data import DataLoader
from transformers import LlamaConfig

from refusals import refused
from trimtab.errors import PlanError, SampleError
from trimtab.specs import SampleTable
from trimtab.torch import PackedCollator, PlanBatchSampler, PlanDataLoader, PlanDataset


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    plan_runs.write_small_plan(folder / "plan")
    return folder


def loader_of(folder: Path, *, dp: int = 2, rank: int = 0, data: Any = None, **options: Any) -> PlanDataLoader:
    sampler = PlanBatchSampler(folder / "plan", dp=dp, rank=rank)
    return PlanDataLoader(plan_runs.Rows() if data is None else data, sampler, collate_fn=list, **options)


# -- one process ------------------------------------------------------------------------------------------------------


def test_a_plain_dataloader_takes_the_sampler(folder: Path) -> None:
    samplers = [PlanBatchSampler(folder / "plan", dp=2, rank=rank) for rank in range(2)]
    loaders = [DataLoader(plan_runs.Rows(), batch_sampler=sampler, collate_fn=list) for sampler in samplers]
    first = [list(loader) for loader in loaders]
    assert sorted(row for own in first for pack in own for row in pack) == list(range(43))
    assert [len(own) for own in first] == [len(loader) for loader in loaders] == [12, 12]
    for sampler in samplers:
        sampler.set_epoch(1)
    assert [list(loader) for loader in loaders] != first


def test_a_sampler_resumes_from_the_batches_its_user_counted(folder: Path) -> None:
    sampler = PlanBatchSampler(folder / "plan", dp=2, rank=1)
    sampler.set_epoch(3)
    whole = list(sampler)
    other = PlanBatchSampler(folder / "plan", dp=2, rank=1)
    other.load_state_dict(json.loads(json.dumps(sampler.state_dict(num_batches=5))))
    assert list(other) == whole[5:]
    other.set_epoch(3)  # as a resumed loop does before its first epoch: the run stays where it is
    assert list(other) == whole[5:]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_state_is_that_of_batches_used_and_not_of_those_drawn_ahead(folder: Path, num_workers: int) -> None:
    options = {"num_workers": num_workers, **({"prefetch_factor": 4} if num_workers else {})}
    whole = loader_of(folder)
    expected = list(whole) + list(whole)  # two epochs
    loader = loader_of(folder, **options)
    used = []
    for _ in range(2):
        for batch in loader:
            used.append(batch)
            if len(used) in (3, 15):
                break
        resumed = loader_of(folder, **options)
        resumed.load_state_dict(loader.state_dict())
        loader = resumed
        used += list(loader)
    assert used == expected


def test_a_loop_left_early_goes_on_where_it_stood(folder: Path) -> None:
    expected, loader = list(loader_of(folder)), loader_of(folder)
    used = [next(iter(loader)) for _ in range(4)]
    assert used + list(loader) == expected
    assert loader.epoch == 1
    loader.set_epoch(0)
    assert list(loader) == expected


def test_batches_go_to_the_device_asked_for(folder: Path) -> None:
    def collate(rows: list[int]) -> dict[str, Any]:
        return {"rows": torch.tensor(rows), "nested": [torch.zeros(1)], "name": "pack"}

    sampler = PlanBatchSampler(folder / "plan", dp=2, rank=0)
    batch = next(iter(PlanDataLoader(plan_runs.Rows(), sampler, collate_fn=collate, device="meta")))
    assert batch["rows"].device.type == batch["nested"][0].device.type == "meta"
    assert batch["name"] == "pack"


def test_a_rank_that_does_not_exist_is_refused(folder: Path) -> None:
    with refused(PlanError, "2", "0", "1"):
        PlanBatchSampler(folder / "plan", dp=2, rank=2)


def test_what_the_trainer_skips_is_not_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from trimtab.runtime.data.tables import PlanTables
    from trimtab.runtime.training.trainer import TrainerPlanSampler

    sampler = TrainerPlanSampler(folder / "plan", dp=2, rank=1)
    whole, sampler.num_unread = list(sampler), 8
    num_read, rows = [], PlanTables.rows
    monkeypatch.setattr(PlanTables, "rows", lambda tables, pack: num_read.append(pack) or rows(tables, pack))
    assert list(sampler) == [[]] * 8 + whole[8:]
    assert len(num_read) == sum(map(bool, whole[8:]))
    assert list(sampler) == whole


class Host:
    """What the mixin asks of a Trainer, without training."""

    def __init__(self, arguments: Any, train_dataset: Any) -> None:
        self.args, self.train_dataset, self.model = arguments, train_dataset, None

    def train(self, resume_from_checkpoint: Any = None) -> str:
        return f"trained from {resume_from_checkpoint}"


def host_of(folder: Path, data: Any, *, accumulation: int, reshuffle: bool = True) -> Any:
    from types import SimpleNamespace

    from trimtab.runtime.data.tables import open_tables
    from trimtab.runtime.training.trainer import Feed, PlannedTrainer

    class Planned(PlannedTrainer, Host):
        pass

    arguments = SimpleNamespace(
        world_size=2, process_index=0, gradient_accumulation_steps=accumulation, output_dir=str(folder)
    )
    host: Any = Planned(arguments, data)
    tables, pack = open_tables(folder / "plan"), PackedCollator(LlamaConfig())
    host._feed = Feed(plan=tables, reshuffle=reshuffle, verify=False, pack=pack)
    return host


def test_a_checkpoint_of_steps_of_other_sizes_or_another_order_is_refused(folder: Path, tmp_path: Path) -> None:
    sampler = PlanBatchSampler(folder / "plan", dp=4, rank=0)
    (tmp_path / "trimtab_plan.json").write_text(
        json.dumps({**sampler.state_dict(num_batches=1), "files": {}, "weights": {}})
    )
    same = host_of(folder, plan_runs.Rows(), accumulation=2)  # 2 ranks x 2 as well as 4 x 1: steps of four packs
    assert same.train(resume_from_checkpoint=str(tmp_path)) == f"trained from {tmp_path}"
    assert same.train() == "trained from None"
    other = host_of(folder, plan_runs.Rows(), accumulation=1)
    with refused(PlanError, "4", "1", "2", "gradient_accumulation_steps"):
        other.train(resume_from_checkpoint=str(tmp_path))
    three = PlanBatchSampler(folder / "plan", dp=3, rank=0, num_microbatches=1)
    (tmp_path / "trimtab_plan.json").write_text(
        json.dumps({**three.state_dict(num_batches=1), "files": {}, "weights": {}})
    )
    with refused(PlanError, "3"):
        same.train(resume_from_checkpoint=str(tmp_path))
    with refused(PlanError):
        host_of(folder, plan_runs.Rows(), accumulation=2, reshuffle=False).train(resume_from_checkpoint=tmp_path)


def test_a_run_resumes_from_the_newest_checkpoint_that_is_whole_and_says_so(folder, tmp_path, caplog):
    place = PlanBatchSampler(folder / "plan", dp=2, rank=0).state_dict(num_batches=2)
    state = {**place, "files": {"weights": 3}, "weights": {}}
    host = host_of(folder, plan_runs.Rows(), accumulation=2)
    host.args.output_dir = str(tmp_path)
    for name in ("checkpoint-8", "checkpoint-9", "checkpoint-10", "checkpoint-11", "checkpoint-old"):
        (tmp_path / name).mkdir()
    with refused(PlanError, "11"):  # of another Trainer, or all torn
        host.train(resume_from_checkpoint=True)
    for name, weights in (
        *(("checkpoint-8", "abc"), ("checkpoint-9", "abc"), ("checkpoint-10", "ab"), ("checkpoint-old", "")),
    ):
        (tmp_path / name / "trimtab_plan.json").write_text(json.dumps(state))
        (tmp_path / name / "weights").write_text(weights)
    with caplog.at_level(logging.WARNING, logger="trimtab"):
        assert host.train(resume_from_checkpoint=True) == f"trained from {tmp_path / 'checkpoint-9'}"
    (message,) = caplog.messages
    assert all(name in message for name in ("checkpoint-11", "checkpoint-10", "checkpoint-9", "2 of 3 bytes"))


# -- bad samples ------------------------------------------------------------------------------------------------------


class Broken:
    """Every tenth sample cannot be read."""

    def __getitem__(self, row: int) -> dict[str, Any]:
        if row % 10 == 0:
            raise OSError(f"truncated image {row}.png")
        return {"input_ids": torch.full((row + 1,), 7), "labels": torch.full((row + 1,), 7)}


def samples_of(num_samples: int) -> SampleTable:
    rows = np.arange(num_samples, dtype=np.int64)
    ids = tuple(f"data:{row}" for row in range(num_samples))
    return SampleTable.of(4 * rows, rows + 1, num_images=rows % 2, patches_sq=rows, ids=ids)


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_replaced_in_place_named_and_counted(folder: Path, num_workers: int) -> None:
    data = PlanDataset(Broken(), samples_of(43), on_error="filler")
    good = list(loader_of(folder, num_workers=num_workers))
    found = list(loader_of(folder, data=data, num_workers=num_workers))
    assert [[len(s["input_ids"]) - 1 for s in pack] for pack in found] == good  # the same samples' places and sizes
    for pack, rows in zip(found, good, strict=True):
        for sample, row in zip(pack, rows, strict=True):
            assert bool((sample["labels"] == -100).all()) == (row % 10 == 0)
    num_bad = sum(row % 10 == 0 for pack in good for row in pack)
    assert data.num_fillers == num_bad > 0


def test_a_filler_is_logged_with_id_and_reason(caplog: pytest.LogCaptureFixture) -> None:
    data = PlanDataset(Broken(), samples_of(43), on_error="filler")
    with caplog.at_level(logging.WARNING, logger="trimtab"):
        data[20]
    assert caplog.messages == [
        "sample data:20 (row 20 of the plan) cannot be read (OSError: truncated image 20.png): a filler of 21 tokens "
        "without weight takes its place"
    ]


def test_a_filler_can_be_the_users_own() -> None:
    data = PlanDataset(Broken(), samples_of(43), on_error="filler", make_filler=lambda missing: missing)
    missing = data[20]
    assert (missing.sample_id, missing.num_tokens, missing.num_patches, missing.num_images) == ("data:20", 21, 80, 0)


def test_without_fillers_a_bad_sample_is_named() -> None:
    with refused(SampleError, "20"):
        PlanDataset(Broken(), samples_of(43))[20]
    with refused(PlanError, "on_error", "skip"):
        PlanDataset(Broken(), samples_of(43), on_error="skip")


# -- two gloo ranks ---------------------------------------------------------------------------------------------------


def test_accelerate_deals_nothing_out_again_and_resumes(folder: Path) -> None:
    on_ranks(plan_runs.accelerate_run, folder)


@pytest.fixture(scope="module")
def trained(folder: Path) -> dict[str, list[list[dict[str, Any]]]]:
    """A run killed at a random step and taken up from its last checkpoint, and one without interruption."""
    kill_at = random.Random().choice([3, 5, 7, 9, 11])  # checkpoints are behind even steps
    print(f"killed at step {kill_at}")
    with refused(torch.multiprocessing.ProcessExitedException):
        on_ranks(plan_runs.train, folder, "killed", False, kill_at)
    on_ranks(plan_runs.resume_then_train_whole, folder)
    names = ("whole", "killed", "second")
    return {name: [read_log(folder / f"{name}-{rank}.jsonl") for rank in range(2)] for name in names}


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_trainer_runs_the_plan_on_two_ranks(folder: Path, trained: dict[str, Any]) -> None:
    samplers = [PlanBatchSampler(folder / "plan", dp=2, rank=rank, num_microbatches=2) for rank in range(2)]
    for epoch in range(2):
        for rank, sampler in enumerate(samplers):
            sampler.set_epoch(epoch)
            own = trained["whole"][rank][12 * epoch : 12 * (epoch + 1)]
            assert [line["rows"] for line in own] == list(sampler)
            assert [line["step"] for line in own] == [6 * epoch + i // 2 for i in range(12)]
        rows = [row for own in trained["whole"] for line in own[12 * epoch : 12 * (epoch + 1)] for row in line["rows"]]
        assert sorted(rows) == list(range(43))


def test_a_killed_run_resumes_to_the_same_batches_losses_and_weights(folder: Path, trained: dict[str, Any]) -> None:
    for rank in range(2):
        whole = {(line["step"], tuple(line["rows"])): line["loss"] for line in trained["whole"][rank]}
        killed = {(line["step"], tuple(line["rows"])): line["loss"] for line in trained["killed"][rank]}
        assert killed == whole
        assert len(trained["killed"][rank]) > len(whole), "nothing was run twice: the run was not killed"
    weights = [torch.load(folder / f"{name}.pt", weights_only=True) for name in ("whole", "killed")]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_the_trainer_resumes_inside_a_later_epoch_in_that_epochs_order(trained: dict[str, Any]) -> None:
    """Its own wrappers would run the order of the first epoch here (Transformers 5.23 on several ranks)."""
    for rank in range(2):
        assert trained["second"][rank] == [line for line in trained["whole"][rank] if line["step"] >= 8]


def test_a_checkpoint_of_the_trainer_resumes_in_a_loader_with_another_dp(folder: Path, trained: dict[str, Any]) -> None:
    state = json.loads((folder / "whole" / "checkpoint-8" / "trimtab_plan.json").read_text())
    loaders = [loader_of(folder, dp=4, rank=rank) for rank in range(4)]
    for loader in loaders:
        loader.load_state_dict(state)
    assert loaders[0].epoch == 1
    rest = [row for loader in loaders for pack in loader for row in pack]
    seen = [row for own in trained["whole"] for line in own[12:] if line["step"] < 8 for row in line["rows"]]
    assert sorted(seen + rest) == list(range(43))
