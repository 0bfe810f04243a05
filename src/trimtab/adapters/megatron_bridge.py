"""A plan's decisions as assignments to a Megatron-Bridge configuration.

Megatron-Bridge's model providers are Megatron-Core's `TransformerConfig` with more fields, so what a layout cannot say
it cannot say either. Field names checked against megatron-bridge 0.3.1 by tests/integration/test_megatron_launchers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from trimtab.adapters.megatron import MegatronExport, megatron_flags, unsupported_cuts
from trimtab.adapters.megatron_recompute import Setting, megatron_ladders
from trimtab.adapters.running import Decided, Exported, Target, full_blocks
from trimtab.plan.decide.expressible import Expressible
from trimtab.specs import ModelSpec, RecomputeChoice, Stage

_TRAIN = {"micro_batch_size": "cfg.train", "global_batch_size": "cfg.train", "use_distributed_optimizer": "cfg.ddp"}


def bridge_fields(export: MegatronExport) -> tuple[tuple[str, Setting], ...]:
    """Dotted fields of a `ConfigContainer` and their values.

    `cfg.model` is the provider of the whole model. Its vision tower needs no clearing for the Qwen families: it is
    Hugging Face's class, or its configuration is made afresh. Recompute of the tower is not carried: no field says it.
    """
    return tuple((f"{_TRAIN.get(name, 'cfg.model')}.{name}", setting) for name, setting in export.settings)


def bridge_runs(model: ModelSpec, stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """These stages without recompute of the vision tower."""
    return tuple(replace(stage, recompute=tuple(_language_alone(model, stage))) for stage in stages)


def _language_alone(model: ModelSpec, stage: Stage) -> Iterator[RecomputeChoice]:
    for choice in stage.recompute:
        layers = tuple(i for i in choice.layers if model.layers[i].tower == "language")
        if layers:
            yield replace(choice, layers=layers)


def bridge_python(export: MegatronExport) -> str:
    """Lines to run between the recipe that makes `cfg` and the training that takes it."""
    lines = []
    for name, setting in bridge_fields(export):
        value = list(setting) if isinstance(setting, tuple) else setting
        lines.append(f"{name} = {value!r}")
    if any(name == "pipeline_model_parallel_layout" for name, _ in export.settings):
        lines += [
            "cfg.model.num_layers_in_first_pipeline_stage = None",
            "cfg.model.num_layers_in_last_pipeline_stage = None",
            "cfg.model.account_for_embedding_in_pipeline_split = False",
            "cfg.model.account_for_loss_in_pipeline_split = False",
        ]
    return "\n".join(lines)


def bridge_warnings(export: MegatronExport) -> tuple[str, ...]:
    """Those of the export that hold here, and what this launcher adds."""
    warnings = [w for w in export.warnings if "launchers that deep-copy" not in w]
    if any(name == "pipeline_model_parallel_layout" for name, _ in export.settings):
        warnings.append(
            "recipes that train with pp 1 leave cfg.model.pipeline_dtype None: set it to the weights' dtype"
        )
    if export.vision_fields:
        fields = dict(export.vision_fields)
        if fields["recompute_granularity"] is not None:
            warnings.append(
                f"recompute of {fields['recompute_num_layers']} vision layers is planned, and a provider has no field "
                "for the tower alone: check the memory of the first rank"
            )
        warnings.append(
            "Nemotron-VL's provider copies the language model's configuration, split included, for its tower; those of "
            "the Qwen families do not"
        )
    return tuple(warnings)


def export(plan: Decided, price: float | None) -> Exported:
    """Assignments to a recipe's `cfg`."""
    flags = megatron_flags(plan, price)
    return Exported(
        text=bridge_python(flags),
        fields=dict(bridge_fields(flags)),
        runs=bridge_runs(plan.model, flags.runs),
        warnings=bridge_warnings(flags),
    )


def _can_run(model: ModelSpec, _pp: int) -> Expressible:
    """As Megatron-Core, without recompute of the vision tower."""

    def ladders(stages: Sequence[Stage]) -> Iterator[list[tuple[Stage, ...]]]:
        for ladder in megatron_ladders(model, stages):
            if all(way == bridge_runs(model, way) for way in ladder):
                yield ladder

    return Expressible(
        forbidden_cuts=unsupported_cuts(model),
        tiers=lambda layer: full_blocks(layer) if layer.tower == "language" else (),
        ladders=ladders,
    )


TARGET = Target(
    title="Megatron-Bridge",
    checked_with="megatron-bridge 0.3.1, its sources; megatron-core 0.16.1",
    can=_can_run,
    export=export,
)
