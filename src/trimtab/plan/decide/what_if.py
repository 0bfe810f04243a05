"""The same packs under smaller memory caps: for each the exact split, as numbers that a page can simulate again."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.errors import PartitionError
from trimtab.partition.assess import stages_bytes, state_bytes
from trimtab.partition.schedules import splits_backward
from trimtab.partition.simulate import block_costs
from trimtab.partition.stages import split_stages
from trimtab.plan.case import Case
from trimtab.plan.decide.times import rank_step_s, times_of
from trimtab.specs import FloatArray, Stage

_SHARES = (0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3)  # of the plan's cap, until nothing fits


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CappedSplit:
    """Stages that fit a cap: seconds of the mean micro-batch, bytes of the largest."""

    cap_bytes: float
    seconds: FloatArray  # (3, S) forward, backward, weight gradients where the schedule runs them apart
    sends: FloatArray  # (2, S) behind forward and backward
    update_s: float  # gradients exchanged, optimizer, once a step
    saved_bytes: FloatArray  # (S,) of a micro-batch from its forward to its backward
    whole_bytes: FloatArray  # (S,) from a backward of the inputs to that of the weights
    transient_bytes: FloatArray  # (S,)
    state_bytes: FloatArray  # (S,)


def capped_splits(case: Case, stages: Sequence[Stage]) -> tuple[CappedSplit, ...]:
    """`stages` under the plan's cap, then the exact split of every smaller cap that something fits."""
    problem = case.problem
    found = [_capped(case, stages, problem.memory_bytes)]
    for share in _SHARES:
        cap = share * problem.memory_bytes
        if cap <= problem.overhead_bytes:
            break
        try:
            split = split_stages(replace(problem, memory_bytes=cap))
        except PartitionError:
            break
        found.append(_capped(case, split.stages, cap))
    return tuple(found)


def _capped(case: Case, stages: Sequence[Stage], cap_bytes: float) -> CappedSplit:
    problem = case.problem
    costs = block_costs(times_of(problem.work_mean[None], stages, problem.profile, case.cluster), problem.schedule)
    once = splits_backward(problem.schedule)
    saved, whole, transient = (
        x[:, 0] for x in stages_bytes(problem.profile, stages, problem.work_max[None], once=once)
    )
    return CappedSplit(
        cap_bytes=cap_bytes,
        seconds=costs.seconds[:, :, 0],
        sends=costs.sends[:, :, 0],
        update_s=rank_step_s(problem, stages),
        saved_bytes=saved,
        whole_bytes=whole,
        transient_bytes=transient,
        state_bytes=state_bytes(problem.profile, stages),
    )
