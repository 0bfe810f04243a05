"""What a user may choose of a plan; None leaves the choice to the planner."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from trimtab.errors import PlanError, join_problems
from trimtab.plan.plan import DataFile, ScheduleName


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOptions:
    """Choices of one plan."""

    dp: int | None = None
    pp: int | None = None
    tp: int | None = None
    num_microbatches: int | None = None  # per data-parallel rank and step; None: from global_batch, else 4 x pp
    global_batch: int | None = None  # samples per step over all ranks, met on average
    max_patches: int | None = None
    max_tokens: int | None = None
    schedule: ScheduleName = "1F1B"
    num_chunks: int = 1
    method: Literal["balanced", "isf"] = "balanced"
    order: Literal["random", "tolerance", "sorted"] = "random"
    oversize: Literal["error", "alone", "skip"] = "error"
    seed: int = 0
    recompute: Literal["auto", "none", "full"] = "auto"
    memory_bytes: int | None = None  # of one device; None: all of it
    reserve: float = 0.06  # share of the memory kept free: context, communication buffers, allocator rounding
    zero_stage: int = 1
    optimizer: str = "adamw"
    dtype: str = "bf16"
    attention: Literal["flash", "sdpa", "eager"] = "flash"
    fused_kernels: bool = False  # norms, rotary and gates as single kernels (Transformer Engine, Liger)
    frozen_towers: tuple[Literal["vision", "projector", "language"], ...] = ()

    def __post_init__(self) -> None:
        counts = ("dp", "pp", "tp", "num_microbatches", "global_batch", "max_patches", "max_tokens", "num_chunks")
        problems = [
            f"{name} {value} was asked for, and it counts something: give 1 or more, or leave it out"
            for name in counts
            if (value := getattr(self, name)) is not None and value < 1
        ]
        if self.num_microbatches is not None and self.global_batch is not None:
            problems.append(
                f"num_microbatches {self.num_microbatches} and global_batch {self.global_batch} were both given, and "
                "each follows from the other: give one of them"
            )
        if not 0 <= self.reserve < 1:
            problems.append(f"reserve {self.reserve} was asked for, and it is a share: give 0 or more, below 1")
        if self.num_chunks > 1 and self.schedule != "Interleaved1F1B":
            problems.append(
                f"num_chunks {self.num_chunks} was asked for with {self.schedule}, which has one stage per device: "
                "give --schedule Interleaved1F1B, or leave num_chunks out"
            )
        if self.schedule == "Interleaved1F1B" and self.num_chunks == 1:
            problems.append("Interleaved1F1B needs several stages per device: give --num-chunks 2 or more")
        if problems:
            raise PlanError(join_problems(problems))

    @property
    def leaves_steps_open(self) -> bool:
        """Micro-batches per step may be chosen so that steps come out equally long."""
        return self.num_microbatches is None and self.global_batch is None and self.num_chunks == 1


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanOrigin:
    """Where a plan's inputs came from, for its header and for `trimtab check`."""

    command: str = ""
    data_files: tuple[DataFile, ...] = ()
    num_skipped: int = 0
    assumptions: tuple[str, ...] = ()
