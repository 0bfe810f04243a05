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

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from trimtab.plan.plan import VisionDecision
from trimtab.runtime.pipeline.cuts import StageModule
from trimtab.runtime.pipeline.image_dispatch import HeldRows, ImageLoad, SharedTower
from trimtab.runtime.pipeline.trace import Batch, Encoded, find_layer, parameters_of
from trimtab.runtime.recompute import apply
from trimtab.runtime.vision.agreement import agree_on_inputs
from trimtab.runtime.vision.encode import encode_share, share_atoms
from trimtab.runtime.vision.exchange import lay_out_rows, route_rows, send_in_place, sum_in_place, used_gradients
from trimtab.runtime.vision.inputs import VisionInputs, join_inputs


@dataclass(slots=True, kw_only=True, eq=False)
class ReplicaTower:
    """One rank's copy of the tower, and what of a step it holds; made by `spread_tower`."""

    tower: SharedTower  # this rank's copy, with the ranks of the pipeline; the first one has stage 0
    parameters: tuple[nn.Parameter, ...]  # of the copy, in one order on all ranks
    load: ImageLoad | None = None  # of the latest step
    _held: HeldRows | None = None  # all rows of a step on the first rank, no row on the others
    _features: dict[int, Encoded] = field(default_factory=dict)
    _sent: list[int] | None = None  # versions of the first rank's parameters when they were sent; None: never

    def expect(self, microbatches: Sequence[Batch]) -> None:
        """Encode the images of a step before it, in whose graph the step's gradients are kept. Collective."""
        self._held = None
        self._features.clear()
        self._send_weights()
        # every rank reads all images of the step; without any, none runs the tower
        inputs, problem = list[dict[str, VisionInputs]](), None
        try:
            inputs = self.tower.read(microbatches)
        except Exception as error:  # the other ranks learn of it
            problem = error
        joined = join_inputs([x for kinds in inputs for x in kinds.values()])
        sharing = self.tower.sharing
        agree_on_inputs(sharing.control, self.tower.function.name, [sharing.settings], joined, problem)
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
        held, self._held = self._held, None
        if held is None or not held.rows.requires_grad:
            return
        held.backward()
        sum_in_place(used_gradients(self.parameters, self.tower.sharing.group), self.tower.sharing.group, to=0)
        if self.tower.sharing.control.rank:
            for parameter in self.parameters:
                parameter.grad = None

    def _encode(self, inputs: VisionInputs, atoms: Sequence[Mapping[str, int]]) -> None:
        """Encode this rank's share, and send all rows to the first rank; `atoms` of each micro-batch by kind."""
        tower, sharing = self.tower, self.tower.sharing
        rank, num_ranks = sharing.control.rank, sharing.control.num_ranks
        # 1. an empty share runs the tower on the smallest image and gives no row of it
        shares = share_atoms(sharing, inputs)
        own = inputs.take(shares.atoms_of(rank)).to(tower.device)
        features, num_rows = encode_share(sharing, tower.function, own, tower.template, shares)
        # 2. all rows to the first rank, whose leaves they are by micro-batch
        layout = lay_out_rows(shares.order, shares.offsets, num_rows)
        everything, nothing = np.arange(len(layout)), np.empty(0, np.int64)
        wanted = [everything if r == 0 else nothing for r in range(num_ranks)]
        self._held = HeldRows(rows=route_rows(features.rows, layout, wanted, sharing.group))
        if rank == 0:
            self._features |= dict(self._held.hand_out(features, num_rows, atoms))
        # 3. patches that each rank encoded; the first stage would have encoded all of them
        encoded = [int(inputs.patches[shares.atoms_of(r)].sum()) for r in range(num_ranks)]
        self.load = ImageLoad(held=(sum(encoded), *[0] * (num_ranks - 1)), encoded=tuple(encoded))

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
        flags = torch.tensor(changed, dtype=torch.int32, device=self.tower.device)
        group = self.tower.sharing.group
        dist.broadcast(flags, dist.get_global_rank(group, 0), group=group)
        chosen = [x.detach() for x, flag in zip(self.parameters, flags.tolist(), strict=True) if flag]
        send_in_place(chosen, group)
        self._sent = [parameter._version for parameter in self.parameters]


def spread_tower(module: StageModule, decision: VisionDecision, tower: SharedTower) -> ReplicaTower:
    """Return this rank's copy of the tower; every rank of the pipeline calls this.

    `module` holds the layers of vision tower and projector: stage 0, or a module of them alone.
    """
    # the tower's layers, with the recompute that was decided for all of them
    names = module.cuts.images
    layers = [find_layer(module.model, name) for name in names]
    if decision.recompute is not None:
        modules = [name for name, layer in zip(names, layers, strict=True) if isinstance(layer, nn.Module)]
        apply(module.model, modules, granularity=decision.recompute)
    parameters = {id(x): x for layer in layers for x in parameters_of(layer)}
    return ReplicaTower(tower=tower, parameters=tuple(parameters.values()))
