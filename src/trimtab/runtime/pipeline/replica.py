"""A tower on every rank of a pipeline: a step's images are encoded before the pipeline runs, and go back after it.

Every rank of a pipeline is given the same micro-batches, pixels included, and holds the whole tower. Before the
pipeline each rank encodes its share of all images of the step, and the first stage gets all rows: they are the leaves
of its graphs, so the stages run as if another rank had made them. After the pipeline the gradients of these rows go
back to who encoded them, each rank runs the backward of its share, and the first rank gets the sum of the tower's
gradients.

The first rank owns the tower: its parameters are those of stage 0, which are clipped, updated and saved with the
others. The other ranks hold copies without optimizer state, to which changed weights are sent before they encode: sum
and sending together are the bytes of one all-reduce. Random draws inside a tower are those of the rank that encodes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from trimtab.balance.cost import LinearCost
from trimtab.balance.images import share_images
from trimtab.options import Rule
from trimtab.plan.plan import VisionDecision
from trimtab.runtime.data.collate import filler_sample
from trimtab.runtime.pipeline.cuts import StageModule
from trimtab.runtime.pipeline.image_dispatch import ImageLoad, call_tower, name_rows, read_images
from trimtab.runtime.pipeline.trace import Batch, Encoded, find_layer, parameters_of
from trimtab.runtime.recompute import apply
from trimtab.runtime.vision.agreement import Control, agree_on_inputs, agree_on_rows, open_control
from trimtab.runtime.vision.exchange import lay_out_rows, route_rows, send_in_place, sum_in_place, used_gradients
from trimtab.runtime.vision.hooks import PatchedFunction, find_functions
from trimtab.runtime.vision.inputs import (
    Family,
    Features,
    VisionInputs,
    find_family,
    join_inputs,
    read_features,
    tower_flops,
)
from trimtab.specs import IntArray


@dataclass(slots=True, kw_only=True, eq=False)
class ReplicaTower:
    """One rank's copy of the tower, and what of a step it holds; made by `spread_tower`."""

    function: PatchedFunction  # where this rank's copy hands out image features
    parameters: tuple[nn.Parameter, ...]  # of the copy, in one order on all ranks
    group: Any  # ranks of the pipeline, the first one has stage 0
    control: Control
    family: Family
    config: Any
    cost: LinearCost
    rule: Rule
    device: torch.device
    template: VisionInputs  # the family's smallest image
    load: ImageLoad | None = None  # of the latest step
    _rows: Tensor | None = None  # of a step as the first stage gets them, in the graph of the exchange
    _leaves: list[Tensor] = field(default_factory=list)  # the same by micro-batch, on the first rank
    _features: dict[int, Encoded] = field(default_factory=dict)
    _sent: list[int] | None = None  # versions of the first rank's parameters when they were sent; None: never

    def expect(self, microbatches: Sequence[Batch]) -> None:
        """Encode the images of a step before it, in whose graph the step's gradients are kept. Collective."""
        self._rows, self._leaves = None, []
        self._features.clear()
        self._send_weights()
        # every rank reads all images of the step; without any, none runs the tower
        inputs, problem = list[dict[str, VisionInputs]](), None
        try:
            inputs = [read_images(batch, self.family, self.config) for batch in microbatches]
        except Exception as error:  # the other ranks learn of it
            problem = error
        joined = join_inputs([x for kinds in inputs for x in kinds.values()])
        agree_on_inputs(self.control, self.function.name, [self.rule, self.cost], joined, problem)
        self.load = None
        if joined is not None:
            self._encode(joined, [{kind: len(x) for kind, x in kinds.items()} for kinds in inputs])

    def features(self, microbatch: int) -> Encoded | None:
        """Return what the tower would have returned for this micro-batch, as leaves; None: it has no images."""
        return self._features.pop(microbatch, None)

    def finish(self, microbatch: int) -> None:
        """Do nothing: the tower's backward runs once, after all micro-batches."""

    def finish_step(self) -> None:
        """Run the tower's backwards after the pipeline's, and sum them on the first rank. Collective."""
        rows, self._rows = self._rows, None
        if rows is None or not rows.requires_grad:
            return
        gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in self._leaves]
        self._leaves = []
        torch.autograd.backward([rows], [torch.cat([rows.new_zeros(0, rows.shape[1]), *gradients])])
        sum_in_place(used_gradients(self.parameters, self.group), self.group, to=0)
        if self.control.rank:
            for parameter in self.parameters:
                parameter.grad = None

    def _encode(self, inputs: VisionInputs, atoms: Sequence[Mapping[str, int]]) -> None:
        """Encode this rank's share, and send all rows to the first rank; `atoms` of each micro-batch by kind."""
        rank, num_ranks = self.control.rank, self.control.num_ranks
        shares = share_images(self.cost.of(inputs.patches, patches_windowed=inputs.windowed), num_ranks, rule=self.rule)
        # 1. an empty share runs the tower on the smallest image and gives no row of it
        share = shares.atoms_of(rank)
        features: Features | None = None
        problem: Exception | None = None
        try:
            own = inputs.take(share).to(self.device) if len(share) else self.template
            features = read_features(call_tower(self.function, own), own)
            features = features if len(share) else features.without_rows()
        except Exception as error:  # the other ranks learn of it
            problem = error
        num_rows = agree_on_rows(self.control, self.function.name, features, shares, problem)
        assert features is not None
        # 2. all rows to the first rank, whose leaves they are by micro-batch
        layout = lay_out_rows(shares.order, shares.offsets, num_rows)
        everything, nothing = np.arange(len(layout)), np.empty(0, np.int64)
        rows = route_rows(
            features.rows, layout, [everything if r == 0 else nothing for r in range(num_ranks)], self.group
        )
        self._rows = rows
        if rank == 0:
            self._hand_out(features, rows, num_rows, atoms)
        # 3. patches that each rank encoded; the first stage would have encoded all of them
        encoded = [int(inputs.patches[shares.atoms_of(r)].sum()) for r in range(num_ranks)]
        self.load = ImageLoad(held=(sum(encoded), *[0] * (num_ranks - 1)), encoded=tuple(encoded))

    def _hand_out(
        self, features: Features, rows: Tensor, num_rows: IntArray, atoms: Sequence[Mapping[str, int]]
    ) -> None:
        start, end = 0, 0
        for number, kinds in enumerate(atoms):
            mine = num_rows[start : start + sum(kinds.values())]
            start += len(mine)
            leaf = rows.detach()[end : end + int(mine.sum())].requires_grad_(rows.requires_grad)
            end += len(leaf)
            self._leaves.append(leaf)
            if len(mine):
                self._features[number] = name_rows(features, leaf, mine, kinds)

    def _send_weights(self) -> None:
        """Send the first rank's parameters that changed since the last time to the copies.

        An optimizer may write where no version counts it: what is trained is sent whenever gradients are on.
        """
        trains = torch.is_grad_enabled()
        versions = [parameter._version for parameter in self.parameters]
        before = [None] * len(versions) if self._sent is None else self._sent
        changed = [
            was != now or (trains and parameter.requires_grad)
            for parameter, was, now in zip(self.parameters, before, versions, strict=True)
        ]
        # which ones, then the values: nothing is sent for a frozen tower after the first step
        flags = torch.tensor(changed, dtype=torch.int32, device=self.device)
        dist.broadcast(flags, dist.get_global_rank(self.group, 0), group=self.group)
        chosen = [x.detach() for x, flag in zip(self.parameters, flags.tolist(), strict=True) if flag]
        send_in_place(chosen, self.group)
        self._sent = [parameter._version for parameter in self.parameters]


