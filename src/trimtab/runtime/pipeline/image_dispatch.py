"""Images of a step to other data-parallel ranks, and their features back: every first stage encodes an equal part.

First stages of a data-parallel group hold the whole tower and run one schedule, so they come to the forward and the
backward of micro-batch i in the same order. Before a step they tell one another the sizes of all its images, in two
exchanges of integers; then each knows who encodes what. The forward of micro-batch i moves pixels out and rows back,
or that of the first of several that share a call. Features enter the stage as leaves of its graph; the tower's own
backward runs when the last micro-batch of the call has had its own. So a rank whose micro-batch has no image takes
part in both, and no schedule needs to know.

Gradients stay exact: rows bring their gradient back to the rank that encoded them (`vision.exchange`), which adds it
to its copy of the tower, and the sum over the group that follows a step is the same as before. Random draws inside a
tower (dropout, stochastic depth) are those of the rank that encodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import share_images
from trimtab.errors import TrimtabError
from trimtab.plan.layout import PipelineLayout
from trimtab.plan.plan import VisionDecision
from trimtab.runtime.data.collate import filler_sample
from trimtab.runtime.pipeline.cuts import StageModule
from trimtab.runtime.pipeline.trace import Batch, Encoded, feature_name, has_images
from trimtab.runtime.ranks import listed
from trimtab.runtime.vision.agreement import differing_ranks, fingerprint, open_control
from trimtab.runtime.vision.encode import Pool, Settings, Sharing, move_images, pool_images, run_tower
from trimtab.runtime.vision.exchange import lay_out_rows, route_rows
from trimtab.runtime.vision.hooks import KINDS, PatchedFunction, find_functions
from trimtab.runtime.vision.inputs import (
    GRIDS,
    PIXELS,
    Family,
    Features,
    GridFamily,
    VisionInputs,
    find_family,
    join_inputs,
    tower_flops,
    write_features,
)
from trimtab.specs import IntArray


@dataclass(frozen=True, slots=True, kw_only=True)
class ImageLoad:
    """ViT patches of one step, by data-parallel rank."""

    held: tuple[int, ...]  # of the images in a rank's own packs: what it would encode alone
    encoded: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class SharedTower:
    """One rank's copy of a tower whose images several ranks encode; made by `share_tower`."""

    function: PatchedFunction  # where image features come out
    sharing: Sharing
    device: torch.device
    template: VisionInputs  # the family's smallest image

    def read(self, microbatches: Sequence[Batch]) -> list[dict[str, VisionInputs]]:
        """Return the images and videos of each micro-batch."""
        return [read_images(batch, self.sharing.family, self.sharing.config) for batch in microbatches]


def share_tower(
    module: StageModule,
    decision: VisionDecision,
    *,
    model: Any,
    cost: LinearCost | None,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout_s: float,
) -> SharedTower:
    """Share the images of a module that holds the whole tower; every rank of the group calls this.

    `cost` None: multiply-adds, by the configuration.
    """
    share_images([1.0], 2, rule=decision.rule)  # compiles before the clock of a step runs
    config = model.config
    family = find_family(config)
    smallest = read_images(filler_sample(config, with_image=True), family, config)["image"]
    sharing = Sharing(
        group=group,
        control=open_control(group, timeout_s),
        settings=Settings(exchange="dispatch", rule=decision.rule, cost=cost or tower_flops(config)),
        family=family,
        config=config,
    )
    function = next(x for x in find_functions(module.model, "features") if x.kind == "image")
    return SharedTower(function=function, sharing=sharing, device=device, template=smallest.to(device))


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HeldRows:
    """A rank's own rows as they came back, and the same by micro-batch, as leaves of the stages' graphs."""

    rows: Tensor
    leaves: list[Tensor] = field(default_factory=list)

    def hand_out(
        self, features: Features, num_rows: IntArray, atoms: Sequence[Mapping[str, int]], first: int = 0
    ) -> Iterator[tuple[int, Encoded]]:
        """Yield the number and the rows of each micro-batch that has some; `atoms` of each from `first` on, by kind."""
        start = end = 0
        for number, kinds in enumerate(atoms, first):
            mine = num_rows[start : start + sum(kinds.values())]
            start += len(mine)
            leaf = self.rows.detach()[end : end + int(mine.sum())].requires_grad_(self.rows.requires_grad)
            end += len(leaf)
            self.leaves.append(leaf)
            if len(mine):
                yield number, name_rows(features, leaf, mine, kinds)

    def backward(self) -> None:
        """Run the backward of exchange and tower, where they have one; collective."""
        if not self.rows.requires_grad:
            return
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self.leaves]
        torch.autograd.backward([self.rows], [torch.cat([torch.zeros_like(self.rows[:0]), *gradients])])


