"""A plan in torch's data loading: the batch sampler of one rank, the loader that knows its place, the data set."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from accelerate.utils.operations import send_to_device
from torch.utils.data import DataLoader, Dataset, Sampler, get_worker_info
from transformers import DataCollatorWithPadding, default_data_collator

from trimtab.errors import PlanError, SampleError, TrimtabError
from trimtab.models.asking.inputs import image_token
from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.data.conversations import MissingSample, make_text_filler
from trimtab.runtime.data.formats import TOKEN_TYPE_KEYS
from trimtab.runtime.data.tables import Cursor, PlanTables, cursor_from_state, cursor_to_state, make_order, open_tables
from trimtab.specs import SampleTable

logger = logging.getLogger("trimtab")

_COUNTERS = 256  # one for each worker process that may count at the same time


class PlanBatchSampler(Sampler[list[int]]):
    """Micro-batches of one rank as lists of sample rows, an epoch at a time; [] is an empty pack.

    Use it as `DataLoader(data, batch_sampler=...)` in a plain loop. Already per rank: nothing may divide its batches
    again. In an Accelerate run use `PlanDataLoader`, for a Transformers `Trainer` `balanced`. Every iteration
    begins where `set_epoch` or `load_state_dict` put it, and ends with that epoch.

    >>> import numpy as np
    >>> from trimtab.runtime.data.tables import hold_tables
    >>> from trimtab.specs import Packing, Schedule
    >>> packing = Packing(offsets=np.array([0, 2, 3]), indices=np.array([0, 2, 1]), limits=(9, 9))
    >>> tables = hold_tables(packing, Schedule(table=np.array([[[0], [1]]])))  # one step of two ranks, a pack each
    >>> list(PlanBatchSampler(tables, dp=2, rank=0)), list(PlanBatchSampler(tables, dp=1, rank=0))
    ([[0, 2]], [[0, 2], [1]])
    """

    def __init__(
        self,
        plan: PlanTables | Path | str,
        *,
        dp: int,
        rank: int,
        num_microbatches: int | None = None,
        reshuffle: bool = True,
    ) -> None:
        tables = plan if isinstance(plan, PlanTables) else open_tables(plan)
        self.order = make_order(tables, dp=dp, num_microbatches=num_microbatches, reshuffle=reshuffle)
        if not 0 <= rank < dp:
            raise PlanError(f"rank {rank} is not one of {dp} ranks: give 0 to {dp - 1}")
        self.rank = rank
        self.cursor = Cursor()

    @property
    def epoch(self) -> int:
        return self.cursor.epoch

    @property
    def batch_size(self) -> int | None:
        """Return None: packs differ in size.

        Accelerate asks for it where it is about to divide them among the ranks a second time, which would lose
        all but one in dp of them silently (accelerate 1.15, `BatchSamplerShard`).
        """
        if self.order.dp > 1:
            raise PlanError(
                f"batches of rank {self.rank} of {self.order.dp} are shared twice: give a PlanDataLoader, or a Trainer "
                "to trimtab.balanced"
            )
        return None

    def __len__(self) -> int:
        """Count the micro-batches of a whole epoch, the same for every rank."""
        return self.order.num_microbatches_left(Cursor())

    def __iter__(self) -> Iterator[list[int]]:
        return self.order.microbatches(self.rank, self.cursor)

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; stay where the run stands if it is in that epoch already."""
        if epoch != self.cursor.epoch:
            self.cursor = Cursor(epoch=epoch)

    def state_dict(self, num_batches: int = 0) -> dict[str, str | int]:
        """The place after `num_batches` batches of an iteration that began at the sampler's own place.

        A loader with workers draws batches ahead of their use, so the sampler cannot count them: `PlanDataLoader` does.
        """
        return cursor_to_state(self.order, self.order.advance(self.cursor, num_batches))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to where a run with this plan stood, on any number of ranks; see `cursor_from_state`."""
        self.cursor = cursor_from_state(self.order, state)


class PlanDataLoader(DataLoader[Any]):
    """A DataLoader over a `PlanBatchSampler` that knows which batches were used, whatever its workers hold ready.

    Use it in your own loop or with Accelerate, where a run is to resume at its very micro-batch.

    A batch counts as used when it is handed out: a state taken in the body of the loop counts the batch in hand. A loop
    ends with the epoch, and the next one runs the next epoch; after a loop that was left early, or
    `load_state_dict`, it goes on where the run stood.

    `Accelerator.prepare` returns it as it is (as it does with what it prepared itself; a private mark, accelerate
    1.15), so batches go to `device` here.

    >>> import numpy as np
    >>> from trimtab.runtime.data.tables import hold_tables
    >>> from trimtab.specs import Packing, Schedule
    >>> packing = Packing(offsets=np.array([0, 2, 3]), indices=np.array([0, 2, 1]), limits=(9, 9))
    >>> tables = hold_tables(packing, Schedule(table=np.array([[[0], [1]]])))
    >>> loader = PlanDataLoader(["a", "b", "c"], PlanBatchSampler(tables, dp=1, rank=0), collate_fn=list)
    >>> list(loader)
    [['a', 'c'], ['b']]
    """

    _is_accelerate_prepared = True

    def __init__(
        self,
        dataset: Dataset[Any] | Sequence[Any],
        sampler: PlanBatchSampler,
        *,
        device: torch.device | str | None = None,
        **options: Any,
    ) -> None:
        super().__init__(dataset, batch_sampler=sampler, **options)  # type: ignore[arg-type]
        self._plan_sampler = sampler
        self._num_used = 0  # since the sampler's own place
        self._device = None if device is None else torch.device(device)

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to."""
        return self._settle().epoch

    def set_epoch(self, epoch: int) -> None:
        """Go to the beginning of an epoch; stay where the run stands if it is in that epoch already."""
        self._settle().set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        self._settle()
        for batch in super().__iter__():
            self._num_used += 1
            yield self._placed(batch)
        self._settle()

    def _placed(self, batch: Any) -> Any:
        return batch if self._device is None else send_to_device(batch, self._device, non_blocking=True)

    def state_dict(self) -> dict[str, str | int]:
        """The place after the last batch that was handed out."""
        return self._plan_sampler.state_dict(self._num_used)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._plan_sampler.load_state_dict(state)
        self._num_used = 0

    def _settle(self) -> PlanBatchSampler:
        """Move the sampler's own place to after the batches used."""
        sampler = self._plan_sampler
        sampler.cursor = sampler.order.advance(sampler.cursor, self._num_used)
        self._num_used = 0
        return sampler


