"""A plan's decisions as Megatron-Core flags, or a refusal with its reason and price.

A layout string is one field a stage, parted by `|`: E embedding, t decoder block, L norm, head and loss; `t*7` repeats.
It has no letter for vision layers: Megatron-Core builds the whole tower and its projector beside the embedding, on the
first stage. Checked against megatron-core 0.16.1 by tests/integration/test_megatron_core.py; nothing is imported here.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from trimtab.adapters.blocks import head_problems, is_block
from trimtab.adapters.megatron_recompute import (
    Setting,
    as_run,
    language_recompute,
    megatron_ladders,
    norm_cuts,
    vision_fields,
    warn_of_neglected,
    warn_of_tied,
)
from trimtab.adapters.running import Decided, Exported, Target, full_blocks, price_without_cuts
from trimtab.errors import UnsupportedPlanError, join_problems
from trimtab.plan.decide.expressible import Expressible
from trimtab.specs import ModelSpec, Stage

_SCHEDULES = ("1F1B", "Interleaved1F1B")


@dataclass(frozen=True, slots=True, kw_only=True)
class MegatronExport:
    """What to pass to a Megatron-LM launcher; flags of the model and of the data are the launcher's own."""

    settings: tuple[tuple[str, Setting], ...]  # Megatron-LM's arguments, named as its parser stores them
    layout: str  # among `settings`, unless there is one stage only
    vision_fields: tuple[tuple[str, int | str | bool | None], ...]  # to set on the vision tower's TransformerConfig
    runs: tuple[Stage, ...]  # what Megatron-Core makes of the plan: norm beside the head, recompute as it knows it
    warnings: tuple[str, ...]

    @property
    def flags(self) -> tuple[str, ...]:
        words: list[str] = []
        for name, setting in self.settings:
            words.append("--" + name.replace("_", "-"))
            if isinstance(setting, tuple):
                words += setting
            elif setting is not True:
                words.append(str(setting))
        return tuple(words)

    def shell(self) -> str:
        """The flags as lines of a shell command, quoted."""
        lines: list[str] = []
        for word in self.flags:
            if word.startswith("--"):
                lines.append(word)
            else:
                lines[-1] += f" {shlex.quote(word)}"
        return " \\\n".join(lines)

    def vision_python(self) -> str:
        """The assignments that belong behind the copy of the language model's config, one a line."""
        return "\n".join(f"vision_config.{name} = {value!r}" for name, value in self.vision_fields)


def unsupported_cuts(model: ModelSpec) -> frozenset[int]:
    """Cuts that no Megatron-Core layout makes; a split that forbids them, too, can be exported.

    All cuts before the end of the token embedding, since tower, projector and embedding stay on the first stage, and
    the one between the final norm and the head.
    """
    embed = model.indices("language", "embed")[0]
    return frozenset((*range(1, embed + 1), *norm_cuts(model)))


def megatron_flags(plan: Decided, price: float | None = None) -> MegatronExport:
    """Flags that make Megatron-Core run these stages, or `UnsupportedPlanError` with everything it cannot express.

    A pack is one micro-batch, hence a micro-batch size of 1. Degrees come out as flags, except dp, which Megatron
    derives from the number of processes.
    """
    model, stages, dims = plan.model, plan.stages, plan.dims
    problems = [
        *_schedule_problems(len(stages), dims.pp, plan.schedule, plan.num_microbatches, plan.num_chunks),
        *_tower_problems(model, stages, price),
        *_forbidden_problems(model, stages),
        *head_problems(model, dims.tp),
    ]
    if plan.zero_stage > 1:
        problems.append(
            f"ZeRO stage {plan.zero_stage} was planned, and Megatron-Core's distributed optimizer shards optimizer "
            "state alone: plan with ZeRO stage 1"
        )
    if problems:
        raise UnsupportedPlanError(join_problems(problems))

    counts = tuple(sum(is_block(model, i) for i in range(stage.start, stage.stop)) for stage in stages)
    layout = layout_of(counts)
    warnings: list[str] = []
    recompute = language_recompute(model, stages, counts, warnings)
    vision = vision_fields(model, stages[0], dims, warnings)
    warn_of_neglected(model, stages, warnings)
    if dims.pp > 1:
        warn_of_tied(model, dims.tp, warnings)
    if vision and plan.num_chunks > 1:
        warnings.append(
            "Megatron-LM's vision-language examples know no interleaving (NVIDIA/Megatron-LM#2866): make sure that "
            "your launcher builds the vision tower in the first chunk of the first rank alone"
        )
    degrees: dict[str, Setting] = {
        "tensor_model_parallel_size": dims.tp,
        "pipeline_model_parallel_size": dims.pp,
    }
    if dims.cp > 1:
        degrees["context_parallel_size"] = dims.cp
    rest: dict[str, Setting] = {
        **recompute,
        "micro_batch_size": 1,
        "global_batch_size": dims.dp * plan.num_microbatches,
    }
    if plan.zero_stage == 1:
        rest["use_distributed_optimizer"] = True
    split: dict[str, Setting] = {"pipeline_model_parallel_layout": layout} if dims.pp > 1 else {}
    return MegatronExport(
        settings=tuple({**degrees, **split, **rest}.items()),
        layout=layout,
        vision_fields=vision,
        runs=as_run(model, stages, recompute),
        warnings=tuple(warnings),
    )


