"""A plan in a framework's own words: what the framework makes of it, what that costs, and the best that it can run."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.balance.packing import pack_samples
from trimtab.errors import PartitionError, UnsupportedPlanError, join_problems
from trimtab.lora import Lora
from trimtab.options import Dispatcher, RecomputedTier, ScheduleName, Tower
from trimtab.partition.schedules import check_schedule, microbatch_unit
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.expressible import (
    Expressible,
    best_expressible,
    mean_step_s,
    overfull_ranks,
    rank_bytes,
    relative_time,
)
from trimtab.plan.decide.stages import epoch_s
from trimtab.plan.decide.work import above_all, packed_work, select_rows
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.file.reload import ReloadedPlan, replan
from trimtab.specs import LayerSpec, ModelSpec, ParallelDims, Stage
from trimtab.units import format_bytes, format_seconds


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What a plan decides that a framework can be told."""

    model: ModelSpec
    stages: tuple[Stage, ...]  # every layer once, in forward order; stage s runs on pipeline rank s mod pp
    dims: ParallelDims
    schedule: ScheduleName
    num_microbatches: int
    num_chunks: int = 1
    zero_stage: int = 1
    frozen_towers: tuple[Tower, ...] = ()
    dispatcher: Dispatcher = "alltoall"
    lora: Lora | None = None  # only adapters are trained
    max_tokens: int | None = None  # of a pack, those of one oversize sample too; None: not known
    samples_per_pack: float = 1.0  # the mean

    @property
    def packs_per_step(self) -> int:
        """What a host counts that takes a pack as one sample."""
        return self.dims.dp * self.num_microbatches

    @property
    def samples_per_step(self) -> int:
        """What a host counts that takes no packs: micro-batches of one sample, about as many a step as planned."""
        return self.dims.dp * max(1, round(self.num_microbatches * self.samples_per_pack))

    def __post_init__(self) -> None:
        pp, num_chunks = self.dims.pp, self.num_chunks
        check_schedule(self.schedule, num_devices=pp, num_chunks=num_chunks, num_microbatches=self.num_microbatches)
        if len(self.stages) != pp * num_chunks:
            raise PartitionError(
                f"{len(self.stages)} stages were planned, and pp {pp} with {num_chunks} chunks a rank has "
                f"{pp * num_chunks}: make them equal"
            )


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in a framework's own words."""

    text: str  # to be pasted or saved
    fields: Mapping[str, object]  # the same, or the parts of it, for JSON
    runs: tuple[Stage, ...]  # what the framework makes of the plan
    warnings: tuple[str, ...] = ()  # where the run will differ from the plan
    beside: str | None = None  # something else to set, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One framework: what it can run, and how a plan is told to it. To add one, see `adapters.frameworks`."""

    title: str
    checked_with: str  # the versions whose own code has read an export, or what stands in for that
    packs: str | None  # how its trainer is given the plan's packs; None: it makes micro-batches of its own
    can: Callable[[ModelSpec, int], Expressible]  # of a model, at a pipeline degree
    export: Callable[[Decided, float | None], Exported]
    """Raises `UnsupportedPlanError` with everything that the framework cannot express. The price that a refusal quotes
    is the step time of the best plan that it can run, relative to this plan's; infinite where none fits."""
    lora: tuple[int, ...] = ()  # bits of frozen weights beside which its export tells adapters; none: it cannot

    def refuse_lora(self, lora: Lora | None) -> None:
        """`UnsupportedPlanError` in one sentence, where adapters were asked for that it cannot be told."""
        if lora is None or lora.bits in self.lora:
            return
        if self.lora:
            known = " or ".join(map(str, self.lora))
            raise UnsupportedPlanError(
                f"LoRA over weights of {lora.bits} bits was asked for, and {self.title} is told it over {known}: leave "
                "bits out, or plan for another framework"
            )
        raise UnsupportedPlanError(
            f"LoRA ({lora}) was asked for, and the export to {self.title} has no words for it: plan without --lora, or "
            "for another framework, such as transformers or ms-swift"
        )


