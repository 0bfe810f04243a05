"""One rank's part of a pipeline, and one step of it: start at `Pipeline.step`."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from accelerate.utils.operations import send_to_device
from torch import Tensor, nn

from trimtab.errors import PlanError
from trimtab.runtime.data.loss import label_weights, packed_loss, step_denominator
from trimtab.runtime.layout import PipelineLayout
from trimtab.runtime.pipeline.flow import Batch, Sealed
from trimtab.runtime.pipeline.gradients import TiedWeight, exchange_tied, sum_over_ranks
from trimtab.runtime.pipeline.image_dispatch import ImageLoad
from trimtab.runtime.pipeline.stage import PackedStage
from trimtab.runtime.vision.families import PIXELS


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What one step computed, the same on every rank."""

    loss: Tensor  # 0-d float32: sum w c / W over all micro-batches and data-parallel ranks (see runtime.loss)
    denominator: Tensor  # 0-d float32: W


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Pipeline:
    """This rank's stages; made by `build_pipeline`.

    An optimizer takes `parameters()`; names are those of the Hugging Face model, so that the state dicts of all ranks
    of a pipeline are together the model's own.
    """

    layout: PipelineLayout
    stages: tuple[PackedStage, ...]  # of this rank, first to last
    schedule: Any  # of torch.distributed.pipelining
    device: torch.device
    pp_group: dist.ProcessGroup
    dp_group: dist.ProcessGroup | None  # None: one data-parallel rank
    tied: TiedWeight | None  # None: no weight is shared with another pipeline rank

    # -- a step -------------------------------------------------------------------------------------------------------

    def step(self, microbatches: Sequence[Batch], *, denominator: Tensor | float | None = None) -> StepResult:
        """Forward and backward of a step's micro-batches, as `PackedCollator` makes them.

        Every rank of a pipeline gives the same micro-batches: all of them need the ids and sizes. Whatever `grad` held
        is dropped; afterwards it is d loss / d parameter over all micro-batches and data-parallel ranks (summed: the
        denominator counts them all), the same on every rank that holds the parameter; None where no micro-batch of any
        rank used it, as in one process. Collective over both groups.

        `denominator`: W of the step, where it is known; None: `step_denominator` over the data-parallel group.
        """
        return self._run(microbatches, denominator, backward=True)

    def evaluate(self, microbatches: Sequence[Batch], *, denominator: Tensor | float | None = None) -> StepResult:
        """The loss of `step` without gradients."""
        return self._run(microbatches, denominator, backward=False)

    def _run(self, microbatches: Sequence[Batch], denominator: Tensor | float | None, *, backward: bool) -> StepResult:
        # pixels stay where they are until the vision tower reads them
        pixels, ahead = list(PIXELS.values()), self.device.type != "cpu"
        batches = [
            send_to_device(dict(batch), self.device, non_blocking=ahead, skip_keys=pixels) for batch in microbatches
        ]
        self._check_microbatches(batches)
        W = torch.as_tensor(self._denominator(batches) if denominator is None else denominator, device=self.device)
        for stage in self.stages:
            stage.expect(batches, backward=backward)
        if backward:
            for parameter in self.parameters():
                parameter.grad = None
        losses: list[Tensor] = []
        # private, torch 2.13: the public step() would cut the batch along its first dimension, and packs have one row
        self.schedule._has_backward = backward
        with nullcontext() if backward else torch.no_grad():
            self.schedule._step_microbatches(
                kwarg_mbs=[{"sealed": Sealed(batch)} for batch in batches],
                target_mbs=[Sealed({**batch, "denominator": W}) for batch in batches],
                losses=losses,
                return_outputs=False,
            )
        if backward:
            self._finish_gradients()
        loss = (
            torch.stack([x.detach().float() for x in losses]).sum() if losses else torch.zeros((), device=self.device)
        )
        for group in (self.pp_group, self.dp_group):
            if group is not None:
                dist.all_reduce(loss, group=group)
        return StepResult(loss=loss, denominator=W)

    def _denominator(self, batches: Sequence[Batch]) -> Tensor:
        if self.dp_group is not None:
            return step_denominator(batches, group=self.dp_group)
        return torch.stack([label_weights(batch).sum() for batch in batches]).sum()

    def _finish_gradients(self) -> None:
        if self.dp_group is not None:
            sum_over_ranks(list(self.parameters()), self.dp_group)
        if self.tied is not None:
            exchange_tied(self.tied, self.pp_group)

    def _check_microbatches(self, batches: Sequence[Batch]) -> None:
        """One small all-reduce instead of a hang, or of a tensor received into a buffer of another size."""
        if len(batches) != self.layout.num_microbatches:
            raise PlanError(
                f"a step of {len(batches)} micro-batches was given, but the pipeline was built for "
                f"{self.layout.num_microbatches}: give as many, collate([]) for an empty slot"
            )
        sizes = [
            sorted((key, tuple(x.shape)) for key, x in batch.items() if isinstance(x, Tensor)) for batch in batches
        ]
        mark = zlib.crc32(repr(sizes).encode())
        extremes = torch.tensor([mark, -mark], device=self.device)
        dist.all_reduce(extremes, op=dist.ReduceOp.MAX, group=self.pp_group)
        if int(extremes[0]) != -int(extremes[1]):
            raise PlanError(
                "the ranks of one pipeline were given micro-batches of different sizes, but each of them needs the "
                "same ones: make the sampler of every pipeline rank with its data-parallel rank"
            )

    @property
    def image_load(self) -> ImageLoad | None:
        """Of the latest step, on the ranks of the first stage; None elsewhere, and where no images are shared."""
        return next((stage.images.load for stage in self.stages if stage.images is not None), None)

    # -- what it holds ------------------------------------------------------------------------------------------------

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters under their names in the whole model; one that two stages share comes once."""
        seen: set[int] = set()
        for stage in self.stages:
            for name, parameter in stage.module.named_own(stage.model.named_parameters(remove_duplicate=False)):
                if id(parameter) not in seen:
                    seen.add(id(parameter))
                    yield name, parameter

    def parameters(self) -> Iterator[nn.Parameter]:
        for _, parameter in self.named_parameters():
            yield parameter

    def state_dict(self) -> dict[str, Tensor]:
        """This rank's part of the whole model's state dict."""
        return {
            name: value
            for stage in self.stages
            for name, value in stage.module.named_own(stage.model.state_dict().items())
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Takes this rank's part out of `state`, which may be the whole model's; `KeyError` for a name it lacks."""
        with torch.no_grad():
            for name, value in self.state_dict().items():
                value.copy_(state[name])

    def gradient_norm(self) -> Tensor:
        """Of all gradients of the whole model together, the same on every rank.

        A tied weight counts once, as in one process; squares are added in float32. Collective over the pipeline group.
        """
        mirror = None if self.tied is None or self.tied.owner else self.tied.parameter
        counted = [p.grad for p in self.parameters() if p.grad is not None and p is not mirror]
        square = torch.zeros((), device=self.device)
        for gradient in counted:
            square += torch.linalg.vector_norm(gradient, dtype=torch.float32).square()
        dist.all_reduce(square, group=self.pp_group)
        return square.sqrt()

    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales all gradients so that `gradient_norm` is at most `max_norm`; returns the norm before. Collective."""
        norm = self.gradient_norm()
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)  # as torch.nn.utils.clip_grad_norm_
        for parameter in self.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(scale.to(parameter.grad.dtype))
        return norm


def pack_loss(logits: Tensor, target: Sealed) -> Tensor:
    """What the schedule calls on the last stage."""
    return packed_loss(logits, target.batch, denominator=target.batch["denominator"])
