"""A plan in a framework's own words: what the framework makes of it, what that costs, and the best that it can run."""

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields, replace

import numpy as np

from trimtab.balance.packing import pack_samples
from trimtab.errors import PartitionError, UnsupportedPlanError, join_problems
from trimtab.lora import Lora
from trimtab.options import (
    Attention,
    Dispatcher,
    DType,
    HostName,
    Optimizer,
    Precision,
    RecomputedTier,
    ScheduleName,
    Tower,
)
from trimtab.partition.schedules import check_schedule, microbatch_unit
from trimtab.plan.decide.case import Case
from trimtab.plan.decide.stages import (
    Expressible,
    best_expressible,
    epoch_s,
    mean_step_s,
    overfull_ranks,
    rank_bytes,
)
from trimtab.plan.decide.work import Lanes, above_all, packed_work, select_rows
from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.file.reload import ReloadedPlan, replan
from trimtab.plan.options import PlanOptions
from trimtab.plan.plan import VisionDecision
from trimtab.specs import AttentionSpec, LayerSpec, ModelSpec, ParallelDims, Stage, recomputing, tiers_of
from trimtab.units import format_bytes, format_seconds

IMPLEMENTATIONS: Mapping[Attention, str] = {"flash": "flash_attention_2", "sdpa": "sdpa", "eager": "eager"}
"""Attention as Transformers spells it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """The settings of a run, next to the plan's decisions, on which its memory and time rest.

    Every export prints each of them in its host's words, or refuses it (`refuse_words`).
    """

    dtype: Precision = "bf16"
    attention: Attention = "flash"
    optimizer: Optimizer = "adamw"
    grad_dtype: DType = "fp32"
    fused_kernels: bool = True
    sequence_parallel: bool = False  # of the language model, where tp is above 1
    tp_overlap: bool = False
    ep_overlap: bool = False

    def problems(self, host: str, **known: Collection[object]) -> list[str]:
        """Return a sentence for each setting for which the host has no word: `known` are the values that it has.

        A field that is not named can only be as by default.
        """
        plain, found = Launch(), []
        for field in fields(self):
            value, words = getattr(self, field.name), known.get(field.name, (getattr(plain, field.name),))
            if value not in words:
                found.append(
                    f"{host} has no {field.name} {value}: plan with --set {field.name}={' or '.join(map(str, words))}"
                )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Decided:
    """What a plan decides that a framework has a setting for."""

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
    launch: Launch = Launch()
    max_tokens: int | None = None  # of a pack, those of one oversize sample too; None: not known
    samples_per_pack: float = 1.0  # the mean
    global_batch: int | None = None  # samples of every step; None: it varies
    vision: VisionDecision | None = None  # the tower's grid; None: the decoder's

    @property
    def packs_per_step(self) -> int:
        """Return what a host counts that takes a pack as one sample."""
        return self.dims.dp * self.num_microbatches

    @property
    def samples_per_step(self) -> int:
        """Return a step's samples on a host without packs: micro-batches of one, as many as its ranks divide."""
        per_rank = self.num_microbatches * self.samples_per_pack
        if self.global_batch is not None:
            per_rank = self.global_batch / self.dims.dp
        return self.dims.dp * max(1, round(per_rank))

    def __post_init__(self) -> None:
        pp, num_chunks = self.dims.pp, self.num_chunks
        check_schedule(self.schedule, num_devices=pp, num_chunks=num_chunks, num_microbatches=self.num_microbatches)
        if len(self.stages) != pp * num_chunks:
            raise PartitionError(f"pp {pp} x {num_chunks} chunks is {pp * num_chunks} stages, not {len(self.stages)}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Exported:
    """A plan in a framework's own words."""

    text: str  # to be pasted or saved
    fields: Mapping[str, object]  # the same, or the parts of it, for JSON
    runs: tuple[Stage, ...]  # what the framework makes of the plan
    warnings: tuple[str, ...] = ()  # where the run will differ from the plan
    also: str | None = None  # something else to set, and why


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """One framework: what it can run, and how it spells a plan. To add one, see `adapters.frameworks`."""

    title: str
    checked_with: str  # the versions whose own code has read an export, or what stands in for that
    packs: str | None  # how its trainer is given the plan's packs; None: it makes micro-batches of its own
    can: Callable[[ModelSpec, int], Expressible]  # of a model, at a pipeline degree
    export: Callable[[Decided], Exported]
    """Raises `UnsupportedPlanError` with everything that the framework cannot express."""
    host: HostName = "megatron"  # what it does by itself, which is priced where the plan says nothing
    lora: tuple[int, ...] = ()  # bits of frozen weights next to which its export tells adapters; none: it cannot
    has_own: bool = False  # whether its export tells devices of the tower's own
    shares_over_cp: tuple[str, ...] = ()  # families of which its export shares images over cp
    packs_by_tokens: bool = False  # whether its trainer packs by itself: greedily, by tokens

    def refuse_lora(self, lora: Lora | None) -> None:
        """Raise `UnsupportedPlanError` where adapters are planned that its export cannot say."""
        if lora is None or lora.bits in self.lora:
            return
        over = f" but over weights of {' or '.join(map(str, self.lora))} bits" if self.lora else ""
        raise UnsupportedPlanError(
            f"the export to {self.title} writes no adapters{over}, and --lora {lora} was given: leave it out, or plan "
            "for another framework"
        )


def decided(found: ReloadedPlan, host: HostName) -> Decided:
    """Return the decisions of a plan that was read back; what it leaves open is as `host` has it."""
    case, schedule, options = found.case, found.case.options.schedule, replace(found.case.options, host=host).of_host()
    assert schedule != "auto", "a plan says which one was chosen"
    dims = case.setting.dims
    shared = dims.tp > 1 and (bool(options.sequence_parallel) or dims.is_folded)
    return Decided(
        model=case.model,
        stages=found.stages,
        dims=case.setting.dims,
        schedule=schedule,
        num_microbatches=case.setting.num_microbatches,
        num_chunks=case.options.num_chunks,
        zero_stage=case.options.sharding,
        frozen_towers=case.options.frozen_towers,
        dispatcher=case.options.of_host().dispatcher or "alltoall",
        lora=case.options.lora,
        launch=Launch(
            **{field.name: getattr(options, field.name) for field in fields(Launch)} | {"sequence_parallel": shared}
        ),
        max_tokens=max(case.setting.max_tokens, int(case.packing.sums(case.samples.num_tokens).max())),
        samples_per_pack=len(case.packing.indices) / case.packing.num_packs,
        global_batch=None if options.fills_packs else options.global_batch,
        vision=None if case.vision is None else case.vision.decision,
    )


def refuse(problems: Sequence[str]) -> None:
    """Raise `UnsupportedPlanError` with all of the problems, if there are any."""
    if problems:
        raise UnsupportedPlanError(join_problems(problems))


def schedule_problems(plan: Decided, framework: str, known: Sequence[str]) -> list[str]:
    """Return a sentence where the framework runs only other schedules."""
    if plan.schedule in known:
        return []
    return [f"{framework} does not run schedule {plan.schedule}: plan with {' or '.join(known)}"]


def cut_problems(plan: Decided, unsupported: frozenset[int], why: str) -> list[str]:
    """Return cuts that the framework cannot make, with the rest of the sentence, and those that the model forbids."""
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
    """Return a sentence for each degree next to dp, pp and tp that the framework does not have."""
    planned = {"cp": dims.cp, "ep": dims.ep, "etp": dims.etp or 1}
    return [
        f"the export to {title} has no {axis} {degree}: plan with {axis} 1"
        for axis, degree in planned.items()
        if degree > 1 and axis not in degrees
    ]


def full_blocks(layer: LayerSpec) -> tuple[RecomputedTier, ...]:
    """The recompute of frameworks that run whole blocks again, and nothing else."""
    return ("full",) if layer.kind == "block" else ()


def export_plan(found: ReloadedPlan, target: Target) -> Exported:
    """The plan in the target's words, with what that costs; or `UnsupportedPlanError` with the reason."""
    case, planned = found.case, found.stages
    target.refuse_lora(case.options.lora)
    can, said = target.can(case.model, case.setting.dims.pp), []
    refuse(degree_problems(case.setting.dims, target.title, can.degrees))
    is_own = isinstance(case.apart, Lanes)
    if is_own and not target.has_own:
        raise UnsupportedPlanError(f"{target.title} has no tower on devices of its own: export to megatron-bridge")
    exported = target.export(decided(found, target.host))
    over_cp = case.vision is not None and case.vision.decision.group == "cp"
    if case.vision is not None and not is_own and not (over_cp and case.model.family in target.shares_over_cp):
        said.append(
            f"{target.title} shares no images over {case.vision.decision.group}: use trimtab.vision.vision_dp_from_plan"
        )
    said += _other_habits(case.options, target)
    text = exported.text
    if target.packs is None:
        ratio = time_without_packs(case, planned)
        text = (
            f"# {target.title} takes single samples, not the plan's packs: the data set takes {ratio:.2f} x as "
            f"long\n{text}"
        )
    return replace(exported, text=text, warnings=(*said, *exported.warnings))


def _other_habits(options: PlanOptions, target: Target) -> list[str]:
    """Return a sentence if the plan priced what another host does by itself."""
    priced, own = options.of_host(), replace(options, host=target.host).of_host()
    pairs = {field.name: (getattr(priced, field.name), getattr(own, field.name)) for field in fields(options)}
    unlike = [
        f"{name} {one} (there {other})" for name, (one, other) in pairs.items() if one != other and name != "host"
    ]
    if not unlike:
        return []
    return [f"{', '.join(unlike)} was priced: plan with --for this framework, or times and memory do not hold"]


def time_without_packs(case: Case, stages: Sequence[Stage]) -> float:
    """Return the predicted time in micro-batches of one sample, as many samples a step, over that of the plan."""
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
    """Return sentences on what the target's own recompute and placement add to the plan; none if it runs as it is."""
    if exported.runs == found.stages:
        return []
    case, runs, planned, sentences = found.case, exported.runs, found.stages, list[str]()
    held, meant = rank_bytes(case, runs), rank_bytes(case, planned)
    rank = max(range(len(held)), key=lambda r: abs(held[r] - meant[r]))
    step_s, planned_s = mean_step_s(case, runs), mean_step_s(case, planned)
    if abs(step_s / planned_s - 1.0) >= 0.0005:
        memory = f", rank {rank} {format_bytes(held[rank])} instead of {format_bytes(meant[rank])}"
        sentences.append(
            f"as it will run, a step takes {format_seconds(step_s)}, not {format_seconds(planned_s)} "
            f"({step_s / planned_s:.3f} x){memory if held[rank] != meant[rank] else ''}: --fit FOLDER writes the best "
            "plan that runs as it says"
        )
    if full := overfull_ranks(case, runs):
        ranks = ", ".join(map(str, full))
        sentences.append(f"as it will run, pipeline rank {ranks} would exceed the plan's memory: use --fit FOLDER")
    return sentences


def fit_plan(found: ReloadedPlan, target: Target) -> PlanDetails:
    """The best plan found that the target can run: packs and degrees unchanged, stages and recompute solved again."""
    case = found.case
    can = target.can(case.model, case.setting.dims.pp)
    planned, runs = found.plan.decisions.schedule.name, can.choices.get("schedule", ())
    if case.setting.dims.pp > 1 and runs and planned not in runs:  # other chunks: other packs a step
        raise PartitionError(f"{target.title} runs {' or '.join(map(str, runs))}, not {planned}: plan again with --for")
    best = best_expressible(case, can)
    if best is None:
        raise PartitionError(
            f"no split of {target.title} fits pp {case.setting.dims.pp}: plan with other degrees, ZeRO or smaller packs"
        )
    note = f"Split again, with the same packs, within what {target.title} can run."
    return replan(found, best, forbidden_cuts=can.forbidden_cuts, note=note)


# -- blocks that a stage holds and recomputes, for frameworks that count layers ----------------------------------------


TIERS: tuple[RecomputedTier, ...] = ("full", "selective")
"""From what holds least to what holds most."""

MEANINGS: Mapping[RecomputedTier, str] = {
    "full": "only its input",
    "selective": "the results of matrix products and attention",
}
"""What a layer holds by each tier, in words."""


def attentions(model: ModelSpec, tower: Tower = "language") -> list[AttentionSpec]:
    return [x.attention for x in model.layers if x.tower == tower and x.attention is not None]


def head_problems(model: ModelSpec, tp: int) -> list[str]:
    """Return what keeps the heads of the language model from being spread over tp ranks."""
    problems = []
    for heads, groups in sorted({(x.num_heads, x.num_kv_heads) for x in attentions(model)}):
        if heads % tp:
            problems.append(f"tp {tp} does not divide the language model's {heads} attention heads")
        elif groups % tp and tp % groups:
            problems.append(f"tp {tp} does not divide the language model's {groups} key-value heads")
    return problems


def padded_heads(model: ModelSpec, tp: int) -> list[tuple[int, int]]:
    """Return the head counts of the vision tower that tp does not divide, each with the next one that it does."""
    counts = sorted({x.num_heads for x in attentions(model, "vision")})
    return [(count, -(-count // tp) * tp) for count in counts if count % tp]


def is_block(model: ModelSpec, index: int, tower: Tower = "language") -> bool:
    return model.layers[index].tower == tower and model.layers[index].kind == "block"


def blocks_of(model: ModelSpec, stage: Stage, tower: Tower = "language") -> tuple[int, ...]:
    """Return the blocks of the tower on the stage, in forward order."""
    return tuple(i for i in range(stage.start, stage.stop) if is_block(model, i, tower))


def recomputed_blocks(model: ModelSpec, stage: Stage, tower: Tower = "language") -> dict[int, RecomputedTier]:
    """Return those that the stage recomputes, each with its tier."""
    return {i: tier for i, tier in tiers_of(stage).items() if is_block(model, i, tower)}


def recompute_first(
    model: ModelSpec, stages: Sequence[Stage], counts: Mapping[Tower, int | None], tier: RecomputedTier = "full"
) -> tuple[Stage, ...]:
    """The stages with recompute of the first blocks of each tower on every one of them: so many, or None for all."""
    return tuple(
        recomputing(
            stage, {i: tier for tower, number in counts.items() for i in blocks_of(model, stage, tower)[:number]}
        )
        for stage in stages
    )


def count_by_tier(stages: Sequence[Stage]) -> Counter[RecomputedTier]:
    """Return the recomputed layers of each tier."""
    return Counter(tier for stage in stages for tier in tiers_of(stage).values())


def lost_tiers(counts: Mapping[RecomputedTier, int], layers: str, instead: str) -> list[str]:
    """Return a sentence for each tier next to full that a framework turns into full."""
    return [
        f"{counts[tier]} {layers} are planned with {tier} recompute (each keeps {MEANINGS[tier]}), and {instead}, "
        "which holds less and takes longer"
        for tier in TIERS[1:]
        if counts.get(tier)
    ]
