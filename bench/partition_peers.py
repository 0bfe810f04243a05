"""Our split beside DeepSpeed's `partition_balanced` and even layer counts: 1,000 vision-language models.

DeepSpeed minimises (largest - smallest stage) by a dynamic programme that keeps one choice for each prefix; here it is
given the true seconds of every layer, which flatters it: its users get parameter counts. Even counts are what
torchtitan's and Megatron-LM's launchers deal when nothing is said. No memory cap, no sends: neither of them knows any.
Where DeepSpeed is installed its own function is compared with the restatement below.
Run: python bench/partition_peers.py   (three minutes)
"""

from __future__ import annotations

import importlib.util
import itertools
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.options import Tower
from trimtab.partition.published import even_stages
from trimtab.partition.search import Evaluator, search_makespan
from trimtab.partition.stages import SplitProblem, split_stages
from trimtab.specs import NUM_WORK_TERMS, DeviceSpec, LayerCost, ParallelDims, Profile, RecomputeTier, Stage

NUM_INSTANCES = 1000
NOTHING = (0.0,) * NUM_WORK_TERMS


@dataclass(frozen=True, slots=True, kw_only=True)
class Instance:
    profile: Profile
    num_stages: int
    num_microbatches: int

    @property
    def seconds(self) -> list[float]:
        return [layer.forward_s[0] + layer.backward_s[0] for layer in self.profile.layers]

    @property
    def problem(self) -> SplitProblem:
        one = np.eye(NUM_WORK_TERMS)[0]
        return SplitProblem(
            profile=self.profile,
            num_stages=self.num_stages,
            work_mean=one,
            work_max=one,
            memory_bytes=1e18,
            num_microbatches=self.num_microbatches,
        )


def draw_instance(rng: np.random.Generator) -> Instance:
    """12-48 vision and 16-80 language blocks, the former 0.1 to 3 times as dear; projector, embeddings, a dear head."""
    vision, language = int(rng.integers(12, 49)), int(rng.integers(16, 81))
    block = float(rng.uniform(5e-3, 40e-3))
    ratio = float(np.exp(rng.uniform(np.log(0.1), np.log(3.0))))
    head = block * float(rng.uniform(0.5, 4.0))
    seconds: list[tuple[Tower, str, float]] = [("vision", "embed", 0.1 * ratio * block)]
    seconds += [("vision", "block", ratio * block)] * vision
    seconds += [("projector", "projector", 0.3 * ratio * block), ("language", "embed", 1e-4)]
    seconds += [("language", "block", block)] * language + [("language", "norm", 1e-4), ("language", "head", head)]
    layers = [make_layer(f"{tower}.{i}", tower, kind, s) for i, (tower, kind, s) in enumerate(seconds)]
    num_stages = int(rng.choice([2, 3, 4, 6, 8, 12, 16]))
    return Instance(
        profile=make_profile(layers),
        num_stages=num_stages,
        num_microbatches=num_stages * int(rng.choice([1, 1, 2, 4])),
    )


def make_layer(name: str, tower: Tower, kind: str, forward_s: float) -> LayerCost:
    return LayerCost(
        name=name,
        tower=tower,
        kind=kind,  # type: ignore[arg-type]
        forward_s=(forward_s, *NOTHING[1:]),
        backward_s=(2 * forward_s, *NOTHING[1:]),
        output_bytes=NOTHING,
        state_bytes=0.0,
        num_params=0.0,
        tiers=(RecomputeTier(name="none", extra_backward_s=NOTHING, saved_bytes=NOTHING),),
        transient_bytes=NOTHING,
        group=0,
    )


def make_profile(layers: Sequence[LayerCost]) -> Profile:
    device = DeviceSpec(
        name="any", memory_bytes=1, peak_flops=1.0, memory_bytes_per_s=1.0, link_bytes_per_s=1.0, source="none"
    )
    return Profile(
        layers=tuple(layers),
        method="analytic",
        device=device,
        dims=ParallelDims(),
        dtype="bf16",
        time_error=0.0,
        memory_error=0.0,
    )


def least_spread_cuts(weights: Sequence[float], num_parts: int) -> list[int]:
    """Ends of parts as DeepSpeed's programme leaves them: for every prefix and number of parts the last part's start
    that makes (largest - smallest part) least, of equals the latest. One choice a prefix, so not the optimum of all.
    """
    n = len(weights)
    before = np.concatenate([[0.0], np.cumsum(weights)])
    largest, smallest = np.full((2, num_parts + 1, n + 1), np.inf)
    largest[0, 0] = 0.0
    start = np.zeros((num_parts + 1, n + 1), int)
    for parts in range(1, num_parts + 1):
        for i in range(parts, n + 1):
            own = before[i] - before[:i]
            high, low = np.maximum(largest[parts - 1, :i], own), np.minimum(smallest[parts - 1, :i], own)
            k = i - 1 - int(np.argmin((high - low)[::-1]))
            largest[parts, i], smallest[parts, i], start[parts, i] = high[k], low[k], k
    ends = [n]
    for parts in range(num_parts, 0, -1):
        ends.append(int(start[parts, ends[-1]]))
    return ends[::-1]


def as_stages(cuts: Sequence[int]) -> tuple[Stage, ...]:
    return tuple(Stage(index=i, start=a, stop=b) for i, (a, b) in enumerate(itertools.pairwise(cuts)))


def print_quality(theirs: Callable[[Sequence[float], int], Sequence[int]] | None) -> None:
    rng = np.random.default_rng(0)
    ratios: dict[str, list[tuple[float, float]]] = {"partition_balanced": [], "even counts": []}
    differing = 0
    begin = time.process_time()
    for number in range(NUM_INSTANCES):
        instance = draw_instance(rng)
        problem, S = instance.problem, instance.num_stages
        work = np.zeros((1, instance.num_microbatches, NUM_WORK_TERMS))
        work[..., 0] = 1.0
        cuts = least_spread_cuts(instance.seconds, S)
        if theirs is not None and number < 10:
            differing += [int(c) for c in theirs(instance.seconds, S)] != cuts
        searched = search_makespan(Evaluator(problem, work), max_simulated=1000)
        exact = split_stages(problem)
        evaluator = Evaluator(problem, work)
        for name, stages in (
            ("partition_balanced", as_stages(cuts)),
            ("even counts", even_stages(instance.profile, S)),
        ):
            slowest = problem.assess(stages).bottleneck_s / exact.bottleneck_s
            ratios[name].append((slowest, evaluator.makespan_of(stages) / searched.makespan_s))
    print(f"{NUM_INSTANCES} models, 2-16 stages, m = 1, 2 or 4 per stage: {time.process_time() - begin:.0f} s of CPU")
    if theirs is not None:
        print(f"restatement and DeepSpeed's own function differ on {differing} of 10")
    print(f"{'theirs / ours':>20} {'worst':>7} {'mean':>7} {'least':>12} {'ours worse':>11}")
    for name, pairs in ratios.items():
        for what, values in zip(("slowest stage", "makespan"), np.array(pairs).T, strict=True):
            worse = int((values < 1 - 1e-9).sum())
            print(f"{name:>20} {values.max():>7.3f} {values.mean():>7.3f} {values.min():>12.9f} {worse:>6}  {what}")


def main() -> None:
    theirs = None
    if importlib.util.find_spec("deepspeed") is not None:
        from deepspeed.runtime.utils import partition_balanced as theirs
    print_quality(theirs)


if __name__ == "__main__":
    main()
