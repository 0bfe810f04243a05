"""What a model is to serve: the batch that must fit, its numbers, and how quantised formats store weights."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from trimtab.errors import ImageError, PartitionError, join_problems
from trimtab.lora import NF4_BYTES
from trimtab.options import ITEM_BYTES, Attention, DType, Option, Tower, option_problems

if TYPE_CHECKING:
    from trimtab.specs import ImageCounts, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True)
class Quant:
    """How a format stores the matrices it covers; everything else keeps the dtype."""

    weight_bytes: float  # per weight, scales included
    towers: tuple[Tower, ...]  # whose linear layers it covers; embeddings, norms and the head it never does
    experts: bool  # whether routed experts too: Transformers 5 keeps them as one 3-d tensor, no linear layer


_MAX_IMAGES = 10_000
_ALL: tuple[Tower, ...] = ("vision", "projector", "language")

QUANTS = MappingProxyType(
    {
        # LLM.int8(): 1 byte; one fp32 scale an output row is not counted (< 0.2 %)
        "bnb-int8": Quant(weight_bytes=1.0, towers=_ALL, experts=False),
        # bitsandbytes 4 bit: an fp32 maximum for each 64 weights
        "bnb-nf4": Quant(weight_bytes=0.5 + 4 / 64, towers=_ALL, experts=False),
        # double quantisation: the maxima in 8 bit, an fp32 scale for 256 of them
        "bnb-nf4-double": Quant(weight_bytes=NF4_BYTES, towers=_ALL, experts=False),
        # AWQ and GPTQ checkpoints: fp16 scale and 4-bit zero for each 128; ViT left as it is
        "awq": Quant(weight_bytes=0.5 + (2 + 0.5) / 128, towers=("language",), experts=True),
        # block-wise checkpoints: an fp32 scale for each 128 x 128 weights; ViT left as it is
        "fp8": Quant(weight_bytes=1.0 + 4 / 128**2, towers=("language",), experts=True),
    }
)
"""Quantised formats by name. A new one is an entry here."""


def parse_images(texts: Sequence[str]) -> tuple[tuple[int, int], ...]:
    """Sizes of one prompt's images from "1024x768" or, several times the same, "1024x768,4"."""
    sizes: list[tuple[int, int]] = []
    for text in texts:
        match = re.fullmatch(r"\s*([0-9]{1,7})[xX]([0-9]{1,7})(?:,([0-9]{1,5}))?\s*", text)
        count = int(match[3] or 1) if match else 0
        if match is None or not 1 <= count <= _MAX_IMAGES:
            raise ImageError(
                f"{text!r} names no images: write width x height in pixels and how many, as in 1024x768,4 "
                f"(at most {_MAX_IMAGES})"
            )
        sizes += [(int(match[1]), int(match[2]))] * count
    return tuple(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The largest batch that is to fit: sequences that run together, all alike.

    Use it to say to `place` what must fit beside the weights. Lengths are in tokens, images in pixels.

    >>> Workload(batch=4, seq_len=8192).seq_len
    8192
    """

    batch: Annotated[int, Option("Sequences that run together.", least=1, common=True)] = 1
    seq_len: Annotated[int, Option("Tokens of text in a prompt; image tokens come on top.", least=1, common=True)] = (
        1024
    )
    max_new_tokens: Annotated[int, Option("Tokens generated for each sequence.", least=1)] = 256
    images: Annotated[
        tuple[tuple[int, int], ...],
        Option(
            "Images of one prompt: 1024x768, or 1024x768,4 for four of them.",
            read=parse_images,
            typed=list[str],
            common=True,
        ),
    ] = ()  # (width, height) in pixels of each image of one prompt
    dtype: Annotated[DType, Option("Of weights and activations.", common=True)] = "bf16"
    quant: Annotated[
        str | None, Option("Quantised weights: bnb-int8, bnb-nf4, bnb-nf4-double, awq, fp8.", common=True)
    ] = None
    attention: Annotated[Attention, Option("Attention as it will run.")] = "sdpa"
    padded: bool | None = None  # prompts of a batch differ in length, so a mask goes with them; None: if batch > 1

    def __post_init__(self) -> None:
        problems = option_problems(self)
        if self.quant not in (None, *QUANTS):
            problems.append(f"quant {self.quant!r} has no formula: choose one of {', '.join(QUANTS)}")
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
    patches_sq: int  # of all images
    largest_patches_sq: int  # of the image with the longest attention

    @property
    def tokens(self) -> int:
        return self.sequences * self.prompt_tokens

    @property
    def context(self) -> int:
        """Tokens of one sequence at the end; the last new token is never fed back."""
        return self.prompt_tokens + self.new_tokens - 1


def count_batch(model: "ModelSpec", workload: Workload) -> Batch:
    """The workload's images counted by the model's own rule."""
    return batch_of(workload, [model.image_rule.count(width, height) for width, height in workload.images])


def batch_of(workload: Workload, images: "list[ImageCounts]") -> Batch:
    """The rows of a workload whose prompts hold `images` each."""
    B = workload.batch
    tokens = sum(x.tokens for x in images)
    return Batch(
        sequences=B,
        prompt_tokens=workload.seq_len + tokens,
        new_tokens=workload.max_new_tokens,
        patches=B * sum(x.patches for x in images),
        patches_sq=B * sum(x.patches_sq for x in images),
        largest_patches_sq=max((x.patches_sq for x in images), default=0),
    )