@dataclass(slots=True, kw_only=True, eq=False)
class _Call:
    """One call of the tower, for the images of consecutive micro-batches."""

    inputs: VisionInputs | None  # this rank's own images; None: none
    pool: Pool
    atoms: list[dict[str, int]]  # own, of each micro-batch: of images, of videos behind them
    waiting: set[int]  # micro-batches whose backward is to come
    has_run: bool = False
    held: HeldRows | None = None  # until their backward


@dataclass(slots=True, kw_only=True, eq=False)
class ImageDispatch:
    """The first stage's side of it; made by `dispatch_images`."""

    tower: SharedTower  # of the first stage, with its data-parallel ranks
    num_pooled: int
    settings_mark: int  # of what makes ranks run their calls in one order, with one assignment
    load: ImageLoad | None = None  # of the latest step
    _calls: list[_Call] = field(default_factory=list)
    _features: dict[int, Encoded] = field(default_factory=dict)

    def expect(self, microbatches: Sequence[Batch]) -> None:
        """Prepare each step; collective over the group. A rank that disagrees raises on all of them."""
        self._calls.clear()
        self._features.clear()
        if not microbatches:  # let go of what a step left
            return
        # pools of k micro-batches: what all ranks hold of them, and who encodes what
        inputs, sharing = self._read_all(microbatches), self.tower.sharing
        k = self.num_pooled
        parts = [inputs[i : i + k] for i in range(0, len(inputs), k)]
        joined = [join_inputs([x for kinds in part for x in kinds.values()]) for part in parts]
        pools = pool_images(joined, self.tower.template, sharing)
        for number, (part, own, pool) in enumerate(zip(parts, joined, pools, strict=True)):
            atoms = [{kind: len(x) for kind, x in kinds.items()} for kinds in part]
            waiting = set(range(number * k, number * k + len(part)))
            self._calls.append(_Call(inputs=own, pool=pool, atoms=atoms, waiting=waiting))
        # patches that each rank holds, and those that it encodes
        N = sharing.control.num_ranks
        held = sum(np.bincount(pool.home, pool.sizes.patches, N) for pool in pools)
        encoded = sum(np.array([pool.sizes.patches[pool.shares.atoms_of(r)].sum() for r in range(N)]) for pool in pools)
        self.load = ImageLoad(held=_whole(held), encoded=_whole(encoded))

    def features(self, microbatch: int) -> Encoded | None:
        """Return what the tower would have returned for this micro-batch, as leaves; None: it has no images."""
        number = microbatch // self.num_pooled
        call = self._calls[number]
        if not call.has_run:
            assert all(x.has_run for x in self._calls[:number]), "ranks exchange in the order of micro-batches"
            call.has_run = True
            if len(call.pool.home):
                self._run(call, number * self.num_pooled)
        return self._features.pop(microbatch, None)

    def finish(self, microbatch: int) -> None:
        """Finish each backward: the last one of a call runs the tower's own, on every rank of the group."""
        call = self._calls[microbatch // self.num_pooled]
        call.waiting.discard(microbatch)
        if not call.waiting and call.held is not None:
            call.held.backward()
            call.held = None

    def _run(self, call: _Call, first: int) -> None:
        """Send pixels, run this rank's share through the tower, and get rows back."""
        tower, pool = self.tower, call.pool
        sharing, rank = tower.sharing, tower.sharing.control.rank
        own = None if call.inputs is None else call.inputs.to(tower.device)
        received = move_images(own, tower.template, pool, rank=rank, group=sharing.group)
        call.inputs = None
        # an empty share runs the tower on the smallest image and gives no row of it: types are right by construction
        features = run_tower(tower.function, received if len(received) else tower.template)
        known = pool.sizes.rows
        num_rows = np.full(len(pool.home), features.num_rows[0]) if known is None else known
        made = features.rows if len(received) else features.rows[:0]
        layout = lay_out_rows(pool.shares.order, pool.shares.offsets, num_rows)
        # gradients wait in the leaves of the micro-batches until the last backward of the pool
        call.held = HeldRows(rows=route_rows(made, layout, pool.rows_by_home(num_rows), sharing.group))
        self._features |= dict(call.held.hand_out(features, num_rows[pool.home == rank], call.atoms, first))

    # -- agreement ----------------------------------------------------------------------------------------------------

    def _read_all(self, microbatches: Sequence[Batch]) -> list[dict[str, VisionInputs]]:
        """Return own images and videos by micro-batch, once all ranks have said that they can go on."""
        problem, inputs = None, []
        try:
            inputs = self.tower.read(microbatches)
            self._check_form([x for kinds in inputs for x in kinds.values()])
        except TrimtabError as error:
            problem = error
        answers = self.tower.sharing.control.gather_unless(
            problem,
            "the start of a step",
            (len(microbatches), self.settings_mark),
            failed="data-parallel rank {} refused its images: see its own message",
        )
        # as many micro-batches and one plan on all ranks
        numbers, marks = zip(*answers, strict=True)
        if others := differing_ranks(numbers):
            raise TrimtabError(
                f"data-parallel rank {listed(others)} runs {numbers[others[0]]} micro-batches in a step and the others "
                "another number: give equally many, collate([]) for an empty slot"
            )
        if others := differing_ranks(marks):
            raise TrimtabError(
                f"data-parallel rank {listed(others)} has another schedule or rule: build all pipelines from one plan"
            )
        return inputs

    def _check_form(self, inputs: Sequence[VisionInputs]) -> None:
        """Check that rows are alike on every rank: they travel into buffers made like the family's smallest image."""
        for image in inputs:
            for part, like in zip(image.parts, self.tower.template.parts, strict=True):
                if part.rows.dtype != like.rows.dtype or part.rows.shape[1:] != like.rows.shape[1:]:
                    shape = ", ".join(map(str, like.rows.shape[1:]))
                    raise TrimtabError(
                        f"{part.name} is {part.rows.dtype} of shape {tuple(part.rows.shape)}, not {like.rows.dtype} "
                        f"(..., {shape}): use the model's own processor, or train without sharing images"
                    )


def read_images(batch: Batch, family: Family, config: Any) -> dict[str, VisionInputs]:
    """Return the atoms of a micro-batch's images and videos, for one call of the function that encodes images."""
    if not has_images(batch):
        return {}
    if not isinstance(family, GridFamily):
        return {"image": family.read("image", {"pixel_values": batch["pixel_values"]}, config)}
    pixels, grids = PIXELS["image"], GRIDS["image"]
    return {
        kind: family.read("image", {pixels: batch[PIXELS[kind]], grids: batch[GRIDS[kind]]}, config)
        for kind in KINDS
        if batch.get(PIXELS[kind]) is not None and len(batch[PIXELS[kind]])
    }


def name_rows(features: Features, rows: Tensor, num_rows: IntArray, atoms: Mapping[str, int]) -> Encoded:
    """Return the rows of one micro-batch as what the functions of images and of videos return."""
    outputs: dict[str, Any] = {}
    columns: dict[str, Tensor] = {}
    start = row = 0
    for kind, num in atoms.items():
        mine = num_rows[start : start + num]
        part = rows[row : row + int(mine.sum())]
        start, row = start + num, row + len(part)
        outputs[kind] = write_features(features, part, mine)
        own = torch.split(part, list(features.widths), dim=-1)
        columns |= {feature_name(kind, i): x for i, x in enumerate(own)}
    return Encoded(outputs=outputs, rows=columns)


def dispatch_images(layout: PipelineLayout, decision: VisionDecision, tower: SharedTower) -> ImageDispatch:
    """Share images of a first stage that holds the whole tower."""
    # all ranks must run one plan: its fingerprint travels with every step
    order = [layout.stages, layout.schedule, layout.num_chunks]
    mark = fingerprint([*order, decision.pooling, tower.sharing.settings], [])
    return ImageDispatch(tower=tower, num_pooled=decision.pooling, settings_mark=mark)


def _whole(values: Any) -> tuple[int, ...]:
    return tuple(int(x) for x in values)