def export(plan: Decided, price: float | None) -> Exported:
    """The flags as lines of a shell command; the vision tower's fields beside them."""
    flags = megatron_flags(plan, price)
    beside = None
    if flags.vision_fields:
        beside = f"set on the vision tower's config, or it may be truncated:\n{flags.vision_python()}"
    return Exported(
        text=flags.shell(),
        fields={
            "flags": flags.flags,
            "layout": flags.layout,
            "vision_config": dict(flags.vision_fields),
        },
        runs=flags.runs,
        warnings=flags.warnings,
        beside=beside,
    )


def can_run(model: ModelSpec, _pp: int) -> Expressible:
    """What Megatron-Core and the launchers that hand on all of its settings can run."""
    return Expressible(
        forbidden_cuts=unsupported_cuts(model), tiers=full_blocks, ladders=partial(megatron_ladders, model)
    )


TARGET = Target(title="Megatron-Core", checked_with="megatron-core 0.16.1, its own classes", can=can_run, export=export)


# -- what is refused ------------------------------------------------------------------------------------------------


def _schedule_problems(num_stages: int, pp: int, schedule: str, num_microbatches: int, num_chunks: int) -> list[str]:
    problems: list[str] = []
    if schedule not in _SCHEDULES:
        problems.append(
            f"schedule {schedule} was planned, and Megatron-Core runs {' or '.join(_SCHEDULES)}: plan with one of them"
        )
    elif (schedule == "Interleaved1F1B") != (num_chunks > 1):
        problems.append(
            f"schedule {schedule} was planned with {num_chunks} chunks a rank, and 1F1B has one, Interleaved1F1B more: "
            "change the schedule or the chunks"
        )
    if num_stages != pp * num_chunks:
        problems.append(
            f"{num_stages} stages were planned, and pp {pp} with {num_chunks} chunks a rank has {pp * num_chunks}: "
            "make them equal"
        )
    if num_chunks > 1 and pp == 1:
        problems.append(
            f"{num_chunks} chunks on one rank were planned, and Megatron-Core interleaves over ranks: use pp > 1"
        )
    elif num_chunks > 1 and num_microbatches % pp:
        problems.append(
            f"{num_microbatches} micro-batches were planned, and Megatron-Core interleaves them in groups of pp {pp}: "
            f"plan a multiple of {pp}"
        )
    return problems


def _forbidden_problems(model: ModelSpec, stages: Sequence[Stage]) -> list[str]:
    cuts = sorted(model.forbidden_cuts.difference(unsupported_cuts(model)) & {stage.start for stage in stages})
    if not cuts:
        return []
    before = ", ".join(model.layers[cut].name for cut in cuts)
    reason = model.forbidden_cut_reason or "the plan was made without these cuts"
    return [f"the plan cuts stages before {before}, which the model forbids ({reason}): move the cut"]


def _tower_problems(model: ModelSpec, stages: Sequence[Stage], price: float | None) -> list[str]:
    cuts = sorted(unsupported_cuts(model).difference(norm_cuts(model)) & {stage.start for stage in stages})
    if not cuts:
        return []
    before = ", ".join(model.layers[cut].name for cut in cuts)
    cost = price_without_cuts(price, then="; it chooses others")
    return [
        f"the plan cuts stages before {before}, and a Megatron-Core layout has no letter for vision layers, so that "
        f"vision tower, projector and embedding share the first stage: export with --fit FOLDER, or plan with --for "
        f"megatron{cost}, or train with a runtime that makes them"
    ]


def layout_of(counts: Sequence[int]) -> str:
    """The layout of stages with so many decoder blocks.

    >>> layout_of((0, 1, 27))
    'E|t|t*27L'
    """
    return "E" + "|".join("t" * count if count < 2 else f"t*{count}" for count in counts) + "L"
