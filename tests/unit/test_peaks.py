"""partition/assess.py: the peak of real micro-batches beside the peak that the limits allow."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_cases import ONE, constant, layer, problem_of, profile_of, random_profile, with_tables

from trimtab import RecomputeChoice, Stage, split_stages
from trimtab.partition.assess import DeviceMemory, stage_bytes
from trimtab.partition.schedules import BACKWARD, FORWARD, splits_backward

SCHEDULES = [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZBH1", 1), ("ZBVZeroBubble", 2)]


def replay_peaks(problem, stages, work, table) -> list[DeviceMemory]:
    """The peak of each pipeline rank when `table` (num_steps, dp, M) runs packs of `work` (num_packs, T).

    As `SplitProblem.assess` adds up a device, with each micro-batch's own bytes: a forward adds what its stage's tiers
    hold, a backward takes it away; while either runs, the stage's largest transient lies on top (of a forward: an upper
    bound). So never above `problem.assess(stages)` where no pack exceeds `problem.work_max`.
    """
    P, V, M = problem.num_stages, problem.num_chunks, problem.num_microbatches
    profile, split = problem.profile, splits_backward(problem.schedule)
    assert table.shape[2] == M, "the schedule has another number of micro-batches"
    packs = table.reshape(-1, M)  # an empty slot is -1, the last row of what follows
    work = np.vstack([work, np.zeros((1, work.shape[1]))])
    order = problem.order
    result = []
    for device in range(P):
        numbers = [s for s in range(P * V) if order.device[s] == device]
        own = {s: stage_bytes(profile, stages[s], work, once=split) for s in numbers}
        state = sum(x.state_bytes for s in numbers for x in profile.layers[stages[s].start : stages[s].stop])
        held, most = np.zeros(len(packs)), np.full(len(packs), -1.0)
        saved_then = np.zeros(len(packs))
        blocks = zip(order.stage[device], order.microbatch[device], order.kind[device], strict=True)
        for stage, microbatch, kind in blocks:
            which, pack = own[int(stage)], packs[:, microbatch]
            if kind == FORWARD:
                held = held + which.saved[pack]
            elif kind == BACKWARD and split:
                held = held + (which.whole - which.saved)[pack]
            now = held + which.transient[pack]
            saved_then = np.where(now > most, held, saved_then)
            most = np.maximum(most, now)
            if kind != FORWARD and not (kind == BACKWARD and split):
                held = held - (which.whole if split else which.saved)[pack]
        worst = int(most.argmax())
        result.append(
            DeviceMemory(
                state_bytes=float(state),
                saved_bytes=float(saved_then[worst]),
                transient_bytes=float(most[worst] - saved_then[worst]),
                overhead_bytes=float(problem.overhead_bytes),
            ).with_share(problem.overhead_share)
        )
    return result


def with_choices(stages, profile, rng):
    """Random tiers for the stages' layers."""
    result = []
    for stage in stages:
        chosen: dict[str, list[int]] = {}
        for i in range(stage.start, stage.stop):
            tier = profile.layers[i].tiers[int(rng.integers(len(profile.layers[i].tiers)))].name
            if tier != "none":
                chosen.setdefault(tier, []).append(i)
        choices = tuple(RecomputeChoice(tier=name, layers=tuple(which)) for name, which in chosen.items())
        result.append(replace(stage, recompute=choices))
    return result


@pytest.mark.parametrize(("schedule", "num_chunks"), SCHEDULES)
def test_full_packs_reach_what_the_limits_allow_and_smaller_ones_never_more(schedule, num_chunks):
    rng = np.random.default_rng(0)
    for _ in range(20):
        P, M = 2, 2 * int(rng.integers(1, 5))
        profile = with_tables(random_profile(rng, 8, 4, num_tiers=3), rng)
        problem = problem_of(profile, P, M, schedule=schedule, num_chunks=num_chunks, overhead_bytes=7.0)
        stages = with_choices(split_stages(problem).stages, profile, rng)
        allowed = [memory.total_bytes for memory in problem.assess(stages).memory]
        table = np.arange(3 * 2 * M).reshape(3, 2, M)
        table[2, 1, M // 2 :] = -1
        work = np.tile(ONE, (table.size, 1))
        full = replay_peaks(problem, stages, work, table)
        if schedule in ("1F1B", "GPipe"):  # elsewhere not all that is largest comes at once
            assert [peak.total_bytes for peak in full] == pytest.approx(allowed)
        work[:, 0] = rng.random(table.size)
        for peak, other, limit in zip(replay_peaks(problem, stages, work, table), full, allowed, strict=True):
            assert peak.total_bytes <= other.total_bytes * (1 + 1e-12) <= limit * (1 + 1e-9)
            assert peak.state_bytes == other.state_bytes


def test_a_window_of_micro_batches_is_held_by_hand():
    """Stage 0 of two holds two micro-batches in a row: 1F1B runs F0 F1 B0 F2 B1 ..."""
    profile = profile_of(layer(i, state=100.0, saved=((0.0, 10.0), (1.0, 2.0)), transient=3.0) for i in range(2))
    problem = problem_of(profile, 2, 4, overhead_bytes=5.0)
    stages = [Stage(index=0, start=0, stop=1), Stage(index=1, start=1, stop=2)]
    work = np.outer([1.0, 2.0, 4.0, 1.0], ONE)
    table = np.arange(4).reshape(1, 1, 4)
    first, last = replay_peaks(problem, stages, work, table)
    assert (first.state_bytes, first.overhead_bytes) == (100.0, 5.0)
    # micro-batches 1 and 2 are held when 2 runs forward: 10 x (2 + 4), with the transient of 2
    assert (first.saved_bytes, first.transient_bytes) == (60.0, 12.0)
    assert (last.saved_bytes, last.transient_bytes) == (40.0, 12.0)
    again = replace(stages[0], recompute=(RecomputeChoice(tier="full", layers=(0,)),))
    first, _ = replay_peaks(problem, [again, stages[1]], work, table)
    # 2 x (2 + 4) held; of micro-batch 2 the workspace, 3 x 4, and what is computed again, 8 x 4
    assert (first.saved_bytes, first.transient_bytes) == (12.0, 44.0)


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_a_stage_behind_the_first_layer_of_a_tower_holds_its_tables_too(seed):
    rng = np.random.default_rng(seed)
    size = float(rng.integers(1, 50))
    layers = [layer(i, saved=((0.0, 10.0 + (size if i == 0 else 0.0)),)) for i in range(4)]
    layers[1:3] = [replace(x, entry_bytes=constant(size)) for x in layers[1:3]]
    profile, M = profile_of(layers), int(rng.integers(1, 5))
    for cut in (1, 2, 3):
        stages = [Stage(index=0, start=0, stop=cut), Stage(index=1, start=cut, stop=4)]
        work = np.tile(ONE, (M, 1))
        held = [x.saved_bytes for x in replay_peaks(problem_of(profile, 2, M), stages, work, np.arange(M)[None, None])]
        assert held == [min(2, M) * (10.0 * cut + size), 10.0 * (4 - cut) + (size if cut < 3 else 0.0)]