class PlanDataset(Dataset[Any]):
    """A data set whose item i is row i of the plan's sample table; a sample that cannot be read never shifts the plan.

    Use it between your own data set and `PlanDataLoader`.

    `on_error="raise"` names the sample; `"filler"` puts `make_filler` of the same size in its place, which no loss
    counts, logs the sample's id and the reason at level WARNING, and counts it in `num_fillers`. `fill_for`: only
    errors of this class are filled, any other is raised.

    >>> from trimtab import SampleTable
    >>> samples = SampleTable.of([0, 0, 0], [4, 4, 4])
    >>> PlanDataset(["first", "second", "third"], samples)[1]
    'second'
    """

    def __init__(
        self,
        data: Any,  # item i is the sample of row i
        samples: SampleTable,
        *,
        on_error: Literal["raise", "filler"] = "raise",
        make_filler: Callable[[MissingSample], Any] = make_text_filler,
        fill_for: type[Exception] = Exception,
    ) -> None:
        if on_error not in ("raise", "filler"):
            raise PlanError(f"on_error {on_error!r} is unknown: choose raise or filler")
        self._data = data
        self._samples = samples
        self._on_error = on_error
        self._make_filler = make_filler
        self._fill_for = fill_for
        # worker processes write, we read
        self._counts = torch.zeros(_COUNTERS, dtype=torch.int64).share_memory_()  # type: ignore[no-untyped-call]

    @property
    def num_fillers(self) -> int:
        """Count the fillers handed out so far on this rank, by its worker processes too."""
        return int(self._counts.sum())

    def __len__(self) -> int:
        return len(self._samples)

    def __getitem__(self, row: int) -> Any:
        try:
            return self._data[row]
        except Exception as error:  # whatever a user's own code raises: named here, and either raised or counted
            samples, reason = self._samples, f"{type(error).__name__}: {error}"
            if not isinstance(error, self._fill_for):
                if isinstance(error, TrimtabError):
                    raise  # names the sample itself
                raise SampleError(
                    f"sample {samples.sample_id(row)} (row {row}) makes no input ({reason}): fix the preprocessor"
                ) from error
            if self._on_error == "raise":
                raise SampleError(
                    f"sample {samples.sample_id(row)} (row {row} of the plan) cannot be read ({reason}): fix it and "
                    'resume, or have fillers (on_error="filler", --on-bad filler)'
                ) from error
            sizes = {name: int(getattr(samples, name)[row]) for name in ("num_tokens", "num_patches", "num_images")}
            missing = MissingSample(row=row, sample_id=samples.sample_id(row), reason=reason, **sizes)
            worker = get_worker_info()
            self._counts[0 if worker is None else 1 + worker.id % (_COUNTERS - 1)] += 1
            logger.warning("%s", missing)
            return self._make_filler(missing)


