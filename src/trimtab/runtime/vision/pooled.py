"""One call of the tower for several micro-batches, whose forwards and backwards follow one at a time.

Larger pools share out better and launch fewer kernels; they hold the tower's activations of all their micro-batches
until the last backward has run (a plan takes what fits).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.families import GRIDS, PIXELS, GridFamily
from trimtab.runtime.vision.handle import VisionDataParallel
from trimtab.runtime.vision.hooks import RETURNS_OBJECTS
from trimtab.runtime.vision.outputs import each_tensor


@dataclass(slots=True, kw_only=True, eq=False)
class PooledFeatures:
    """`outputs[i]` is micro-batch i's `mm_encoder_outputs`; call `backward()` once, after the last of theirs."""

    outputs: list[dict[str, Any]]
    _leaves: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # (what the tower gave, what the model reads)

    def backward(self) -> None:
        """The tower's backward with the gradients that the micro-batches left; one exchange for each kind."""
        leaves, self._leaves = self._leaves, []
        if leaves:  # zeros where nothing reached the loss: the other ranks wait for this one's part of the exchange
            gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for _, leaf in leaves]
            torch.autograd.backward([source for source, _ in leaves], gradients)


def encode_pooled(handle: VisionDataParallel, microbatches: Sequence[dict[str, Any]]) -> PooledFeatures:
    """Image features of several micro-batches' inputs, each of which a model of Transformers 5 takes for pixels.

    Use it where a plan pools micro-batches and the loop is your own; docs/vision-data-parallel.md shows it.

    `microbatches[i]` holds `pixel_values`, `image_grid_thw` and the like, for grid families; others are ignored.
    """
    if not isinstance(handle.family, GridFamily):
        raise TrimtabError(
            f"micro-batches of {type(handle.model).__name__} were to share a call of the tower, which is known for "
            f"families with a grid of patches: call the model on each micro-batch"
        )
    if handle.heartbeat is not None:
        raise TrimtabError(
            "micro-batches were to share a call of the tower on ranks that may hold no image, and a pool has no "
            "heartbeat that would call the others: call the model on each micro-batch, or let `trimtab train` dispatch"
        )
    outputs: list[dict[str, Any]] = [{} for _ in microbatches]
    pooled = PooledFeatures(outputs=outputs)
    for function in handle.functions:
        if function.kind == "tower" or not RETURNS_OBJECTS:
            raise TrimtabError(
                "features are fed back at mm_encoder_outputs, which the tower's own forward does not know: "
                "make the handle with at='features', under Transformers 5"
            )
        pixels, grid = PIXELS[function.kind], GRIDS[function.kind]
        holders = [i for i, inputs in enumerate(microbatches) if inputs.get(pixels) is not None]
        if not holders:
            continue
        grids = [microbatches[i][grid] for i in holders]
        arguments = {pixels: torch.cat([microbatches[i][pixels] for i in holders]), grid: torch.cat(grids)}
        whole = getattr(function.module, function.name)(**arguments, return_dict=True)
        ends = torch.tensor([len(g) for g in grids]).cumsum(0).tolist()
        for i, start, end in zip(holders, [0, *ends], ends, strict=False):
            outputs[i][function.kind] = _cut(whole, start, end, pooled._leaves)
    return pooled


def _cut(whole: Any, start: int, end: int, leaves: list[tuple[Tensor, Tensor]]) -> Any:
    """Entries `start` to `end`, as leaves of the micro-batch's own graph."""

    def detached(source: Tensor) -> Tensor:
        if not source.requires_grad:
            return source
        leaf = source.detach().requires_grad_()
        leaves.append((source, leaf))
        return leaf

    return each_tensor(whole, start, end, detached)
