"""Tests of partition/ (stages, tiers, cuts, layer_table, assess, baselines): optimum, memory, messages."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
from partition_cases import ONE, assess_stages, layer, problem_of, profile_of, random_profile, split, with_tables

from refusals import refused
from trimtab.errors import PartitionError
from trimtab.partition.cuts import least_choice, time_cost
from trimtab.partition.layer_table import layer_table, pipeline_of
from trimtab.partition.published import even_stages
from trimtab.partition.stages import chunk_room, recompute_stages, split_stages
from trimtab.partition.tiers import Upgrade, least_bound, least_extra, menus_of, round_up, tier_table
from trimtab.specs import RecomputeChoice, Stage


def stage_options(profile, start, stop, *, split_backward=False):
    """Every tier choice of the stage: arrays of time, saved bytes, recomputed layers, transient; state."""
    own = profile.layers[start:stop]
    time_, saved, recomputed, transient = np.zeros(1), np.zeros(1), np.zeros(1, int), np.zeros(1)
    for x in own:
        extra = np.array([t.extra_backward_s[0] for t in x.tiers])
        size = np.array([t.saved_bytes[0] for t in x.tiers])
        again = x.transient_bytes[0] + (0 if split_backward else size[0] - size)  # its tensors are there once more
        time_ = np.add.outer(time_, x.forward_s[0] + x.backward_s[0] + extra).ravel()
        saved = np.add.outer(saved, size).ravel()
        recomputed = np.add.outer(recomputed, np.arange(len(x.tiers)) > 0).ravel()
        transient = np.maximum.outer(transient, np.broadcast_to(again, size.shape)).ravel()
    return time_, saved, recomputed, transient, sum(x.state_bytes for x in own)


def held_by(schedule, num_stages, M):
    """(in flight by the tiers, pending and whole) of every stage."""
    P = num_stages
    if schedule == "ZBH1":  # P micro-batches everywhere, of which device d has run B and not W for d + 1
        pending = [min(i + 1, M) for i in range(P)]
        return [min(P, M) - w for w in pending], pending
    return [M if schedule == "GPipe" else min(P - i, M) for i in range(P)], [0] * P


def sized_options(profile, start, stop, held, i):
    """Every tier choice of stage i: arrays of time, recomputed layers and all its bytes."""
    in_flight, pending = held
    times, saved, recomputed, transient, state = stage_options(profile, start, stop, split_backward=any(pending))
    entry = sum(profile.layers[start].entry_bytes)
    whole = entry + sum(x.tiers[0].saved_bytes[0] for x in profile.layers[start:stop])
    return times, recomputed, state + in_flight[i] * (entry + saved) + pending[i] * whole + transient


def brute_force(profile, num_stages, memory, held, forbidden):
    """(bottleneck, recompute seconds, recomputed layers) of the best split by complete enumeration, and what its
    fullest stage holds at most; None if there is none.
    """
    L = len(profile.layers)
    base = sum(x.forward_s[0] + x.backward_s[0] for x in profile.layers)
    options: dict = {}
    for i, a in itertools.product(range(num_stages), range(L)):
        for b in range(a + 1, L + 1):
            times, recomputed, size = sized_options(profile, a, b, held, i)
            fits = np.flatnonzero(size <= memory)
            options[i, a, b] = (times[fits], recomputed[fits], size[fits])
    splits = []
    for inner in itertools.combinations([c for c in range(1, L) if c not in forbidden], num_stages - 1):
        cuts = (0, *inner, L)
        stages = [options[i, cuts[i], cuts[i + 1]] for i in range(num_stages)]
        if all(len(s[0]) for s in stages):
            splits.append((max(s[0].min() for s in stages), stages))
    if not splits:
        return None
    bottleneck = min(time_ for time_, _ in splits)
    # among the tied splits each stage takes its least time, and of those its fewest recomputed layers; then the
    # smallest fullest stage, whichever of equal choices each takes
    keys = []
    for time_, stages in splits:
        if time_ == bottleneck:
            least = sum(s[0].min() for s in stages)
            fewest = [s[1][s[0] == s[0].min()].min() for s in stages]
            fullest = max(
                s[2][(s[0] == s[0].min()) & (s[1] == few)].max() for s, few in zip(stages, fewest, strict=True)
            )
            keys.append((least - base, sum(fewest), fullest))
    return (bottleneck, *min(keys)[:2]), min(keys)[2]


@pytest.mark.parametrize("block", range(10))
def test_split_equals_brute_force_on_a_thousand_instances(block):
    """Four kinds of layers, four tiers."""
    rng = np.random.default_rng(block)
    num_infeasible = 0
    for _ in range(100):
        L, M = int(rng.integers(2, 7)), int(rng.integers(1, 6))
        P = int(rng.integers(1, min(L, 4) + 1))
        profile = random_profile(rng, L, 4, num_tiers=3)
        if rng.random() < 0.5:
            profile = with_tables(profile, rng)
        schedule = str(rng.choice(["1F1B", "1F1B", "GPipe", "ZBH1"]))
        free = split(profile, P, microbatches=M, schedule=schedule)
        memory = int(rng.uniform(0.3, 1.0) * max(device.total_bytes for device in free.memory))
        forbidden = frozenset(int(c) for c in range(1, L) if rng.random() < 0.15)
        if L - len(forbidden) < P:
            forbidden = frozenset()
        expected = brute_force(profile, P, memory, held_by(schedule, P, M), forbidden)
        ask = {"microbatches": M, "schedule": schedule, "forbidden_cuts": forbidden}
        if expected is None:
            num_infeasible += 1
            with refused(PartitionError):
                split(profile, P, memory=memory, **ask)
            continue
        best, fullest = expected
        result = split(profile, P, memory=memory, **ask)
        assert result.exact
        chosen = sum(stage.num_recomputed() for stage in result.stages)
        assert (result.bottleneck_s, sum(result.recompute_s), chosen) == pytest.approx(best, rel=1e-9)
        assert max(device.total_bytes for device in result.memory) <= min(memory, fullest + 1e-6)
        for i, stage in enumerate(result.stages):
            times, _, size = sized_options(profile, stage.start, stage.stop, held_by(schedule, P, M), i)
            took = result.forward_s[i] + result.backward_s[i]
            assert np.isclose(size[np.isclose(times, took)], result.memory[i].total_bytes).any()
        assert [s.start for s in result.stages[1:]] == [s.stop for s in result.stages[:-1]]
        assert not forbidden & {s.start for s in result.stages}
        assert result.lower_bound_s <= result.bottleneck_s * (1 + 1e-12)
    assert 0 < num_infeasible < 90


def test_of_tied_splits_the_one_with_the_smallest_fullest_stage_counts_what_is_computed_again():
    """Both blocks of the first stage recompute: 10 + 10 bytes, and 45 that the backward of one computes again."""
    again = {"saved": ((0.0, 50.0), (1.0, 5.0)), "state": 5.0}
    layers = [layer(0, **again), layer(1, **again), layer(2, 0.0, 0.0, state=20.0), layer(3, 2.0, 4.0, state=50.0)]
    found = split(profile_of(layers), 2, memory=100, microbatches=1)
    assert [stage.stop for stage in found.stages] == [2, 4]  # at 3 the stages would hold 85 and 50
    assert [device.total_bytes for device in found.memory] == [65.0, 70.0]


@pytest.mark.parametrize("U", [1, 2, 3])
def test_choice_of_tiers_equals_brute_force_with_many_alike_layers(U):
    rng = np.random.default_rng(5)
    for _ in range(100):
        C = int(rng.integers(1, 5))
        gain, cost = np.cumsum(rng.integers(1, 60, (2, C, U)), axis=2)
        num_alike = rng.integers(0, 5 if U == 3 else 7, C)
        offered = [1 if rng.random() < 0.3 else U for _ in range(C)]
        need = int(rng.integers(1, max(2, int((num_alike * gain.max(axis=1)).sum()) + 20)))
        # every count of every class
        saved, paid = np.zeros((2, 1), int)
        for g in range(C):
            numbers = np.array(list(itertools.product(range(num_alike[g] + 1), repeat=offered[g])))
            numbers = numbers[numbers.sum(axis=1) <= num_alike[g]]
            saved, paid = (
                np.add.outer(total, numbers @ values[g, : offered[g]]).ravel()
                for total, values in ((saved, gain), (paid, cost))
            )
        enough = paid[saved >= need]
        upgrades = [[Upgrade(int(gain[g, u]), int(cost[g, u]), 7) for u in range(offered[g])] for g in range(C)]
        tiers, alike = tier_table(upgrades), num_alike.tolist()
        *_, menu = menus_of(tiers, [number > 0 for number in alike])
        found = least_extra(tiers, menu, alike, need)
        if not len(enough):
            assert found is None
            assert least_bound(menu, alike, need) == np.inf
            continue
        least = int(enough.min())
        assert found is not None
        own = [(n, x) for ns, xs in zip(found.counts, upgrades, strict=True) for n, x in zip(ns, xs, strict=True)]
        assert found.extra == least == sum(n * x.cost for n, x in own)
        assert sum(n * x.gain for n, x in own) >= need
        assert all(sum(ns) <= number and min(ns) >= 0 for ns, number in zip(found.counts, alike, strict=True))
        assert least_bound(menu, alike, need) <= least <= round_up(tiers, menu, alike, need).extra
        for slack in (0, 3, 40):
            assert least_extra(tiers, menu, alike, need, least + slack) == found
        assert least_extra(tiers, menu, alike, need, least - 1) is None


def test_a_stage_whose_layers_take_the_limit_must_still_fit():
    profile = profile_of([layer(i, saved=((0, 100.0), (1.0, 10.0))) for i in range(2)])
    problem = problem_of(profile, 1, 1, memory_bytes=195.0)  # both keep 200
    pipeline = pipeline_of(problem, layer_table(problem), chunk_room(problem))
    cost, own = time_cost(pipeline), pipeline.time[-1]
    choice = least_choice(replace(pipeline, choices={}), 0, 0, 2)
    assert choice is not None
    assert choice.extra > 0
    assert cost(0, 0, 2, own) > own
    assert cost(0, 0, 2, own + choice.extra) == own + choice.extra
    assert cost(0, 0, 2, own + choice.extra - 1) == own + choice.extra


def test_ties_recompute_least_and_then_even_out_memory():
    # the head is the bottleneck whatever is done: the rest is free to choose
    layers = [layer(i, 1.0, 2.0, state=10.0, saved=((0, 10.0), (1.0, 0.0))) for i in range(4)]
    layers.append(layer(4, 10.0, 20.0, state=1.0))
    result = split(profile_of(layers), 3, memory=1000.0, microbatches=1)
    assert [s.stop for s in result.stages] == [2, 4, 5]
    assert result.bottleneck_s == 30.0
    # with 60 bytes a 2 + 2 split recomputes one layer, 1 + 3 and 3 + 1 two
    tight = split(profile_of(layers), 3, memory=60.0, microbatches=8)
    assert [s.stop for s in tight.stages] == [2, 4, 5]
    assert tight.recompute_s == (1.0, 0.0, 0.0)


def test_recompute_names_tiers_and_the_first_layers():
    layers = [layer(i, saved=((0, 100.0), (0.5, 60.0), (1.0, 10.0)), transient=5.0) for i in range(3)]
    profile = profile_of(layers)
    # all on none 300 and a workspace of 5
    assert split(profile, 1, memory=305.0, microbatches=1).stages[0].recompute == ()
    # one layer on selective saves 40 bytes, and computes them again where the peak is; the second layer saves 40 more
    assert split(profile, 1, memory=304.0, microbatches=1).stages[0].recompute == (
        RecomputeChoice(tier="selective", layers=(0, 1)),
    )
    assert split(profile, 1, memory=200.0, microbatches=1).stages[0].recompute == (
        RecomputeChoice(tier="selective", layers=(2,)),
        RecomputeChoice(tier="full", layers=(0, 1)),
    )
    forced = split(profile, 1, memory=1e6, microbatches=1, recompute="full")
    assert forced.stages[0].recompute == (RecomputeChoice(tier="full", layers=(0, 1, 2)),)
    assert forced.recompute_s == (3.0,)
    assert forced.memory[0].total_bytes == 3 * 10.0 + 90.0 + 5.0
    # where it is forced, what it costs decides the cuts: 2 + 4, 2, 2, 2
    dear = profile_of([layer(i, 1.0, 1.0, saved=((0, 10.0), (4.0 * (i == 0), 0.0))) for i in range(4)])
    assert [stage.stop for stage in split(dear, 2, recompute="full").stages] == [1, 4]
    assert [stage.stop for stage in split(dear, 2, recompute="none").stages] == [2, 4]


def test_a_stage_without_recompute_needs_the_workspace_alone():
    saved = ((0, 100.0), (0.5, 60.0), (1.0, 10.0))
    profile = profile_of([layer(0, saved=saved, transient=7.0), layer(1, saved=saved, transient=9.0)])
    for tiers, transient in (
        ((), 9.0),
        ((RecomputeChoice(tier="full", layers=(0,)),), 7.0 + 90.0),
        ((RecomputeChoice(tier="selective", layers=(1,)),), 9.0 + 40.0),
        ((RecomputeChoice(tier="selective", layers=(0,)), RecomputeChoice(tier="selective", layers=(1,))), 9.0 + 40.0),
    ):
        stage = Stage(index=0, start=0, stop=2, recompute=tiers)
        ask = {"work_mean": ONE, "work_max": ONE, "num_microbatches": 1}
        assert assess_stages(profile, [stage], **ask).memory[0].transient_bytes == transient
        # with weight gradients apart, what was computed again is held with the micro-batch until they are done
        apart = assess_stages(profile, [stage], schedule="ZBH1", **ask).memory[0]
        assert (apart.saved_bytes, apart.transient_bytes) == (200.0, 9.0)


def test_memory_counts_state_flight_transient_and_overhead():
    layers = [layer(i, state=100.0, saved=((0, 7.0),), transient=float(i)) for i in range(8)]
    stages = [Stage(index=i, start=2 * i, stop=2 * i + 2) for i in range(4)]
    ask = {"work_mean": ONE, "work_max": 2 * ONE, "overhead_bytes": 3.0}
    result = assess_stages(profile_of(layers), stages, num_microbatches=8, **ask)
    assert [m.total_bytes for m in result.memory] == [
        200 + n * 28 + 2 * t + 3 for n, t in ((4, 1), (3, 3), (2, 5), (1, 7))
    ]
    assert result.in_flight == (4, 3, 2, 1)
    gpipe = assess_stages(profile_of(layers), stages, num_microbatches=8, schedule="GPipe", **ask)
    assert [m.saved_bytes for m in gpipe.memory] == [8 * 28.0] * 4
    # two devices of two chunks: at most 2 (P - d - 1) + (V - 1) P + 1 chunk activations alive
    chunks = assess_stages(
        profile_of(layers), stages, num_microbatches=8, schedule="Interleaved1F1B", num_chunks=2, **ask
    )
    assert [m.saved_bytes for m in chunks.memory] == [5 * 28.0, 3 * 28.0]
    assert [m.state_bytes for m in chunks.memory] == [400.0, 400.0]


def test_interleaved_is_exact_when_memory_is_ample_and_says_so_when_not():
    rng = np.random.default_rng(2)
    profile = random_profile(rng, 12, 3)
    ask = {"schedule": "Interleaved1F1B", "num_chunks": 2, "microbatches": 4}
    ample = split(profile, 2, **ask)
    assert ample.exact
    assert ample.bottleneck_s == pytest.approx(brute_force(profile, 4, 1e18, ([1] * 4, [0] * 4), frozenset())[0][0])
    need = max(m.total_bytes for m in ample.memory)
    assert split(profile, 2, memory=need, **ask).exact
    for share in (0.95, 0.85, 0.75):
        capped = split(profile, 2, memory=need * share, **ask)
        assert max(m.total_bytes for m in capped.memory) <= need * share
        assert not capped.exact
        assert capped.bottleneck_s >= ample.bottleneck_s


def test_of_two_ways_to_share_a_devices_room_the_faster_split_is_taken(monkeypatch):
    rng = np.random.default_rng(4)
    won = set()
    for _ in range(20):
        profile = random_profile(rng, 10, 3)
        problem = problem_of(profile, 2, 4, schedule="Interleaved1F1B", num_chunks=2)
        free = split_stages(problem)
        problem = replace(problem, memory_bytes=0.85 * free.peak_bytes)
        even, alike = chunk_room(problem), chunk_room(problem, like=free)

        def bottleneck(rooms, problem=problem):
            with monkeypatch.context() as patch:
                patch.setattr("trimtab.partition.stages.chunk_room", lambda *_, **__: rooms)
                try:
                    return split_stages(problem).bottleneck_s
                except PartitionError:
                    return np.inf

        each = [bottleneck(even), bottleneck(alike)]
        if min(each) < np.inf:
            assert split_stages(problem).bottleneck_s == min(each)
            won.add(np.sign(each[0] - each[1]))
    assert {-1.0, 1.0} <= won


def test_chunks_of_a_device_share_its_room_by_what_their_micro_batches_in_flight_hold():
    profile = profile_of([layer(i, saved=((0.0, 10.0),)) for i in range(4)])
    ask = {"schedule": "Interleaved1F1B", "num_chunks": 2, "memory_bytes": 1010.0, "overhead_bytes": 10.0}
    problem = problem_of(profile, 2, 4, **ask)
    found = problem.assess([Stage(index=i, start=i, stop=i + 1) for i in range(4)])
    assert found.devices == (0, 1, 0, 1)
    assert found.in_flight == (4, 3, 2, 1)
    assert chunk_room(problem).tolist() == [500.0] * 4
    assert chunk_room(problem, like=found).tolist() == pytest.approx(
        [1000 * 4 / 6, 1000 * 3 / 4, 1000 * 2 / 6, 1000 * 1 / 4]
    )


def test_recompute_stages_keeps_the_cuts():
    rng = np.random.default_rng(8)
    profile = random_profile(rng, 9, 3)
    problem = problem_of(profile, 3, 4, memory_bytes=500.0)
    stages = [Stage(index=i, start=3 * i, stop=3 * i + 3) for i in range(3)]
    result = recompute_stages(problem, stages)
    assert [(s.start, s.stop) for s in result.stages] == [(0, 3), (3, 6), (6, 9)]
    for i, stage in enumerate(result.stages):
        times, saved, _, transient, state = stage_options(profile, stage.start, stage.stop)
        fits = state + (3 - i) * saved + transient <= 500.0
        assert result.forward_s[i] + result.backward_s[i] == pytest.approx(times[fits].min())


def test_two_hundred_layers_into_64_stages_keep_to_the_cap():
    rng = np.random.default_rng(0)
    kinds = []
    for g in range(4):
        f, size = rng.uniform(5e-3, 1e-2), rng.uniform(0.6e9, 2e9)
        tiers = ((0, size), (0.4 * f, 0.45 * size), (0.9 * f, 0.05 * size))
        kinds.append({"forward": f, "backward": 2 * f, "state": 2e9, "saved": tiers, "transient": size, "group": g})
    profile = profile_of(layer(i, **kinds[i // 50]) for i in range(200))
    free = split(profile, 64, microbatches=128)
    cap = 0.6 * max(m.total_bytes for m in free.memory)
    result = split(profile, 64, microbatches=128, memory=cap)
    assert max(m.total_bytes for m in result.memory) <= cap
    assert sum(stage.num_recomputed() for stage in result.stages) > 0


def test_even_splits():
    profile = profile_of(
        [
            replace(layer(0), kind="embed", tower="vision"),
            *(replace(layer(i, params=1.0), tower="vision") for i in range(1, 5)),
            replace(layer(5), kind="projector", tower="projector"),
            *(layer(i, params=10.0) for i in range(6, 12)),
            replace(layer(12, params=30.0), kind="head"),
        ]
    )
    # ten blocks: 4 + 3 + 3; embedding first, projector behind the vision blocks, head last
    assert [s.start for s in even_stages(profile, 3)] == [0, 6, 9]
    assert [s.start for s in even_stages(profile, 3, vision="first")] == [0, 8, 10]
    assert [s.start for s in even_stages(profile, 3, forbidden_cuts=frozenset({6, 7}))] == [0, 5, 9]
    # the only two cuts there are, both behind the first one wanted
    assert [s.start for s in even_stages(profile, 3, forbidden_cuts=frozenset(range(1, 11)))] == [0, 11, 12]
    with refused(PartitionError, "10", "11", "1"):
        even_stages(profile, 11)
    with refused(PartitionError, "1", "2"):
        even_stages(profile, 4, forbidden_cuts=frozenset(range(2, 13)))


def test_infeasible_splits_say_how_many_bytes_are_missing():
    profile = profile_of([layer(i, state=100.0, saved=((0, 50.0), (1.0, 10.0)), transient=4.0) for i in range(4)])
    # 2 + 2 layers: 200 + 2 x 2 x 10 + one of them computed again, 40, + 4 + 1 on the first device
    ask = {"microbatches": 4, "overhead_bytes": 1.0}
    assert split(profile, 2, memory=285.0, **ask).bottleneck_s == 8.0
    expected = r"strongest recompute everywhere.*needs 285 B.*5 B \(5 bytes\) too many: try more stages, a larger tp or"
    with pytest.raises(PartitionError, match=expected):
        split(profile, 2, memory=280.0, **ask)
    with refused(PartitionError, "405", "5", "recompute='auto", "auto"):
        split(profile, 2, memory=400.0, recompute="none", **ask)
    with refused(PartitionError, "schedule='1F1B", "1F1B"):
        split(profile, 2, memory=284.0, recompute="full", schedule="GPipe", **ask)
    with refused(PartitionError):
        split(profile, 2, memory=240.0, schedule="Interleaved1F1B", num_chunks=2, **ask)


def test_a_stage_dearer_than_those_before_it_is_priced_as_such():
    # under ZBH1 the first of 3 devices holds 2 micro-batches by their tiers and 1 whole, the second 1 and 2: of the two
    # blocks that no cut may part the first would recompute one, the second both. Two stages would cover the model in 16
    block = {"forward": 2.0, "backward": 3.0, "saved": ((0, 50.0), (5.0, 0.0))}
    profile = profile_of([layer(0, 0.5, 0.5), layer(1, **block), layer(2, **block), layer(3, 1.0, 1.0)])
    ask = {"memory": 200.0, "microbatches": 4, "forbidden_cuts": frozenset({2})}
    result = split(profile, 3, **ask, schedule="ZBH1")
    assert [s.stop for s in result.stages] == [1, 3, 4]
    assert result.exact
    assert result.bottleneck_s == 20.0
    assert [device.saved_bytes for device in result.memory] == [0.0, 200.0, 0.0]