# A user's own collator under a plan: it makes each sample by itself, as a batch of one, and packs are made of these.
#
# So any chat template, masking of prompts and processing of images stays what it was: TRL's collator, LLaMA-Factory's,
# ms-swift's template, one from an example.


_OF_EACH_TOKEN = ("input_ids", "labels", *TOKEN_TYPE_KEYS)
_OF_THE_BATCH = ("attention_mask", "position_ids", "rope_deltas", "use_cache", "cache_position")
"""Made for a padded row: a pack has its own."""


@dataclass(slots=True)
class AloneThenPacked:
    """A `collate_fn` for lists of items that the user's collator takes: what it gives of each alone, in one pack."""

    collate: Callable[[list[Any]], Mapping[str, Any]]
    pack: PackedCollator
    max_tokens: int | None = None  # of the plan's packs: said once where a pack has more
    _said: list[int] = field(default_factory=list)

    def __call__(self, items: Sequence[Any]) -> dict[str, Any]:
        batch = self.pack([self._sample(item) for item in items])
        found = batch["input_ids"].shape[1]
        if self.max_tokens is not None and found > self.max_tokens and not self._said:
            self._said.append(found)
            logger.warning(
                "a pack has %d tokens, the plan's at most %d: size with this collator's template, tokenizer and image "
                "limits",
                found,
                self.max_tokens,
            )
        return batch

    def _sample(self, item: Any) -> Mapping[str, Any]:
        knows_no_images = self.collate is default_data_collator or isinstance(self.collate, DataCollatorWithPadding)
        if isinstance(item, Mapping) and "input_ids" in item and knows_no_images:
            return item  # they would only add a dimension
        given = dict(item) if isinstance(item, Mapping) else item  # some collators change what they are given
        return self._one_row(self.collate([given]))

    def _one_row(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Return what the collator made of one item, without padding."""
        ids = batch.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1:
            shape = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise SampleError(f"a collator makes input_ids {shape} of one sample: leave packing and padding-free off")
        mask = batch.get("attention_mask")
        kept = mask[0].bool() if isinstance(mask, torch.Tensor) and mask.dim() == 2 else torch.ones_like(ids[0]).bool()
        sample = {key: value for key, value in batch.items() if key not in _OF_THE_BATCH and value is not None}
        sample |= {key: sample[key][0][kept] for key in _OF_EACH_TOKEN if key in sample}
        config = self.pack.config
        places = [image_token(config), getattr(config, "video_token_id", None)]
        assert self.pack.family is not None, "filled in when made"
        if not kept.all() and not any(
            bool((sample["input_ids"] == token).any()) for token in places if token is not None
        ):
            for key in self.pack.family.joined:  # an image that stood in the padding alone, to keep the tower busy
                sample.pop(key, None)
        return sample
