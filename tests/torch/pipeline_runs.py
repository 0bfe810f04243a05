"""Four gloo ranks that run every pipeline case in one launch; spawned processes call `run_all`. Needs torch."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tiny_packs import TinyPacks, make_tiny_packs

from trimtab.errors import PlanError
from trimtab.plan.layout import PipelineLayout, Recompute
from trimtab.plan.plan import VisionDecision
from trimtab.runtime.data.collate import PackedCollator, label_weights, packed_loss
from trimtab.runtime.pipeline.build import build_pipeline
from trimtab.runtime.pipeline.pipeline import Pipeline
from trimtab.runtime.pipeline.replica import ReplicaTower

WORLD = 4
MICROBATCHES = ((0,), (1, 5), (2,), (3, 4))  # samples of `make_tiny_packs`; 1 and 5 have no image
MIRRORED = MICROBATCHES[::-1]
WITH_VIDEO = ((0, 6), (1,), (6, 5), (3, 4))  # sample 6 is a video, in the Qwen families
TEXT_ALONE = ((1,), (5,), (1, 5), (5,))
FAMILIES = {
    "internvl": "internvl qwen2",
    "internvl tied": "internvl qwen3, rms, qk norm, mask token, pooled by class token, tied",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen2_5_vl tied": "qwen2_5_vl tied, no full blocks",
    "llava": "llava llama",
    "llava taps": "llava mistral, window, three taps, siglip with head",
    "llava tied": "llava llama, biases, tied, mha, own head_dim",
    "qwen2_vl tied": "qwen2_vl tied, sliding",
    "qwen3_vl": "qwen3_vl",
    "gemma3": "gemma3",
    "qwen3_vl_moe": "qwen3_vl_moe some dense",
    "qwen3_vl tied": "qwen3_vl tied, biased, taps out of order",
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """One step of a pipeline beside the same step in one process."""

    family: str
    schedule: str
    cuts: tuple[str, ...]  # the first layer of each stage but the first
    ranks: int = 2  # of the pipeline; 2: each pair of the four runs a case of its own
    dp: int = 1
    chunks: int = 1
    frozen: tuple[str, ...] = ()  # prefixes of parameter names
    recompute: str | None = None
    dtype: str = "float32"
    packs: tuple[tuple[tuple[int, ...], ...], ...] = ()  # of each data-parallel rank
    shared: int | None = None  # data-parallel ranks share the images of so many micro-batches at a time
    replica: str | None = None  # every rank of a pipeline has the tower, whose activations are "kept" or made "again"

    @property
    def name(self) -> str:
        words = [self.family, self.schedule, f"{self.ranks}x{self.dp}", " | ".join(self.cuts)]
        words += [f"frozen {', '.join(self.frozen)}"] if self.frozen else []
        words += [f"recompute {self.recompute}"] if self.recompute else []
        words += [self.dtype] if self.dtype != "float32" else []
        words += [f"images of {self.shared} shared"] if self.shared else []
        words += [f"tower on every rank, {self.replica}"] if self.replica else []
        words += ["video"] if WITH_VIDEO in self.packs else []
        words += ["text"] if self.packs and set(self.packs) == {TEXT_ALONE} else []
        return "; ".join(words)


def layer_groups(layers: Sequence[str], cuts: Sequence[str]) -> tuple[tuple[str, ...], ...]:
    ends = [0, *(layers.index(cut) for cut in cuts), len(layers)]
    return tuple(tuple(layers[a:b]) for a, b in itertools.pairwise(ends))


def make_packs(family: str, dtype: str = "float32") -> TinyPacks:
    packs = make_tiny_packs(FAMILIES[family])
    packs.model.to(getattr(torch, dtype))
    packs.model.train()  # no dropout in these models
    return packs


def collate(packs: TinyPacks, contents: Sequence[Sequence[int]]) -> list[dict[str, Any]]:
    collator = PackedCollator(packs.model.config, vision_in_every_pack=False)
    return [collator([packs.samples[i] for i in pack if i < len(packs.samples)]) for pack in contents]


def freeze(model: torch.nn.Module, prefixes: Sequence[str]) -> None:
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not name.startswith(tuple(prefixes)) if prefixes else True)


def step_alone(model: Any, batches: Sequence[dict[str, Any]]) -> float:
    """Forward and backward in this process, by the model's own forward."""
    denominator = sum(float(label_weights(batch).sum()) for batch in batches)
    losses = []
    for batch in batches:
        logits = model(**{k: v for k, v in batch.items() if k not in ("labels", "loss_weights")}).logits
        loss = packed_loss(logits, batch, denominator=denominator)
        losses.append(loss.detach())
        if loss.requires_grad:
            loss.backward()
    return float(torch.stack(losses).sum())


def errors_of(pipeline: Pipeline, expected: dict[str, torch.Tensor | None]) -> tuple[float, float]:
    """|found - expected| / |expected| of the worst parameter, and of all as one vector.

    Infinite where one has a gradient and one has none. Single parameters are held against a thousandth of the largest
    at least: those of keys' biases are zero but for rounding.
    """
    floor = 1e-3 * max((float(g.norm()) for g in expected.values() if g is not None), default=1.0)
    worst, difference, square = 0.0, 0.0, 0.0
    for name, parameter in pipeline.named_parameters():
        found, right = parameter.grad, expected[name]
        if (found is None) != (right is None):
            return float("inf"), float("inf")
        if right is not None:
            distance, norm = float((found - right).norm()), float(right.norm())
            worst = max(worst, distance / max(norm, floor))
            difference, square = difference + distance**2, square + norm**2
    return worst, (difference / square) ** 0.5 if square else 0.0


