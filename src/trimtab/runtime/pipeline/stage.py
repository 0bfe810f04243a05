"""`PipelineStage` for packs: every micro-batch has shapes of its own, known on both sides of a cut beforehand."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage

from trimtab.runtime.pipeline.flow import ENCODED, Batch, Sealed, Wire
from trimtab.runtime.pipeline.image_dispatch import ImageDispatch
from trimtab.runtime.pipeline.module import StageModule


class PackedStage(PipelineStage):
    """Sends and receives `Cuts.wires` of each micro-batch: none, one or several tensors.

    The stock class (torch 2.13) takes one shape for all micro-batches and receives a smaller tensor into a larger
    buffer silently. It cannot run without a tensor across the cut, nor without a gradient, and when backwards are
    split it drops the weights' gradients of a stage whose inputs need none (frozen or image-free in front of it).
    Overridden are the methods that schedules call; those with an underscore are private, tested with 2.13 and 2.15.
    """

    def __init__(self, module: StageModule, index: int, num_stages: int, device: torch.device, group: Any) -> None:
        super().__init__(module, index, num_stages, device, group=group)
        self.images: ImageDispatch | None = None  # None: this stage encodes what it holds
        self.microbatches: Sequence[Batch] = ()
        self.received: dict[int, tuple[Tensor, ...]] = {}
        self.sent: dict[int, tuple[Tensor, ...]] = {}  # made, and not yet handed to a send
        self.gradients: dict[int, tuple[Tensor | None, ...]] = {}  # of what was sent
        self.later: dict[int, Callable[[], None]] = {}  # backwards that wait for their weight block

    @property
    def module(self) -> StageModule:
        assert isinstance(self.submod, StageModule)
        return self.submod

    @property
    def model(self) -> nn.Module:
        return self.module.model

    def wires_in(self, batch: Batch) -> tuple[Wire, ...]:
        return self.module.cuts.wires(self.module.start, batch)

    def wires_out(self, batch: Batch) -> tuple[Wire, ...]:
        return self.module.cuts.wires(self.module.stop, batch)

    def expect(self, microbatches: Sequence[Batch], *, backward: bool) -> None:
        """Before each step: its micro-batches."""
        self.clear_runtime_states()
        for left in (self.received, self.sent, self.gradients, self.later, self.bwd_cache):
            left.clear()  # of a step that failed, or of stage 0, which hands no gradients on
        self.has_backward = backward
        self.chunks = len(microbatches)
        self.microbatches = microbatches
        self.args_recv_info = dict.fromkeys(range(len(microbatches)), ())
        if self.images is not None:
            self.images.expect(microbatches)

    # -- what schedules set up once: nothing, since shapes differ -----------------------------------------------------

    def _prepare_forward_infra(self, *_: Any, **__: Any) -> None:
        """Shapes come with `expect`."""

    def _prepare_backward_infra(self, *_: Any, **__: Any) -> None:
        """Shapes come with `expect`."""

    def _pre_metadata_inference_backup(self) -> None:
        """Since nothing is inferred, no buffer changes: torch 2.15 keeps a copy of each, and fails on expanded ones."""

    # -- forward ------------------------------------------------------------------------------------------------------

    def forward_one_chunk(
        self,
        fwd_chunk_id: int,
        args: tuple[Any, ...],
        kwargs: dict[str, Any] | None = None,
        save_forward_output: bool = True,
    ) -> Any:
        """Of a batch with encoded images, where ranks share them."""
        if self.images is not None:
            encoded = self.images.features(fwd_chunk_id)
            if encoded is not None:
                kwargs = {"sealed": Sealed({**self.microbatches[fwd_chunk_id], ENCODED: encoded})}
        output = super().forward_one_chunk(fwd_chunk_id, args, kwargs, save_forward_output)
        if not self.is_last:
            self.sent[fwd_chunk_id] = tuple(tensor.detach() for tensor in output)
        return output

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        buffers = [self._buffer(wire) for wire in self.wires_in(self.microbatches[fwd_chunk_id])]
        self.received[fwd_chunk_id] = tuple(buffers)
        return [self._operation(dist.irecv, buffer, self.stage_index - 1) for buffer in buffers]

    def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
        self.received[mb_index] = tuple(tensor.detach() for tensor in prev_stage_outputs)

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        wires, tensors = self.wires_in(self.microbatches[fwd_chunk_id]), self.received.pop(fwd_chunk_id)
        for wire, tensor in zip(wires, tensors, strict=True):
            assert tensor.shape == wire.shape
            tensor.requires_grad_(wire.requires_grad and self.has_backward)
        return tensors

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        if self.is_last:
            return []
        return [self._operation(dist.isend, x, self.stage_index + 1) for x in self.sent.pop(fwd_chunk_id)]

    # -- backward -----------------------------------------------------------------------------------------------------

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_last:
            return []
        wires = self.wires_out(self.microbatches[bwd_chunk_id])
        buffers = tuple(self._buffer(wire) if wire.requires_grad else None for wire in wires)
        self.gradients[bwd_chunk_id] = buffers
        return [self._operation(dist.irecv, x, self.stage_index + 1) for x in buffers if x is not None]

    def set_local_bwd_input(self, next_stage_bwd_outputs: tuple[Tensor | None, ...], mb_index: int) -> None:
        if self.has_backward:
            self.gradients[mb_index] = next_stage_bwd_outputs

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor | None, ...]:
        return self.gradients.pop(bwd_chunk_id)

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Tensor | None = None, full_backward: bool = True, last_backward: bool = False
    ) -> None:
        """Leaves out micro-batches that no gradient reaches, and splits no backward whose inputs need none."""
        if not self.has_backward:
            self._forget_forward(bwd_chunk_id)
            return
        received = self.wires_in(self.microbatches[bwd_chunk_id])
        sent = self.wires_out(self.microbatches[bwd_chunk_id])
        graded = loss is not None and loss.requires_grad if self.is_last else any(w.requires_grad for w in sent)
        if not graded:
            self._drop(bwd_chunk_id, num_inputs=len(received))
            self._finish_images(bwd_chunk_id)
            return
        self._stage_meta.inputs = (None,) * len(received)  # type: ignore[assignment]  # private: only its length is read
        if not full_backward and any(wire.requires_grad for wire in received):
            way = self.module.cuts.way(self.microbatches[bwd_chunk_id])
            full_backward = not way.is_fed(self.module.start, self.module.stop)  # torch would lose what is not
        if full_backward or any(wire.requires_grad for wire in received):
            super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
            self._finish_images(bwd_chunk_id)
            return
        self.bwd_cache[bwd_chunk_id] = (None,) * len(received)
        whole = super().backward_one_chunk
        self.later[bwd_chunk_id] = lambda: whole(bwd_chunk_id, loss, True, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> None:
        if bwd_chunk_id in self.later:
            self.later.pop(bwd_chunk_id)()
            del self.bwd_cache[bwd_chunk_id]
            self._finish_images(bwd_chunk_id)
        elif bwd_chunk_id in self.dw_runner:
            super().backward_weight_one_chunk(bwd_chunk_id, last_backward)
            del self.dw_runner[bwd_chunk_id]

    def _finish_images(self, microbatch: int) -> None:
        """A first stage's whole backward has run: no input of it needs a gradient, so none of its is split."""
        if self.images is not None:
            self.images.finish(microbatch)

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        if not self.has_backward or self.is_first:
            return []
        gradients = self._input_gradients(bwd_chunk_id)
        return [self._operation(dist.isend, x, self.stage_index - 1) for x in gradients if x is not None]

    def get_local_bwd_output(self, mb_index: int) -> tuple[Tensor | None, ...]:
        return self._input_gradients(mb_index) if self.has_backward else ()

    def _input_gradients(self, microbatch: int) -> tuple[Tensor | None, ...]:
        """One for each wire that needs one; zeros where nothing of the wire reached the loss."""
        wires, gradients = self.wires_in(self.microbatches[microbatch]), self.bwd_cache.pop(microbatch)
        return tuple(
            None if not wire.requires_grad else self._buffer(wire).zero_() if x is None else x.contiguous()
            for wire, x in zip(wires, gradients, strict=True)
        )

    def _drop(self, microbatch: int, *, num_inputs: int) -> None:
        self._forget_forward(microbatch)
        self.gradients.pop(microbatch, None)
        self.bwd_cache[microbatch] = (None,) * num_inputs

    def _forget_forward(self, microbatch: int) -> None:
        """Drops what torch keeps of a forward for its backward; the keeper's name is private, and torch's own."""
        kept = "fwd_cache" if hasattr(self, "fwd_cache") else "_forward_chunk_states"  # torch 2.13 | 2.15
        getattr(self, kept).pop(microbatch)

    # -- sending ------------------------------------------------------------------------------------------------------

    def _buffer(self, wire: Wire) -> Tensor:
        return torch.empty(wire.shape, dtype=self.module.dtype, device=self.device)

    def _operation(self, kind: Any, tensor: Tensor, peer_stage: int) -> dist.P2POp:
        return dist.P2POp(kind, tensor, self._resolve_peer_global_rank(peer_stage), self.group)
