"""A plan's decisions as torchtitan's `ParallelismConfig` and activation checkpointing, or a refusal with its price.

torchtitan splits a model by the names of its children: whole modules, and single entries of a list or dict of layers.
A vision encoder is one module beside the embedding, so no cut goes through it or after it. Checked against torchtitan
0.3.0 by tests/integration/test_torchtitan.py; the names of batch sizes in its main branch, read at b5bcd76, are told
apart when the lines run. Nothing is imported here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from trimtab.adapters.blocks import TIERS, head_problems, lost_tiers, recompute_first
from trimtab.adapters.running import (
    Decided,
    Exported,
    Target,
    cut_problems,
    full_blocks,
    price_without_cuts,
    refuse,
    schedule_problems,
)
from trimtab.costs.profile import has_experts
from trimtab.options import RecomputedTier
from trimtab.plan.decide.expressible import Expressible
from trimtab.specs import LayerSpec, ModelSpec, Stage, tiers_of

_POLICIES: Mapping[RecomputedTier, str] = {"full": "FullAC", "attention": "AttentionAC", "selective": "SelectiveAC"}
_ATTENTION_POLICY = '''from dataclasses import dataclass
from torchtitan.distributed.activation_checkpoint import SelectiveAC

class AttentionAC(SelectiveAC):
    """Keeps what attention gave, and nothing else."""

    @dataclass(kw_only=True, slots=True)
    class Config(SelectiveAC.Config):
        pass

    def get_save_ops(self):
        return {op for op in super().get_save_ops() if "attention" in str(op) or "attn" in str(op)}
'''
_VISION_MODULE = "vision_encoder"  # the child of torchtitan's models that holds tower and projector
FAMILIES = ("qwen3_5", "qwen3_5_moe")  # of torchtitan.models those with a vision encoder that we describe
_SCHEDULES = ("1F1B", "GPipe", "Interleaved1F1B", "ZBVZeroBubble")


def titan_unsupported_cuts(model: ModelSpec) -> frozenset[int]:
    """All cuts before the end of the token embedding: the encoder runs where the embedding is."""
    return frozenset(range(1, model.indices("language", "embed")[0] + 1))


def titan_ladder(model: ModelSpec, stages: Sequence[Stage]) -> list[tuple[Stage, ...]]:
    """Recompute of no block, or of every language block, keeping attention or nothing."""
    return [
        recompute_first(model, stages, {}),
        *(recompute_first(model, stages, {"language": None}, tier) for tier in TIERS[1::-1]),
    ]


def export(plan: Decided, price: float | None) -> Exported:
    """Lines for a config function, after `cfg = ...`: parallelism, local batch size and the recompute policy."""
    model, stages, dims, zero_stage = plan.model, plan.stages, plan.dims, plan.zero_stage
    problems = [
        *_family_problems(model),
        *cut_problems(
            plan,
            titan_unsupported_cuts(model),
            "and torchtitan keeps the vision encoder whole beside the embedding: export with --fit FOLDER"
            + price_without_cuts(price),
        ),
        *schedule_problems(plan, "torchtitan", _SCHEDULES),
    ]
    if dims.ep > 1 and dims.expert_tp > 1:
        problems.append(
            f"ep {dims.ep} and etp {dims.expert_tp} were planned, and torchtitan's experts are whole on their devices: "
            "plan with --set etp=1"
        )
    if model.tied and dims.pp > 1:
        owner, borrower = model.tied[0]
        problems.append(
            f"{borrower} shares the weight of {owner}, and torchtitan refuses tied weights with pipeline parallelism: "
            "plan with pp 1, or untie them"
        )
    refuse([*problems, *head_problems(model, dims.tp)])
    names = titan_names(model)
    parts = [[name for i in range(stage.start, stage.stop) for name in names[i]] for stage in stages]
    warnings: list[str] = []
    recompute, runs = _recompute(model, stages, warnings)
    parallelism: dict[str, int | str | list[list[str]]] = {
        "pipeline_parallel_degree": dims.pp,
        "pipeline_parallel_schedule": plan.schedule,
        "tensor_parallel_degree": dims.tp,
        "context_parallel_degree": dims.cp,
    }
    if has_experts(model):
        parallelism["expert_parallel_degree"] = dims.ep
    if dims.pp > 1:
        parallelism["module_fqns_per_model_part"] = parts
    # replicas hold everything (ZeRO 0), or parameters, gradients and optimizer state are sharded together (ZeRO 3)
    parallelism["data_parallel_replicate_degree"] = dims.dp if zero_stage == 0 else 1
    parallelism["data_parallel_shard_degree"] = 1 if zero_stage == 0 else dims.dp
    if zero_stage in (1, 2) and dims.dp > 1:
        warnings.append(
            f"ZeRO stage {zero_stage} was planned, and torchtitan shards parameters and gradients too: the run holds "
            "less than planned and sends more"
        )
    text = _python(parallelism, plan, recompute)
    return Exported(
        text=text,
        fields={
            "parallelism": parallelism,
            "local_batch_size": plan.samples_per_step // dims.dp,
            "activation_checkpoint": recompute,
            "python": text,
        },
        runs=runs,
        warnings=tuple(warnings),
    )


def _python(parallelism: Mapping[str, object], plan: Decided, recompute: str | None) -> str:
    lines = []
    for name, setting in parallelism.items():
        if isinstance(setting, list):
            parts = "\n".join(f"    {part!r}," for part in setting)
            lines.append(f"cfg.parallelism.{name} = [\n{parts}\n]")
        else:
            lines.append(f"cfg.parallelism.{name} = {setting!r}")
    num_samples = plan.samples_per_step // plan.dims.dp
    lines += [
        'if hasattr(cfg.parallelism, "num_pp_microbatches"):  # after 0.3.0: batches are counted in tokens',
        f"    cfg.parallelism.num_pp_microbatches = {num_samples if plan.dims.pp > 1 else 1}",
        "    cfg.training.num_tokens_per_microbatch_per_dp_rank = cfg.training.max_context_length",
        "else:",
        "    cfg.parallelism.pipeline_parallel_microbatch_size = 1",
        f"    cfg.training.local_batch_size = {num_samples}",
    ]
    if recompute is None:
        lines.append("cfg.activation_checkpoint = None")
    else:
        own = recompute == _POLICIES["attention"]
        given = f"from torchtitan.distributed.activation_checkpoint import {recompute}"
        lines.append(_ATTENTION_POLICY if own else given)
        lines.append(f"cfg.activation_checkpoint = {recompute}.Config()")
    return "\n".join(lines)


def _family_problems(model: ModelSpec) -> list[str]:
    if not model.indices("vision") or model.family in FAMILIES:
        return []
    return [
        f"{model.name} is of the family {model.family}, and torchtitan 0.3 and its main branch have "
        f"vision-language models only of {', '.join(FAMILIES)}: train by `trimtab train`"
    ]


def titan_names(model: ModelSpec) -> list[tuple[str, ...]]:
    """torchtitan's names of what each layer is, by layer number; the whole tower is named once, at its first layer."""
    names: list[tuple[str, ...]] = [() for _ in model.layers]
    tower = [i for i, layer in enumerate(model.layers) if layer.tower != "language"]
    if tower:
        names[tower[0]] = (_VISION_MODULE,)
    for i in model.indices("language", "embed")[:1]:
        names[i] = ("tok_embeddings",)
    for number, i in enumerate(model.indices("language", "block")):
        names[i] = (f"layers.{number}",)
    for i in model.indices("language", "norm"):
        names[i] = ("norm",)
    for i in model.indices("language", "head"):
        names[i] = ("lm_head",)
    return names


