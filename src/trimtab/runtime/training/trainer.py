"""A plan in a Transformers `Trainer`: the sampler it hands on untouched, and the mixin that makes it.

Written against Transformers 5.23, which lets a batch sampler through as it is only if it is a `BatchRebalanceSampler`;
any other is divided among the ranks a second time.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import torch.distributed as dist
import transformers
from transformers import TrainerCallback, trainer_pt_utils
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR

from trimtab.errors import ConfigError, PlanError
from trimtab.files import write_atomically
from trimtab.runtime.data.cursor import Cursor, Deal, cursor_from_state, cursor_to_state
from trimtab.runtime.data.dataset import PlanBatchSampler
from trimtab.runtime.data.tables import PlanTables

STATE_FILE = "trimtab_plan.json"
"""In every checkpoint: where the run stands in its plan. Written last, so a checkpoint that has it is whole."""


if not hasattr(trainer_pt_utils, "BatchRebalanceSampler"):
    raise ConfigError(
        f"PlanTrainerMixin was asked for, and the Trainer of Transformers {transformers.__version__} takes no batch "
        "sampler: upgrade to 5.17 or newer, or train on PlanDataset.as_hf(...), packs for any version's Trainer"
    )


class TrainerPlanSampler(PlanBatchSampler, trainer_pt_utils.BatchRebalanceSampler):  # type: ignore[misc]
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

    Use it to train from a plan with `transformers.Trainer`. docs/howto-trainer.md is a whole run.

    Row i of the plan is item i of `train_dataset`. The number of micro-batches of a step is
    `gradient_accumulation_steps`; `per_device_train_batch_size` is not used. The Trainer's own checkpoints resume in
    the middle of any epoch, on any number of ranks whose steps hold as many packs (dp x accumulation) as before: the
    Trainer counts steps. For another number of packs a step, the checkpoint's `trimtab_plan.json` is a state that
    `PlanDataLoader` resumes.
    """

    def __init__(
        self,
        *args: Any,
        plan: PlanTables | Path | str,
        reshuffle: bool = True,
        **kwargs: Any,
    ) -> None:
        self._plan = plan
        self._reshuffle = reshuffle
        super().__init__(*args, **kwargs)

    def train(self, resume_from_checkpoint: str | bool | None = None, **kwargs: Any) -> Any:
        """The Trainer's `train`; refuses a checkpoint of another plan, or of steps of another number of packs.

        True resumes from the newest checkpoint that was written whole: a kill may have torn the newest.
        """
        trainer: Any = super()
        folder: str | bool | None = resume_from_checkpoint
        if folder is True:
            folder = self._last_whole_checkpoint() or True
        if isinstance(folder, (str, Path)) and (Path(folder) / STATE_FILE).is_file():
            _check_state(self._make_sampler().deal, Path(folder) / STATE_FILE)
        return trainer.train(resume_from_checkpoint=folder, **kwargs)

    def _last_whole_checkpoint(self) -> str | None:
        """Of those in `output_dir`, on every rank the one that the first rank sees."""
        files = Path(self.args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*/{STATE_FILE}")  # type: ignore[attr-defined]
        steps = {int(number): file for file in files if (number := file.parent.name.rpartition("-")[2]).isdigit()}
        found = [str(steps[max(steps)].parent) if steps else None]
        if dist.is_available() and dist.is_initialized():
            dist.broadcast_object_list(found)
        return found[0]

    def _make_sampler(self) -> TrainerPlanSampler:
        arguments = self.args  # type: ignore[attr-defined]
        return TrainerPlanSampler(
            self._plan,
            dp=max(1, arguments.world_size),
            rank=arguments.process_index,
            num_microbatches=arguments.gradient_accumulation_steps,
            reshuffle=self._reshuffle,
        )

    def _get_train_sampler(self, train_dataset: Any = None) -> TrainerPlanSampler:  # the Trainer's hook; not public
        trainer: Any = self
        size = len(train_dataset if train_dataset is not None else trainer.train_dataset)
        sampler = self._make_sampler()
        last = int(sampler.deal.tables.indices.max(initial=-1))  # a mixture may draw rows several times, or not at all
        if size <= last:
            raise PlanError(
                f"the plan packs row {last}, train_dataset has {size} samples: give the data set that was sized, "
                "row for row (PlanDataset)"
            )
        trainer.remove_callback(_FollowEpochs)  # of an earlier call of train
        trainer.add_callback(_FollowEpochs(sampler))
        return sampler


def _check_state(deal: Deal, path: Path) -> None:
    """`PlanError` where the Trainer, which counts steps, would go on at another place than the checkpoint's."""
    state = json.loads(path.read_text(encoding="utf-8"))
    cursor_from_state(deal, state)
    packs = state["dp"] * state["num_microbatches"]
    if packs == deal.packs_per_step:
        return
    advice = (
        f"set gradient_accumulation_steps to {packs // deal.dp}"
        if packs % deal.dp == 0
        else f"resume on a number of ranks that divides {packs}"
    )
    raise PlanError(
        f"{path.parent} was taken in steps of {packs} packs ({state['dp']} ranks x {state['num_microbatches']} "
        f"micro-batches), this run's have {deal.packs_per_step} ({deal.dp} x {deal.num_microbatches}), and the Trainer "
        f"counts steps: {advice}, or load the file's state into a PlanDataLoader"
    )


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

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if control.should_save and state.is_world_process_zero:  # written again: not whole until it is
            (_checkpoint_of(args, state) / STATE_FILE).unlink(missing_ok=True)

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:  # noqa: ARG002
        if dist.is_available() and dist.is_initialized():
            dist.barrier()  # every rank has written its part
        if state.is_world_process_zero:
            place = cursor_to_state(self._sampler.deal, self._cursor(state.global_step))
            write_atomically(_checkpoint_of(args, state) / STATE_FILE, json.dumps(place) + "\n")

    def _cursor(self, global_step: int) -> Cursor:
        deal = self._sampler.deal
        epoch, step = divmod(global_step, max(1, deal.num_steps_left(Cursor())))
        return Cursor(epoch=epoch, packs_done=step * deal.packs_per_step)


def _checkpoint_of(args: Any, state: Any) -> Path:
    return Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}"
