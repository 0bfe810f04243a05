"""The simulator against torch's own schedules on four gloo processes, every block sleeping for given seconds.

Seconds of stages: InternVL-Chat-V1-5 on A100-80 tp 2 by formula, scaled so that a mean forward takes 60 ms; the host
takes about one for each block on a busy machine, which the simulator does not know. The message's cost is measured
first and given to the simulator as its latency. Best of three steps, taken in rounds over all scenarios.
Run: python bench/simulator_against_torch.py   (six minutes, most of it asleep)
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import numpy as np

from injected_stages import Run, ping_pong_s, run_steps, spawn
from partition import LINK_BYTES_PER_S, draw_work, parameter_stages, problem_of, profile_of
from trimtab.options import ScheduleName
from trimtab.partition.published import even_stages
from trimtab.partition.search import Evaluator, search_makespan
from trimtab.partition.simulate import StageTimes, block_costs, simulate, stage_times
from trimtab.partition.stages import recompute_stages, split_stages
from trimtab.specs import FloatArray, Profile, Stage

DEVICES, FORWARD_S, ROUNDS = 4, 0.060, 3
PROFILE = profile_of(93, memory_bytes=1e15)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    name: str
    schedule: ScheduleName
    times: StageTimes
    num_chunks: int = 1


def scaled(times: StageTimes) -> StageTimes:
    factor = FORWARD_S / times.forward_s.mean()
    assert times.weight_s is not None
    return replace(
        times,
        forward_s=times.forward_s * factor,
        backward_s=times.backward_s * factor,
        weight_s=times.weight_s * factor,
    )


def of(profile: Profile, stages: tuple[Stage, ...], work: FloatArray) -> StageTimes:
    return scaled(stage_times(profile, stages, work))


def lognormal(times: StageTimes, spread: float, seed: int) -> StageTimes:
    """Every micro-batch longer or shorter by a factor of its own on all stages."""
    factor = np.random.default_rng(seed).lognormal(-(spread**2) / 2, spread, times.forward_s.shape[1])
    assert times.weight_s is not None
    return replace(
        times,
        forward_s=times.forward_s * factor,
        backward_s=times.backward_s * factor,
        weight_s=times.weight_s * factor,
    )


def by_sizes(sizes: list[int]) -> tuple[Stage, ...]:
    """Stages of so many of the 93 blocks; embeddings, projector and head lie beside their neighbours."""
    blocks = [i for i, x in enumerate(PROFILE.layers) if x.kind == "block"]
    starts = [0, *(blocks[n] for n in np.cumsum(sizes[:-1]).tolist()), len(PROFILE.layers)]
    return tuple(Stage(index=i, start=a, stop=b) for i, (a, b) in enumerate(itertools.pairwise(starts)))


def scenarios() -> list[Scenario]:
    one = draw_work(1, 8, seed=1).max(axis=(0, 1))
    eight, four = np.tile(one, (8, 1)), np.tile(one, (4, 1))

    def exact(m: int, schedule: ScheduleName = "1F1B", chunks: int = 1) -> tuple[Stage, ...]:
        problem = problem_of(PROFILE, np.tile(one, (1, m, 1)), DEVICES, m)
        return split_stages(replace(problem, schedule=schedule, num_chunks=chunks)).stages

    few = problem_of(PROFILE, np.tile(one, (1, 4, 1)), DEVICES, 4)
    searched = search_makespan(Evaluator(few, np.tile(one, (1, 4, 1)), link_bytes_per_s=LINK_BYTES_PER_S)).split.stages
    real = profile_of(93)
    capped = problem_of(real, np.tile(one, (1, 8, 1)), DEVICES, 8)
    recomputed = recompute_stages(capped, even_stages(real, DEVICES)).stages
    varied = of(PROFILE, exact(8), eight)
    return [
        Scenario(name="searched, m 4", schedule="1F1B", times=of(PROFILE, searched, four)),
        Scenario(name="least slowest stage, m 4", schedule="1F1B", times=of(PROFILE, exact(4), four)),
        Scenario(name="22,23,24,24, m 4", schedule="1F1B", times=of(PROFILE, by_sizes([22, 23, 24, 24]), four)),
        Scenario(name="least slowest stage, m 8", schedule="1F1B", times=varied),
        Scenario(name="equal parameters", schedule="1F1B", times=of(PROFILE, parameter_stages(PROFILE, 4), eight)),
        Scenario(
            name="ViT on stage 0", schedule="1F1B", times=of(PROFILE, even_stages(PROFILE, 4, vision="first"), eight)
        ),
        Scenario(name="even, recompute", schedule="1F1B", times=of(real, recomputed, eight)),
        Scenario(name="lognormal 0.4", schedule="1F1B", times=lognormal(varied, 0.4, 1)),
        Scenario(name="lognormal 0.6", schedule="1F1B", times=lognormal(varied, 0.6, 2)),
        Scenario(name="lognormal 0.4", schedule="GPipe", times=lognormal(varied, 0.4, 3)),
        Scenario(
            name="lognormal 0.4",
            schedule="Interleaved1F1B",
            times=lognormal(of(PROFILE, exact(8, "Interleaved1F1B", 2), eight), 0.4, 4),
            num_chunks=2,
        ),
        Scenario(name="lognormal 0.4", schedule="ZBH1", times=lognormal(varied, 0.4, 5)),
        Scenario(
            name="lognormal 0.4",
            schedule="ZBVZeroBubble",
            times=lognormal(of(PROFILE, exact(8, "ZBVZeroBubble", 2), eight), 0.4, 6),
            num_chunks=2,
        ),
    ]


def measure(rank: int, runs: list[Run]) -> tuple[float, list[float]]:
    latency_s = ping_pong_s(rank)
    rounds = [[run_steps(run, rank, 1)[0][0] for run in runs] for _ in range(ROUNDS)]
    return latency_s, np.min(rounds, axis=0).tolist()


def main() -> None:
    every = scenarios()
    runs = [
        Run(
            schedule=x.schedule,
            num_devices=DEVICES,
            num_chunks=x.num_chunks,
            num_microbatches=x.times.forward_s.shape[1],
            costs=block_costs(x.times, x.schedule),
        )
        for x in every
    ]
    (latency_s, measured), *_ = spawn(measure, DEVICES, runs)
    print(f"message: {latency_s * 1e6:.0f} us")
    print(f"{'split and micro-batches':>26} {'schedule':>16} {'predicted':>10} {'measured':>10} {'error':>7}")
    predicted, errors = [], []
    for x, seconds in zip(every, measured, strict=True):
        sends = np.full_like(x.times.forward_s, latency_s)
        times = replace(x.times, send_forward_s=sends, send_backward_s=sends)
        line = simulate(times, schedule=x.schedule, num_devices=DEVICES)
        predicted.append(line.makespan_s)
        errors.append(line.makespan_s / seconds - 1)
        row = (f"{line.makespan_s * 1e3:.1f} ms", f"{seconds * 1e3:.1f} ms", f"{errors[-1]:+.2%}")
        print(f"{x.name:>26} {x.schedule:>16} {row[0]:>10} {row[1]:>10} {row[2]:>7}")
    print(f"mean error {np.mean(errors):+.2%}, largest {max(errors, key=abs):+.2%}")
    kept = np.argsort(predicted[:3]).tolist() == np.argsort(measured[:3]).tolist()
    print(f"order of the three splits at m 4: {'kept' if kept else 'NOT kept'}")


if __name__ == "__main__":
    main()
