"""How long the exact split takes, how it compares with launchers' splits, and what the makespan search adds.

Layers: InternVL-Chat-V1-5 (InternViT-6B + InternLM2-20B) on A100-80, tp 2, its language blocks repeated or cut to reach
L layers. Micro-batches: 9 tiles of 448 x 448 and 4096 tokens, each drawn between half and all of that.
Seconds are of the processor. Run: python bench/partition.py   (a minute, most of it the first run's compilation)
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import numpy as np

from trimtab.costs.devices import find_device
from trimtab.costs.profile import profile_model
from trimtab.errors import PartitionError
from trimtab.models.describe import describe
from trimtab.options import ScheduleName
from trimtab.partition.assess import SplitResult
from trimtab.partition.published import even_stages
from trimtab.partition.simulate import simulate_steps, stage_times
from trimtab.partition.stages import Evaluator, SplitProblem, recompute_stages, search_makespan, split_stages
from trimtab.specs import NUM_WORK_TERMS, FloatArray, ParallelDims, Profile, Stage, stages_between

LINKS = {"link_bytes_per_s": 25e9, "latency_s": 10e-6}


def profile_of(num_layers: int, *, memory_bytes: float = 80e9) -> Profile:
    device = replace(find_device("A100-80GB"), memory_bytes=int(memory_bytes))
    profile = profile_model(describe("InternVL-Chat-V1-5"), device, dims=ParallelDims(tp=2, dp=4, pp=4))
    blocks = [i for i, x in enumerate(profile.layers) if x.tower == "language" and x.kind == "block"]
    wanted = num_layers - (len(profile.layers) - len(blocks))
    middle = [profile.layers[blocks[0]]] * wanted
    return replace(profile, layers=(*profile.layers[: blocks[0]], *middle, *profile.layers[blocks[-1] + 1 :]))


def draw_work(steps: int, num_microbatches: int, *, seed: int = 0) -> FloatArray:
    """(steps, num_microbatches, len(WORK_TERMS)) of packs with whole tiles and samples of 512 tokens."""
    rng = np.random.default_rng(seed)
    tiles = rng.integers(5, 10, (steps, num_microbatches)).astype(float)
    tokens = 512.0 * rng.integers(4, 9, (steps, num_microbatches))
    work = np.zeros((steps, num_microbatches, NUM_WORK_TERMS))
    work[..., 0] = 1.0
    work[..., 1], work[..., 2], work[..., 3] = tiles * 1025, tiles * 1025**2, tiles * 1025**2
    work[..., 4], work[..., 5], work[..., 6] = tokens, tokens * 512, tokens * 512
    return work


def problem_of(profile: Profile, work: FloatArray, num_stages: int, num_microbatches: int) -> SplitProblem:
    return SplitProblem(
        profile=profile,
        num_stages=num_stages,
        work_mean=work.mean(axis=(0, 1)),
        work_max=work.max(axis=(0, 1)),
        memory_bytes=profile.device.memory_bytes,
        num_microbatches=num_microbatches,
        overhead_bytes=4e9,
    )


def fitted(problem: SplitProblem, stages: Sequence[Stage]) -> SplitResult | None:
    """A launcher's split with our own exact recompute, which flatters it; None where it cannot fit."""
    try:
        return recompute_stages(problem, stages)
    except PartitionError:
        return None


def parameter_stages(
    profile: Profile, num_stages: int, *, forbidden_cuts: frozenset[int] = frozenset()
) -> tuple[Stage, ...]:
    """The contiguous split whose largest stage has fewest parameters (exact; earliest cuts on ties).

    What DeepSpeed's partition_method="parameters" asks for. Dynamic programme over cuts, O(P L^2).
    """
    L = len(profile.layers)
    cuts = np.array([c for c in range(L + 1) if c not in forbidden_cuts])
    before = np.concatenate([[0.0], np.cumsum([layer.num_params for layer in profile.layers])])[cuts]
    largest = np.full(len(cuts), np.inf)
    largest[0] = 0.0
    came_from = np.zeros((num_stages, len(cuts)), int)
    for stage in range(num_stages):
        reached = np.full(len(cuts), np.inf)
        for b in range(stage + 1, len(cuts)):
            candidates = np.maximum(largest[:b], before[b] - before[:b])
            came_from[stage, b] = int(np.argmin(candidates))
            reached[b] = candidates[came_from[stage, b]]
        largest = reached
    chosen = [len(cuts) - 1]
    for stage in range(num_stages - 1, -1, -1):
        chosen.append(int(came_from[stage, chosen[-1]]))
    return stages_between(int(cuts[k]) for k in reversed(chosen))


