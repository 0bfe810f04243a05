"""The FLOPs rule for uneven pipeline stages, as a published notebook states it, and the optimum of its own model.

Pai-Megatron-Patch's "Uneven pp" notebook splits a Qwen2-VL-like model by arithmetic: the vision tower sits whole on the
first stage, and language layers are counted so that FLOPs come out even. It knows no recompute, no schedule, no head or
embedding time and no memory cap. Here to compare its figures with `split_stages`; plans do not use it.

N vision tokens, h width, f feed-forward width, S decoder tokens, L layers; every figure is forward + backward (x 3).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.errors import PartitionError


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenModel:
    """What the rule looks at."""

    image_width: int
    image_height: int
    image_channels: int
    patch_size: int
    vision_layers: int
    vision_hidden: int
    vision_ffn: int
    llm_layers: int
    llm_hidden: int
    llm_ffn: int
    decoder_tokens: int

    @property
    def vision_tokens(self) -> int:
        return -(-self.image_width // self.patch_size) * -(-self.image_height // self.patch_size)

    @property
    def vision_flops(self) -> float:
        """3 (2 N h c p^2 + L layer)."""
        N, h, p = self.vision_tokens, self.vision_hidden, self.patch_size
        embed = 2 * N * h * self.image_channels * p * p
        return 3.0 * (embed + self.vision_layers * _layer_flops(N, h, self.vision_ffn))

    @property
    def projector_flops(self) -> float:
        """3 x 2 N h_vision h_llm."""
        return 3.0 * 2 * self.vision_tokens * self.vision_hidden * self.llm_hidden

    @property
    def llm_layer_flops(self) -> float:
        return 3.0 * _layer_flops(self.decoder_tokens, self.llm_hidden, self.llm_ffn)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenSplit:
    """Language layers of each stage; the vision tower and the projector belong to stage 0."""

    counts: tuple[int, ...]
    imbalance: float  # slowest / mean stage - 1, in the rule's own FLOPs


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The rule's bytes of the first stage."""

    vision_bytes: float
    llm_bytes: float

    @property
    def total_bytes(self) -> float:
        return self.vision_bytes + self.llm_bytes


def flops_split(model: UnevenModel, *, pp: int) -> UnevenSplit:
    """The notebook's answer.

    A stage's share is total / pp. Middle and last stages get ceil(share / layer) layers, the first what is left. When
    vision tower and projector alone reach the share, the first stage gets none, the middle ones
    ceil(total / (pp - 1) / layer) and the last what is left. Not optimal: it rounds one way only (`best_split` is).
    """
    _check_pp(model, pp)
    L, layer = model.llm_layers, model.llm_layer_flops
    vision = model.vision_flops + model.projector_flops
    total = vision + L * layer
    if vision < total / pp:
        middle = math.ceil(total / pp / layer)
        counts = (L - middle * (pp - 1), *[middle] * (pp - 1))
    else:
        middle = math.ceil(total / (pp - 1) / layer)
        counts = (0, *[middle] * (pp - 2), L - middle * (pp - 2))
    if min(counts) < 0:
        raise PartitionError(
            f"the FLOPs rule cannot deal {L} language layers to {pp} stages: its rounding up leaves {min(counts)} for "
            "one of them: use split_stages, or fewer stages"
        )
    return _priced(model, counts)


def best_split(model: UnevenModel, *, pp: int) -> UnevenSplit:
    """The counts of least maximum FLOPs in the rule's own model (exact; the first stage as full as that allows)."""
    _check_pp(model, pp)
    L = model.llm_layers
    splits = []
    for first in range(L, -1, -1):
        each, left = divmod(L - first, pp - 1)
        counts = (first, *[each + (i < left) for i in range(pp - 1)])
        splits.append(_priced(model, counts))
    return min(splits, key=lambda split: split.imbalance)


def first_stage_memory(model: UnevenModel, *, first: int, tp: int = 1, batch: int = 1) -> StageMemory:
    """Bytes of the first stage with `first` language layers, as the notebook's code computes them (its GB are 10**9).

    A layer: 16 bytes for each of (4 h^2 + 2 h f)/tp + (3 h + f)/tp + 6 h parameters, and b s (18 h + 4 f)/tp of
    activations; the patch embedding: 16 p^2 c h + 2 W H c. Nothing for projector, token embedding, attention scores, or
    more than one micro-batch in flight.
    """

    def layers(num_layers: int, s: int, h: int, f: int) -> float:
        params = (4 * h * h + 2 * h * f) / tp + (3 * h + f) / tp + 6 * h
        return num_layers * (16 * params + batch * s * (18 * h + 4 * f) / tp)

    p, c, h = model.patch_size, model.image_channels, model.vision_hidden
    embed = 16 * p * p * c * h + 2 * model.image_width * model.image_height * c
    return StageMemory(
        vision_bytes=layers(model.vision_layers, model.vision_tokens, h, model.vision_ffn) + embed,
        llm_bytes=layers(first, model.decoder_tokens, model.llm_hidden, model.llm_ffn),
    )


def _layer_flops(num_tokens: int, hidden: int, ffn: int) -> float:
    """8 N h^2 + 4 h N^2 + 4 N h f: projections, full attention, two-matrix feed-forward."""
    N, h, f = num_tokens, hidden, ffn
    return 8.0 * N * h * h + 4.0 * h * N * N + 4.0 * N * h * f


def _priced(model: UnevenModel, counts: tuple[int, ...]) -> UnevenSplit:
    flops = [count * model.llm_layer_flops for count in counts]
    flops[0] += model.vision_flops + model.projector_flops
    return UnevenSplit(counts=counts, imbalance=max(flops) * len(flops) / sum(flops) - 1.0)


def _check_pp(model: UnevenModel, pp: int) -> None:
    if not 2 <= pp <= model.llm_layers:
        raise PartitionError(
            f"the FLOPs rule splits into 2 to {model.llm_layers} stages, one language layer each, {pp} were asked for: "
            "choose such a pp, or use split_stages"
        )
