"""Share a Trainer's own batches among ranks and micro-batches, without a plan.

The samples of each optimizer step are those that the Trainer itself draws; only who computes which of them changes.
Each sample's size is asked of the Trainer's own data set and collator, once: the ranks divide the rows of a step among
themselves, and tell one another what they found. Then all compute the same shares (`share_step`).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import numpy as np
import torch.distributed as dist
from accelerate.data_loader import BatchSamplerShard
from torch import nn
from torch.utils.data import BatchSampler, DataLoader

from trimtab.balance.cost import LinearCost
from trimtab.balance.step import share_step
from trimtab.errors import TrimtabError
from trimtab.runtime.vision.inputs import GRIDS, PIXELS, Family, Kind, find_family, tower_flops

_KINDS: tuple[Kind, ...] = ("image", "video")


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleSize:
    """What one sample takes, as the collator makes it."""

    tokens: int
    patches: int
    flops: float  # of a forward; ranks are even in these


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SizeOfSample:
    """The size of one collated sample; it holds no model, so workers can have it.

    Forward flops: 2 P T + 2 L d T^2 of the language model (P weights in matrices, causal attention), and the tower's.
    """

    pack: Callable[[list[Any]], Any]  # of items, as the Trainer runs them
    config: Any
    family: Family | None  # None: no function that encodes images is known
    tower: LinearCost
    weights: int
    attention: int  # L d

    def __call__(self, items: Sequence[Any]) -> list[SampleSize]:
        return [self._size(self.pack([item])) for item in items]

    def _size(self, sample: Any) -> SampleSize:
        tokens = int(sample["input_ids"].shape[-1])
        flops, patches = 2.0 * self.weights * tokens + 2.0 * self.attention * tokens**2, 0
        for kind in _KINDS:
            if self.family is None or sample.get(PIXELS[kind]) is None:
                continue
            names = (PIXELS[kind], GRIDS[kind], "image_sizes", "pixel_attention_mask", "spatial_shapes")
            given = {name: sample[name] for name in names if sample.get(name) is not None}
            found = self.family.read(kind, given, self.config)
            patches += int(found.patches.sum())
            flops += float(self.tower.of(found.patches, patches_windowed=found.windowed).sum())
        return SampleSize(tokens=tokens, patches=patches, flops=flops)


def size_of_sample(model: nn.Module, pack: Callable[[list[Any]], Any]) -> SizeOfSample:
    """Return what a sample takes of this model, which may be wrapped by PEFT."""
    model = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    config: Any = model.config
    text = config.get_text_config()
    vision = [p for name, p in model.named_parameters() if "vision" in name or "visual" in name]
    tables = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    seen = tables | {id(p) for p in vision}
    try:
        family: Family | None = find_family(config)
    except TrimtabError:
        family = None
    return SizeOfSample(
        pack=pack,
        config=config,
        family=family,
        tower=tower_flops(config),
        weights=sum(p.numel() for p in model.parameters() if id(p) not in seen and p.dim() > 1),
        attention=int(text.num_hidden_layers) * int(text.hidden_size),
    )


def steps_of(own: DataLoader[Any], num_ranks: int, num_microbatches: int) -> list[list[list[int]]]:
    """The rows of each optimizer step of the coming epoch, as the Trainer's own loader gives them to all ranks.

    steps[s][m] are the rows of micro-batch m of all ranks; the last step of an epoch may have fewer micro-batches.
    """
    sampler: Any = own.batch_sampler
    if isinstance(sampler, BatchSamplerShard):
        whole = _Listed(sampler.batch_sampler)  # read once: a sampler may draw anew each time
        ranks = []
        for rank in range(num_ranks):
            shard = copy.copy(sampler)
            shard.batch_sampler, shard.process_index = whole, rank
            ranks.append([list(batch) for batch in shard])
    else:
        ranks = [[list(batch) for batch in sampler]]
    batches = [[row for rank in together for row in rank] for together in zip(*ranks, strict=True)]
    return [batches[i : i + num_microbatches] for i in range(0, len(batches), num_microbatches)]


class _Listed(list[Any]):
    """The batches of a sampler, with the fields that a shard of it reads."""

    def __init__(self, sampler: Any) -> None:
        super().__init__(sampler)
        self.batch_size, self.drop_last = sampler.batch_size, sampler.drop_last


@dataclass(slots=True, kw_only=True, eq=False)
class SharedSampler(BatchSampler):
    """This rank's micro-batches: of each step's samples an even share; a batch may be empty where samples are few."""

    own: DataLoader[Any]  # the Trainer's: it draws the samples
    data: Any
    size_of: SizeOfSample
    rank: int
    num_ranks: int
    num_microbatches: int
    seed: int
    num_workers: int = 0
    epoch: int = 0
    num_unread: int = 0  # batches the Trainer is about to skip: the next iteration gives empty ones in their place
    sizes: dict[int, SampleSize] = field(default_factory=dict)  # by row; all ranks have the same

    def __len__(self) -> int:
        return len(self.own)

    @property
    def num_steps(self) -> int:
        return -(-len(self) // self.num_microbatches)

    def begin_at(self, global_step: int) -> tuple[int, int]:
        """The epoch of a step, and how many of its batches have run."""
        epoch, step = divmod(global_step, max(1, self.num_steps))
        return epoch, step * self.num_microbatches

    def state_at(self, _global_step: int) -> dict[str, Any]:
        """Return what a checkpoint holds of the place: the Trainer counts steps itself."""
        return {}

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        if hasattr(self.own, "set_epoch"):
            self.own.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[int]]:
        unread, self.num_unread = self.num_unread, 0
        steps = steps_of(self.own, self.num_ranks, self.num_microbatches)
        done = unread // self.num_microbatches
        for step in steps[:done]:
            yield from ([] for _ in step)
        found = self._measure([list(chain.from_iterable(step)) for step in steps[done:]])
        for number, step in enumerate(steps[done:], done):
            rows = np.array(list(chain.from_iterable(step)), np.int64)
            next(found)
            known = [self.sizes[row] for row in rows.tolist()]
            shared = share_step(
                np.array([[x.patches, x.tokens] for x in known], np.int64),
                np.array([x.flops for x in known]),
                limits=None,
                dp=self.num_ranks,
                num_microbatches=len(step),
                keys=(self.seed, self.epoch, number),
            )
            mine = [rows[members].tolist() for members in shared.of_rank(self.rank)]
            yield from mine
            yield from ([] for _ in range(len(step) - len(mine)))

    def _measure(self, steps: Sequence[Sequence[int]]) -> Iterator[None]:
        """Before each step: the sizes of its rows are known. Ranks divide unknown rows among themselves; collective."""
        seen, unknown = set(self.sizes), []
        for rows in steps:
            unknown.append([row for row in dict.fromkeys(rows) if row not in seen])
            seen.update(unknown[-1])
        mine = [rows[self.rank :: self.num_ranks] for rows in unknown]
        asked = [rows for rows in mine if rows]
        loader = iter(DataLoader(self.data, batch_sampler=asked, collate_fn=self.size_of, num_workers=self.num_workers))
        for rows, of_all in zip(mine, unknown, strict=True):
            found = dict(zip(rows, next(loader), strict=True)) if rows else {}
            known: list[dict[int, SampleSize]] = [found]
            if self.num_ranks > 1 and of_all:
                known = [{} for _ in range(self.num_ranks)]
                dist.all_gather_object(known, found)
            for each in known:
                self.sizes.update(each)
            yield
