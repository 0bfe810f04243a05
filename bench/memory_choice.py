"""Split and recompute chosen together, or recompute after the split: share of the possible gain, and seconds to solve.

Four cases at the limits of published devices. The gain is from everything recomputed in full to nothing recomputed, as
if memory had no end, both on the split that is best without recompute. Beside ours, on that split: one number of layers
for all stages, from the first (Megatron-Core's `recompute_num_layers` with the block method), and recompute chosen
stage by stage (the order of the OmniBal paper), exactly, which flatters both. Bytes and seconds
are the formulas'; a step is 1F1B at equal micro-batches, without sends.
Run: python bench/memory_choice.py   (a minute, most of it the first run's compilation)
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.costs.devices import find_device
from trimtab.costs.profile import profile_model
from trimtab.errors import PartitionError
from trimtab.models.describe import describe
from trimtab.partition.assess import SplitResult
from trimtab.partition.stages import SplitProblem, recompute_stages, split_stages
from trimtab.specs import NUM_WORK_TERMS, FloatArray, ParallelDims, Profile, RecomputeChoice, Stage

NUM_MICROBATCHES = 4  # of each stage
RESERVE = 0.05
NO_LIMIT = 2.0**59


@dataclass(frozen=True, kw_only=True)
class Case:
    model: str
    device: str
    memory_gib: float
    pp: int
    tp: int = 1
    patches: int
    tokens: int
    images: int


CASES = (
    Case(model="Qwen2.5-VL-7B", device="A100-80GB", memory_gib=74.5, pp=4, patches=16384, tokens=8192, images=4),
    Case(model="Qwen2.5-VL-32B", device="H200", memory_gib=131, pp=8, patches=16384, tokens=8192, images=4),
    Case(model="InternVL-Chat-V1-5", device="A100-80GB", memory_gib=74.5, pp=8, patches=9225, tokens=4096, images=9),
    Case(model="Qwen2.5-VL-72B", device="H200", memory_gib=131, pp=8, tp=4, patches=36864, tokens=16384, images=8),
)


def work_of(case: Case) -> FloatArray:
    work = np.zeros(NUM_WORK_TERMS)
    squares = case.patches**2 / case.images
    work[:] = 1, case.patches, squares, case.patches * 64.0, case.tokens, case.tokens**2 / 4, case.tokens**2 / 4
    return work


def problem_of(case: Case, profile: Profile) -> SplitProblem:
    model, work = describe(case.model), work_of(case)
    memory = min(case.memory_gib * 2**30, profile.device.memory_bytes)
    return SplitProblem(
        profile=profile,
        num_stages=case.pp,
        work_mean=work,
        work_max=work,
        memory_bytes=memory,
        num_microbatches=NUM_MICROBATCHES * case.pp,
        forbidden_cuts=model.forbidden_cuts,
        overhead_bytes=RESERVE * memory,
    )


def step_s(problem: SplitProblem, split: SplitResult) -> float:
    """1F1B at equal micro-batches, no sends: the slowest stage M - 1 times, and one pass through all."""
    stages = np.add(split.forward_s, split.backward_s)
    return float((problem.num_microbatches - 1) * stages.max() + stages.sum())


def fitted(problem: SplitProblem, split: SplitResult) -> bool:
    return max(device.total_bytes for device in split.memory) <= problem.memory_bytes


def one_number(problem: SplitProblem, stages: Sequence[Stage]) -> SplitResult | None:
    """The least n for which full recompute of every stage's first n blocks fits."""
    layers = problem.profile.layers
    own = [[i for i in range(s.start, s.stop) if len(layers[i].tiers) > 1] for s in stages]
    for n in range(max(map(len, own)) + 1):
        chosen = [
            replace(s, recompute=(RecomputeChoice(tier="full", layers=tuple(x[:n])),) if x[:n] else ())
            for s, x in zip(stages, own, strict=True)
        ]
        split = problem.assess(chosen)
        if fitted(problem, split):
            return split
    return None


def only_full(profile: Profile) -> Profile:
    layers = (replace(x, tiers=tuple(t for t in x.tiers if t.name in ("none", "full"))) for x in profile.layers)
    return replace(profile, layers=tuple(layers))


def timed(problem: SplitProblem) -> tuple[SplitResult, float]:
    begin = time.process_time()
    return split_stages(problem), time.process_time() - begin


def print_case(case: Case) -> None:
    model = describe(case.model)
    dims = ParallelDims(dp=8, pp=case.pp, tp=case.tp)
    problem = problem_of(case, profile_model(model, find_device(case.device), dims=dims))
    full_tier = replace(problem, profile=only_full(problem.profile))
    free = split_stages(replace(problem, memory_bytes=NO_LIMIT, overhead_bytes=0.0))
    first = free.stages
    worst = step_s(problem, recompute_stages(replace(full_tier, memory_bytes=NO_LIMIT, recompute="full"), first))
    best = step_s(problem, free)

    def share(split: SplitResult | None) -> str:
        if split is None:
            return "no fit"
        seconds = step_s(problem, split)
        return f"{(worst - seconds) / (worst - best):4.0%} x{worst / seconds:.3f}"

    def after(chosen: SplitProblem) -> SplitResult | None:
        try:
            return recompute_stages(chosen, first)
        except PartitionError:
            return None

    joint, seconds = timed(problem)
    cells = {
        "one n for all": share(one_number(full_tier, first)),
        "after, full": share(after(full_tier)),
        "after, 3 tiers": share(after(problem)),
        "joint, full": share(timed(full_tier)[0]),
        "joint, 3 tiers": share(joint),
    }
    print(f"{case.model}, pp {case.pp}, {case.memory_gib:.0f} GiB on {case.device} (ideal x{worst / best:.3f})")
    print("   " + "   ".join(f"{name} {cell}" for name, cell in cells.items()))
    tiers = {
        t: sum(len(c.layers) for s in joint.stages for c in s.recompute if c.tier == t) for t in ("selective", "full")
    }
    print(f"   chosen: {tiers} of {len(problem.profile.layers)} layers; solved in {seconds:.2f} s of CPU")


def main() -> None:
    timed(problem_of(CASES[0], profile_model(describe(CASES[0].model), find_device("H200"), dims=ParallelDims(pp=4))))
    print("share of the possible gain captured, and speed-up over full recompute")
    for case in CASES:
        print_case(case)


if __name__ == "__main__":
    main()
