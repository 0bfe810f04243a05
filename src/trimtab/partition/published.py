"""Splits as others make them: OmniBal's search, the FLOPs rule of Pai's notebook, and launchers' equal counts.

OmniBal's balanced model partitioning: Yao et al. 2025, ICML (arXiv 2407.20761). `search_makespan` needs no radius and
no ranking by proxy.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from trimtab.costs.profile import mean_seconds
from trimtab.errors import PartitionError
from trimtab.options import RecomputedTier
from trimtab.partition.assess import SplitProblem, SplitResult
from trimtab.partition.simulate import StageTimes
from trimtab.partition.stages import recompute_stages
from trimtab.specs import FloatArray, IntArray, LayerSpec, ModelSpec, Profile, Stage, recomputing, stages_between
from trimtab.units import MIB

MAX_CANDIDATES = 5_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class BmpCandidate:
    """Cuts near the anchor's, and what they are ranked by: squared deviations in ms^2 + `sent_mib`, smaller first."""

    cuts: tuple[int, ...]  # layers at which stages 1, 2, ... begin
    spread_ms: float  # standard deviation of the stages' forward times: what the paper's tables print as VAR(fwd_time)
    sent_mib: float  # activations that pass all boundaries, SUM(comm)

    @property
    def rank(self) -> float:
        """Sum over the stages of the squared deviation from their mean forward time, plus what is sent."""
        return (len(self.cuts) + 1) * self.spread_ms**2 + self.sent_mib


@dataclass(frozen=True, slots=True, kw_only=True)
class BmpResult:
    """The fastest of the candidates that were timed."""

    split: SplitResult
    seconds: float
    anchor: tuple[int, ...]
    timed: tuple[tuple[BmpCandidate, float], ...]  # in the order of their rank; infinite where it does not fit
    splits: tuple[SplitResult, ...]  # that were timed, in the order of their rank
    num_candidates: int


def bmp_split(
    problem: SplitProblem, time_stages: Callable[[Sequence[Stage]], float], *, radius: int = 3, num_timed: int = 10
) -> BmpResult:
    """The fastest by `time_stages` of the `num_timed` best-ranked candidates that fit the memory.

    `time_stages` gives seconds of a step: `Evaluator.makespan_of`, or a run on the devices. A candidate's recompute is
    ours (exact, stage by stage); the paper decides it afterwards by hand. Heuristic: the rank adds milliseconds to MiB.
    Raises `PartitionError` where no candidate fits.
    """
    anchor = bmp_anchor(problem)
    candidates = bmp_candidates(problem, anchor, radius=radius)
    splits: list[tuple[SplitResult, float]] = []
    timed: list[tuple[BmpCandidate, float]] = []
    for candidate in candidates:
        if len(splits) == num_timed:
            break
        # recompute where memory asks for it; what does not fit is named, and does not count
        try:
            split = recompute_stages(problem, stages_between((0, *candidate.cuts, len(problem.profile.layers))))
        except PartitionError:
            timed.append((candidate, float("inf")))
            continue
        splits.append((split, time_stages(split.stages)))
        timed.append((candidate, splits[-1][1]))
    if not splits:
        raise PartitionError(f"no split in radius {radius} of the anchor fits: give more, or split_stages")
    # the fastest of those that were timed
    best, seconds = min(splits, key=lambda x: x[1])
    return BmpResult(
        split=best,
        seconds=seconds,
        anchor=anchor,
        timed=tuple(timed),
        splits=tuple(split for split, _ in splits),
        num_candidates=len(candidates),
    )


def bmp_anchor(problem: SplitProblem) -> tuple[int, ...]:
    """Find the cuts nearest to where the forward's seconds, summed from the first layer, reach i / S; greedy."""
    S = problem.num_stages * problem.num_chunks
    before, positions = _forward_before(problem)
    cuts: list[int] = []
    low = 0
    for i in range(1, S):
        # an allowed cut after the last one, leaving one for each stage to come
        free = np.arange(low + 1, len(positions) - (S - i))
        low = int(free[np.abs(before[free] - before[-1] * i / S).argmin()])
        cuts.append(int(positions[low]))
    return tuple(cuts)