@dataclass(frozen=True, kw_only=True)
class Groups:
    """Every group that a case may need, made by all ranks in the same order."""

    pairs: list[Any]
    crossed: list[Any]  # ranks of equal place in the two pairs
    three: Any
    four: Any

    @staticmethod
    def make() -> Groups:
        return Groups(
            pairs=[dist.new_group([0, 1]), dist.new_group([2, 3])],
            crossed=[dist.new_group([0, 2]), dist.new_group([1, 3])],
            three=dist.new_group([0, 1, 2]),
            four=dist.new_group([0, 1, 2, 3]),
        )


def dispatch_by(pooling: int, dp: int = 2) -> VisionDecision:
    return VisionDecision(
        group="dp", degree=dp, exchange="dispatch", pooling=pooling, rule="balanced", objective="time", reduction=None
    )


def on_replica(num_ranks: int, num_microbatches: int, recompute: str | None = None) -> VisionDecision:
    return VisionDecision(
        group="replica",
        degree=num_ranks,
        exchange="gather",
        pooling=num_microbatches,
        rule="balanced",
        objective="time",
        reduction=None,
        recompute=recompute,
    )


def build(packs: TinyPacks, case: Case, num_microbatches: int, rank: int, groups: Groups) -> Pipeline:
    layers = packs.layers
    blocks = [x for x in layers if ".blocks." in x or ".layer" in x]
    layout = PipelineLayout(
        stages=layer_groups(layers, case.cuts),
        schedule=case.schedule,
        num_microbatches=num_microbatches,
        num_chunks=case.chunks,
        recompute=(Recompute(modules=tuple(blocks[::2]), granularity=case.recompute),) if case.recompute else (),
        images=_images_of(case, num_microbatches),
    )
    group = {3: groups.three, 4: groups.four}.get(case.ranks, groups.pairs[rank // 2])
    return build_pipeline(
        packs.model, layout, pp_group=group, dp_group=groups.crossed[rank % 2] if case.dp == 2 else None
    )


def _images_of(case: Case, num_microbatches: int) -> VisionDecision | None:
    if case.replica is not None:
        return on_replica(case.ranks, num_microbatches, "full" if case.replica == "again" else None)
    return None if case.shared is None else dispatch_by(case.shared)


def run_case(case: Case, rank: int, groups: Groups, reference: dict[Any, Any]) -> dict[str, Any]:
    """Errors of this rank, by what they are of."""
    contents = case.packs or (MICROBATCHES,) * case.dp
    key = (case.family, case.frozen, contents, case.dtype)
    if key not in reference:
        packs = make_packs(case.family, case.dtype)
        freeze(packs.model, case.frozen)
        loss = step_alone(packs.model, [x for own in contents for x in collate(packs, own)])
        names = dict(packs.model.named_parameters(remove_duplicate=False))
        reference[key] = loss, {name: p.grad for name, p in names.items()}
    expected_loss, expected = reference[key]

    packs = make_packs(case.family, case.dtype)
    freeze(packs.model, case.frozen)
    whole = set(packs.model.state_dict())
    batches = collate(packs, contents[rank // 2 if case.dp == 2 else 0])
    pipeline = build(packs, case, len(batches), rank, groups)
    result = pipeline.step(batches)
    errors: dict[str, Any] = {
        "gradients": errors_of(pipeline, expected),
        "loss": abs(float(result.loss) - expected_loss) / expected_loss,
    }
    pipeline.step(batches)
    errors["again"] = errors_of(pipeline, expected)  # nothing of the first step is left
    norm = sum(
        float(g.double().square().sum()) for g in {id(g): g for g in expected.values() if g is not None}.values()
    )
    errors["norm"] = abs(float(pipeline.clip_gradients(1e-3 * norm**0.5)) - norm**0.5) / norm**0.5
    scaled = {name: None if g is None else 1e-3 * g for name, g in expected.items()}
    errors["clipped"] = errors_of(pipeline, scaled)
    gathered: list[Any] = [None] * dist.get_world_size(pipeline.pp_group)
    dist.all_gather_object(gathered, list(pipeline.state_dict()), group=pipeline.pp_group)
    errors["names"] = sorted(whole.symmetric_difference(name for names in gathered for name in names))
    dropped = [p for p in packs.model.parameters() if p.is_meta]
    held = {id(p) for p in pipeline.parameters()}
    if isinstance(pipeline.images, ReplicaTower):
        held |= {id(p) for p in pipeline.images.parameters}
    errors["held"] = sum(not p.is_meta and id(p) not in held for p in packs.model.parameters()), len(dropped)
    return errors


def differing_microbatches(rank: int, groups: Groups) -> str:
    """What a rank is told whose neighbour was given other micro-batches."""
    case = Case(family="internvl", schedule="1F1B", cuts=("lm_head",))
    packs = make_packs(case.family)
    pipeline = build(packs, case, 2, rank, groups)
    try:
        pipeline.step(collate(packs, [[0], [1] if rank % 2 else [2]]))
    except PlanError as problem:
        return str(problem)
    return "nothing"


def run_all(rank: int, folder: str, cases: Sequence[Case]) -> None:
    """Runs the cases in turn and writes the errors of each; two-rank cases run two at a time, one on each pair."""
    groups, reference = Groups.make(), {}
    found: dict[str, Any] = {}
    pairs = [case for case in cases if case.ranks == 2 and case.dp == 1]
    for case in (*(x for x in cases if x not in pairs), *pairs[rank // 2 :: 2]):
        if case.ranks == 3 and rank == 3:
            continue
        try:
            found[case.name] = run_case(case, rank, groups, reference)
        except Exception as problem:
            raise RuntimeError(f"in case {case.name}") from problem
    told = differing_microbatches(rank, groups)
    Path(folder, f"found{rank}.json").write_text(json.dumps({"errors": found, "told": told}))
