"""The FLOPs rule for uneven pipeline stages, as a published notebook states it, and the optimum of its own model.

Pai-Megatron-Patch's "Uneven pp" notebook (searobbersduck/Pai-Megatron-Patch, examples/qwen2_vl) splits a Qwen2-VL by
arithmetic: the vision tower and the projector stand whole on the first stage, and language layers are counted so that
FLOPs come out even. It knows no recompute, no schedule, no time of head and embedding, and looks at memory afterwards.
Here to reproduce its figures beside better ones (`trimtab uneven`); plans do not use it.

N vision tokens, h width, f feed-forward width, s decoder tokens, b samples of a micro-batch, V vocabulary; every count
of FLOPs is forward + backward (x 3).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.errors import PartitionError
from trimtab.specs import LayerSpec, ModelSpec

STATE_BYTES = 16  # of a parameter: bf16 weight and gradient, fp32 weight and Adam's two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenModel:
    """What the rule looks at."""

    vision_tokens: int  # patches of a sample's images: ceil(W / p) x ceil(H / p) for one image
    patch_values: int  # c p^2, the numbers in a patch: channels x pixels (x frames)
    vision_layers: int
    vision_hidden: int
    vision_ffn: int
    llm_layers: int
    llm_hidden: int
    llm_ffn: int
    decoder_tokens: int
    vocab_size: int = 0

    @property
    def vision_flops(self) -> float:
        """3 (2 N h c p^2 + L layer)."""
        N, h = self.vision_tokens, self.vision_hidden
        return 3.0 * (2 * N * h * self.patch_values + self.vision_layers * _layer_flops(N, h, self.vision_ffn))

    @property
    def projector_flops(self) -> float:
        """3 x 2 N h_vision h_llm."""
        return 3.0 * 2 * self.vision_tokens * self.vision_hidden * self.llm_hidden

    @property
    def llm_layer_flops(self) -> float:
        return 3.0 * _layer_flops(self.decoder_tokens, self.llm_hidden, self.llm_ffn)

    def stage_flops(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Of each stage with so many language layers; vision tower and projector belong to stage 0."""
        first, *others = (count * self.llm_layer_flops for count in counts)
        return (self.vision_flops + self.projector_flops + first, *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenSplit:
    """Language layers of each stage; the vision tower and the projector belong to stage 0."""

    counts: tuple[int, ...]
    imbalance: float  # slowest / mean stage - 1, in the rule's own FLOPs


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The notebook's bytes of one stage: its M_first, M_other or M_last, by their parts."""

    vision_bytes: float = 0.0
    projector_bytes: float = 0.0  # M_projector of its text; its code, and so what it prints, leaves this out
    llm_bytes: float = 0.0
    head_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return self.vision_bytes + self.projector_bytes + self.llm_bytes + self.head_bytes


def uneven_model(model: ModelSpec, *, image: tuple[int, int], decoder_tokens: int) -> UnevenModel:
    """What the rule looks at of a described model, for samples of one image of (width, height) pixels.

    Patches are those of the model's own processor. Raises `PartitionError` for a model that the rule has no words for:
    without a vision tower, with layers of several widths, or with experts.
    """
    vision, language = (
        [layer for layer in model.layers if layer.tower == tower and layer.kind == "block"]
        for tower in ("vision", "language")
    )
    embedding = next((layer for layer in model.layers if layer.tower == "vision" and layer.kind != "block"), None)
    if not vision or embedding is None:
        raise PartitionError(f"the FLOPs rule counts a vision tower's blocks, and {model.name} has none: use plan")
    widths = (
        {(layer.hidden_size, _ffn(model, layer)) for layer in vision},
        {(layer.hidden_size, _ffn(model, layer)) for layer in language},
    )
    if any(len(found) > 1 for found in widths):
        raise PartitionError(
            f"the FLOPs rule knows one width for a tower's layers, and those of {model.name} differ: use plan, which "
            "counts every layer"
        )
    ((vision_hidden, vision_ffn),), ((llm_hidden, llm_ffn),) = widths
    return UnevenModel(
        vision_tokens=model.image_rule.count(*image).patches,
        patch_values=embedding.num_matmul_params // vision_hidden,
        vision_layers=len(vision),
        vision_hidden=vision_hidden,
        vision_ffn=vision_ffn,
        llm_layers=len(language),
        llm_hidden=llm_hidden,
        llm_ffn=llm_ffn,
        decoder_tokens=decoder_tokens,
        vocab_size=model.vocab_size,
    )


def flops_split(model: UnevenModel, *, pp: int) -> UnevenSplit:
    """The notebook's answer.

    A stage's share is total / pp. Middle and last stages get ceil(share / layer) layers, the first what is left. When
    vision tower and projector together reach the share, the first stage gets none, the middle ones
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
            f"the FLOPs rule cannot divide {L} language layers among {pp} stages: its rounding up leaves {min(counts)} "
            "for one of them: use the optimum, or fewer stages"
        )
    return priced_split(model, counts)


def best_split(model: UnevenModel, *, pp: int) -> UnevenSplit:
    """The counts of least maximum FLOPs in the rule's own model (exact; the first stage as full as that allows)."""
    splits = (split_with(model, first, pp=pp) for first in range(model.llm_layers, -1, -1))
    return min(splits, key=lambda split: split.imbalance)


def split_with(model: UnevenModel, first: int, *, pp: int) -> UnevenSplit:
    """`first` layers on the first stage, the others as even as whole layers go."""
    _check_pp(model, pp)
    if not 0 <= first <= model.llm_layers:
        raise PartitionError(
            f"the first stage cannot have {first} of {model.llm_layers} language layers: give 0 to {model.llm_layers}"
        )
    each, left = divmod(model.llm_layers - first, pp - 1)
    return priced_split(model, (first, *[each + (i < left) for i in range(pp - 1)]))


def priced_split(model: UnevenModel, counts: Sequence[int]) -> UnevenSplit:
    """A split by any counts."""
    flops = model.stage_flops(counts)
    return UnevenSplit(counts=tuple(counts), imbalance=max(flops) * len(flops) / sum(flops) - 1.0)


def stage_memory(
    model: UnevenModel,
    counts: Sequence[int],
    *,
    tp: int = 1,
    batch: int = 1,
    fp8: bool = False,
) -> tuple[StageMemory, ...]:
    """Bytes of every stage by the notebook's formulas (its GB are 10**9): M_first, M_other for each middle, M_last.

    A layer: 16 bytes for each of (4 h^2 + 2 h f)/tp + (3 h + f)/tp + 6 h parameters, and b s (18 h + 4 f)/tp of
    activations (b s (15 h + 3 f)/tp in FP8); with f = 4 h the 34 b s h / tp of its text. Patch embedding:
    16 c p^2 h + 2 b N c p^2. Projector: 16 h_vision h_llm + 2 b N h_vision. Last stage: 16 h V/tp + 8 b s h/tp.

    It counts one micro-batch, where 1F1B holds pp - stage of them before a stage's first backward.
    Not counted: the token embedding, attention scores, gated feed-forwards' third matrix, buffers.
    """

    def layers(num_layers: int, s: int, h: int, f: int) -> float:
        params = (4 * h * h + 2 * h * f) / tp + (3 * h + f) / tp + 6 * h
        activations = batch * s * ((15 * h + 3 * f) if fp8 else (18 * h + 4 * f)) / tp
        return num_layers * (STATE_BYTES * params + activations)

    N, c, h = model.vision_tokens, model.patch_values, model.vision_hidden
    embed = STATE_BYTES * c * h + 2 * batch * N * c
    projector = STATE_BYTES * h * model.llm_hidden + 2 * batch * N * h
    head = STATE_BYTES * model.llm_hidden * model.vocab_size
    head += 8 * batch * model.decoder_tokens * model.llm_hidden
    last = len(counts) - 1
    return tuple(
        StageMemory(
            vision_bytes=layers(model.vision_layers, N, h, model.vision_ffn) + embed if stage == 0 else 0.0,
            projector_bytes=projector if stage == 0 else 0.0,
            llm_bytes=layers(count, model.decoder_tokens, model.llm_hidden, model.llm_ffn),
            head_bytes=head / tp if stage == last else 0.0,
        )
        for stage, count in enumerate(counts)
    )


def _layer_flops(num_tokens: int, hidden: int, ffn: int) -> float:
    """8 N h^2 + 4 h N^2 + 4 N h f: projections, full attention, two-matrix feed-forward."""
    N, h, f = num_tokens, hidden, ffn
    return 8.0 * N * h * h + 4.0 * h * N * N + 4.0 * N * h * f


def _ffn(model: ModelSpec, layer: LayerSpec) -> int:
    if layer.mlp is None or layer.mlp.num_experts:
        raise PartitionError(
            f"the FLOPs rule counts one feed-forward a layer, and {layer.name} of {model.name} has experts or none: "
            "use plan, which counts them"
        )
    return layer.mlp.intermediate_size


def _check_pp(model: UnevenModel, pp: int) -> None:
    if not 2 <= pp <= model.llm_layers:
        raise PartitionError(
            f"the FLOPs rule splits into 2 to {model.llm_layers} stages, one language layer each, {pp} were asked for: "
            "choose such a pp, or use split_stages"
        )
