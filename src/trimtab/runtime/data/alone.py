"""A user's own collator under a plan: it makes each sample by itself, as a batch of one, and packs are made of these.

So any chat template, masking of prompts and processing of images stays what it was: TRL's collator, LLaMA-Factory's,
ms-swift's template, one from an example.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import DataCollatorWithPadding, default_data_collator

from trimtab.errors import SampleError
from trimtab.models.asking.inputs import image_token
from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.data.formats import TOKEN_TYPE_KEYS

LOG = logging.getLogger("trimtab")

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
            LOG.warning(
                "a pack has %d tokens and the plan's hold at most %d: the data was sized with another chat template, "
                "tokenizer or image limits than this collator's, so that memory and times of the plan do not hold",
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
        """What the collator made of one item, without padding."""
        ids = batch.get("input_ids")
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or len(ids) != 1:
            shape = tuple(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
            raise SampleError(
                f"the trainer's data collator was given one sample and returned input_ids of {shape}: packs are made "
                "of its samples, so it must return one row for each (leave its own packing and padding-free modes off)"
            )
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
