"""Tests of partition/ (simulate, schedules, replay, backward): dependencies, known makespans, memory, many steps."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from partition_cases import constant, layer, profile_of

from trimtab.costs.profile import weight_coefficients
from trimtab.partition.schedules import (
    BACKWARD,
    FORWARD,
    WEIGHT,
    block_order,
    device_of_stage,
    devices_of_stages,
    num_warmup,
    peak_in_flight,
    peak_pending,
    peak_saved_bytes,
    splits_backward,
)
from trimtab.partition.simulate import StageTimes, simulate, simulate_steps, stage_times
from trimtab.specs import NUM_WORK_TERMS, RecomputeChoice, Stage

ALL = ["1F1B", "GPipe", "Interleaved1F1B", "ZBH1", "ZBVZeroBubble"]


def times_of(forward, backward, send=None, weight=None):
    forward, backward = np.asarray(forward, float), np.asarray(backward, float)
    send = np.zeros_like(forward) if send is None else np.asarray(send, float)
    return StageTimes(
        forward_s=forward,
        backward_s=backward,
        send_forward_s=send,
        send_backward_s=send.copy(),
        weight_s=None if weight is None else np.asarray(weight, float),
    )


def random_case(seed):
    rng = np.random.default_rng(seed)
    P, V = int(rng.integers(1, 6)), int(rng.integers(1, 4))
    schedule = str(rng.choice(ALL))
    V = {"Interleaved1F1B": V, "ZBVZeroBubble": 2}.get(schedule, 1)
    M = P * int(rng.integers(1, 5)) if schedule == "Interleaved1F1B" else int(rng.integers(1, 12))
    forward, backward, send, share = rng.uniform(0, 1, (4, P * V, M))
    return schedule, P, V, M, times_of(forward, backward, send * 0.3, backward * share)


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=80, deadline=None)
def test_blocks_wait_for_their_inputs_never_overlap_and_never_idle_without_cause(seed):
    schedule, P, V, M, times = random_case(seed)
    line = simulate(times, schedule=schedule, num_devices=P)
    S, kinds = P * V, 3 if splits_backward(schedule) else 2
    assert len(line.stage) == kinds * S * M
    blocks = set(zip(line.stage.tolist(), line.microbatch.tolist(), line.kind.tolist(), strict=True))
    assert len(blocks) == kinds * S * M
    start, end = np.full((3, S, M), np.inf), np.zeros((3, S, M))
    start[line.kind, line.stage, line.microbatch] = line.start_s
    end[line.kind, line.stage, line.microbatch] = line.end_s
    lies_on = devices_of_stages(schedule, num_devices=P, num_chunks=V)
    assert lies_on.tolist() == [line.device_of(s) for s in range(S)]
    # neighbours on one device send nothing
    send = times.send_forward_s * (lies_on != np.append(lies_on[1:], -1))[:, None]
    back = times.send_backward_s * (lies_on != np.append(-1, lies_on[:-1]))[:, None]
    ready = np.zeros((3, S, M))
    ready[0, 1:] = end[0, :-1] + send[:-1]
    ready[1, :-1] = end[1, 1:] + back[1:]
    ready[1, -1] = end[0, -1]
    ready[2] = end[1]
    assert (start >= ready - 1e-12).all()
    device = line.device
    assert device.tolist() == lies_on[line.stage].tolist()
    for d in range(P):
        mine = np.flatnonzero(device == d)
        free = np.concatenate([[0.0], line.end_s[mine][:-1]])
        own_ready = ready[line.kind[mine], line.stage[mine], line.microbatch[mine]]
        np.testing.assert_allclose(line.start_s[mine], np.maximum(free, own_ready), atol=1e-12)
    assert line.makespan_s == pytest.approx(line.end_s.max())
    work = times.forward_s.sum() + times.backward_s.sum()
    assert line.bubble_ratio == pytest.approx(1 - work / (P * line.makespan_s))


@given(st.integers(0, 2**32 - 1))
@settings(max_examples=60, deadline=None)
def test_activations_alive_reach_and_never_exceed_the_memory_formula(seed):
    schedule, P, V, M, times = random_case(seed)
    line = simulate(times, schedule=schedule, num_devices=P)
    counts = peak_in_flight(schedule, num_devices=P, num_chunks=V, num_microbatches=M)
    begun = peak_pending(schedule, num_devices=P, num_chunks=V, num_microbatches=M)
    rng = np.random.default_rng(seed)
    saved = rng.uniform(1, 2, P * V)
    whole = saved + rng.uniform(0, 2, P * V)
    ask = {"num_devices": P, "num_chunks": V, "num_microbatches": M}
    peaks = peak_saved_bytes(saved, schedule, **ask, pending_bytes=whole)
    split = splits_backward(schedule)
    for d in range(P):
        mine = np.flatnonzero(line.device == d)
        alive, pending = np.zeros((2, P * V), int)
        most, most_pending, most_bytes = alive.copy(), alive.copy(), 0.0
        for block in mine:
            stage, kind = line.stage[block], line.kind[block]
            alive[stage] += {FORWARD: 1, BACKWARD: -1, WEIGHT: 0}[kind]
            pending[stage] += {FORWARD: 0, BACKWARD: int(split), WEIGHT: -1}[kind]
            most = np.maximum(most, alive + pending)
            most_pending = np.maximum(most_pending, pending)
            most_bytes = max(most_bytes, float(alive @ saved + pending @ whole))
        assert not alive.any()
        assert not pending.any()
        own = [s for s in range(P * V) if line.device_of(s) == d]
        assert (most[own] == counts[own]).all()
        assert (most_pending[own] == begun[own]).all()
        assert peaks[d] == pytest.approx(most_bytes)
        if V == 1:  # what the exact solver counts
            assert (counts - begun)[d] * saved[d] + begun[d] * whole[d] == pytest.approx(most_bytes)


def test_in_flight_counts_are_the_published_ones():
    assert peak_in_flight("1F1B", num_devices=4, num_microbatches=8).tolist() == [4, 3, 2, 1]
    assert peak_in_flight("1F1B", num_devices=4, num_microbatches=2).tolist() == [2, 2, 2, 1]
    assert peak_in_flight("GPipe", num_devices=3, num_microbatches=5).tolist() == [5, 5, 5]
    # interleaved: 2 (P - d - 1) + (V - 1) P + 1 chunk activations on device d; counts rise towards the model's start
    for P, V, M in ((4, 2, 16), (8, 4, 32), (2, 3, 2), (4, 2, 4)):
        ones = np.ones(P * V)
        peaks = peak_saved_bytes(ones, "Interleaved1F1B", num_devices=P, num_chunks=V, num_microbatches=M)
        assert peaks.tolist() == [min(2 * (P - d - 1) + (V - 1) * P + 1, V * M) for d in range(P)]
        counts = peak_in_flight("Interleaved1F1B", num_devices=P, num_chunks=V, num_microbatches=M)
        assert (np.diff(counts) <= 0).all()


@pytest.mark.parametrize(("P", "V", "M"), [(2, 2, 2), (4, 2, 8), (4, 3, 12), (8, 4, 32), (3, 1, 6)])
def test_interleaving_divides_the_bubble_by_the_chunks(P, V, M):
    times = times_of(np.full((P * V, M), 2.0 / V), np.full((P * V, M), 4.0 / V))
    line = simulate(times, schedule="Interleaved1F1B", num_devices=P)
    # bubble time / ideal time = (P - 1) / (V M): Narayanan et al. 2021, section 2.2.2
    assert line.makespan_s == pytest.approx(M * 6.0 * (1 + (P - 1) / (V * M)))


@pytest.mark.parametrize(("P", "M"), [(2, 4), (4, 8), (8, 24)])
def test_zero_bubble_schedules_shorten_the_bubble_as_published(P, M):
    # Qi et al. 2024, table 1, with F = B = W: 1F1B idles (P - 1)(F + B + W), ZB-H1 (P - 1)(F + B - W), ZB-V not at all
    one = np.ones((P, M))
    plain = simulate(times_of(one, 2 * one)).makespan_s
    zbh1 = simulate(times_of(one, 2 * one, weight=one), schedule="ZBH1").makespan_s
    assert plain == pytest.approx(3 * (M + P - 1))
    assert zbh1 == pytest.approx(3 * M + (P - 1))
    half = np.full((2 * P, M), 0.5)
    zbv = simulate(times_of(half, 2 * half, weight=half), schedule="ZBVZeroBubble", num_devices=P)
    # the last device waits for P - 1 chunks of half a stage before its first block, as every schedule must
    first = np.array([line.min() for line in (zbv.start_s[zbv.device == d] for d in range(P))])
    assert first == pytest.approx(np.arange(P) * 0.5)
    busy = np.array([zbv.end_s[zbv.device == d].max() for d in range(P)]) - first
    assert busy == pytest.approx(np.full(P, 3.0 * M))


def test_zero_bubble_memory_is_that_of_1f1bs_first_device():
    for P, M in ((1, 4), (4, 8), (8, 32), (4, 2)):
        ask = {"num_devices": P, "num_microbatches": M}
        assert peak_in_flight("ZBH1", **ask).tolist() == [min(P, M)] * P
        assert peak_pending("ZBH1", **ask).tolist() == [min(d + 1, M) for d in range(P)]
        assert peak_pending("1F1B", **ask).tolist() == [0] * P
        # ZB-V: at most P micro-batches of two half stages
        both = peak_saved_bytes(np.full(2 * P, 0.5), "ZBVZeroBubble", num_chunks=2, **ask)
        assert both.max() <= min(P, M)


def test_stages_of_a_v_return_to_the_first_device():
    assert [device_of_stage("ZBVZeroBubble", s, num_devices=3, num_chunks=2) for s in range(6)] == [0, 1, 2, 2, 1, 0]
    assert [device_of_stage("Interleaved1F1B", s, num_devices=3, num_chunks=2) for s in range(6)] == [0, 1, 2, 0, 1, 2]


def test_weight_gradients_come_from_the_profile_or_by_flops():
    known = replace(layer(0, 1.0, 3.0), weight_s=constant(0.7))
    assert weight_coefficients(known).tolist() == list(constant(0.7))
    terms = (1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0)
    unknown = replace(layer(0), backward_s=terms)
    # half of what is linear in rows; attention's pairs multiply no weights
    assert weight_coefficients(unknown).tolist() == [0.5, 1.0, 0.0, 0.0, 2.5, 0.0, 0.0]
    profile = profile_of([known, layer(1, 1.0, 2.0, saved=((0, 10), (0.5, 1)))])
    stage = Stage(index=0, start=0, stop=2, recompute=(RecomputeChoice(tier="full", layers=(1,)),))
    times = stage_times(profile, (stage,), np.array([constant(2.0)]))
    assert times.backward_s == pytest.approx(2 * (3.0 + 2.5))
    assert times.weight_s == pytest.approx(2 * (0.7 + 1.0))


def test_stage_times_price_recompute_and_sends():
    profile = profile_of([layer(i, 1.0, 2.0, saved=((0, 10), (0.5, 1)), sent=100.0 * (i + 1)) for i in range(4)])
    recompute = (RecomputeChoice(tier="full", layers=(1, 3)),)
    stages = (Stage(index=0, start=0, stop=1), Stage(index=1, start=1, stop=4, recompute=recompute))
    work = np.zeros((2, NUM_WORK_TERMS))
    work[:, 0] = 1.0, 2.0
    times = stage_times(profile, stages, work, link_bytes_per_s=50.0, latency_s=0.25)
    assert times.forward_s.tolist() == [[1.0, 2.0], [3.0, 6.0]]
    assert times.backward_s.tolist() == [[2.0, 4.0], [7.0, 14.0]]
    assert times.send_forward_s.tolist() == [[2.25, 4.25], [0.0, 0.0]]
    assert times.send_backward_s.tolist() == [[0.0, 0.0], [2.25, 4.25]]
    assert stage_times(profile, stages, work).send_forward_s.tolist() == [[0.0, 0.0], [0.0, 0.0]]


@pytest.mark.parametrize("schedule", ALL)
def test_many_steps_equal_one_by_one(schedule):
    rng = np.random.default_rng(1)
    S, P, M, num_packs = 4, 2 if schedule in ("Interleaved1F1B", "ZBVZeroBubble") else 4, 6, 40
    times = times_of(*rng.uniform(0.1, 1, (4, S, num_packs)))
    table = rng.permutation(36).reshape(3, 2, M)
    steps = simulate_steps(times, table, schedule=schedule, num_devices=P, all_reduce_s=0.5)
    for step in range(3):
        alone = [
            simulate(
                times_of(*(x[:, t] for x in (times.forward_s, times.backward_s, times.send_forward_s, times.weight_s))),
                schedule=schedule,
                num_devices=P,
            ).makespan_s
            for t in table[step]
        ]
        assert steps[step] == pytest.approx(max(alone) + 0.5)


def test_empty_slots_cost_nothing():
    times = times_of(np.ones((2, 3)), np.ones((2, 3)))
    full, short = simulate_steps(times, np.array([[[0, 1, 2]], [[0, 1, -1]]]))
    assert (full, short) == (8.0, 6.0)


def test_warmup_is_capped_by_the_number_of_blocks():
    assert num_warmup("1F1B", device=0, num_devices=8, num_chunks=1, num_microbatches=3) == 3
    assert num_warmup("Interleaved1F1B", device=0, num_devices=4, num_chunks=2, num_microbatches=4) == 8
    order = block_order("1F1B", num_devices=2, num_microbatches=3)
    assert order.kind[0].tolist() == [0, 0, 1, 0, 1, 1]
    assert order.microbatch[0].tolist() == [0, 1, 0, 2, 1, 2]
