"""Two-rank runs over a small plan, for the sampler's tests: functions that spawned processes call. Needs torch."""

import json
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from plan_cases import packs_of, write_packs

from refusals import refused
from trimtab.runtime.data.dataset import PlanBatchSampler, PlanDataLoader

NUM_PACKS, PLAN_DP, NUM_MICROBATCHES = 22, 2, 2


def write_small_plan(folder: Path) -> int:
    """22 packs of 1 to 3 samples in steps of 2 ranks x 2 micro-batches, the last of which is half empty; its rows."""
    packing, schedule = packs_of(NUM_PACKS, dp=PLAN_DP, num_microbatches=NUM_MICROBATCHES)
    write_packs(folder, packing, schedule)
    return len(packing.indices)


def gather_rows(rows: list[list[int]]) -> list[list[list[int]]]:
    """(rank, micro-batch) -> rows, on every rank."""
    gathered: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(gathered, rows)
    return gathered


# -- Accelerate -------------------------------------------------------------------------------------------------------


def accelerate_run(rank: int, folder: Path) -> None:
    """Through `Accelerator.prepare`, stopped inside an epoch with batches drawn ahead, and resumed by a new loader."""
    from accelerate import Accelerator
    from torch.utils.data import DataLoader

    from trimtab.errors import PlanError

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=NUM_MICROBATCHES)
    assert accelerator.num_processes == 2

    def make_loader(**options: Any) -> PlanDataLoader:
        sampler = PlanBatchSampler(folder / "plan", dp=2, rank=rank)
        loader = PlanDataLoader(Rows(), sampler, collate_fn=list, **options)
        prepared = accelerator.prepare(loader)
        assert prepared is loader
        return prepared

    loader = make_loader()
    epochs = [list(loader) for _ in range(2)]
    for rows in (gather_rows(epoch) for epoch in epochs):
        assert sorted(row for own in rows for pack in own for row in pack) == list(range(len(Rows())))
        assert len(rows[0]) == len(rows[1]) == 12
    assert epochs[0] != epochs[1]

    first = make_loader(num_workers=1, prefetch_factor=3)
    first.set_epoch(1)
    accelerator.register_for_checkpointing(first)
    seen = []
    for batch in first:
        seen.append(batch)
        if len(seen) == 5:  # inside a step, with batches of the worker unused
            break
    accelerator.save_state(str(folder / "accelerate"))
    accelerator.wait_for_everyone()  # the first rank writes what was registered
    accelerator._custom_objects.clear()
    second = make_loader()
    accelerator.register_for_checkpointing(second)
    accelerator.load_state(str(folder / "accelerate"))
    assert second.epoch == 1
    assert seen + list(second) == epochs[1]

    plain = DataLoader(Rows(), batch_sampler=PlanBatchSampler(folder / "plan", dp=2, rank=rank), collate_fn=list)
    with refused(PlanError, "2", rank):
        accelerator.prepare(plain)


class Rows(torch.utils.data.Dataset):
    """Item i is i."""

    def __len__(self) -> int:
        return 43

    def __getitem__(self, row: int) -> int:
        return row


# -- Transformers' Trainer --------------------------------------------------------------------------------------------


class Sentences(torch.utils.data.Dataset):
    """Item i: a token that names it and a few that depend on it."""

    def __len__(self) -> int:
        return 43

    def __getitem__(self, row: int) -> dict[str, Any]:
        tokens = torch.randint(50, 80, (3 + row % 5,), generator=torch.Generator().manual_seed(row))
        ids = torch.cat([torch.tensor([1 + row]), tokens])
        return {"input_ids": ids, "labels": ids.clone()}


def rows_in(ids: torch.Tensor) -> list[int]:
    """Of a pack; the token of an empty one is 0."""
    return [token - 1 for token in ids[0].tolist() if 0 < token <= 43]


def train(
    rank: int,
    folder: Path,
    name: str,
    resume: bool,
    kill_at: int | None,
    accumulation: int = NUM_MICROBATCHES,
    save_steps: int = 2,
) -> None:
    """A tiny Llama over two epochs of the plan; writes rows and loss of every micro-batch to `name`-`rank`.jsonl."""
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    from trimtab.runtime.training.balanced import balanced

    log = (folder / f"{name}-{rank}.jsonl").open("a")

    class Logged(Trainer):
        def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
            rows = rows_in(inputs["input_ids"])
            loss = super().training_step(model, inputs, num_items_in_batch)
            line = {"step": self.state.global_step, "rows": rows, "loss": loss.item()}
            log.write(json.dumps(line) + "\n")
            log.flush()
            return loss

    class Killer(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if rank == 0 and state.global_step == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=80, hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    arguments = TrainingArguments(
        output_dir=str(folder / name),
        num_train_epochs=2,
        gradient_accumulation_steps=accumulation,
        save_steps=save_steps,
        logging_steps=100,
        learning_rate=1e-2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
        remove_unused_columns=False,
        seed=1,
    )
    trainer = Logged(model=LlamaForCausalLM(config), args=arguments, train_dataset=Sentences(), callbacks=[Killer()])
    balanced(trainer, folder / "plan")
    trainer.train(resume_from_checkpoint=resume or None)
    if rank == 0:
        torch.save(trainer.model.state_dict(), folder / f"{name}.pt")


def resume_then_train_whole(rank: int, folder: Path) -> None:
    """The killed run taken up again; the same run without interruption; that one again from inside its second epoch."""
    train(rank, folder, "killed", True, None)
    train(rank, folder, "whole", False, None)
    if rank == 0:
        shutil.copytree(folder / "whole" / "checkpoint-8", folder / "second" / "checkpoint-8")
    dist.barrier()
    train(rank, folder, "second", True, None)
