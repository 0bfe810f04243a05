"""What a model is to serve: the batch that must fit, its numbers, and how quantised formats store weights."""

from __future__ import annotations

from dataclasses import dataclass
from types import MappingProxyType
from typing import get_args

from trimtab.costs.settings import ITEM_BYTES, Attention
from trimtab.errors import PartitionError, join_problems
from trimtab.specs import ImageCounts, ModelSpec, Tower


@dataclass(frozen=True, slots=True, kw_only=True)
class Quant:
    """How a format stores the matrices it covers; everything else keeps the dtype."""

    weight_bytes: float  # per weight, scales included
    towers: tuple[Tower, ...]  # whose linear layers it covers; embeddings, norms and the head it never does
    experts: bool  # whether routed experts too: Transformers 5 keeps them as one 3-d tensor, no linear layer
    source: str


_ALL: tuple[Tower, ...] = ("vision", "projector", "language")

QUANTS = MappingProxyType(
    {
        "bnb-int8": Quant(
            weight_bytes=1.0,
            towers=_ALL,
            experts=False,
            source="bitsandbytes LLM.int8(): 1 byte; one fp32 scale an output row is not counted (< 0.2 %)",
        ),
        "bnb-nf4": Quant(
            weight_bytes=0.5 + 4 / 64,
            towers=_ALL,
            experts=False,
            source="bitsandbytes 4 bit: an fp32 maximum for each 64 weights",
        ),
        "bnb-nf4-double": Quant(
            weight_bytes=0.5 + 1 / 64 + 4 / (64 * 256),
            towers=_ALL,
            experts=False,
            source="bitsandbytes 4 bit, double quantisation: the maxima in 8 bit, an fp32 scale for 256 of them",
        ),
        "awq": Quant(
            weight_bytes=0.5 + (2 + 0.5) / 128,
            towers=("language",),
            experts=True,
            source="AWQ and GPTQ checkpoints, 4 bit, fp16 scale and 4-bit zero for each 128; ViT left alone",
        ),
        "fp8": Quant(
            weight_bytes=1.0 + 4 / 128**2,
            towers=("language",),
            experts=True,
            source="block-wise fp8 checkpoints: an fp32 scale for each 128 x 128 weights; ViT left alone",
        ),
    }
)
"""Quantised formats by name. A new one is an entry here."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The largest batch that is to fit: sequences that run together, all alike."""

    batch: int = 1
    seq_len: int = 1024  # tokens of text in a prompt; image tokens come on top
    max_new_tokens: int = 256
    images: tuple[tuple[int, int], ...] = ()  # (width, height) in pixels of each image of one prompt
    dtype: str = "bf16"
    quant: str | None = None
    attention: Attention = "sdpa"
    padded: bool | None = None  # prompts of a batch differ in length, so a mask goes with them; None: if batch > 1

    def __post_init__(self) -> None:
        problems = [
            f"{name} {value} cannot be served: give {least} or more"
            for name, value, least in (
                ("batch", self.batch, 1),
                ("seq_len", self.seq_len, 1),
                ("max_new_tokens", self.max_new_tokens, 1),
            )
            if value < least
        ]
        for what, value, known in (
            ("dtype", self.dtype, tuple(ITEM_BYTES)),
            ("attention", self.attention, get_args(Attention)),
            ("quant", self.quant, (None, *QUANTS)),
        ):
            if value not in known:
                names = ", ".join(str(x) for x in known if x is not None)
                problems.append(f"{what} {value!r} has no formula: choose one of {names}")
        if problems:
            raise PartitionError(join_problems(problems))

    @property
    def item_bytes(self) -> int:
        return ITEM_BYTES[self.dtype]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A workload's rows in the two towers."""

    sequences: int
    prompt_tokens: int  # of one sequence, image tokens included
    new_tokens: int
    patches: int  # ViT rows of all sequences: they run as one batch
    image_tokens: int  # of all sequences
    patches_sq: int  # of all images
    largest_patches_sq: int  # of the image with the longest attention

    @property
    def tokens(self) -> int:
        return self.sequences * self.prompt_tokens

    @property
    def context(self) -> int:
        """Tokens of one sequence at the end; the last new token is never fed back."""
        return self.prompt_tokens + self.new_tokens - 1


def count_batch(model: ModelSpec, workload: Workload) -> Batch:
    """The workload's images counted by the model's own rule."""
    return batch_of(workload, [model.image_rule.count(width, height) for width, height in workload.images])


def batch_of(workload: Workload, images: list[ImageCounts]) -> Batch:
    """The rows of a workload whose prompts hold `images` each."""
    B = workload.batch
    tokens = sum(x.tokens for x in images)
    return Batch(
        sequences=B,
        prompt_tokens=workload.seq_len + tokens,
        new_tokens=workload.max_new_tokens,
        patches=B * sum(x.patches for x in images),
        image_tokens=B * tokens,
        patches_sq=B * sum(x.patches_sq for x in images),
        largest_patches_sq=max((x.patches_sq for x in images), default=0),
    )
