"""Options as fields: type, default, help and range of a field make the command line and the checks.

A new option is one field of a dataclass such as `PlanOptions`: `trimtab.cli.settings.verb` makes the command line of
it, `option_problems` checks it. No NumPy here: `--help` reads these.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from numbers import Integral, Real
from pathlib import Path
from types import MappingProxyType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from trimtab.address import Allowed, place_of
from trimtab.errors import TrimtabError

Tower = Literal["vision", "projector", "language", "audio"]
RecomputedTier = Literal["selective", "full"]
"""What a layer holds next to its input: results of matrix products and of attention, or nothing."""
DType = Literal["bf16", "fp16", "fp32"]
Precision = Literal["bf16", "fp16", "fp32", "fp8", "mxfp8"]
"""Of a training run. fp8, mxfp8: blocks multiply 8-bit copies; weights and what is kept stay bf16."""
MapRule = Literal["auto", "balanced", "balanced_low_0", "sequential"]  # by which Accelerate makes a device map
Optimizer = Literal["adamw", "adamw_8bit", "sgd_momentum", "sgd"]
Attention = Literal["flash", "sdpa", "eager"]
AttentionImplementation = Literal["sdpa", "eager", "flash_attention_2"]  # as Transformers spells them
ScheduleName = Literal["1F1B", "GPipe", "Interleaved1F1B", "ZBH1", "ZBVZeroBubble"]
RecomputeMode = Literal["auto", "none", "full"]
Order = Literal["random", "sorted"]
Oversize = Literal["error", "alone", "skip"]
PackMethod = Literal["balanced", "isf", "greedy", "random", "length_group", "device_group"]
PlanMethod = Literal["balanced", "isf"]
VisionGroup = Literal["tp", "cp", "tp_cp", "dp", "replica", "own"]
"""Ranks that share images. tp_cp: the tp x cp ranks that hold the same pack; replica: those of the whole pipeline,
before it runs; own: devices that hold the tower alone. Only ranks of dp hold other images."""
VisionExchange = Literal["gather", "dispatch", "send"]
VisionObjective = Literal["time", "memory"]
VisionReduction = Literal["mean"]
Rule = Literal["balanced", "contiguous"]  # any image to any rank, or runs of images in order
LossWeighting = Literal["token", "sample"]
Exif = Literal["ignore", "apply"]
SpecialTokens = Literal["template", "processor"]
TorchDevice = Literal["cpu", "cuda"]

ITEM_BYTES = MappingProxyType({"bf16": 2, "fp16": 2, "fp32": 4, "fp8": 2, "mxfp8": 2})

_MOST = 2**40  # keeps products of counts inside 64 bits

Dispatcher = Literal["alltoall", "deepep"]  # a row goes to every expert, or once to a device with several
AttentionKernel = Literal["fa2", "cudnn"]  # of attention="flash": FlashAttention-2, or cuDNN's and FlashAttention-3
ExpertProducts = Literal["grouped", "loop", "fused"]
"""Kernels of an expert one after the other; a Python loop over experts; all experts' MLP in kernels that nobody counts
rows for (Transformer Engine's grouped MLP in MXFP8, in a graph of the whole step)."""
HostName = Literal["none", "common", "eager", "deepspeed", "megatron", "recipe", "nanotron"]
"""What launches the kernels, see costs/formula/host.py; none: nothing but the kernels themselves counts."""
AdapterWeights = Literal["same", "fp32", "fp32_products"]
"""Of LoRA: the model's own format; fp32, multiplied in the model's format under autocast; fp32, multiplied in fp32."""

EXPERT_IMBALANCE = 1.1
"""Assumed: rows of the busiest device of an expert-parallel group, over the mean.

Auxiliary losses leave single experts 0.5 to 0.6 above the mean in a batch (arXiv 2408.15664, table 2: MaxVio of 64
experts, about 2.4 standard deviations); devices with 8 experts each, of 8 devices: 1.4 / 2.4 / sqrt(8) of that.
Benchmarks that force balanced routing are priced with 1.
"""


@dataclass(frozen=True, slots=True)
class Option:
    """What a field's `Annotated` says next to its type: how the command line shows it, and which values it takes."""

    text: str  # the line of `--help`
    flag: str | None = None  # None: the field's name; what is true by default is switched off by its flag
    least: int | float | None = None
    most: int | float | None = None
    read: Callable[[Any], object] | None = None  # what is typed -> the field's value, where they differ
    typed: Any = str  # type of what is typed, for `read`
    shown: object = None  # the default as it would be typed, for `read`
    argument: bool = False  # by its place instead of by a flag
    common: bool = False  # a flag of its own; the others are given by `--set NAME=VALUE`

    def named(self, field: str) -> str:
        """The field as a message names it, with its flag where that has another name."""
        if self.flag in (None, "--" + field.replace("_", "-")):
            return field
        return f"{field} ({self.flag})" if self.common else f"{field} (--set {self.flag[2:].replace('-', '_')})"


PLAN = Option("plan.yaml, or the folder that `trimtab plan` wrote.", argument=True)
TIMEOUT = Option(
    "Seconds that ranks wait for one another; who is waited for is said after ten.",
    flag="--timeout",
    least=1,
    most=7 * 24 * 3600,
)


def option_fields(kind: type) -> Iterator[tuple[str, Any, Option | None]]:
    """Name, type and `Option` of every field of a dataclass; None: no option, or a dataclass of options itself.

    The dataclass's file must not import `annotations` from `__future__`: a quoted type is not read.
    """
    for own in fields(kind):
        assert not str(own.type).startswith("Annotated"), f"{kind} is quoted"
        if get_origin(own.type) is Annotated:
            hint, option = get_args(own.type)
            yield own.name, hint, option
        else:
            yield own.name, own.type, None


def option_problems(options: Any) -> list[str]:
    """Return the values that their options do not take, a sentence each; None is always taken."""
    problems = []
    for name, hint, option in option_fields(type(options)):
        value = getattr(options, name)
        if is_dataclass(hint):
            problems += option_problems(value)
        if option is None or value is None:
            continue
        known, least, most = literals_of(hint), option.least, option.most
        named = option.named(name)
        number = _number_type(hint)
        if number is not None and (isinstance(value, bool) or not isinstance(value, number)):
            whole = "whole " if number is Integral else ""
            problems.append(f"{named} must be a {whole}number, not {value!r} ({type(value).__name__})")
            continue
        if known and value not in known:
            problems.append(f"{named} must be one of {', '.join(known)}, not {value!r}")
        elif least is not None and not value >= least:  # nan too
            problems.append(f"{named} must be at least {least}, not {value!r}")
        elif most is not None and not value <= most:
            problems.append(f"{named} must be at most {most}, not {value!r}")
        elif least is not None and isinstance(value, int) and value > _MOST:
            problems.append(f"{named} must be at most {_MOST}, not {value!r}")
    return problems


def _number_type(hint: Any) -> type | None:
    """Return what a field of a number takes, NumPy's too; None for another field."""
    for number, kind in ((int, Integral), (float, Real)):
        if hint in (number, number | None):
            return kind
    return None


def literals_of(hint: Any) -> tuple[str, ...]:
    """The words of `Literal[...]`, or of `Literal[...] | None`; none for another type."""
    if get_origin(hint) is Literal:
        return get_args(hint)
    parts = get_args(hint) if get_origin(hint) in (Union, UnionType) else ()
    return next((found for part in parts if (found := literals_of(part))), ())


def same_fields(source: Any, kind: type) -> dict[str, Any]:
    """The values of `source` that a `kind` has a field for: what one record hands on to the next, under one name."""
    return {field.name: getattr(source, field.name) for field in fields(kind) if hasattr(source, field.name)}


@dataclass(frozen=True, slots=True, kw_only=True)
class VideoOptions:
    """How frames of a video are sampled and cut, where the files of the processor do not say it as wanted.

    Use it with `clip_rule_of`, as examples/video_samples.py does. The first three are the processor's own settings, by
    its own names; its limits of pixels it keeps in `size`.
    """

    fps: Annotated[float | None, Option("Frames taken of each second of a video.", least=0.001)] = None
    num_frames: Annotated[int | None, Option("Frames taken of a video, evenly spread.", least=1)] = None
    max_frames: Annotated[int | None, Option("The most frames taken of a video.", least=1)] = None
    video_min_pixels: Annotated[
        int | None, Option("The least pixels of a video, as its processor counts them (shortest_edge).", least=1)
    ] = None
    video_max_pixels: Annotated[
        int | None, Option("The most pixels of a video, as its processor counts them (longest_edge).", least=1)
    ] = None

    def shown(self) -> str:
        """Return what was asked for: "fps 1.0, max_frames 16"; nothing where the processor's own files decide."""
        return ", ".join(
            f"{name} {value}" for name, value in same_fields(self, VideoOptions).items() if value is not None
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadingOptions:
    """How the data set is read: the same when it is sized and when a plan runs, or counts differ.

    Use the same options for `size_samples` and `open_conversations`.

    >>> ReadingOptions(exif="apply").exif
    'apply'
    """

    tokenizer: Annotated[
        Path | None,
        Option("tokenizer.json or folder; default: model's.", common=True),
    ] = None  # in a run: without it the model's folder
    chat_template: Annotated[Path | None, Option("Chat template, where it does not lie next to the tokenizer.")] = None
    special_tokens: Annotated[
        SpecialTokens,
        Option("Special tokens: as the chat template writes them, or as the model's processor adds them."),
    ] = "template"
    media_root: Annotated[Path | str | None, Option("Folder of image paths.", read=place_of, common=True)] = None
    columns: Annotated[str | None, Option("Fields, as in question=query,answer=label.", common=True)] = None
    allow_outside: Annotated[bool, Option("Read files outside of named folders.", common=True)] = False
    allow_remote: Annotated[bool, Option("Open addresses that files name.", common=True)] = False
    exif: Annotated[Exif, Option("Turn images as their EXIF flag says; most trainers ignore it.")] = "ignore"
    video: VideoOptions = field(default_factory=VideoOptions)

    @property
    def allowed(self) -> Allowed:
        """Return what files from outside may name."""
        return Allowed(outside=self.allow_outside, remote=self.allow_remote)


# -- degrees of parallelism -------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDims:
    """How the devices are divided: data, pipeline, tensor and context parallel degrees, and those of experts.

    Use it where a function asks for `dims`. dp x pp x tp x cp is the number of devices. Experts divide the dp x cp x tp
    devices of a pipeline stage once more, among ep x etp of them; the others hold copies, as Megatron-Core's parallel
    folding has it. Neighbours are first those of tp (of etp for experts), then cp (ep), then dp.

    >>> ParallelDims(dp=4, pp=8)
    ParallelDims(dp=4, pp=8, tp=1, cp=1, ep=1, etp=None)
    >>> dims = ParallelDims(dp=4, tp=2, ep=4, etp=1)
    >>> dims.replicas, dims.expert_replicas
    (4, 2)
    """

    dp: int = 1
    pp: int = 1
    tp: int = 1
    cp: int = 1  # devices that share the tokens of a pack
    ep: int = 1  # devices that share the experts of a layer
    etp: int | None = None  # devices that share one expert; None: as many as tp

    def __post_init__(self) -> None:
        for axis in ("dp", "pp", "tp", "cp", "ep", "etp"):
            degree = getattr(self, axis)
            if degree is not None and degree < 1:
                raise TrimtabError(f"{axis} {degree} is not a degree of parallelism: give 1 or more")
        ranks = self.dp * self.cp * self.tp
        if ranks % (self.ep * self.expert_tp):
            raise TrimtabError(f"ep {self.ep} x etp {self.expert_tp} does not divide dp x cp x tp = {ranks}")

    @property
    def expert_tp(self) -> int:
        return self.tp if self.etp is None else self.etp

    @property
    def is_folded(self) -> bool:
        """Return whether experts are divided otherwise than the dense layers."""
        return self.ep > 1 or self.expert_tp != self.tp

    @property
    def replicas(self) -> int:
        """Count the devices that hold the same dense weights, and share their gradients and optimizer state."""
        return self.dp * self.cp

    @property
    def expert_replicas(self) -> int:
        """The same of experts' weights."""
        return self.dp * self.cp * self.tp // (self.ep * self.expert_tp)