def bmp_candidates(problem: SplitProblem, anchor: Sequence[int], *, radius: int) -> list[BmpCandidate]:
    """Return all cuts within `radius` allowed cuts of the anchor's, best rank first; (2 radius + 1)^(S - 1) at most."""
    S = len(anchor) + 1
    count = (2 * radius + 1) ** len(anchor)
    if radius < 0 or count > MAX_CANDIDATES:
        raise PartitionError(f"radius {radius} makes {count} splits: choose a smaller one, at least 0")
    _, positions = _forward_before(problem)
    at = np.searchsorted(positions, anchor)
    ranges = [range(max(1, a - radius), min(len(positions) - 1, a + radius + 1)) for a in at.tolist()]
    listed = list(itertools.product(*ranges))
    inner = np.array(listed, np.int64).reshape(len(listed), S - 1)
    cuts = positions[inner[(np.diff(inner, axis=1) > 0).all(axis=1)]]
    spread, sent = _spread_and_sent(problem, cuts)
    order = np.argsort(S * spread**2 + sent, kind="stable")
    return [
        BmpCandidate(cuts=tuple(cuts[n].tolist()), spread_ms=float(spread[n]), sent_mib=float(sent[n])) for n in order
    ]


def rank_cuts(problem: SplitProblem, cuts: Sequence[int]) -> BmpCandidate:
    """Return any allowed cuts as a candidate."""
    spread, sent = _spread_and_sent(problem, np.array([cuts], np.int64).reshape(1, -1))
    return BmpCandidate(cuts=tuple(cuts), spread_ms=float(spread[0]), sent_mib=float(sent[0]))


def _spread_and_sent(problem: SplitProblem, cuts: IntArray) -> tuple[FloatArray, FloatArray]:
    """Return (n,) ms and MiB of n rows of cuts."""
    forward, _ = mean_seconds(problem.profile, problem.work_mean)
    before = np.concatenate([[0.0], np.cumsum(forward)])
    ends = np.full((len(cuts), 1), len(forward))
    spread = np.diff(before[np.hstack([np.zeros_like(ends), cuts, ends])], axis=1).std(axis=1) * 1e3
    sent = (problem.profile.matrix("output_bytes") @ problem.work_mean)[cuts - 1].sum(axis=1) / MIB
    return spread, sent


def _forward_before(problem: SplitProblem) -> tuple[FloatArray, IntArray]:
    """Return the seconds of the forward before each allowed cut, and the layers at which these lie."""
    L = len(problem.profile.layers)
    positions = np.array([c for c in range(L + 1) if c not in problem.forbidden_cuts], np.int64)
    forward, _ = mean_seconds(problem.profile, problem.work_mean)
    return np.concatenate([[0.0], np.cumsum(forward)])[positions], positions


# -- the FLOPs rule for uneven stages, and the optimum of its own model -----------------------------------------------
#
# Pai-Megatron-Patch's "Uneven pp" notebook (searobbersduck/Pai-Megatron-Patch, examples/qwen2_vl) splits a Qwen2-VL by
# arithmetic: the vision tower and the projector stand whole on the first stage, and language layers are counted so
# that FLOPs come out even. It knows no recompute, no schedule, no time of head and embedding. Here to reproduce its
# figures next to better ones (`trimtab uneven`); plans do not use it.
#
# N vision tokens, h width, f feed-forward width, s decoder tokens, b samples of a micro-batch, V vocabulary; every
# count of FLOPs is forward + backward (x 3).