def ratio(split: SplitResult | None, best: SplitResult) -> str:
    return "no fit" if split is None else f"{split.bottleneck_s / best.bottleneck_s:.3f}x"


def print_row(*cells: object) -> None:
    print(" ".join(f"{cell:>15}" if cell in get_args(ScheduleName) else f"{cell:>10}" for cell in cells))


def ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


def print_splits() -> None:
    print(
        "exact split with recompute (3 tiers) under 80 GB, 1F1B, m = 2 P; launchers' slowest stage / ours at the right"
    )
    print_row("L", "P", "seconds", "slowest", "bound", "recomputed", "even", "ViT first", "parameters")
    for num_layers in (93, 125, 200):
        profile = profile_of(num_layers)
        num_language = sum(x.tower == "language" and x.kind == "block" for x in profile.layers)
        for num_stages in (4, 8, 16, 32, 64):
            work = draw_work(4, 2 * num_stages)
            problem = problem_of(profile, work, num_stages, 2 * num_stages)
            begin = time.process_time()
            try:
                ours = split_stages(problem)
            except PartitionError as error:
                print_row(num_layers, num_stages, f"{time.process_time() - begin:.3f}", str(error).split(": try")[0])
                continue
            seconds = time.process_time() - begin
            first = "-"  # fewer language blocks than stages
            if num_stages <= num_language:
                first = ratio(fitted(problem, even_stages(profile, num_stages, vision="first")), ours)
            print_row(
                num_layers,
                num_stages,
                f"{seconds:.3f}",
                ms(ours.bottleneck_s),
                ms(ours.lower_bound_s),
                sum(stage.num_recomputed() for stage in ours.stages),
                ratio(fitted(problem, even_stages(profile, num_stages)), ours),
                first,
                ratio(fitted(problem, parameter_stages(profile, num_stages)), ours),
            )


def print_search() -> None:
    print("\nmakespan of a step, sends at 25 GB/s + 10 us; fresh gain: on 64 steps that were not searched on")
    print_row("packs", "P", "m", "even", "exact", "searched", "gain", "fresh gain", "tried", "seconds")
    profile = profile_of(98)
    for name in ("equal", "varied"):
        for num_stages, num_microbatches in ((4, 4), (4, 5), (4, 8), (4, 16), (8, 8), (8, 16), (16, 16)):
            work = draw_work(8, num_microbatches, seed=1)
            fresh = draw_work(64, num_microbatches, seed=2)
            if name == "equal":
                work = fresh = np.broadcast_to(work.max(axis=(0, 1)), (1, *work.shape[1:])).copy()
            problem = problem_of(profile, work, num_stages, num_microbatches)
            even = fitted(problem, even_stages(profile, num_stages))
            begin = time.process_time()
            result = search_makespan(Evaluator(problem, work, **LINKS))
            seconds = time.process_time() - begin
            before, after = (makespan(profile, split.stages, fresh) for split in (split_stages(problem), result.split))
            print_row(
                name,
                num_stages,
                num_microbatches,
                "no fit" if even is None else ms(makespan(profile, even.stages, work)),
                ms(result.start_makespan_s),
                ms(result.makespan_s),
                f"{result.start_makespan_s / result.makespan_s - 1:.2%}",
                f"{before / after - 1:.2%}",
                result.num_simulated,
                f"{seconds:.2f}",
            )


def makespan(profile: Profile, stages: Sequence[Stage], work: FloatArray) -> float:
    rows = work.reshape(-1, NUM_WORK_TERMS)
    times = stage_times(profile, stages, rows, **LINKS)
    return float(simulate_steps(times, np.arange(len(rows)).reshape(len(work), 1, -1)).mean())


def main() -> None:
    split_stages(problem_of(profile_of(93), draw_work(1, 8), 4, 8))  # compiles
    print_splits()
    print_search()


if __name__ == "__main__":
    main()
