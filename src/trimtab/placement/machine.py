"""The machine that serves a model (GPUs of any sizes, host memory, a disk), and the batch that must fit on it."""

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated

from trimtab.errors import ImageError, PartitionError, TrimtabError, join_problems, quote, refuse_type
from trimtab.lora import NF4_BYTES
from trimtab.options import ITEM_BYTES, Attention, DType, Option, Tower, option_problems
from trimtab.units import MIB, parse_bytes

if TYPE_CHECKING:
    from trimtab.specs import ImageCounts, ModelSpec


MAX_GPUS = 64
CONTEXT_BYTES = 512 * MIB  # what a CUDA process takes before its first tensor: 0.3-0.6 GiB, by GPU and libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as a device map names it."""

    index: int
    free_bytes: int  # what a process may take of it, its own context included
    name: str | None = None  # a row of `costs.devices.DEVICES`
    memory_bytes_per_s: float | None = None  # None: unknown, and then as fast as any other unknown one

    def __post_init__(self) -> None:
        assert self.index >= 0
        if self.free_bytes < 0:
            raise PartitionError(f"GPU {self.index} cannot have {self.free_bytes} bytes free: give 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a model may be spread over."""

    gpus: tuple[Gpu, ...]
    cpu_bytes: int = 0  # host memory for weights that no GPU holds; 0: none may lie there
    disk: bool = False  # whether weights may stay on disk
    context_bytes: int = CONTEXT_BYTES  # of each GPU in use
    kept_share: float = 0.0  # of what is free on each GPU: no map fills it

    def __post_init__(self) -> None:
        indices = [gpu.index for gpu in self.gpus]
        assert len(set(indices)) == len(indices), "two GPUs have one index"
        if not self.gpus:
            raise PartitionError("a machine without a GPU has nothing to balance: give at least one, as in 1x24GiB")
        if not 0 <= self.kept_share < 1:
            raise PartitionError(f"a reserve of {100 * self.kept_share:g} % leaves nothing: give 0 up to but not 100")
        if len(self.gpus) > MAX_GPUS:
            raise PartitionError(f"{len(self.gpus)} GPUs are more than one process drives: give at most {MAX_GPUS}")


_GROUP = re.compile(r"^\s*(?:(?P<count>[0-9]{1,4})\s*[xX*]\s*)?(?P<kind>[^:]+?)\s*(?::\s*(?P<free>[^:]+?)\s*)?$")


def parse_machine(text: str, *, cpu: str | None = None, disk: bool = False, kept_share: float = 0.0) -> Machine:
    """Read GPUs from "4x24GiB", "40GiB,80GiB", "2xA100-80GB,H200" or with less free: "A100-80GB:31GiB,3xA100-80GB".

    Use it for the GPUs that `place` takes.

    A size is what is free on the GPU; a name is a row of the device table, all of its memory free unless a size
    follows after a colon. GPUs are numbered in the order given.

    >>> [gpu.free_bytes >> 30 for gpu in parse_machine("2x24GiB,80GiB").gpus]
    [24, 24, 80]
    """
    refuse_type("machine", text, str, 'one as in "4x24GiB"')
    gpus: list[Gpu] = []
    problems: list[str] = []
    for group in text.split(","):
        match = _GROUP.match(group)
        if match is None or not match["kind"]:
            problems.append(f"{group!r} names no GPU: write 4x24GiB, 80GiB, A100-80GB or A100-80GB:31GiB")
            continue
        try:
            gpu = _parse_gpu(match["kind"], match["free"])
        except TrimtabError as error:
            problems.append(str(error))
            continue
        count = int(match["count"] or 1)
        if not 1 <= count <= MAX_GPUS:
            problems.append(f"{group.strip()!r} asks for {count} GPUs: give 1 to {MAX_GPUS}")
            continue
        gpus += [replace(gpu, index=len(gpus) + i) for i in range(count)]
    if problems:
        raise PartitionError(join_problems(problems))
    host = 0 if cpu is None else _parse_size(cpu)
    return Machine(gpus=tuple(gpus), cpu_bytes=host, disk=disk, kept_share=kept_share)


def _parse_size(text: str) -> int:
    size = parse_bytes(text)
    if (number := text.strip()).isdecimal() and 0 < size < MIB:
        raise PartitionError(f"{text!r} names no unit, and so few bytes hold nothing: write {number}GiB")
    return size


def _parse_gpu(kind: str, free: str | None) -> Gpu:
    if kind[0].isdigit():
        size = _parse_size(kind)
        if free is not None and _parse_size(free) > size:
            raise PartitionError(f"{kind}:{free} has more free than it holds: give at most {kind} after the colon")
        return Gpu(index=0, free_bytes=size if free is None else _parse_size(free))
    from trimtab.costs.devices import find_device  # NumPy, which the help of the options does without

    device = find_device(kind)
    free_bytes = device.memory_bytes if free is None else _parse_size(free)
    if free_bytes > device.memory_bytes:
        raise PartitionError(f"{kind}:{free} has more free than a {device.name} holds: give less after the colon")
    return Gpu(index=0, free_bytes=free_bytes, name=device.name, memory_bytes_per_s=device.memory_bytes_per_s)


def machine_of(free_bytes: Sequence[int], *, cpu_bytes: int = 0, disk: bool = False) -> Machine:
    """Return the GPUs of the given free memories, numbered in order."""

    gpus = tuple(Gpu(index=i, free_bytes=free) for i, free in enumerate(free_bytes))
    return Machine(gpus=gpus, cpu_bytes=cpu_bytes, disk=disk)


# -- the batch ----------------------------------------------------------------------------------------------------
# Its numbers, and how quantised formats store weights.


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
    """Return the sizes of one prompt's images from "1024x768" or, several times the same, "1024x768,4"."""
    sizes: list[tuple[int, int]] = []
    for text in texts:
        match = re.fullmatch(r"\s*([0-9]{1,7})[xX]([0-9]{1,7})(?:,([0-9]{1,5}))?\s*", text)
        count = int(match[3] or 1) if match else 0
        if match is None or not 1 <= count <= _MAX_IMAGES:
            raise ImageError(f"{text!r} names no images: write pixels and number, as 1024x768,4 (up to {_MAX_IMAGES})")
        sizes += [(int(match[1]), int(match[2]))] * count
    return tuple(sizes)


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """The largest batch that is to fit: sequences that run together, all alike.

    Use it to say to `place` what must fit next to the weights. Lengths are in tokens, images in pixels.

    >>> Workload(batch=4, seq_len=8192).seq_len
    8192
    """

    batch: Annotated[int, Option("Sequences that run together.", least=1, common=True)] = 1
    seq_len: Annotated[int, Option("Tokens of text in a prompt; images come on top.", least=1, common=True)] = 1024
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


def stored_workload(model: "ModelSpec", workload: Workload) -> Workload:
    """Return `workload` in the format that the model's weights lie in, unless it names one itself."""
    if model.stored_as is None or workload.quant is not None:
        return workload
    if model.stored_as not in QUANTS:
        raise PartitionError(f"{model.name} is stored as {quote(model.stored_as)}: give --quant {', '.join(QUANTS)}")
    return replace(workload, quant=model.stored_as)


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestBatch:
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
        """Count the tokens of one sequence at the end; the last new token is never fed back."""
        return self.prompt_tokens + self.new_tokens - 1


def count_batch(model: "ModelSpec", workload: Workload) -> RequestBatch:
    """The workload's images counted by the model's own rule."""
    return batch_of(workload, [model.image_rule.count(width, height) for width, height in workload.images])


def batch_of(workload: Workload, images: "list[ImageCounts]") -> RequestBatch:
    """The rows of a workload whose prompts hold `images` each."""
    B = workload.batch
    tokens = sum(x.tokens for x in images)
    return RequestBatch(
        sequences=B,
        prompt_tokens=workload.seq_len + tokens,
        new_tokens=workload.max_new_tokens,
        patches=B * sum(x.patches for x in images),
        patches_sq=B * sum(x.patches_sq for x in images),
        largest_patches_sq=max((x.patches_sq for x in images), default=0),
    )