STATE_BYTES = 16  # of a parameter: bf16 weight and gradient, fp32 weight and Adam's two moments


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenModel:
    """What the rule looks at."""

    vision_tokens: int  # patches of a sample's images: ceil(W / p) x ceil(H / p) for one image
    patch_values: int  # c p^2, the numbers in a patch: channels x pixels (x frames)
    vision_layers: int
    vision_hidden: int
    vision_ffn: int
    llm_layers: int
    llm_hidden: int
    llm_ffn: int
    decoder_tokens: int
    vocab_size: int = 0

    @property
    def vision_flops(self) -> float:
        """Return 3 (2 N h c p^2 + L layer)."""
        N, h = self.vision_tokens, self.vision_hidden
        return 3.0 * (2 * N * h * self.patch_values + self.vision_layers * layer_flops(N, h, self.vision_ffn))

    @property
    def projector_flops(self) -> float:
        """Return 3 x 2 N h_vision h_llm."""
        return 3.0 * 2 * self.vision_tokens * self.vision_hidden * self.llm_hidden

    @property
    def llm_layer_flops(self) -> float:
        return 3.0 * layer_flops(self.decoder_tokens, self.llm_hidden, self.llm_ffn)

    def stage_flops(self, counts: Sequence[int]) -> tuple[float, ...]:
        """Return the FLOPs of each stage with so many language layers; vision tower and projector belong to stage 0."""
        first, *others = (count * self.llm_layer_flops for count in counts)
        return (self.vision_flops + self.projector_flops + first, *others)


@dataclass(frozen=True, slots=True, kw_only=True)
class UnevenSplit:
    """Language layers of each stage; the vision tower and the projector belong to stage 0."""

    counts: tuple[int, ...]
    imbalance: float  # slowest / mean stage - 1, in the rule's own FLOPs


@dataclass(frozen=True, slots=True, kw_only=True)
class StageMemory:
    """The notebook's bytes of one stage: its M_first, M_other or M_last, by their parts."""

    vision_bytes: float = 0.0
    projector_bytes: float = 0.0  # M_projector of its text; its code, and so what it prints, leaves this out
    llm_bytes: float = 0.0
    head_bytes: float = 0.0

    @property
    def total_bytes(self) -> float:
        return self.vision_bytes + self.projector_bytes + self.llm_bytes + self.head_bytes


def uneven_model(model: ModelSpec, *, image: tuple[int, int], decoder_tokens: int) -> UnevenModel:
    """Return what the rule looks at of a described model, for samples of one image of (width, height) pixels.

    Patches are those of the model's own processor. Raises `PartitionError` for a model that the rule has no words for:
    without a vision tower, with layers of several widths, or with experts.
    """
    vision, language = (
        [layer for layer in model.layers if layer.tower == tower and layer.kind == "block"]
        for tower in ("vision", "language")
    )
    # one width for each tower, or the rule does not apply
    embedding = next((layer for layer in model.layers if layer.tower == "vision" and layer.kind != "block"), None)
    if not vision or embedding is None:
        raise PartitionError(f"the FLOPs rule counts a vision tower's blocks, and {model.name} has none: use plan")
    widths = (
        {(layer.hidden_size, _ffn(model, layer)) for layer in vision},
        {(layer.hidden_size, _ffn(model, layer)) for layer in language},
    )
    if any(len(found) > 1 for found in widths):
        raise PartitionError(f"the FLOPs rule knows one width for a tower, and {model.name} has several: use plan")
    # the rule's own words
    ((vision_hidden, vision_ffn),), ((llm_hidden, llm_ffn),) = widths
    return UnevenModel(
        vision_tokens=model.image_rule.count(*image).patches,
        patch_values=embedding.num_matmul_params // vision_hidden,
        vision_layers=len(vision),
        vision_hidden=vision_hidden,
        vision_ffn=vision_ffn,
        llm_layers=len(language),
        llm_hidden=llm_hidden,
        llm_ffn=llm_ffn,
        decoder_tokens=decoder_tokens,
        vocab_size=model.vocab_size,
    )


def flops_split(model: UnevenModel, *, pp: int) -> UnevenSplit:
    """The notebook's answer.

    A stage's share is total / pp. Middle and last stages get ceil(share / layer) layers, the first what is left. When
    vision tower and projector together reach the share, the first stage gets none, the middle ones
    ceil(total / (pp - 1) / layer) and the last what is left. Not optimal: it rounds one way only (`best_split` is).
    """
    _check_pp(model, pp)
    L, layer = model.llm_layers, model.llm_layer_flops
    vision = model.vision_flops + model.projector_flops
    total = vision + L * layer
    # the first stage has room for decoder layers, or none
    if vision < total / pp:
        middle = math.ceil(total / pp / layer)
        counts = (L - middle * (pp - 1), *[middle] * (pp - 1))
    else:
        middle = math.ceil(total / (pp - 1) / layer)
        counts = (0, *[middle] * (pp - 2), L - middle * (pp - 2))
    if min(counts) < 0:
        raise PartitionError(f"the FLOPs rule leaves a stage {min(counts)} of {L} layers: give fewer stages than {pp}")
    return priced_split(model, counts)