def decided(found: ReloadedPlan) -> Decided:
    """The decisions of a plan that was read back."""
    case, schedule = found.case, found.case.options.schedule
    assert schedule != "auto", "a plan says which one was chosen"
    return Decided(
        model=case.model,
        stages=found.stages,
        dims=case.setting.dims,
        schedule=schedule,
        num_microbatches=case.setting.num_microbatches,
        num_chunks=case.options.num_chunks,
        zero_stage=case.options.sharding,
        frozen_towers=case.options.frozen_towers,
        dispatcher=case.options.dispatcher,
        lora=case.options.lora,
        max_tokens=max(case.setting.max_tokens, int(case.packing.sums(case.samples.num_tokens).max())),
        samples_per_pack=len(case.packing.indices) / case.packing.num_packs,
    )


def refuse(problems: Sequence[str]) -> None:
    """`UnsupportedPlanError` with all of the problems, if there are any."""
    if problems:
        raise UnsupportedPlanError(join_problems(problems))


def schedule_problems(plan: Decided, framework: str, known: Sequence[str]) -> list[str]:
    """A sentence where the framework runs only other schedules."""
    if plan.schedule in known:
        return []
    return [f"schedule {plan.schedule} was planned, and {framework} does not run it: plan with {' or '.join(known)}"]


def cut_problems(plan: Decided, unsupported: frozenset[int], why: str) -> list[str]:
    """Cuts that the framework cannot make, with the rest of the sentence, and those that the model forbids."""
    model, starts, problems = plan.model, {stage.start for stage in plan.stages}, []
    reason = model.forbidden_cut_reason or "the plan was made without these cuts"
    for cuts, said in (
        (unsupported, why),
        (model.forbidden_cuts - unsupported, f"which the model forbids ({reason}): move the cut"),
    ):
        names = ", ".join(model.layers[cut].name for cut in sorted(cuts & starts))
        if names:
            problems.append(f"the plan cuts stages before {names}, {said}")
    return problems


def degree_problems(dims: ParallelDims, title: str, degrees: Sequence[str]) -> list[str]:
    """A sentence for each degree beside dp, pp and tp that the framework does not have."""
    planned = {"cp": dims.cp, "ep": dims.ep, "etp": dims.etp or 1}
    return [
        f"{axis} {degree} was planned, which this export cannot say for {title}: plan with {axis} 1"
        for axis, degree in planned.items()
        if degree > 1 and axis not in degrees
    ]


def full_blocks(layer: LayerSpec) -> tuple[RecomputedTier, ...]:
    """The recompute of frameworks that run whole blocks again, and nothing else."""
    return ("full",) if layer.kind == "block" else ()


def price_without_cuts(price: float | None, *, then: str = "") -> str:
    """In parentheses, the step time of the best plan without the refused cuts, relative to the plan's; none is silence.

    Infinite is a price too: without such cuts nothing fits, and `then` says what becomes of that.
    """
    if price is None:
        return ""
    if math.isinf(price):
        return f" (without such cuts nothing fits these degrees of parallelism{then})"
    return f" (the best plan without such cuts takes {price:.2f} x as long a step)"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunCost:
    """Predicted seconds of a step, and the peak of the rank on which that differs most: as it runs, beside the plan."""

    step_s: float
    planned_s: float
    rank: int
    held_bytes: float
    planned_bytes: float
    memory_bytes: float  # the plan's limit

    @property
    def ratio(self) -> float:
        return self.step_s / self.planned_s

    def __str__(self) -> str:
        said = (
            f"a step is predicted to take {self.ratio:.3f} x as long as planned ({format_seconds(self.step_s)} instead "
            f"of {format_seconds(self.planned_s)})"
        )
        if self.held_bytes == self.planned_bytes:
            return said
        return (
            f"{said}, and rank {self.rank} to hold {format_bytes(self.held_bytes)} of "
            f"{format_bytes(self.memory_bytes)} instead of {format_bytes(self.planned_bytes)}"
        )