def _recompute(model: ModelSpec, stages: Sequence[Stage], warnings: list[str]) -> tuple[str | None, tuple[Stage, ...]]:
    """One policy for every block of every stage; what it adds to the plan, or leaves out of it, is a warning."""
    blocks = set(model.indices("language", "block"))
    chosen = {i: tier for stage in stages for i, tier in tiers_of(stage).items()}
    inside = {i: tier for i, tier in chosen.items() if i in blocks}
    outside = len(chosen) - len(inside)
    if outside:
        warnings.append(
            f"recompute of {outside} layers outside the decoder is planned, and torchtitan's policies wrap only its "
            "decoder blocks: check the memory of the first rank"
        )
    if not inside:
        return None, recompute_first(model, stages, {})
    tiers = Counter(inside.values())
    tier = next(t for t in TIERS if tiers[t])  # which holds no more than any block is planned to
    if tier == "selective":
        warnings.append(
            "the plan's selective recompute keeps the results of matrix products, and torchtitan's SelectiveAC those "
            "of every second one: it holds less and takes longer"
        )
    if len(inside) < len(blocks):
        warnings.append(
            f"recompute of {len(inside)} of {len(blocks)} blocks is planned, and a torchtitan policy wraps all: it "
            "holds less and takes longer"
        )
    del tiers[tier]
    warnings += lost_tiers(tiers, "blocks", f"one torchtitan policy serves all ({_POLICIES[tier]})")
    return _POLICIES[tier], recompute_first(model, stages, {"language": None}, tier)


def _tiers(layer: LayerSpec) -> tuple[RecomputedTier, ...]:
    return ("attention", *full_blocks(layer)) if layer.tower == "language" and layer.kind == "block" else ()


def _can_run(model: ModelSpec, _pp: int) -> Expressible:
    refuse(_family_problems(model))
    return Expressible(
        forbidden_cuts=titan_unsupported_cuts(model),
        tiers=_tiers,
        ladders=lambda stages: [titan_ladder(model, stages)],
        choices={"schedule": _SCHEDULES, "zero_stage": (3, 0)},
        tp_degrees=lambda tp: not head_problems(model, tp),
        degrees=("cp", "ep"),
    )


TARGETS = {
    "torchtitan": Target(
        title="torchtitan",
        checked_with="torchtitan 0.3.0, its own configuration and splitter",
        packs=None,
        can=_can_run,
        export=export,
    )
}
