"""A user's own Transformers `Trainer` on a plan: its packs in its order, their loss, and the place in every checkpoint.

Nothing here is of one version of Transformers: the loader is our own, which the Trainer of 4.57 to 5.23 runs as it is.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trimtab.errors import PlanError
from trimtab.files import write_atomically
from trimtab.plan.plan import Plan
from trimtab.runtime.data.collate import PackedCollator, label_weights, packed_loss, step_denominator
from trimtab.runtime.data.dataset import AloneThenPacked, PlanBatchSampler
from trimtab.runtime.data.packing import sharded, unwrap, verify_packing
from trimtab.runtime.data.tables import Cursor, PackOrder, PlanTables, cursor_from_state, cursor_to_state
from trimtab.runtime.ranks import Watch, open_watch
from trimtab.runtime.training.in_force import Ran, attention_in, differences, recomputed_layers
from trimtab.runtime.training.restore import (
    KeptState,
    check_states,
    check_weights,
    restore_weights,
    stand_of,
    unreadable,
    weigh,
    weigh_optimizer,
)
from trimtab.runtime.training.shared import SharedSampler, size_of_sample
from trimtab.typed_json import parse_json

LOG = logging.getLogger("trimtab")

STATE_FILE = "trimtab_plan.json"
"""In every checkpoint: where the run stands in its plan. Written last, so a checkpoint that has it is whole."""


class TrainerPlanSampler(PlanBatchSampler):
    """A `PlanBatchSampler` that a Trainer may take up in the middle of an epoch."""

    num_unread = 0
    """Batches the Trainer is about to skip: the next iteration gives empty ones in their place and reads nothing."""

    def __iter__(self) -> Iterator[list[int]]:
        num_unread, self.num_unread = self.num_unread, 0
        start = self.order.advance(self.cursor, num_unread)
        return chain(([] for _ in range(num_unread)), self.order.microbatches(self.rank, start))

    def begin_at(self, global_step: int) -> tuple[int, int]:
        """The epoch of a step, and how many of its batches have run."""
        cursor = self._cursor_at(global_step)
        return cursor.epoch, cursor.packs_done // self.order.dp

    def state_at(self, global_step: int) -> dict[str, Any]:
        """Return what a checkpoint holds of the place in the plan."""
        return dict(cursor_to_state(self.order, self._cursor_at(global_step)))

    def _cursor_at(self, global_step: int) -> Cursor:
        epoch, step = divmod(global_step, max(1, self.order.num_steps_left(Cursor())))
        return Cursor(epoch=epoch, packs_done=step * self.order.packs_per_step)


@dataclass(frozen=True, slots=True, kw_only=True)
class Feed:
    """What a balanced Trainer runs."""

    plan: PlanTables | None  # None: the Trainer's own batches, shared
    reshuffle: bool
    verify: bool  # that the model keeps samples of a pack apart, before the first step
    pack: PackedCollator
    decided: Plan | None = None  # None: tables alone, or no plan

    @property
    def max_tokens(self) -> int | None:
        """Return the limit of the plan's packs; None: it is not known."""
        return None if self.decided is None else self.decided.decisions.packing.max_tokens

    def collate(self, given: Callable[[list[Any]], Any]) -> Callable[[Sequence[Any]], Any]:
        """Return the packs of what the user's own collator makes of samples; one of packs is taken as it is."""
        return given if isinstance(given, PackedCollator) else AloneThenPacked(given, self.pack, self.max_tokens)

    def collate_alone(self, given: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
        """Return the same for one sample whose size is asked: without the image that keeps a tower busy."""
        alone = replace(self.pack, vision_in_every_pack=False)
        return alone if isinstance(given, PackedCollator) else AloneThenPacked(given, alone)


class PlannedTrainer:
    """Goes before the class of a Trainer, which `balanced` then makes the class of the instance.

    The loss is `packed_loss` over the whole optimizer step, for any weighting the collator chose. Transformers' own
    (5.23) counts labels over the step for llava, llava_next, llava_onevision and internvl. The Qwen-VL and Gemma 3
    classes say `accepts_loss_kwargs = False`: there it takes the mean of each micro-batch and then of those, so that a
    token weighs more the fewer labels its pack has. It knows no weights per sample.
    """

    _feed: Feed
    _is_compared = False  # what runs with what was planned
    _kept: KeptState | None = None  # of the checkpoint that this call of `train` resumes
    loss_is_scaled_for_ga = True  # the Trainer must not divide by the number of micro-batches again

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """The Trainer's `train`; refuses a checkpoint of another plan, or of steps of another number of packs.

        True resumes from the newest checkpoint that was written whole. Weights are restored by the names that this
        version saves them under, and compared one by one before the first step, FSDP's and DeepSpeed's too. Every rank
        first checks that its own copy of the model keeps the samples of a pack apart; one that is loaded in pieces
        (FSDP, ZeRO-3) is not checked: call `verify_packing` on a copy of it, whole or with fewer layers.
        """
        trainer: Any = super()
        folder, self._kept = self._find_checkpoint(resume_from_checkpoint) if resume_from_checkpoint else (None, None)
        model: Any = self.model  # type: ignore[attr-defined]
        if self._feed.verify and not sharded(model):
            verify_packing(model, collator=self._feed.pack)
        return trainer.train(folder, *args, **kwargs)

    def _find_checkpoint(self, given: str | Path | bool) -> tuple[str, KeptState | None]:
        """The checkpoint to go on from and what it was taken of, as the first rank finds it; raises on every rank."""
        found: list[tuple[str, KeptState | None, Exception | None]] = [("", None, None)]
        if self.args.process_index == 0:  # type: ignore[attr-defined]
            folder = Path(self.args.output_dir)  # type: ignore[attr-defined]
            try:
                chosen = _newest_whole(folder) if given is True else _refuse_torn(Path(str(given)))
                if self._feed.plan is not None:
                    _check_state(self._plan_sampler(self._feed.plan).order, chosen / STATE_FILE)
                found = [(str(chosen), _kept_in(chosen), None)]
            except PlanError as problem:
                found = [("", None, problem)]
        if dist.is_available() and dist.is_initialized():
            dist.broadcast_object_list(found)
        path, kept, raised = found[0]
        if raised is not None:
            raise raised
        return path, kept

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """The Trainer's own, but by the names under which this version saves.

        Adapters, and weights in pieces (FSDP), are stored by the names that they have: the Trainer loads them.
        """
        target: Any = self.model if model is None else model  # type: ignore[attr-defined]
        if sharded(target) or getattr(self, "is_fsdp_enabled", False) or hasattr(target, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)  # type: ignore[misc]
        else:
            restore_weights(unwrap(target), Path(resume_from_checkpoint))

    def _load_best_model(self) -> None:
        """Load as `load_best_model_at_end` does, compared at once."""
        trainer: Any = self
        model, folder = trainer.model, Path(trainer.state.best_model_checkpoint)
        if sharded(model) or hasattr(model, "peft_config") or getattr(self, "is_deepspeed_enabled", False):
            super()._load_best_model()  # type: ignore[misc]
        else:
            self._load_from_checkpoint(str(folder))
        check_weights(model, _kept_in(folder).weights, folder, trainer.args.device)

    def _plan_sampler(self, plan: PlanTables) -> TrainerPlanSampler:
        arguments = self.args  # type: ignore[attr-defined]
        return TrainerPlanSampler(
            plan,
            dp=max(1, arguments.world_size),
            rank=arguments.process_index,
            num_microbatches=arguments.gradient_accumulation_steps,
            reshuffle=self._feed.reshuffle,
        )

    def get_train_dataloader(self) -> DataLoader[Any]:
        """Return this rank's packs, which need not be prepared: the Trainer moves them itself."""
        trainer: Any = self
        arguments, plan = trainer.args, self._feed.plan
        sampler = self._shared_sampler() if plan is None else self._plan_sampler(plan)
        trainer.remove_callback(_FollowEpochs)  # of an earlier call of train
        trainer.add_callback(_FollowEpochs(sampler, self._kept))
        trainer.remove_callback(_WatchRanks)
        trainer.add_callback(_WatchRanks())
        data = trainer.train_dataset
        if hasattr(data, "column_names"):  # of the library `datasets`: without the columns that the collator never saw
            data = trainer._remove_unused_columns(data, description="training")
        return DataLoader(
            data,
            batch_sampler=sampler,
            collate_fn=self._feed.collate(trainer.data_collator),
            num_workers=arguments.dataloader_num_workers,
            pin_memory=arguments.dataloader_pin_memory and arguments.device.type != "cpu",
            persistent_workers=arguments.dataloader_persistent_workers,
            prefetch_factor=arguments.dataloader_prefetch_factor,
        )

    def _shared_sampler(self) -> SharedSampler:
        """Return a sampler of the batches that the Trainer's own loader draws."""
        trainer: Any = self
        own, arguments = super().get_train_dataloader(), trainer.args  # type: ignore[misc]
        return SharedSampler(
            own=own,
            data=trainer.train_dataset if not hasattr(trainer.train_dataset, "column_names") else own.dataset,
            size_of=size_of_sample(trainer.model, self._feed.collate_alone(trainer.data_collator)),
            rank=arguments.process_index,
            num_ranks=max(1, arguments.world_size),
            num_microbatches=arguments.gradient_accumulation_steps,
            seed=arguments.seed,
            num_workers=arguments.dataloader_num_workers,
        )

    def get_batch_samples(
        self, epoch_iterator: Iterator[Any], num_batches: int, device: torch.device
    ) -> tuple[list[Any], Tensor | None]:
        """The micro-batches of one step, and its denominator over all ranks."""
        trainer: Any = super()
        batches, _ = trainer.get_batch_samples(epoch_iterator, num_batches, device)
        if batches and not self._is_compared:
            self._compare(batches)
        return batches, step_denominator(batches) if batches else None

    def _compare(self, batches: list[Any]) -> None:
        """Say once, before the first step, where what runs is not what was planned."""
        trainer: Any = self
        self._is_compared = True
        if self._feed.decided is None or trainer.args.process_index:
            return
        model, mixed = unwrap(trainer.model), trainer.accelerator.mixed_precision
        ran = Ran(
            ranks=trainer.accelerator.num_processes,
            num_packs=len(batches) * trainer.accelerator.num_processes,
            most_tokens=max(batch["input_ids"].numel() for batch in batches),
            dtype={"bf16": torch.bfloat16, "fp16": torch.float16}.get(mixed, next(model.parameters()).dtype),
            attention=attention_in(model),
            recomputed=recomputed_layers(model),
        )
        for sentence in differences(self._feed.decided, ran):
            LOG.warning("not as planned: %s", sentence)

    def compute_loss(
        self,
        model: torch.nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | None = None,
    ) -> Any:
        """Compute the loss; evaluation gives no denominator, so the batch's own weights are taken."""
        batch: dict[str, Any] = {key: inputs[key] for key in ("labels", "loss_weights") if key in inputs}
        outputs = model(**{key: value for key, value in inputs.items() if key not in batch})
        if num_items_in_batch is None or not model.training:
            loss = packed_loss(outputs.logits, batch, denominator=label_weights(batch).sum())
        else:
            ranks = self.accelerator.num_processes  # type: ignore[attr-defined]
            loss = packed_loss(outputs.logits, batch, denominator=num_items_in_batch, num_ranks=ranks)
        return (loss, outputs) if return_outputs else loss


def _newest_whole(folder: Path) -> Path:
    """The newest checkpoint that was written whole: a kill or a disk may have torn the newest."""
    found = {int(x.name.rpartition("-")[2]): x for x in folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*[0-9]")}
    torn = []
    for step in sorted(found, reverse=True):
        if problem := _tear(found[step]):
            torn.append(f"{found[step].name} is not whole ({problem})")
            continue
        if torn:
            LOG.warning("%s: the run resumes from %s", "; ".join(torn), found[step].name)
        return found[step]
    state = "; ".join(torn) or "it has no checkpoint"
    raise PlanError(f"no checkpoint in {folder} is whole: {state}; start again")


def _refuse_torn(folder: Path) -> Path:
    if problem := _tear(folder):
        raise PlanError(f"{folder} is no whole checkpoint of a balanced Trainer ({problem}): give another")
    return folder


def _tear(folder: Path) -> str:
    """Say what a checkpoint lacks; empty: it is whole. `STATE_FILE`, written last, has the sizes of all files."""
    try:
        files = parse_json((folder / STATE_FILE).read_bytes())["files"]
        for name, size in files.items():
            if not (folder / name).is_file():
                return f"it lacks {name}"
            if (folder / name).stat().st_size != size:
                return f"{name} has {(folder / name).stat().st_size} of {size} bytes"
    except FileNotFoundError:
        return f"it has no {STATE_FILE}"
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return f"{STATE_FILE} cannot be read"
    return ""


def _kept_in(folder: Path) -> KeptState:
    try:
        state = parse_json((folder / STATE_FILE).read_bytes())
        optimizer, scheduler = state.get("optimizer"), state.get("scheduler")
        return KeptState(
            weights=_weighed(state["weights"]),
            optimizer=None if optimizer is None else _weighed(optimizer),
            scheduler=[*map(float, scheduler)] if scheduler else None,
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise unreadable(folder / STATE_FILE, error) from None


def _weighed(held: Any) -> dict[str, list[int]]:
    return {name: [int(bits), int(count)] for name, (bits, count) in held.items()}


def _check_state(order: PackOrder, path: Path) -> None:
    """Raise `PlanError` where the Trainer, which counts steps, would go on at another place than the checkpoint's."""
    state = parse_json(path.read_bytes())
    cursor_from_state(order, state)
    packs = state["dp"] * state["num_microbatches"]
    if packs == order.packs_per_step:
        return
    advice = (
        f"set gradient_accumulation_steps to {packs // order.dp}"
        if packs % order.dp == 0
        else f"resume on a number of ranks that divides {packs}"
    )
    raise PlanError(
        f"{path.parent} has steps of {packs} packs, not {order.packs_per_step} "
        f"({order.dp} x {order.num_microbatches}): {advice}"
    )


class _FollowEpochs(TrainerCallback):  # type: ignore[misc]
    """Tells the sampler which epoch begins, and puts its state into every checkpoint.

    The Trainer sets the epoch itself, but not where it resumes inside an epoch on several ranks: there two wrappers
    hide the sampler from it, and the epoch would run in the order of epoch 0.
    """

    def __init__(self, sampler: TrainerPlanSampler | SharedSampler, kept: KeptState | None) -> None:
        self._sampler, self._kept = sampler, kept
        self._begins = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._begins = True
        if self._kept is not None:
            check_weights(kwargs["model"], self._kept.weights, "the checkpoint", args.device)
            check_states(kwargs["optimizer"], kwargs["lr_scheduler"], self._kept, "the checkpoint", args.device)

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        epoch, num_done = self._sampler.begin_at(state.global_step)
        self._sampler.set_epoch(epoch)
        if self._begins and not args.ignore_data_skip:  # a resumed run: the Trainer skips what it has of this epoch
            self._sampler.num_unread = num_done
        self._begins = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if control.should_save and state.is_world_process_zero:  # written again: not whole until it is
            (_checkpoint_of(args, state) / STATE_FILE).unlink(missing_ok=True)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if dist.is_available() and dist.is_initialized():
            dist.barrier()  # every rank has written its part
        states = {
            "weights": weigh(kwargs["model"], args.device),
            "optimizer": weigh_optimizer(kwargs["optimizer"], args.device),
            "scheduler": stand_of(kwargs["lr_scheduler"]),
        }
        if state.is_world_process_zero:
            folder = _checkpoint_of(args, state)
            place = self._sampler.state_at(state.global_step)
            files = {str(x.relative_to(folder)): x.stat().st_size for x in sorted(folder.rglob("*")) if x.is_file()}
            write_atomically(folder / STATE_FILE, json.dumps({**place, "files": files, **states}) + "\n")


class _WatchRanks(TrainerCallback):  # type: ignore[misc]
    """Names a rank that keeps the others waiting in a step; when the wait ends is the host's own limit."""

    def __init__(self) -> None:
        self._watch: Watch | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self._watch = open_watch(None, "training", timeout_s=args.ddp_timeout)

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._watch is not None:
            self._watch.arrive()

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if self._watch is not None:
            self._watch.close()


def _checkpoint_of(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
