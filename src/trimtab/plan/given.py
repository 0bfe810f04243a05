"""What a user's run is made of, as it is given to `trimtab predict`. No NumPy here: `--help` reads it."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated

from trimtab.errors import PlanError, join_problems
from trimtab.lora import Lora
from trimtab.options import (
    EXPERT_IMBALANCE,
    Attention,
    Dispatcher,
    Optimizer,
    Option,
    PackMethod,
    Precision,
    ScheduleName,
    Tower,
    option_problems,
    same_fields,
)
from trimtab.parallel import ParallelDims
from trimtab.plan.options import (
    ATTENTION,
    DISPATCHER,
    DTYPE,
    EP_OVERLAP,
    FREEZE,
    FUSED_KERNELS,
    IMBALANCE,
    LORA,
    MEMORY,
    OPTIMIZER,
    SEED,
    TP_OVERLAP,
    PlanOptions,
    batch_problems,
)

if TYPE_CHECKING:
    from trimtab.specs import Profile


@dataclass(frozen=True, slots=True, kw_only=True)
class GivenRun:
    """What a run that you already have is made of; None is what a launcher does when nothing is said.

    Use it for `predict_run`. Raises `PlanError` for values that no run can have.

    >>> GivenRun(dp=4, pp=2, tp=4, batch=1, global_batch=64, stages="vision-first", recompute="full").pp
    2
    """

    dp: Annotated[int | None, Option("Data-parallel degree; default: the devices left.", least=1, common=True)] = None
    pp: Annotated[int | None, Option("Pipeline degree; default: 1.", least=1, common=True)] = None
    tp: Annotated[int | None, Option("Tensor-parallel degree; default: 1.", least=1, common=True)] = None
    cp: Annotated[int | None, Option("Context-parallel degree; default: 1.", least=1)] = None
    ep: Annotated[int | None, Option("Expert-parallel degree; default: 1.", least=1)] = None
    etp: Annotated[int | None, Option("Tensor-parallel degree of one expert; default: that of --tp.", least=1)] = None
    batch: Annotated[
        int | None,
        Option("Samples of a micro-batch; else give --set max_patches, --set max_tokens.", least=1, common=True),
    ] = None
    no_padding: Annotated[bool, Option("Samples of --batch are joined, not padded to the longest.")] = False
    max_patches: Annotated[int | None, Option("Most ViT patches of a pack; default: any.", least=1)] = None
    max_tokens: Annotated[int | None, Option("Most LLM tokens of a pack.", least=1)] = None
    method: Annotated[
        PackMethod | None, Option("How batches or packs are made; default: random batches, balanced packs.")
    ] = None
    num_microbatches: Annotated[
        int | None, Option("Micro-batches per rank and step; default: 1.", least=1, common=True)
    ] = None
    global_batch: Annotated[
        int | None, Option("Samples per step, instead of --num-microbatches.", least=1, common=True)
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
            "none, full, selective, attention, or how many blocks of each stage recompute all, as in 2,1,0,0.",
            common=True,
        ),
    ] = None
    schedule: Annotated[ScheduleName | None, Option("Pipeline schedule; default: 1F1B.", common=True)] = None
    num_chunks: Annotated[int | None, Option("Virtual stages per device.", least=1)] = None
    zero_stage: Annotated[int | None, Option("ZeRO sharding; 3 is FSDP. Default: 1.", least=0, most=3, common=True)] = (
        None
    )
    optimizer: Annotated[Optimizer | None, OPTIMIZER] = None
    dtype: Annotated[Precision | None, DTYPE] = None
    attention: Annotated[Attention | None, ATTENTION] = None
    fused_kernels: Annotated[bool, FUSED_KERNELS] = False
    tp_overlap: Annotated[bool, TP_OVERLAP] = False
    ep_overlap: Annotated[bool, EP_OVERLAP] = False
    frozen_towers: Annotated[tuple[Tower, ...], FREEZE] = ()
    expert_imbalance: Annotated[float, IMBALANCE] = EXPERT_IMBALANCE
    dispatcher: Annotated[Dispatcher, DISPATCHER] = "alltoall"
    lora: Annotated[Lora | None, LORA] = None
    memory_bytes: Annotated[int | None, MEMORY] = None
    seed: Annotated[int, SEED] = 0
    profile: "Profile | None" = None  # whose seconds to predict with; None: the formulas'

    def __post_init__(self) -> None:
        problems = option_problems(self)
        problems += batch_problems(self.num_microbatches, self.global_batch)
        if self.batch is not None and (self.max_patches or self.max_tokens):
            problems.append(
                f"batch {self.batch} was given with limits of a pack: give --batch for batches of so many samples, or "
                "limits for packs"
            )
        if problems:
            raise PlanError(join_problems(problems))

    def options(self, dims: ParallelDims) -> PlanOptions:
        """Options that price this run; what was not said has a plan's default."""
        return replace(self._said(), **same_fields(dims, ParallelDims))

    def open_options(self, *, global_batch: int) -> PlanOptions:
        """Options of a plan in place of this run: the same training, and everything that a plan decides left open."""
        return replace(self._said(), global_batch=global_batch, schedule="1F1B", num_chunks=1, zero_stage=None)

    def _said(self) -> PlanOptions:
        decided = {
            *("dp", "pp", "tp", "cp", "ep", "etp", "method", "recompute"),
            *("max_patches", "max_tokens", "num_microbatches", "global_batch"),
        }
        said = same_fields(self, PlanOptions) | {"schedule": self.schedule or "1F1B"}
        return PlanOptions(**{name: x for name, x in said.items() if x is not None and name not in decided})
