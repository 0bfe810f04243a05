"""Seconds of packs on stages, of steps, and of what a step costs beside its micro-batches."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from trimtab.costs.settings import Efficiency
from trimtab.partition.jitter import StepSpread, spread_steps
from trimtab.partition.simulate import StageTimes, simulate_steps, stage_times
from trimtab.partition.stages import SplitProblem
from trimtab.specs import ClusterSpec, FloatArray, IntArray, Profile, Stage, evaluate
from trimtab.units import format_seconds

_SHORTEST_S = 2.5e-3  # a block's pass in dense text runs that hold; bench/published_small.py has shorter ones


def stage_link(cluster: ClusterSpec) -> float:
    """Bytes per second between stages: neighbours are taken to lie on different nodes, where there are several."""
    return cluster.slowest_link_bytes_per_s * Efficiency().link


def times_of(work: FloatArray, stages: Sequence[Stage], profile: Profile, cluster: ClusterSpec) -> StageTimes:
    """Seconds of every pack on every stage, sends included."""
    return stage_times(profile, stages, work, link_bytes_per_s=stage_link(cluster), latency_s=cluster.latency_s)


def steps_of(times: StageTimes, table: IntArray, stages: Sequence[Stage], problem: SplitProblem) -> FloatArray:
    """(num_steps,) seconds: the slowest rank's pipeline, then gradient exchange and optimizer; nothing overlaps."""
    return simulate_steps(
        times,
        table,
        schedule=problem.schedule,
        num_devices=problem.num_stages,
        all_reduce_s=rank_step_s(problem, stages),
    )


def spread_of(
    work: FloatArray, table: IntArray, step_s: FloatArray, stages: Sequence[Stage], *, on: SplitProblem, at: ClusterSpec
) -> StepSpread:
    """Of steps `step_s`, which `steps_of` found, on devices with the cluster's jitter."""
    return spread_steps(
        times_of(work, stages, on.profile, at),
        table,
        step_s,
        schedule=on.schedule,
        num_devices=on.num_stages,
        stage_devices=on.profile.dims.tp * on.profile.dims.cp,
        jitter=at.jitter,
        all_reduce_s=rank_step_s(on, stages),
    )


def host_sentences(profile: Profile, work: FloatArray) -> tuple[str, ...]:
    """What to know where blocks run so shortly that launching them takes longer, which formulas do not price."""
    blocks = [i for i, layer in enumerate(profile.layers) if layer.kind == "block"]
    forward_s = float(np.mean(evaluate(profile.matrix("forward_s")[blocks], work))) if blocks else 0.0
    if profile.method != "analytic" or not 0 < forward_s < _SHORTEST_S:
        return ()
    return (
        f"A block's forward takes {format_seconds(forward_s)} in the mean. Below {format_seconds(_SHORTEST_S)} hosts "
        "may launch too slowly: published runs took 1.9 to 3.6 times as long. Larger packs then gain more than is "
        "shown; trimtab profile --timed measures it.",
    )


def rank_step_s(problem: SplitProblem, stages: Sequence[Stage]) -> float:
    """Seconds of gradient exchange and optimizer on the pipeline rank that has most of both."""
    devices = problem.order.device
    per_rank = [0.0] * problem.num_stages
    for stage in stages:
        layers = problem.profile.layers[stage.start : stage.stop]
        per_rank[devices[stage.index]] += sum(layer.step_s for layer in layers)
    return max(per_rank)
