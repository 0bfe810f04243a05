"""A plan's recompute for Transformers: layer by layer, or the nearest setting of its own.

Layer by layer it is `trimtab.apply_recompute`. Transformers' own switch knows "every n-th layer" (`every_n_layers` of
`activation_checkpointing_kwargs`, in 5.17 `gradient_checkpointing_kwargs`), counted through the vision tower and the
language model alike, from the first block on: tests/torch/test_huggingface_switch.py asks Transformers' own models.
Remote code has one switch for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from trimtab.adapters.blocks import TIERS
from trimtab.adapters.running import Decided, Exported, Target, cost_of_runs, refuse
from trimtab.models.families.known import family_of
from trimtab.options import RecomputedTier
from trimtab.plan.decide.expressible import Expressible, fastest_fitting
from trimtab.plan.file.modules import fold_modules
from trimtab.plan.file.reload import ReloadedPlan
from trimtab.specs import ModelSpec, Stage, recomputing, tiers_of

_APPLY = """from trimtab.runtime.recompute.apply import apply

RECOMPUTE = {{
{tiers}
}}
for granularity, modules in RECOMPUTE.items():
    apply(model, modules, granularity=granularity)  # leave the Trainer's own activation_checkpointing off"""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlainSetting:
    """Recompute as Transformers itself can say it."""

    every_n_layers: int | None  # None: no recompute
    stages: tuple[Stage, ...]

    def arguments(self) -> dict[str, object]:
        """Fields of `TrainingArguments` in Transformers 5.23; in 5.17 they are named gradient_checkpointing*."""
        if self.every_n_layers is None:
            return {"activation_checkpointing": False}
        kwargs: dict[str, object] = {"use_reentrant": False}
        if self.every_n_layers > 1:
            kwargs["every_n_layers"] = self.every_n_layers
        return {"activation_checkpointing": True, "activation_checkpointing_kwargs": kwargs}

    def python(self) -> str:
        return f"TrainingArguments({', '.join(f'{name}={value!r}' for name, value in self.arguments().items())})"


def plain_settings(model: ModelSpec, stages: Sequence[Stage]) -> Iterator[PlainSetting]:
    """Everything that the model's own switch can say: nothing, and every n-th block for every n.

    Blocks count from the model's first, whatever stage they are on.
    """
    blocks = [i for i, layer in enumerate(model.layers) if layer.kind == "block"]
    yield PlainSetting(every_n_layers=None, stages=tuple(replace(stage, recompute=()) for stage in stages))
    for n in range(1, 2 if family_of(model.family).is_remote_code else len(blocks) + 1):
        chosen: dict[int, RecomputedTier] = dict.fromkeys(blocks[::n], "full")
        yield PlainSetting(every_n_layers=n, stages=tuple(recomputing(stage, chosen) for stage in stages))


def export(plan: Decided, _price: float | None) -> Exported:
    """Lines to run once between making the model and training it: every layer that the plan recomputes, by tier."""
    stages, dims = plan.stages, plan.dims
    problems = []
    if len(stages) > 1:
        problems.append(
            f"{len(stages)} stages were planned, and Transformers runs the whole model on every rank: plan with pp 1, "
            "or train by `trimtab train`, which runs stages"
        )
    if dims.cp > 1:
        problems.append(f"cp {dims.cp} was planned, which this export cannot say for Transformers: plan with cp 1")
    refuse(problems)
    warnings = []
    if dims.tp > 1:
        warnings.append(
            f"tp {dims.tp} was planned, and the recompute of single layers does not set it: load the model with "
            f"tp_plan='auto' on {dims.tp} ranks"
        )
    if plan.frozen_towers:
        warnings.append(
            f"the {' and '.join(plan.frozen_towers)} tower is frozen: Transformers' own activation_checkpointing makes "
            "the embeddings' results need gradients, so that in most families a frozen vision tower is recomputed and "
            "back-propagated for nothing; the lines of this export leave it alone"
        )
    chosen = {i: tier for stage in stages for i, tier in sorted(tiers_of(stage).items())}
    named = {tier: [plan.model.layers[i].name for i in chosen if chosen[i] == tier] for tier in TIERS}
    modules = {tier: fold_modules(found) for tier, found in named.items() if found}
    text = "# the plan recomputes nothing: leave activation_checkpointing off"
    if modules:
        text = _APPLY.format(tiers="\n".join(f"    {tier!r}: {list(found)!r}," for tier, found in modules.items()))
    fields = {"recompute": modules, "python": text}
    return Exported(text=text, fields=fields, runs=stages, warnings=tuple(warnings))


def _own_setting(found: ReloadedPlan, exported: Exported) -> Exported:
    """The export, with the nearest setting of Transformers' own beside it, and what that costs."""
    case = found.case
    plains = list(plain_settings(case.model, found.stages))
    nearest = fastest_fitting(case, [plain.stages for plain in plains])
    if nearest is None:
        beside, arguments = "no setting of Transformers' own fits the plan's memory", None
    else:
        plain = plains[nearest]
        cost = "it runs as planned"
        if plain.stages != found.stages:
            cost = str(cost_of_runs(case, plain.stages, found.stages))
        beside = f"without trimtab, the nearest setting of Transformers' own is {plain.python()}: {cost}"
        arguments = plain.arguments()
    return replace(exported, fields={**exported.fields, "training_arguments": arguments}, beside=beside)


TARGET = Target(
    title="Transformers",
    checked_with="Transformers 5.23, its own models and `TrainingArguments`",
    can=lambda model, _pp: Expressible(forbidden_cuts=frozenset(range(1, len(model.layers)))),
    export=export,
    own_setting=_own_setting,
)
