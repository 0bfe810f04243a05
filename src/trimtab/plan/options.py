"""What a user may choose of a plan; None leaves the choice to the planner.

One field is one option: `trimtab plan` shows it, `PlanOptions` checks it (see `trimtab.options`).
"""

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Literal, cast, get_args

from trimtab.costs.formula.host import HOSTS
from trimtab.errors import PlanError, join_problems
from trimtab.lora import Lora, parse_lora
from trimtab.options import (
    Attention,
    AttentionKernel,
    Dispatcher,
    DType,
    ExpertProducts,
    HostName,
    Optimizer,
    Option,
    Order,
    Oversize,
    PackMethod,
    ParallelDims,
    PlanMethod,
    Precision,
    RecomputeMode,
    Rule,
    ScheduleName,
    Tower,
    VisionObjective,
    option_problems,
    same_fields,
)
from trimtab.units import parse_bytes

if TYPE_CHECKING:
    from trimtab.plan.plan import DataFile
    from trimtab.specs import Profile


# A run to compare a plan with, in a few words: how batches, stages and recompute come about without it.


METHODS = {name.replace("_", "-"): name for name in get_args(PackMethod)}
PADDED = ("random", "length_group", "device_group")
STAGES = ("equal-layers", "balanced-stages")
RECOMPUTE: dict[str, RecomputeMode] = {"full-recompute": "full", "no-recompute": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What `--baseline random,batch=4,padded,equal-layers,full-recompute` says; each word has a default."""

    method: PackMethod = "random"
    batch: float | None = None  # samples; None: of the padded methods the size that is fastest and fits
    padded: bool | None = None  # None: as the method is
    stages: str = "equal-layers"
    recompute: RecomputeMode = "auto"  # auto: none if that fits, else full
    unknown: tuple[str, ...] = field(default=(), repr=False)  # words that mean nothing

    @property
    def is_padded(self) -> bool:
        """Return whether its batches know no limits and are padded to their longest sample."""
        return self.method in PADDED

    def problems(self, text: str) -> list[str]:
        """Return a sentence for each thing in `text`, which it was read from, that cannot be."""
        found = []
        if self.unknown:
            words = ", ".join([*METHODS, "batch=N", "padded", "packed", *STAGES, *RECOMPUTE])
            found.append(f"baseline {text!r}: {', '.join(map(repr, self.unknown))} is none of {words}")
        if self.batch is not None and self.batch < 1:
            found.append(f"baseline {text!r}: batch must be at least 1")
        if self.batch is not None and not self.is_padded:
            found.append(f"baseline {text!r}: {self.method} packs up to the plan's limits, leave batch= out")
        if self.padded is not None and self.padded != self.is_padded:
            found.append(
                f"baseline {text!r}: {self.method} {'pads' if self.is_padded else 'packs'}, leave one word out"
            )
        return found


def parse_baseline(text: str) -> Baseline:
    """Read words in any order, joined by commas; `Baseline.problems` says what is wrong with them.

    >>> parse_baseline("random,batch=4,padded,full-recompute")
    Baseline(method='random', batch=4.0, padded=True, stages='equal-layers', recompute='full')
    """
    said: dict[str, object] = {}
    unknown = []
    for word in (word.strip() for word in text.split(",")):
        batch = re.fullmatch(r"batch=([0-9]+(?:[.][0-9]+)?)", word)
        if word in METHODS:
            said["method"] = METHODS[word]
        elif word in STAGES:
            said["stages"] = word
        elif word in RECOMPUTE:
            said["recompute"] = RECOMPUTE[word]
        elif word in ("padded", "packed"):
            said["padded"] = word == "padded"
        elif batch is not None:
            said["batch"] = float(batch[1])
        else:
            unknown.append(word)
    return Baseline(**said, unknown=tuple(unknown))  # type: ignore[arg-type]


# What a user may ask of vision data parallel.


GroupChoice = Literal["one-grid", "auto", "shared", "replica", "own", "tp", "cp", "tp_cp", "dp"]


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionChoice:
    """Vision data parallel as asked for; None leaves a choice to the planner.

    Use it as `PlanOptions(vision=...)`, to let ranks share the images of a micro-batch.

    >>> VisionChoice(group="auto").rule
    'balanced'
    """

    group: Annotated[
        GroupChoice,
        Option(
            "The grid of vision towers: the decoder's, images shared among ranks of it (shared: the best of tp, cp, "
            "tp_cp, dp), every device of a replica, devices of its own, or auto: what gains 2 %, which is the default "
            "with --for trimtab.",
            flag="--towers",
        ),
    ] = "one-grid"
    pooling: Annotated[
        int | None,
        Option(
            "Micro-batches whose images are encoded in one call; default: chosen.", flag="--vision-pooling", least=1
        ),
    ] = None  # None: those of the shortest epoch that fit the memory
    devices: Annotated[
        int | None, Option("Devices of the tower's own; default: all others.", flag="--tower-devices", least=1)
    ] = None
    rule: Annotated[Rule, Option("Any image to any rank, or runs of images in order.", flag="--vision-rule")] = (
        "balanced"
    )
    objective: Annotated[
        VisionObjective, Option("What the shares of images are balanced by.", flag="--vision-objective")
    ] = "time"

    def problems(self) -> Iterator[str]:
        """Yield what no plan could follow of values that options take, a sentence each."""
        if self.group == "one-grid" and self != VisionChoice():
            yield "vision_rule, vision_pooling, vision_objective and tower_devices need a group: give --set towers=auto"


ScheduleChoice = Literal["1F1B", "GPipe", "Interleaved1F1B", "ZBH1", "ZBVZeroBubble", "auto"]
Weights = Sequence[tuple[str, float]]  # source name, weight
Preference = Literal["simplest", "fastest"]


def parse_share(text: str) -> float:
    """Read "6%" or "0.06" as 0.06."""
    try:
        return float(text.rstrip("% ")) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        raise PlanError(f"{text!r} is not a share: write it as 6% or 0.06") from None


def parse_towers(names: Sequence[str]) -> tuple[Tower, ...]:
    """Return towers, from names that stand alone or are joined by commas; `PlanOptions` says which there are."""
    return tuple(cast(Tower, name) for given in names for name in given.split(","))


def parse_weights(given: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Return names and numbers of `web=1,docs=2.5`; who uses them says which names and numbers there may be."""
    weights, problems = [], []
    for word in (word for text in given for word in text.split(",")):
        name, mark, number = word.rpartition("=")
        try:
            weights.append((name.strip(), float(number)))
        except ValueError:
            mark = ""
        if not mark or not name.strip():
            problems.append(f"{word!r} is no weight: write NAME=NUMBER, as in web=0.5,docs=2")
    if problems:
        raise PlanError(join_problems(problems))
    return tuple(weights)


# what `trimtab pack` takes too
ORDER = Option("How packs are grouped into steps; random keeps the shuffle.")
OVERSIZE = Option("What to do with a sample that exceeds a limit by itself.")
NUM_DRAWN = Option("Samples of an epoch with --set weights; default: as many as there are.", least=1)
WEIGHTS = Option(
    "Share of each source in an epoch, as in web=1,docs=2.5; name every source, 0 leaves it out.",
    read=parse_weights,
    typed=list[str],
)


# of runs that are priced, and of layers alone
FREEZE = Option(
    "Towers not trained, as in vision,projector.", flag="--freeze", read=parse_towers, typed=list[str], common=True
)
LORA = Option("LoRA, as in r=16,targets=q_proj,bits=4.", read=parse_lora, shown=None, common=True)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunOptions:
    """What a run is priced by, whoever decides it."""

    dp: Annotated[int | None, Option("Data-parallel degree.", least=1, common=True)] = None
    pp: Annotated[int | None, Option("Pipeline degree.", least=1, common=True)] = None
    tp: Annotated[int | None, Option("Tensor-parallel degree.", least=1, common=True)] = None
    cp: Annotated[int | None, Option("Context-parallel degree (tokens of a pack).", least=1)] = None
    ep: Annotated[int | None, Option("Expert-parallel degree.", least=1)] = None
    etp: Annotated[
        int | None,
        Option("Tensor-parallel degree of one expert; default: that of --tp, or 1.", least=1),
    ] = None
    global_batch: Annotated[int | None, Option("Samples a step.", least=1, common=True)] = None
    max_patches: Annotated[int | None, Option("Most ViT patches of a pack.", least=1)] = None
    max_tokens: Annotated[int | None, Option("Most LLM tokens of a pack.", least=1)] = None
    memory_bytes: Annotated[
        int | None, Option("Memory of a device, as in 80GiB.", flag="--memory", read=parse_bytes, common=True)
    ] = None  # None: all of it
    zero_stage: Annotated[int | None, Option("ZeRO sharding; 3 is FSDP.", least=0, most=3, common=True)] = None
    optimizer: Annotated[Optimizer, Option("Optimizer, which decides the bytes of state.")] = "adamw"
    dtype: Annotated[
        Precision, Option("Of weights and activations; fp8, mxfp8: of the blocks' products, the rest bf16.")
    ] = "bf16"
    attention: Annotated[Attention, Option("Attention as it will run.")] = "flash"
    # what the host does by itself where nothing is said
    host: Annotated[
        HostName,
        Option("What launches the kernels: its settings hold where nothing is said, its seconds where it is slower."),
    ] = "common"
    host_block_s: Annotated[
        float | None, Option("Seconds of the host for a block's forward; default: the host's own.", least=0.0)
    ] = None
    blocking_launches: Annotated[
        bool, Option("The device waits for each launch, as with CUDA_LAUNCH_BLOCKING=1: host and device take turns.")
    ] = False
    fused_kernels: Annotated[
        bool | None, Option("Norms, rotary and gates as single kernels (TE, Liger); default: as the host.")
    ] = None
    sequence_parallel: Annotated[
        bool | None, Option("The language model's norms and residuals divided among tp; default: as the host.")
    ] = None
    vision_sequence_parallel: Annotated[bool | None, Option("The same in the vision tower; default: as the host.")] = (
        None
    )
    grad_dtype: Annotated[DType | None, Option("Gradients as they are summed; default: as the host.")] = None
    attention_kernel: Annotated[
        AttentionKernel | None, Option("Of flash attention: FlashAttention-2, or cuDNN's; default: as the host.")
    ] = None
    early_stop: Annotated[
        bool | None,
        Option("Recompute ends before a block's last product, as PyTorch's own does; default: as the host."),
    ] = None
    tp_overlap: Annotated[
        bool | None, Option("tp's messages run with the products, as with Megatron's --tp-comm-overlap.")
    ] = None
    expert_imbalance: Annotated[
        float | None, Option("Rows of the busiest expert-parallel device over the mean.", least=1)
    ] = None
    expert_products: Annotated[
        ExpertProducts | None,
        Option("Experts by grouped kernels, a loop over them, or one fused MLP (MXFP8); default: as the host."),
    ] = None
    dispatcher: Annotated[
        Dispatcher | None,
        Option("How rows reach experts of other devices: once for each expert, or for each device (deepep)."),
    ] = None
    ep_overlap: Annotated[
        bool, Option("Experts' rows are sent with products, as with --overlap-moe-expert-parallel-comm.")
    ] = False
    frozen_towers: Annotated[tuple[Tower, ...], FREEZE] = ()
    lora: Annotated[Lora | None, LORA] = None
    seed: Annotated[int, Option("Same seed, same result.")] = 0
    profile: "Profile | None" = None  # whose seconds to price with; None: the formulas'


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions(RunOptions):
    """Choices of one plan.

    Use it to fix what you know already; what stays None is chosen.

    >>> PlanOptions(pp=4, tp=2, recompute="full").recompute
    'full'
    """

    num_microbatches: Annotated[
        int | None, Option("Packs per rank and step; without --global-batch they are filled.", least=1, most=2**20)
    ] = None
    schedule: Annotated[ScheduleChoice, Option("Pipeline schedule; auto: chosen by simulation.")] = "auto"
    num_chunks: Annotated[int, Option("Virtual stages per device (Interleaved1F1B; ZBVZeroBubble: 2).", least=1)] = (
        1  # auto: those of an interleaved schedule, 1 standing for 2
    )
    steps: Annotated[
        Literal["exact", "filled"],
        Option(
            "exact: steps of exactly --global-batch samples, shared among the packs; filled: packs as full as their "
            "limits allow, so that steps hold about so many."
        ),
    ] = "exact"
    # what may be chosen, of what is left open; none: any
    tp_degrees: tuple[int, ...] = ()
    zero_stages: tuple[int, ...] = ()
    schedules: tuple[ScheduleName, ...] = ()
    fills_pipeline: bool = False  # 1F1B with at least as many micro-batches as stages, as torch's own schedule asks
    method: Annotated[PlanMethod, Option("How packs are made.")] = "balanced"
    order: Annotated[Order, ORDER] = "random"
    oversize: Annotated[Oversize, OVERSIZE] = "error"
    weights: Annotated[tuple[tuple[str, float], ...], WEIGHTS] = ()  # of every source, by name; none: each sample once
    num_drawn: Annotated[int | None, NUM_DRAWN] = None
    recompute: Annotated[RecomputeMode, Option("Layers that recompute.", common=True)] = "auto"
    risk: Annotated[float, Option("Accepted chance to lack memory.", read=parse_share, shown="0.5%", common=True)] = (
        0.005
    )
    reserve_bytes: int | None = None  # kept free instead: of a plan that was probed, or made before there was a risk
    prefer: Annotated[
        Preference, Option("fastest: the simplest of the settings within 1 % of it; simplest: of those within 5 %.")
    ] = "fastest"
    vision: VisionChoice = field(default_factory=VisionChoice)  # whether and how ranks share their images
    search: Annotated[
        Literal["exact", "omnibal"],
        Option("How stages are searched: exactly, or as OmniBal published it (the best ranked near an anchor)."),
    ] = "exact"
    radius: Annotated[int, Option("With --set search=omnibal: move cuts by up to this many layers.", least=0)] = 3
    top: Annotated[int, Option("With --set search=omnibal: simulate this many of the best ranked splits.", least=1)] = (
        10
    )
    baselines: Annotated[
        tuple[str, ...],
        Option(
            "Compared run, as in random,batch=4,padded.",
            flag="--baseline",
            read=tuple,
            typed=list[str],
            common=True,
        ),
    ] = ()

    def __post_init__(self) -> None:
        problems = option_problems(self)
        problems += self._step_problems()
        problems += weight_problems(self.weights)
        if self.num_drawn is not None and not self.weights:
            problems.append(f"num_drawn {self.num_drawn} needs weights: give every source one")
        problems += self.vision.problems()
        problems += risk_problems(self.risk)
        problems += self._schedule_problems()
        problems += [problem for text in self.baselines for problem in parse_baseline(text).problems(text)]
        unknown = [tower for tower in self.frozen_towers if tower not in get_args(Tower)]
        if unknown:
            problems.append(f"tower {unknown[0]!r} is unknown: models have {', '.join(get_args(Tower))}")
        if set(self.frozen_towers) | {"audio"} == set(get_args(Tower)):  # no sample trains an audio tower
            problems.append("all towers are frozen: train one of them")
        problems += lora_problems(self.lora, self.frozen_towers)
        if problems:
            raise PlanError(join_problems(problems))

    def _step_problems(self) -> list[str]:
        if self.steps == "filled":
            return batch_problems(self.num_microbatches, self.global_batch)
        if self.fills_packs:
            return []
        return [
            f"{name} {value} fills packs, and steps hold exactly so many samples: give --set steps=filled, or leave it"
            for name, value, own in (("method", self.method, "balanced"), ("order", self.order, "random"))
            if value != own
        ]

    def _schedule_problems(self) -> list[str]:
        problems = []
        if self.num_chunks > 1 and self.schedule not in ("Interleaved1F1B", "ZBVZeroBubble", "auto"):
            problems.append(f"num_chunks must be 1 with {self.schedule}: give --set schedule=Interleaved1F1B for more")
        if self.schedule == "Interleaved1F1B" and self.num_chunks == 1:
            problems.append("num_chunks must be 2 or more with Interleaved1F1B: give --set num_chunks=2")
        if self.schedule == "ZBVZeroBubble" and self.num_chunks != 2:
            problems.append(f"num_chunks must be 2 with ZBVZeroBubble, not {self.num_chunks}: give --set num_chunks=2")
        if self.num_chunks > 1 and self.pp == 1 and self.schedule != "auto":
            problems.append("num_chunks needs a pipeline: give pp 2 or more")
        return problems

    def of_host(self) -> "PlanOptions":
        """Return the options with what the host does by itself where nothing was said."""
        own = HOSTS[self.host].settings(self.dtype)
        return replace(self, **{name: x for name, x in own.items() if getattr(self, name, x) is None})

    @property
    def sharding(self) -> int:
        """The ZeRO stage, 1 where it was left open and no other was chosen."""
        return 1 if self.zero_stage is None else self.zero_stage

    @property
    def fills_packs(self) -> bool:
        """Return whether packs are filled; a number of packs a step without a number of samples asks for it."""
        return self.steps == "filled" or (self.num_microbatches is not None and self.global_batch is None)

    @property
    def leaves_steps_open(self) -> bool:
        """Return whether micro-batches per step may be chosen so that steps come out equally long.

        GPipe holds all micro-batches of a step, so its memory was priced with their number; interleaved schedules take
        multiples of the pipeline's devices.
        """
        return self.num_microbatches is None and self.schedule not in ("GPipe", "Interleaved1F1B")


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRun(RunOptions):
    """What a run that you already have is made of; None is what a launcher does when nothing is said.

    Use it for `predict_run`. Raises `PlanError` for values that no run can have.

    >>> GivenRun(dp=4, pp=2, tp=4, batch=1, global_batch=64, stages="vision-first", recompute="full").pp
    2
    """

    batch: Annotated[
        int | None,
        Option("Samples of a micro-batch; else give --set max_patches, --set max_tokens.", least=1, common=True),
    ] = None
    no_padding: Annotated[bool, Option("Samples of --batch are joined, not padded to the longest.")] = False
    method: Annotated[
        PackMethod | None, Option("How batches or packs are made; default: random batches, balanced packs.")
    ] = None
    num_microbatches: Annotated[
        int | None, Option("Micro-batches per rank and step; default: 1.", least=1, common=True)
    ] = None
    stages: Annotated[
        str | None,
        Option(
            "Blocks of each stage, vision v and language l, as in '24v|8v+10l|18l'; even: as many of both on each; "
            "vision-first: the tower on the first, the language model even. Default: even.",
            common=True,
        ),
    ] = None
    recompute: Annotated[
        str | None,
        Option(
            "none, full, selective, or how many blocks of each stage recompute all, as in 2,1,0,0.",
            common=True,
        ),
    ] = None
    schedule: Annotated[ScheduleName | None, Option("Pipeline schedule; default: 1F1B.", common=True)] = None
    num_chunks: Annotated[int | None, Option("Virtual stages per device.", least=1)] = None

    def __post_init__(self) -> None:
        problems = option_problems(self)
        problems += batch_problems(self.num_microbatches, self.global_batch)
        if self.batch is not None and (self.max_patches or self.max_tokens):
            problems.append(f"batch {self.batch} excludes max_patches and max_tokens, which make packs: give one kind")
        if problems:
            raise PlanError(join_problems(problems))

    def options(self, dims: ParallelDims) -> PlanOptions:
        """Return the options that price this run; what was not said has a plan's default."""
        return replace(self._said(), **same_fields(dims, ParallelDims))

    def open_options(self, *, global_batch: int) -> PlanOptions:
        """Return options of a plan in place of this run: the same training, with all that a plan decides left open."""
        return replace(self._said(), global_batch=global_batch, schedule="1F1B", num_chunks=1, zero_stage=None)

    def _said(self) -> PlanOptions:
        decided = {"dp", "pp", "tp", "cp", "ep", "etp", "method", "recompute"}
        decided |= {"max_patches", "max_tokens", "num_microbatches", "global_batch"}
        said = same_fields(self, PlanOptions) | {"schedule": self.schedule or "1F1B"}
        return PlanOptions(**{name: x for name, x in said.items() if x is not None and name not in decided})


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrigin:
    """Where a plan's inputs came from, for its header and for `trimtab check`."""

    command: str = ""
    data_files: "tuple[DataFile, ...]" = ()
    num_skipped: int = 0
    assumptions: tuple[str, ...] = ()


def risk_problems(risk: float) -> list[str]:
    """Return a sentence where `risk` is no chance."""
    if risk > 0 and 0 < 1 - risk < 1:  # 1e-17 from 1 is 1
        return []
    return [f"risk {risk} must be above 0 and below 1, as in 5%"]


def batch_problems(num_microbatches: int | None, global_batch: int | None) -> list[str]:
    """Return a sentence where a step's size was given twice."""
    if num_microbatches is None or global_batch is None:
        return []
    return [f"num_microbatches {num_microbatches} and global_batch {global_batch} exclude each other: give one"]


def lora_problems(lora: Lora | None, frozen: Sequence[Tower]) -> list[str]:
    """Return a sentence for each tower that was to have adapters and to be frozen with them."""
    return [
        f"tower {tower!r} is frozen (--freeze) and has adapters (--lora), which freeze it already: leave one out"
        for tower in (() if lora is None else lora.towers)
        if tower in frozen
    ]


def weight_problems(weights: Weights) -> list[str]:
    """Return what is wrong with weights whatever they are for, a sentence each."""
    names = [name for name, _ in weights]
    problems = [
        f"source {name!r} has two weights: give it one" for name in dict.fromkeys(names) if names.count(name) > 1
    ]
    problems += [
        f"source {name!r} has weight {weight:g}: give 0 or more"
        for name, weight in weights
        if not (math.isfinite(weight) and weight >= 0)
    ]
    if weights and all(weight == 0 for _, weight in weights):
        problems.append("all weights are 0: give one source more")
    return problems
