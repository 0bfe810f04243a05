"""Small models with named towers, and stages over them, for the tests of adapters/."""

import itertools

from trimtab.adapters.running import Decided
from trimtab.options import Tower
from trimtab.specs import (
    AttentionSpec,
    ImageCounts,
    LayerKind,
    LayerSpec,
    MlpSpec,
    ModelSpec,
    ParallelDims,
    RecomputeChoice,
    Stage,
)


class NoImages:
    name = "none"

    def count(self, width: int, height: int) -> ImageCounts:
        raise NotImplementedError


def make_model(
    num_vision: int = 4,
    num_language: int = 12,
    *,
    heads: int = 8,
    kv: int = 2,
    vision_heads: int = 8,
    family: str = "qwen2_5_vl",
    tied: bool = False,
    forbidden: frozenset[int] = frozenset(),
    reason: str | None = None,
    experts: int | None = None,
    kinds: bool = False,
) -> ModelSpec:
    """Patch embedding, vision blocks, projector, token embedding, decoder blocks, norm, head.

    With `kinds`, the second half of the decoder blocks is larger.
    """

    def layer(
        name: str, tower: Tower, kind: LayerKind, count: int = 0, groups: int = 0, params: int = 100
    ) -> LayerSpec:
        attention = None
        if count:
            attention = AttentionSpec(
                num_heads=count, num_kv_heads=groups, head_dim=8, value_head_dim=8, causal=tower != "vision"
            )
        return LayerSpec(
            name=name,
            tower=tower,
            kind=kind,
            hidden_size=64,
            output_size=64,
            num_params=params,
            num_matmul_params=params,
            attention=attention,
            mlp=MlpSpec(intermediate_size=128, gated=True, num_experts=experts if tower == "language" else None)
            if count
            else None,
        )

    layers = []
    if num_vision:
        layers.append(layer("visual.patch_embed", "vision", "embed"))
        layers += [
            layer(f"visual.blocks.{i}", "vision", "block", vision_heads, vision_heads) for i in range(num_vision)
        ]
        layers.append(layer("visual.merger", "projector", "projector"))
    layers.append(layer("embed_tokens", "language", "embed", params=5000))
    layers += [
        layer(f"layers.{i}", "language", "block", heads, kv, params=200 if kinds and 2 * i >= num_language else 100)
        for i in range(num_language)
    ]
    layers += [layer("norm", "language", "norm"), layer("lm_head", "language", "head", params=0 if tied else 5000)]
    return ModelSpec(
        name="tiny",
        family=family,
        layers=tuple(layers),
        image_rule=NoImages(),
        vocab_size=1000,
        tied=(("embed_tokens", "lm_head"),) if tied else (),
        forbidden_cuts=forbidden,
        forbidden_cut_reason=reason,
    )


def first_block(model: ModelSpec) -> int:
    return model.indices("language", "block")[0]


def cut(model: ModelSpec, *cuts: int, recompute: dict[int, list[RecomputeChoice]] | None = None) -> tuple[Stage, ...]:
    bounds = [0, *cuts, len(model.layers)]
    chosen = recompute or {}
    return tuple(
        Stage(index=s, start=a, stop=b, recompute=tuple(chosen.get(s, [])))
        for s, (a, b) in enumerate(itertools.pairwise(bounds))
    )


def by_counts(
    model: ModelSpec, *counts: int, recompute: dict[int, list[RecomputeChoice]] | None = None
) -> tuple[Stage, ...]:
    """Stages with these numbers of decoder blocks, vision side on the first, norm and head on the last."""
    at, cuts = first_block(model), []
    for count in counts[:-1]:
        at += count
        cuts.append(at)
    return cut(model, *cuts, recompute=recompute)


def decide(model: ModelSpec, stages: tuple[Stage, ...], **options) -> Decided:
    """Eight micro-batches of 1F1B on two ranks a stage, unless the options say otherwise."""
    given = {"dims": ParallelDims(dp=2, pp=len(stages)), "schedule": "1F1B", "num_microbatches": 8} | options
    return Decided(model=model, stages=stages, **given)