def best_split(model: UnevenModel, *, pp: int) -> UnevenSplit:
    """The counts of least maximum FLOPs in the rule's own model (exact; the first stage as full as that allows)."""
    splits = (split_with(model, first, pp=pp) for first in range(model.llm_layers, -1, -1))
    return min(splits, key=lambda split: split.imbalance)


def split_with(model: UnevenModel, first: int, *, pp: int) -> UnevenSplit:
    """Return `first` layers on the first stage, the others as even as whole layers go."""
    _check_pp(model, pp)
    if not 0 <= first <= model.llm_layers:
        raise PartitionError(f"the first stage has 0 to {model.llm_layers} language layers, not {first}")
    each, left = divmod(model.llm_layers - first, pp - 1)
    return priced_split(model, (first, *[each + (i < left) for i in range(pp - 1)]))


def priced_split(model: UnevenModel, counts: Sequence[int]) -> UnevenSplit:
    """Return a split by any counts."""
    flops = model.stage_flops(counts)
    return UnevenSplit(counts=tuple(counts), imbalance=max(flops) * len(flops) / sum(flops) - 1.0)


def stage_memory(
    model: UnevenModel, counts: Sequence[int], *, tp: int = 1, batch: int = 1, fp8: bool = False
) -> tuple[StageMemory, ...]:
    """Count bytes of every stage by the notebook's formulas (GB: 10**9): M_first, M_other for each middle, M_last.

    A layer: 16 bytes for each of (4 h^2 + 2 h f)/tp + (3 h + f)/tp + 6 h parameters, and b s (18 h + 4 f)/tp of
    activations (b s (15 h + 3 f)/tp in FP8); with f = 4 h the 34 b s h / tp of its text. Patch embedding:
    16 c p^2 h + 2 b N c p^2. Projector: 16 h_vision h_llm + 2 b N h_vision. Last stage: 16 h V/tp + 8 b s h/tp.

    It counts one micro-batch, where 1F1B holds pp - stage of them before a stage's first backward.
    Not counted: the token embedding, attention scores, gated feed-forwards' third matrix, buffers.
    """

    def layers(num_layers: int, s: int, h: int, f: int) -> float:
        return num_layers * layer_bytes(batch * s, h, f, tp=tp, fp8=fp8)

    # what lies outside of layers: on the first stage and on the last
    N, c, h = model.vision_tokens, model.patch_values, model.vision_hidden
    embed = STATE_BYTES * c * h + 2 * batch * N * c
    projector = STATE_BYTES * h * model.llm_hidden + 2 * batch * N * h
    head = STATE_BYTES * model.llm_hidden * model.vocab_size
    head += 8 * batch * model.decoder_tokens * model.llm_hidden
    last = len(counts) - 1
    return tuple(
        StageMemory(
            vision_bytes=layers(model.vision_layers, N, h, model.vision_ffn) + embed if stage == 0 else 0.0,
            projector_bytes=projector if stage == 0 else 0.0,
            llm_bytes=layers(count, model.decoder_tokens, model.llm_hidden, model.llm_ffn),
            head_bytes=head / tp if stage == last else 0.0,
        )
        for stage, count in enumerate(counts)
    )


def fitting_tp(
    model: UnevenModel, counts: Sequence[int], memory_bytes: float, *, batch: int = 1, fp8: bool = False
) -> int | None:
    """Return the notebook's tip: the layers stay, and tp is doubled until the fullest stage fits; None: 8 does not."""
    for tp in (1, 2, 4, 8):
        stages = stage_memory(model, counts, tp=tp, batch=batch, fp8=fp8)
        if max(stage.total_bytes for stage in stages) <= memory_bytes:
            return tp
    return None


