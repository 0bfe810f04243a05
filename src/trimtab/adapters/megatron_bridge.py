"""A plan's decisions as assignments to a Megatron-Bridge configuration.

Megatron-Bridge's model providers are Megatron-Core's `TransformerConfig` with more fields, so what a layout cannot say
it cannot say either. Field names checked against megatron-bridge 0.3.1 by tests/integration/test_megatron_launchers.py.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from trimtab.adapters.blocks import recomputed_blocks
from trimtab.adapters.megatron import MegatronExport, megatron_flags, unsupported_cuts
from trimtab.adapters.megatron_recompute import Setting, megatron_ladders
from trimtab.adapters.running import Decided, Exported, Target, full_blocks
from trimtab.plan.decide.expressible import Expressible
from trimtab.specs import ModelSpec, Stage, recomputing

_TRAIN = {"micro_batch_size": "cfg.train", "global_batch_size": "cfg.train", "use_distributed_optimizer": "cfg.ddp"}
_LAYOUT = "cfg.model.pipeline_model_parallel_layout"


def export(plan: Decided, price: float | None) -> Exported:
    """Assignments to a recipe's `cfg`, to run between the recipe that makes it and the training that takes it.

    `cfg.model` is the provider of the whole model. Its vision tower needs no clearing for the Qwen families: it is
    Hugging Face's class, or its configuration is made afresh. Recompute of the tower is not carried: no field says it.
    """
    flags = megatron_flags(plan, price)
    fields = {f"{_TRAIN.get(name, 'cfg.model')}.{name}": setting for name, setting in flags.settings.items()}
    values: dict[str, Setting | list[str] | None] = {
        name: list(setting) if isinstance(setting, tuple) else setting for name, setting in fields.items()
    }
    if _LAYOUT in fields:
        values |= dict.fromkeys(
            ("cfg.model.num_layers_in_first_pipeline_stage", "cfg.model.num_layers_in_last_pipeline_stage")
        )
        values |= dict.fromkeys(
            (
                "cfg.model.account_for_embedding_in_pipeline_split",
                "cfg.model.account_for_loss_in_pipeline_split",
            ),
            False,
        )
    return Exported(
        text="\n".join(f"{name} = {value!r}" for name, value in values.items()),
        fields=fields,
        runs=_without_tower(plan.model, flags.runs),
        warnings=tuple(_warnings(flags, has_layout=_LAYOUT in fields)),
    )


def _without_tower(model: ModelSpec, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """These stages without recompute of the vision tower."""
    return tuple(recomputing(stage, recomputed_blocks(model, stage)) for stage in stages)


def _warnings(flags: MegatronExport, *, has_layout: bool) -> Iterator[str]:
    """Those of the flags that hold here, and what this launcher adds."""
    yield from (w for w in flags.warnings if "launchers that deep-copy" not in w)
    if has_layout:
        yield "recipes that train with pp 1 leave cfg.model.pipeline_dtype None: set it to the weights' dtype"
    if not flags.vision_fields:
        return
    if flags.vision_fields["recompute_granularity"] is not None:
        yield (
            f"recompute of {flags.vision_fields['recompute_num_layers']} vision layers is planned, and a provider has "
            "no field for the tower alone: check the memory of the first rank"
        )
    yield (
        "Nemotron-VL's provider copies the language model's configuration, split included, for its tower; those of the "
        "Qwen families do not"
    )


def _can_run(model: ModelSpec, _pp: int) -> Expressible:
    """As Megatron-Core, without recompute of the vision tower."""

    def ladders(stages: Sequence[Stage]) -> Iterator[list[tuple[Stage, ...]]]:
        for ladder in megatron_ladders(model, stages):
            if all(way == _without_tower(model, way) for way in ladder):
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
