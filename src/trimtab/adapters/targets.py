"""The frameworks that a plan's stages and recompute can be exported to: what each can run, and its export."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from trimtab.adapters.deepspeed import deepspeed_export, deepspeed_runs
from trimtab.adapters.huggingface import huggingface_export, plain_settings
from trimtab.adapters.megatron import MegatronExport, megatron_flags, unsupported_cuts
from trimtab.adapters.megatron_bridge import bridge_fields, bridge_python, bridge_runs, bridge_warnings
from trimtab.adapters.megatron_recompute import megatron_ladders
from trimtab.adapters.ms_swift import swift_arguments, swift_runs, swift_shell, swift_warnings
from trimtab.adapters.pai_megatron import pai_export, pai_ladder, pai_splits
from trimtab.adapters.running import Exported, Target, cost_of_runs
from trimtab.adapters.torch_pipelining import pipelining_export
from trimtab.adapters.torchtitan import titan_export, titan_ladder, titan_unsupported_cuts
from trimtab.adapters.xtuner_fsdp import xtuner_export, xtuner_ladder
from trimtab.plan.decide.expressible import Expressible, fastest_fitting
from trimtab.plan.file.reload import ReloadedPlan
from trimtab.specs import LayerSpec, ModelSpec, Stage

# -- the frameworks -------------------------------------------------------------------------------------------------


def _planned(found: ReloadedPlan, *more: str) -> dict[str, Any]:
    """What every export of stages takes of a plan, and `more` of its options."""
    case = found.case
    return {
        "model": case.model,
        "stages": found.stages,
        "dims": case.setting.dims,
        "schedule": case.options.schedule,
        "num_microbatches": case.setting.num_microbatches,
        **{name: getattr(case.options, name) for name in more},
    }


def megatron_export(found: ReloadedPlan, price: float | None = None) -> MegatronExport:
    """The plan's flags, which Megatron-Core's launchers share."""
    return megatron_flags(**_planned(found, "num_chunks", "zero_stage"), price=price)


def _to_megatron(found: ReloadedPlan, price: float | None) -> Exported:
    export = megatron_export(found, price)
    beside = None
    if export.vision_fields:
        beside = f"set on the vision tower's config, or it may be truncated:\n{export.vision_python()}"
    return Exported(
        text=export.shell(),
        fields={
            "flags": export.flags,
            "simple_flags": export.simple_flags,
            "layout": export.layout,
            "vision_config": dict(export.vision_fields),
        },
        runs=export.runs,
        warnings=export.warnings,
        beside=beside,
    )


def _to_bridge(found: ReloadedPlan, price: float | None) -> Exported:
    export = megatron_export(found, price)
    return Exported(
        text=bridge_python(export),
        fields=dict(bridge_fields(export)),
        runs=bridge_runs(found.case.model, export.runs),
        warnings=bridge_warnings(export),
    )


def _to_swift(found: ReloadedPlan, price: float | None) -> Exported:
    export = megatron_export(found, price)
    return Exported(
        text=swift_shell(export),
        fields=dict(swift_arguments(export)),
        runs=swift_runs(found.case.model, export.runs),
        warnings=swift_warnings(export, len(found.case.model.indices("vision", "block"))),
    )


def _to_pai(found: ReloadedPlan, price: float | None) -> Exported:
    export = pai_export(**_planned(found, "num_chunks", "zero_stage"), price=price)
    return Exported(
        text=export.shell(),
        fields={"environment": dict(export.environment), "arguments": export.arguments},
        runs=export.runs,
        warnings=export.warnings,
    )


def _to_torchtitan(found: ReloadedPlan, price: float | None) -> Exported:
    export = titan_export(**_planned(found, "zero_stage"), price=price)
    return Exported(
        text=export.python(),
        fields={
            "parallelism": dict(export.parallelism),
            "local_batch_size": export.local_batch_size,
            "activation_checkpoint": export.recompute,
            "python": export.python(),
        },
        runs=export.runs,
        warnings=export.warnings,
    )


def _to_deepspeed(found: ReloadedPlan, _price: float | None) -> Exported:
    export = deepspeed_export(**_planned(found, "num_chunks", "zero_stage"))
    return Exported(
        text=export.python,
        fields={"parts": export.parts, "config": export.config, "python": export.python},
        runs=export.runs,
        warnings=export.warnings,
    )


def _to_torch_pipelining(found: ReloadedPlan, _price: float | None) -> Exported:
    export = pipelining_export(**_planned(found, "num_chunks"))
    return Exported(text=export.json(), fields=export.as_dict(), runs=found.stages, warnings=export.warnings)


def _to_xtuner(found: ReloadedPlan, _price: float | None) -> Exported:
    case = found.case
    export = xtuner_export(
        model=case.model, stages=found.stages, dims=case.setting.dims, zero_stage=case.options.zero_stage
    )
    return Exported(
        text=export.python(),
        fields={"fsdp_config": dict(export.fields), "python": export.python()},
        runs=export.runs,
        warnings=export.warnings,
    )


def _to_huggingface(found: ReloadedPlan, _price: float | None) -> Exported:
    case = found.case
    export = huggingface_export(
        model=case.model, stages=found.stages, dims=case.setting.dims, frozen_towers=case.options.frozen_towers
    )
    plains = list(plain_settings(case.model, found.stages))
    nearest = fastest_fitting(case, [plain.stages for plain in plains])
    arguments = None if nearest is None else plains[nearest].arguments()
    beside = "no setting of Transformers' own fits the plan's memory"
    if nearest is not None:
        plain = plains[nearest]
        cost = "it runs as planned"
        if plain.stages != found.stages:
            cost = str(cost_of_runs(case, plain.stages, found.stages))
        beside = f"without trimtab, the nearest setting of Transformers' own is {plain.python()}: {cost}"
    return Exported(
        text=export.python(),
        fields={"recompute": export.modules, "python": export.python(), "training_arguments": arguments},
        runs=found.stages,
        warnings=export.warnings,
        beside=beside,
    )


# -- what each can run ----------------------------------------------------------------------------------------------


def _full_blocks(layer: LayerSpec) -> tuple[str, ...]:
    return ("full",) if layer.kind == "block" else ()


def _full_decoder(layer: LayerSpec) -> tuple[str, ...]:
    return _full_blocks(layer) if layer.tower == "language" else ()


def _titan_decoder(layer: LayerSpec) -> tuple[str, ...]:
    return ("attention", *_full_decoder(layer)) if _full_decoder(layer) else ()


def _megatron_can(model: ModelSpec, _pp: int) -> Expressible:
    return Expressible(
        forbidden_cuts=unsupported_cuts(model), tiers=_full_blocks, ladders=partial(megatron_ladders, model)
    )


def _bridge_can(model: ModelSpec, _pp: int) -> Expressible:
    def ladders(stages: Sequence[Stage]) -> Iterator[list[tuple[Stage, ...]]]:
        for ladder in megatron_ladders(model, stages):
            if all(way == bridge_runs(model, way) for way in ladder):
                yield ladder

    return Expressible(forbidden_cuts=unsupported_cuts(model), tiers=_full_decoder, ladders=ladders)


def _pai_can(model: ModelSpec, pp: int) -> Expressible:
    cuts = unsupported_cuts(model)
    return Expressible(
        forbidden_cuts=cuts,
        splits=pai_splits(model, pp),
        tiers=_full_blocks,
        ladders=lambda stages: [pai_ladder(model, stages)],
    )


def _titan_can(model: ModelSpec, _pp: int) -> Expressible:
    return Expressible(
        forbidden_cuts=titan_unsupported_cuts(model),
        tiers=_titan_decoder,
        ladders=lambda stages: [titan_ladder(model, stages)],
    )


def _xtuner_can(model: ModelSpec, _pp: int) -> Expressible:
    return Expressible(forbidden_cuts=_every_cut(model), tiers=_full_blocks, ladders=partial(xtuner_ladder, model))


def _every_cut(model: ModelSpec) -> frozenset[int]:
    return frozenset(range(1, len(model.layers)))


TARGETS: Mapping[str, Target] = {
    "megatron": Target(title="Megatron-Core", can=_megatron_can, export=_to_megatron),
    "megatron-bridge": Target(title="Megatron-Bridge", can=_bridge_can, export=_to_bridge),
    "ms-swift": Target(title="ms-swift", can=_megatron_can, export=_to_swift),
    "pai-megatron": Target(title="Pai-Megatron-Patch", can=_pai_can, export=_to_pai),
    "torchtitan": Target(title="torchtitan", can=_titan_can, export=_to_torchtitan),
    "deepspeed": Target(
        title="DeepSpeed",
        can=lambda _model, _pp: Expressible(
            tiers=lambda _layer: ("full",), ladders=lambda stages: [[deepspeed_runs(stages)]]
        ),
        export=_to_deepspeed,
    ),
    "xtuner-fsdp": Target(title="xtuner", can=_xtuner_can, export=_to_xtuner),
    "huggingface": Target(
        title="Transformers",
        can=lambda model, _pp: Expressible(forbidden_cuts=_every_cut(model)),
        export=_to_huggingface,
    ),
    "torch-pipelining": Target(
        title="torch.distributed.pipelining", can=lambda _model, _pp: Expressible(), export=_to_torch_pipelining
    ),
}
