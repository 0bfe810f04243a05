"""What a user may choose of a plan; None leaves the choice to the planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, get_args

from trimtab.balance.dispatch import Order
from trimtab.balance.packing import Oversize
from trimtab.costs.settings import ITEM_BYTES, OPTIMIZER_BYTES, Attention
from trimtab.errors import PlanError, join_problems
from trimtab.partition.schedules import ScheduleName
from trimtab.partition.stages import RecomputeMode
from trimtab.plan.decide.mixture import weight_problems
from trimtab.plan.plan import DataFile, PlanMethod
from trimtab.plan.sharing.choice import VisionChoice
from trimtab.specs import Profile, Tower

ScheduleChoice = ScheduleName | Literal["auto"]

_MOST = 2**40  # keeps products of counts inside 64 bits
_CHOICES = {
    "schedule": (*get_args(ScheduleName), "auto"),
    "method": get_args(PlanMethod),
    "order": get_args(Order),
    "oversize": get_args(Oversize),
    "recompute": get_args(RecomputeMode),
    "dtype": tuple(ITEM_BYTES),
    "optimizer": tuple(OPTIMIZER_BYTES),
    "zero_stage": (0, 1, 2, 3),
    "attention": get_args(Attention),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Choices of one plan."""

    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    num_microbatches: int | None = None  # per data-parallel rank and step; None: from global_batch
    global_batch: int | None = None  # samples per step over all ranks, met on average; None: 256, or 8 a device
    max_patches: int | None = None
    max_tokens: int | None = None
    schedule: ScheduleChoice = "1F1B"  # auto: the one whose simulated step is shortest
    num_chunks: int = 1  # virtual stages per device; auto: those of an interleaved schedule, 1 standing for 2
    method: PlanMethod = "balanced"
    order: Order = "random"
    oversize: Oversize = "error"
    weights: tuple[tuple[str, float], ...] = ()  # of every source, by name; none: every sample once
    num_drawn: int | None = None  # samples of an epoch by these weights; None: as many as there are
    seed: int = 0
    recompute: RecomputeMode = "auto"
    memory_bytes: int | None = None  # of one device; None: all of it
    reserve: float = 0.06  # share of the memory kept free: context, communication buffers, allocator rounding
    reserve_bytes: int | None = None  # the same in bytes, instead of the share
    zero_stage: int = 1
    optimizer: str = "adamw"
    dtype: str = "bf16"
    attention: Attention = "flash"
    fused_kernels: bool = False  # norms, rotary and gates as single kernels (Transformer Engine, Liger)
    frozen_towers: tuple[Tower, ...] = ()
    offload: bool = False  # whether layers may keep their activations in host memory
    host_bytes_per_s: float | None = None  # between a device and host memory, one direction; None: the device table's
    host_memory_bytes: int | None = (
        None  # for one device's offloaded layers; None: half its share of a published server
    )
    profile: Profile | None = None  # whose seconds to plan with; None: the formulas'
    vision: VisionChoice = field(default_factory=VisionChoice)  # whether and how ranks share their images

    def __post_init__(self) -> None:
        counts = (
            "dp",
            "pp",
            "tp",
            "num_microbatches",
            "global_batch",
            "max_patches",
            "max_tokens",
            "num_chunks",
            "num_drawn",
        )
        problems = [
            f"{name} {value} was asked for, and it counts something: give 1 or more, or leave it out"
            for name in counts
            if (value := getattr(self, name)) is not None and value < 1
        ]
        problems += [
            f"{name} {value} was asked for, which no run has: give at most {_MOST}"
            for name in counts
            if (value := getattr(self, name)) is not None and value > _MOST
        ]
        if self.num_microbatches is not None and self.global_batch is not None:
            problems.append(
                f"num_microbatches {self.num_microbatches} and global_batch {self.global_batch} were both given, and "
                "each follows from the other: give one of them"
            )
        problems += weight_problems(self.weights)
        problems += self.vision.problems()
        problems += self._tier_problems()
        if self.num_drawn is not None and not self.weights:
            problems.append(f"num_drawn {self.num_drawn} was asked for without weights: give every source a weight")
        if not 0 <= self.reserve < 1:
            problems.append(f"reserve {self.reserve} was asked for, and it is a share: give 0 or more, below 1")
        if self.num_chunks > 1 and self.schedule not in ("Interleaved1F1B", "ZBVZeroBubble", "auto"):
            problems.append(
                f"num_chunks {self.num_chunks} was asked for with {self.schedule}, which has one stage per device: "
                "give --schedule Interleaved1F1B, or leave num_chunks out"
            )
        if self.schedule == "Interleaved1F1B" and self.num_chunks == 1:
            problems.append("Interleaved1F1B needs several stages per device: give --num-chunks 2 or more")
        if self.schedule == "ZBVZeroBubble" and self.num_chunks != 2:
            problems.append(
                f"ZBVZeroBubble has two stages per device, and num_chunks is {self.num_chunks}: give --num-chunks 2"
            )
        for name, known in _CHOICES.items():
            value = getattr(self, name)
            if value not in known:
                problems.append(f"{name} {value!r} was asked for: choose one of {', '.join(map(str, known))}")
        unknown = [tower for tower in self.frozen_towers if tower not in get_args(Tower)]
        if unknown:
            problems.append(f"tower {unknown[0]!r} was to be frozen: models have {', '.join(get_args(Tower))}")
        if set(self.frozen_towers) | {"audio"} == set(get_args(Tower)):  # no sample trains an audio tower
            problems.append("all towers were to be frozen, which leaves nothing to train: train one of them")
        if self.num_chunks > 1 and self.pp == 1 and self.schedule != "auto":
            problems.append("several stages per device were asked for on a pipeline of one device: give pp 2 or more")
        if problems:
            raise PlanError(join_problems(problems))

    def _tier_problems(self) -> list[str]:
        problems = []
        for name, value in (
            ("host_bytes_per_s", self.host_bytes_per_s),
            ("host_memory_bytes", self.host_memory_bytes),
        ):
            if value is None:
                continue
            if not 0 < value <= _MOST**1.5:
                problems.append(f"{name} {value} was asked for, and no machine has that: give a size, as in 50GB")
            if not self.offload:
                problems.append(f"{name} {value} was given without offload, which alone uses it: give --offload too")
        if self.offload and self.recompute != "auto":
            problems.append(
                f"offload was asked for with recompute {self.recompute}, which leaves no choice between layers: "
                "give --recompute auto"
            )
        return problems

    @property
    def leaves_steps_open(self) -> bool:
        """Micro-batches per step may be chosen so that steps come out equally long.

        GPipe holds all micro-batches of a step, so its memory was priced with their number; interleaved schedules take
        multiples of the pipeline's devices.
        """
        return self.num_microbatches is None and self.schedule not in ("GPipe", "Interleaved1F1B")


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrigin:
    """Where a plan's inputs came from, for its header and for `trimtab check`."""

    command: str = ""
    data_files: tuple[DataFile, ...] = ()
    num_skipped: int = 0
    assumptions: tuple[str, ...] = ()
