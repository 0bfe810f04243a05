"""A plan in a Transformers `Trainer`: the sampler it hands on untouched, and the mixin that makes it.

Written against Transformers 5.23, which lets a batch sampler through as it is only if it is a `BatchRebalanceSampler`;
any other is dealt out to the ranks a second time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

from transformers import TrainerCallback
from transformers.trainer_pt_utils import BatchRebalanceSampler
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, get_last_checkpoint

from trimtab.errors import PlanError
from trimtab.files import write_atomically
from trimtab.runtime.cursor import Cursor, ShortStep, cursor_from_state, cursor_to_state
from trimtab.runtime.data import PlanBatchSampler
from trimtab.runtime.tables import PlanTables

STATE_FILE = "trimtab_plan.json"
"""In every checkpoint: where the run stands in its plan."""


class TrainerPlanSampler(PlanBatchSampler, BatchRebalanceSampler):  # type: ignore[misc]
    """A `PlanBatchSampler` by kind a `BatchRebalanceSampler`; nothing of the latter's work is used."""

    @property
    def batch_size(self) -> None:
        """None: packs differ in size. The Trainer undoes what Accelerate does with it."""

    num_unread = 0
    """Batches the Trainer is about to skip: the next iteration gives empty ones in their place and reads nothing."""

    def __iter__(self) -> Iterator[list[int]]:
        num_unread, self.num_unread = self.num_unread, 0
        start = self.deal.advance(self.cursor, num_unread)
        return chain(([] for _ in range(num_unread)), self.deal.microbatches(self.rank, start))


class PlanTrainerMixin:
    """Feeds a Trainer from a plan: `class MyTrainer(PlanTrainerMixin, Trainer)`, made with `plan=`, a folder or tables.

    Row i of the plan is item i of `train_dataset`. The number of micro-batches of a step is
    `gradient_accumulation_steps`; `per_device_train_batch_size` is not used. The Trainer's own checkpoints resume in
    the middle of any epoch. The Trainer counts steps, so dp and accumulation must be those of the checkpoint; the
    checkpoint's `trimtab_plan.json` is a state that `PlanDataLoader` resumes with any other.
    """

    def __init__(
        self,
        *args: Any,
        plan: PlanTables | Path | str,
        short_step: ShortStep = "fill",
        reshuffle: bool = True,
        **kwargs: Any,
    ) -> None:
        self._plan = plan
        self._short_step: ShortStep = short_step
        self._reshuffle = reshuffle
        super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """The Trainer's `train`; refuses a checkpoint of another plan, dp or accumulation."""
        trainer: Any = super()
        arguments = self.args  # type: ignore[attr-defined]
        folder = resume_from_checkpoint
        if folder is True:
            folder = get_last_checkpoint(arguments.output_dir)
        if isinstance(folder, (str, Path)) and (Path(folder) / STATE_FILE).is_file():
            self._check_state(Path(folder) / STATE_FILE)
        return trainer.train(resume_from_checkpoint=resume_from_checkpoint, **kwargs)

    def _check_state(self, path: Path) -> None:
        deal = self._make_sampler().deal
        state = json.loads(path.read_text(encoding="utf-8"))
        cursor_from_state(deal, state)
        if (state["dp"], state["num_microbatches"]) != (deal.dp, deal.num_microbatches):
            raise PlanError(
                f"{path.parent} was taken on {state['dp']} ranks x {state['num_microbatches']} micro-batches, "
                f"this run has {deal.dp} x {deal.num_microbatches}: the Trainer would resume at another sample; "
                "resume as before, or load the file's state into a PlanDataLoader"
            )

    def _make_sampler(self) -> TrainerPlanSampler:
        arguments = self.args  # type: ignore[attr-defined]
        return TrainerPlanSampler(
            self._plan,
            dp=max(1, arguments.world_size),
            rank=arguments.process_index,
            num_microbatches=arguments.gradient_accumulation_steps,
            short_step=self._short_step,
            reshuffle=self._reshuffle,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> TrainerPlanSampler:  # the Trainer's hook; not public
        trainer: Any = self
        size = len(train_dataset if train_dataset is not None else trainer.train_dataset)
        sampler = self._make_sampler()
        num_rows = len(sampler.deal.tables.indices)
        if size < num_rows:
            raise PlanError(
                f"the plan packs {num_rows} samples, train_dataset has {size}: give the data set that was sized, "
                "row for row (PlanDataset)"
            )
        trainer.remove_callback(_FollowEpochs)  # of an earlier call of train
        trainer.add_callback(_FollowEpochs(sampler))
        return sampler


class _FollowEpochs(TrainerCallback):  # type: ignore[misc]
    """Tells the sampler which epoch begins, and puts its state into every checkpoint.

    The Trainer sets the epoch itself, but not where it resumes inside an epoch on several ranks: there two wrappers
    hide the sampler from it, and the epoch would run in the order of epoch 0.
    """

    def __init__(self, sampler: TrainerPlanSampler) -> None:
        self._sampler = sampler
        self._begins = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        self._begins = True

    def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        cursor = self._cursor(state.global_step)
        self._sampler.set_epoch(cursor.epoch)
        if self._begins and not args.ignore_data_skip:  # a resumed run: the Trainer skips what it has of this epoch
            self._sampler.num_unread = cursor.packs_done // self._sampler.deal.dp
        self._begins = False

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if state.is_world_process_zero:
            place = cursor_to_state(self._sampler.deal, self._cursor(state.global_step))
            folder = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
            write_atomically(folder / STATE_FILE, json.dumps(place) + "\n")

    def _cursor(self, global_step: int) -> Cursor:
        deal = self._sampler.deal
        epoch, step = divmod(global_step, max(1, deal.num_steps_left(Cursor())))
        return Cursor(epoch=epoch, packs_done=step * deal.packs_per_step)