def spread_tower(
    tower: StageModule,
    decision: VisionDecision,
    *,
    model: Any,
    cost: LinearCost | None,
    group: dist.ProcessGroup,
    device: torch.device,
    timeout_s: float,
) -> ReplicaTower:
    """Return this rank's copy of the tower; every rank of the pipeline calls this.

    `tower` holds the layers of vision tower and projector: stage 0, or a module of them alone. `cost` None:
    multiply-adds, by the configuration.
    """
    share_images([1.0], 2, rule=decision.rule)  # compiles before the clock of a step runs
    config, names = model.config, tower.cuts.images
    # the tower's layers, with the recompute that was decided for all of them
    family = find_family(config)
    layers = [find_layer(tower.model, name) for name in names]
    if decision.recompute is not None:
        modules = [name for name, layer in zip(names, layers, strict=True) if isinstance(layer, nn.Module)]
        apply(tower.model, modules, granularity=decision.recompute)
    # the smallest image, for ranks that have none
    smallest = read_images(filler_sample(config, with_image=True), family, config)["image"]
    function = next(x for x in find_functions(tower.model, "features") if x.kind == "image")
    return ReplicaTower(
        function=function,
        parameters=tuple({id(x): x for layer in layers for x in parameters_of(layer)}.values()),
        group=group,
        control=open_control(group, timeout_s),
        family=family,
        config=config,
        cost=cost or tower_flops(config),
        rule=decision.rule,
        device=device,
        template=smallest.to(device),
    )
