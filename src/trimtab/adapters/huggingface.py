"""A plan's recompute for Transformers: layer by layer, or the nearest setting of its own.

Layer by layer it is `trimtab.apply_recompute`. Transformers' own switch knows "every n-th layer" (`every_n_layers` of
`activation_checkpointing_kwargs`, in 5.17 `gradient_checkpointing_kwargs`), counted through the vision tower and the
language model alike, from the first block on: tests/torch/test_huggingface_switch.py asks Transformers' own models.
Remote code has one switch for all layers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from trimtab.adapters.blocks import TIERS, recomputing
from trimtab.errors import UnsupportedPlanError, join_problems
from trimtab.models.families.known import family_of
from trimtab.options import RecomputedTier, Tower
from trimtab.plan.file.modules import fold_modules
from trimtab.specs import ModelSpec, ParallelDims, Stage

_APPLY = """from trimtab.runtime.recompute.apply import apply

RECOMPUTE = {{
{tiers}
}}
for granularity, modules in RECOMPUTE.items():
    apply(model, modules, granularity=granularity)  # leave the Trainer's own activation_checkpointing off"""


@dataclass(frozen=True, slots=True, kw_only=True)
class HuggingfaceExport:
    """Modules to recompute by tier, ranges folded, as `runtime.recompute.apply` takes them."""

    modules: dict[RecomputedTier, tuple[str, ...]]
    warnings: tuple[str, ...]

    def python(self) -> str:
        """Lines to run once between making the model and training it."""
        if not self.modules:
            return "# the plan recomputes nothing: leave activation_checkpointing off"
        tiers = "\n".join(f"    {tier!r}: {list(names)!r}," for tier, names in self.modules.items())
        return _APPLY.format(tiers=tiers)


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
    yield PlainSetting(every_n_layers=None, stages=tuple(recomputing(stage, ()) for stage in stages))
    for n in range(1, 2 if family_of(model.family).is_remote_code else len(blocks) + 1):
        chosen = blocks[::n]
        runs = tuple(recomputing(stage, (i for i in chosen if stage.start <= i < stage.stop)) for stage in stages)
        yield PlainSetting(every_n_layers=n, stages=runs)


def huggingface_export(
    *, model: ModelSpec, stages: Sequence[Stage], dims: ParallelDims, frozen_towers: Sequence[Tower] = ()
) -> HuggingfaceExport:
    """Every layer that the plan recomputes, by tier; `UnsupportedPlanError` for a plan with a pipeline."""
    problems = []
    if len(stages) > 1:
        problems.append(
            f"{len(stages)} stages were planned, and Transformers runs the whole model on every rank: plan with pp 1, "
            "or train by `trimtab train`, which runs stages"
        )
    if dims.cp > 1:
        problems.append(f"cp {dims.cp} was planned, which this export cannot say for Transformers: plan with cp 1")
    if problems:
        raise UnsupportedPlanError(join_problems(problems))
    warnings = []
    if dims.tp > 1:
        warnings.append(
            f"tp {dims.tp} was planned, and the recompute of single layers does not set it: load the model with "
            f"tp_plan='auto' on {dims.tp} ranks"
        )
    if frozen_towers:
        warnings.append(
            f"the {' and '.join(frozen_towers)} tower is frozen: Transformers' own activation_checkpointing makes the "
            "embeddings' results need gradients, so that in most families a frozen vision tower is recomputed and "
            "back-propagated for nothing; the lines of this export leave it alone"
        )
    names = [layer.name for layer in model.layers]
    chosen: dict[RecomputedTier, list[str]] = {tier: [] for tier in TIERS}
    for stage in stages:
        for choice in stage.recompute:
            chosen[choice.tier] += [names[i] for i in choice.layers]
    return HuggingfaceExport(
        modules={tier: fold_modules(found) for tier, found in chosen.items() if found}, warnings=tuple(warnings)
    )