def draw_times(model: UnevenModel, counts: Sequence[int], *, num_microbatches: int, flops_per_s: float) -> StageTimes:
    """Return seconds of equal micro-batches, if every device did `flops_per_s` and sends took no time."""
    seconds = np.array(model.stage_flops(counts))[:, None] / flops_per_s
    whole = np.repeat(seconds, num_microbatches, axis=1)
    none = np.zeros_like(whole)
    return StageTimes(forward_s=whole / 3, backward_s=whole * 2 / 3, send_forward_s=none, send_backward_s=none)


def layer_bytes(num_tokens: int, hidden: int, ffn: int, *, tp: int, fp8: bool = False) -> float:
    """Return the bytes of one layer for a micro-batch of so many tokens, as `stage_memory` says."""
    h, f = hidden, ffn
    params = (4 * h * h + 2 * h * f) / tp + (3 * h + f) / tp + 6 * h
    return STATE_BYTES * params + num_tokens * ((15 * h + 3 * f) if fp8 else (18 * h + 4 * f)) / tp


def layer_flops(num_tokens: int, hidden: int, ffn: int) -> float:
    """Return 8 N h^2 + 4 h N^2 + 4 N h f: projections, full attention, two-matrix feed-forward."""
    N, h, f = num_tokens, hidden, ffn
    return 8.0 * N * h * h + 4.0 * h * N * N + 4.0 * N * h * f


def _ffn(model: ModelSpec, layer: LayerSpec) -> int:
    if layer.mlp is None or layer.mlp.num_experts:
        raise PartitionError(f"the FLOPs rule knows no experts, as in {layer.name} of {model.name}: use plan")
    return layer.mlp.intermediate_size


def _check_pp(model: UnevenModel, pp: int) -> None:
    if not 2 <= pp <= model.llm_layers:
        raise PartitionError(f"the FLOPs rule makes 2 to {model.llm_layers} stages, not {pp}: use split_stages")


# -- equal block counts, and one switch of recompute ------------------------------------------------------------------


def even_stages(
    profile: Profile,
    num_stages: int,
    *,
    vision: Literal["spread", "first"] = "spread",
    forbidden_cuts: frozenset[int] = frozenset(),
) -> tuple[Stage, ...]:
    """Return equal counts of transformer blocks, earlier stages taking what is left over; all else next to its block.

    Embeddings come first and the head last; a norm, projector or embedding between the towers stays with the blocks
    before it. "spread" counts the blocks of both towers alike, as uniform partitioning of a layer list does; "first"
    keeps the whole vision tower on stage 0 and counts only the language model's blocks, as Megatron-style launchers
    do. A forbidden cut gives way to the nearest allowed one.
    """
    blocks = [
        i
        for i, layer in enumerate(profile.layers)
        if layer.kind == "block" and (vision == "spread" or layer.tower == "language")
    ]
    if not 1 <= num_stages <= len(blocks):
        raise PartitionError(f"{len(blocks)} blocks make 1 to {len(blocks)} stages, not {num_stages}")
    # where the first block of each stage lies
    each, left = divmod(len(blocks), num_stages)
    starts = [i * each + min(i, left) for i in range(1, num_stages)]
    return stages_between(_allowed([blocks[k] for k in starts], len(profile.layers), forbidden_cuts))


def full_recompute(profile: Profile, stages: Sequence[Stage]) -> tuple[Stage, ...]:
    """The stages with full recompute of every layer that can."""
    able: dict[int, RecomputedTier] = {i: "full" for i, layer in enumerate(profile.layers) if layer.tier("full")}
    return tuple(recomputing(stage, able) for stage in stages)


def _allowed(inner: Sequence[int], num_layers: int, forbidden_cuts: frozenset[int]) -> list[int]:
    """Return the cuts 0, ..., num_layers, each inner one at the nearest free allowed place (earlier on ties)."""
    free = [c for c in range(1, num_layers) if c not in forbidden_cuts]
    if len(free) < len(inner):
        raise PartitionError(f"{num_layers} layers allow {len(free) + 1} stages, not {len(inner) + 1}")
    cuts = [0]
    for k, wanted in enumerate(inner):
        # leave enough allowed cuts for those behind
        choices = [c for c in free[: len(free) - (len(inner) - k - 1)] if c > cuts[-1]]
        cuts.append(min(choices, key=lambda c: (abs(c - wanted), c)))
    return [*cuts, num_layers]