def export_plan(found: ReloadedPlan, target: Target) -> Exported:
    """The plan in the target's words, with what that costs; or `UnsupportedPlanError` with reason and price.

    The price is the predicted time of the best plan that the target can run, at the same degrees, over the plan's.
    """
    case, planned = found.case, found.stages
    target.refuse_lora(case.options.lora)
    can, said = target.can(case.model, case.setting.dims.pp), []
    refuse(degree_problems(case.setting.dims, target.title, can.degrees))
    try:
        exported = target.export(decided(found), None)
    except UnsupportedPlanError:
        best = best_expressible(case, can)
        exported = target.export(decided(found), math.inf if best is None else relative_time(case, best, planned))
    if case.vision is not None:
        said.append(
            f"the plan's {case.vision.decision.group} ranks share images, which {target.title} is not told here: share "
            "them with trimtab.vision.vision_dp_from_plan, or plan with --vision-dp none, or its times and "
            "memory do not hold"
        )
    text = exported.text
    if target.packs is None:
        ratio = time_without_packs(case, planned)
        text = (
            f"# {target.title} cannot be given the plan's packs, and the batch size below counts single samples: for "
            f"these the data set is predicted to take {ratio:.2f} x as long as planned\n{text}"
        )
    return replace(exported, text=text, warnings=(*said, *exported.warnings))


def time_without_packs(case: Case, stages: Sequence[Stage]) -> float:
    """Predicted time of the data set in micro-batches of one sample, as many samples a step, over that of the plan."""
    dims, drawn = case.setting.dims, np.sort(case.packing.indices)
    per_pack = len(drawn) / case.packing.num_packs
    unit = microbatch_unit(case.options.schedule, dims.pp)
    num_microbatches = max(1, round(case.setting.num_microbatches * per_pack / unit)) * unit
    singles = pack_samples(
        select_rows(case.samples, drawn),
        dp=dims.dp,
        num_microbatches=num_microbatches,
        method="random",
        batch_size=1,
        limits=above_all(case.samples),
        seed=case.options.seed,
    )
    alone = replace(
        case.without_vision(),
        setting=replace(case.without_vision().setting, num_microbatches=num_microbatches),
        packing=singles.packing,
        schedule=singles.schedule,
        work=packed_work(singles.packing, case.samples_work[drawn]),
    )
    return epoch_s(alone, stages) / epoch_s(case, stages)


def cost_of_running(found: ReloadedPlan, exported: Exported) -> list[str]:
    """Sentences on what the target's own recompute and placement add to the plan; none if it runs it as it is."""
    if exported.runs == found.stages:
        return []
    sentences = []
    case, runs = found.case, exported.runs
    cost = cost_of_runs(case, runs, found.stages)
    if abs(cost.ratio - 1.0) >= 0.0005:
        sentences.append(f"as it will run, {cost}: --fit FOLDER writes the best plan found that runs as it says")
    full = overfull_ranks(case, runs)
    if full:
        ranks = ", ".join(map(str, full))
        sentences.append(
            f"as it will run, pipeline rank {ranks} would exceed the plan's memory: export with --fit FOLDER"
        )
    return sentences


def fit_plan(found: ReloadedPlan, target: Target) -> PlanDetails:
    """The best plan found that the target can run: packs and degrees unchanged, stages and recompute solved again."""
    case = found.case
    can = target.can(case.model, case.setting.dims.pp)
    best = best_expressible(case, can)
    if best is None:
        raise PartitionError(
            f"no split that {target.title} can run fits {case.setting.dims.pp} pipeline ranks in the plan's memory: "
            "plan again with other degrees, a higher ZeRO stage or smaller packs"
        )
    note = f"Split again, with the same packs, within what {target.title} can run."
    return replan(found, best, forbidden_cuts=can.forbidden_cuts, note=note)


def cost_of_runs(case: Case, runs: Sequence[Stage], planned: Sequence[Stage]) -> RunCost:
    """What these stages cost beside the planned ones."""
    held, meant = rank_bytes(case, runs), rank_bytes(case, planned)
    rank = max(range(len(held)), key=lambda r: abs(held[r] - meant[r]))
    return RunCost(
        step_s=mean_step_s(case, runs),
        planned_s=mean_step_s(case, planned),
        rank=rank,
        held_bytes=held[rank],
        planned_bytes=meant[rank],
        memory_bytes=case.problem.memory_bytes,
    )
