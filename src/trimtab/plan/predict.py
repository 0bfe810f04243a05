"""A run that somebody else decided, priced and simulated: its seconds, its memory and why its devices wait.

Nothing is decided here: degrees, batches, stages and recompute are what `GivenRun` says. `trimtab plan` decides.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np

from trimtab.balance.packing import PackResult, pack_samples
from trimtab.costs.bands import Regime
from trimtab.costs.measured.fitted import place_blocks
from trimtab.costs.profile import regime_of
from trimtab.errors import PlanError, refuse_type
from trimtab.options import RecomputedTier
from trimtab.partition.published import even_stages
from trimtab.partition.stages import SplitProblem
from trimtab.plan.decide.case import MemoryBudget, Setting, make_case
from trimtab.plan.decide.compare import Compared, Variant, simulate_run
from trimtab.plan.decide.epoch import Epoch, open_epoch
from trimtab.plan.decide.setting import profile_setting
from trimtab.plan.decide.work import (
    above_all,
    band_sentence,
    host_sentences,
    with_band,
)
from trimtab.plan.options import PADDED, GivenRun
from trimtab.specs import ClusterSpec, ModelSpec, ParallelDims, Profile, SampleTable, Stage, recomputing

_STAGE = re.compile(r"\s*(?:(?P<vision>[0-9]{1,5})v)?(?:\s*\+\s*)?(?:(?P<language>[0-9]{1,5})l)?\s*")
_EVEN = {"even": "spread", "vision-first": "first"}


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Prediction:
    """What a given run is expected to take; `variant` holds its stages, memory, steps and timeline."""

    model: ModelSpec
    cluster: ClusterSpec
    profile: Profile  # its `time_error` is the band of the seconds here, `budget.band` that of the bytes
    num_samples: int
    num_microbatches: int
    budget: MemoryBudget
    variant: Variant
    regime: Regime  # published runs of which its band is known
    notes: tuple[str, ...] = ()  # what its seconds leave out

    @property
    def dims(self) -> ParallelDims:
        return self.profile.dims

    @property
    def mean_step_s(self) -> float:
        return float(self.variant.step_s.mean())

    @property
    def p95_step_s(self) -> float:
        """Return one step of 20 takes longer, for batches are unlike."""
        return float(np.quantile(self.variant.step_s, 0.95))

    @property
    def samples_per_s(self) -> float:
        return self.num_samples / self.variant.epoch_s


def predict_run(model: ModelSpec, samples: SampleTable, cluster: ClusterSpec, run: GivenRun) -> Prediction:
    """Simulate `run` on the data, step by step; see `trimtab predict`.

    Use it to know seconds, bytes and idle of a run before it starts, or to set one next to a plan.

    Raises `PlanError` for what contradicts the cluster or itself, `TrimtabError` for stages that the model does not
    have. A run that does not fit the memory is predicted too, and `variant.fits` says so.

    >>> import numpy as np
    >>> from trimtab import GivenRun, SampleTable, describe, parse_cluster, predict_run
    >>> patches, tokens = np.full(64, 1025), np.full(64, 400)
    >>> samples = SampleTable(num_images=np.ones(64, np.int64), num_patches=patches, num_tokens=tokens,
    ...                       patches_sq=patches**2, patches_windowed=patches**2, source=np.zeros(64, np.int32))
    >>> model, cluster = describe("InternVL-Chat-V1-5"), parse_cluster("8xA100-80GB")
    >>> found = predict_run(model, samples, cluster, GivenRun(pp=4, tp=2, batch=2, num_microbatches=8))
    >>> found.dims.dp, len(found.variant.step_s), found.variant.fits
    (1, 4, False)
    """
    refuse_type("run", run, GivenRun, "GivenRun(dp=4, batch=2)")
    dims = _dims(run, cluster)
    options = run.options(dims)
    epoch = open_epoch(model, samples, options)
    profile, budget = profile_setting(model, cluster, options, dims), MemoryBudget.of(cluster, options)
    made, padded = _batches(epoch, run, dims)
    setting = Setting(
        dims=dims,
        max_patches=made.packing.limits[0],
        max_tokens=made.packing.limits[1],
        num_microbatches=made.schedule.table.shape[2],
        profile=profile,
    )
    case = make_case(model, epoch.samples, cluster, options, budget, setting, made, padded=padded)
    # memory at the largest of the packs there are: their limits may be far above
    work = case.work
    problem = replace(case.problem, work_max=work.max(axis=0))
    stages = _recomputed(problem, _stages(problem, model, run), run)
    ran = Compared(
        name="your run",
        problem=problem,
        packs=f"{made.packing.method}, {'padded' if padded else 'packed'}",
        work=work,
        schedule=made.schedule,
        stages=stages,
        rules=(run.stages or "even", run.recompute or "none"),
    )
    variant = simulate_run(ran, cluster)
    return Prediction(
        model=model,
        cluster=cluster,
        profile=with_band(profile, model, problem.work_mean, cluster),
        num_samples=len(made.packing.indices),
        num_microbatches=problem.num_microbatches,
        budget=budget,
        variant=variant,
        regime=regime_of(profile, model, problem.work_mean, nodes=cluster.num_nodes),
        notes=(
            band_sentence(profile, model, problem.work_mean, cluster),
            *host_sentences(profile, problem.work_mean),
        ),
    )


def parse_stages(text: str) -> list[dict[str, int]]:
    """The blocks of each stage: "24v|8v+10l" is 24 vision blocks, then 8 with 10 language blocks.

    >>> parse_stages("24v|8v+10l|18l")
    [{'vision': 24}, {'vision': 8, 'language': 10}, {'language': 18}]
    """
    found = [_STAGE.fullmatch(stage) for stage in text.split("|")]
    if any(match is None or not any(match.groups()) for match in found):
        raise PlanError(f"{text!r} names no stages: write blocks, as in 24v|8v+10l|18l, or one of {', '.join(_EVEN)}")
    return [
        {tower: int(number) for tower, number in match.groupdict().items() if number is not None}
        for match in found
        if match is not None
    ]


def _dims(run: GivenRun, cluster: ClusterSpec) -> ParallelDims:
    pp, tp, cp = run.pp or 1, run.tp or 1, run.cp or 1
    dp = run.dp or max(1, cluster.num_devices // (pp * tp * cp))
    if dp * pp * tp * cp != cluster.num_devices:
        degrees = f"dp {dp} x pp {pp} x tp {tp}" + (f" x cp {cp}" if cp > 1 else "")
        raise PlanError(f"{degrees} are {dp * pp * tp * cp} devices, and the cluster has {cluster.num_devices}")
    if cluster.devices_per_node % tp:
        raise PlanError(f"tp {tp} does not divide nodes of {cluster.devices_per_node} devices")
    return ParallelDims(dp=dp, pp=pp, tp=tp, cp=cp, ep=run.ep or 1, etp=run.etp)


def _batches(epoch: Epoch, run: GivenRun, dims: ParallelDims) -> tuple[PackResult, bool]:
    """Return its micro-batches and their order, and whether they are padded."""
    if run.batch is None and run.max_tokens is None:
        raise PlanError("give what a micro-batch holds: --batch (samples) or --set max_tokens (of a pack)")
    method = run.method or ("balanced" if run.batch is None else "random")
    if (method in PADDED) != (run.batch is not None):
        needs = "batches of a size: give --batch" if method in PADDED else "packs up to limits: give --set max_tokens"
        raise PlanError(f"method {method} makes {needs}")
    samples = epoch.samples
    made = pack_samples(
        samples,
        limits=(run.max_patches or int(samples.num_patches.sum()) + 1, run.max_tokens)
        if run.max_tokens
        else above_all(samples),
        dp=dims.dp,
        num_microbatches=_num_microbatches(run, dims),
        method=method,
        batch_size=run.batch or 1,
        seed=run.seed,
    )
    return made, run.batch is not None and not run.no_padding


def _num_microbatches(run: GivenRun, dims: ParallelDims) -> int:
    if run.global_batch is None:
        return run.num_microbatches or 1
    if run.batch is None:
        raise PlanError(f"packs hold unlike samples: give num_microbatches, not global_batch {run.global_batch}")
    each = dims.dp * run.batch
    if run.global_batch % each:
        raise PlanError(f"global_batch {run.global_batch} must be {each}: a multiple of dp {dims.dp} x {run.batch}")
    return run.global_batch // each


def _stages(problem: SplitProblem, model: ModelSpec, run: GivenRun) -> tuple[Stage, ...]:
    text, num = run.stages or "even", problem.num_stages * problem.num_chunks
    if text in _EVEN:
        vision: Literal["spread", "first"] = "first" if text == "vision-first" else "spread"
        return even_stages(problem.profile, num, vision=vision, forbidden_cuts=model.forbidden_cuts)
    counts = parse_stages(text)
    if len(counts) != num:
        raise PlanError(f"{text!r} names {len(counts)} stages, and the run has {num}: name each of them once")
    built, stages = place_blocks(model, counts)
    if len(built.layers) != len(model.layers):
        have = {tower: len(model.indices(tower, "block")) for tower in ("vision", "language")}
        raise PlanError(f"{text!r} does not hold all {have['vision']} vision and {have['language']} language blocks")
    return stages


def _recomputed(problem: SplitProblem, stages: Sequence[Stage], run: GivenRun) -> tuple[Stage, ...]:
    text, layers = run.recompute or "none", problem.profile.layers
    if text == "none":
        return tuple(stages)
    chosen: dict[int, RecomputedTier]
    if text in get_args(RecomputedTier):
        chosen = {
            i: tier for tier in get_args(RecomputedTier) if tier == text for i, x in enumerate(layers) if x.tier(tier)
        }
    else:
        chosen = dict.fromkeys(_first_blocks(problem.profile, stages, text), "full")
    return tuple(recomputing(stage, chosen) for stage in stages)


def _first_blocks(profile: Profile, stages: Sequence[Stage], text: str) -> list[int]:
    """Return, for "2,1,0,0", the first two blocks of the first stage and the first of the second."""
    counts = [int(word) if word.strip().isdecimal() else -1 for word in text.split(",")]
    if min(counts) < 0:
        names = ", ".join(("none", *get_args(RecomputedTier)))
        raise PlanError(f"recompute {text!r}: choose one of {names}, or blocks of each stage, as in 2,1,0,0")
    if len(counts) != len(stages):
        raise PlanError(f"recompute {text!r} has {len(counts)} numbers for {len(stages)} stages: give one for each")
    found = []
    for stage, count in zip(stages, counts, strict=True):
        blocks = [i for i in range(stage.start, stage.stop) if profile.layers[i].tier("full")]  # frozen ones have none
        if count > len(blocks):
            raise PlanError(f"recompute {text!r}: stage {stage.index} has only {len(blocks)} blocks, not {count}")
        found += blocks[:count]
    return found
