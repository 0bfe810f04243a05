"""StreamPacker: every sample once, limits hard, dp packs a row, a bounded wait, and a restart that changes nothing."""

from __future__ import annotations

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.columns import pack_columns
from trimtab.balance.cost import LinearCost
from trimtab.balance.metrics import dist_ratio
from trimtab.balance.stream import MAX_AGE
from trimtab.balance.streaming import StreamPacker
from trimtab.errors import PackingError


def drain(packer) -> list:
    rows = []
    while (row := packer.pop()) is not None:
        rows.append(row)
    return rows


def run(packer, samples) -> list:
    rows = []
    for sample_id, sizes in enumerate(samples):
        packer.push(sizes, sample_id)
        rows += drain(packer)
    packer.flush()
    return rows + drain(packer)


samples_of_three_columns = st.lists(st.tuples(st.integers(0, 9), st.integers(0, 60), st.integers(0, 5)), max_size=150)


@settings(max_examples=40, deadline=None)
@given(
    samples_of_three_columns,
    st.integers(1, 5),
    st.integers(1, 4),
    st.integers(5, 40),
    st.sampled_from(["random", "tolerance", "sorted"]),
)
def test_any_stream_is_packed_once_within_the_limits(samples, dp, buffer_rows, max_samples, order):
    limits = (9, 60, 5)
    packer = StreamPacker(limits, dp, buffer_rows=buffer_rows, max_samples=max_samples, order=order, seed=3)
    rows, most = [], 0
    for sample_id, sizes in enumerate(samples):
        packer.push(sizes, sample_id)
        most = max(most, packer.num_waiting)
        rows += drain(packer)
    packer.flush()
    rows += drain(packer)
    assert most < max_samples
    assert packer.num_waiting == 0
    flat = sorted(i for row in rows for pack in row for i in pack)
    assert flat == list(range(len(samples)))
    for row in rows:
        assert len(row) == dp
        for pack in row:
            assert (np.sum([samples[i] for i in pack], axis=0) <= limits).all()
    for row in rows[:-1]:
        assert all(row), "only the last row may hold empty packs"


@settings(max_examples=25, deadline=None)
@given(samples_of_three_columns, st.integers(0, 150), st.integers(0, 3))
def test_a_restored_packer_goes_on_as_if_it_had_never_stopped(samples, stop, taken):
    def make():
        return StreamPacker((9, 60, 5), 2, buffer_rows=2, max_samples=30, order="tolerance")

    whole = run(make(), samples)
    first = make()
    for sample_id, sizes in enumerate(samples[:stop]):
        first.push(sizes, sample_id)
    rows = [row for _ in range(taken) if (row := first.pop()) is not None]
    second = make()
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    for sample_id, sizes in enumerate(samples[stop:], min(stop, len(samples))):
        second.push(sizes, sample_id)
    second.flush()
    assert rows + drain(second) == whole


def draw(n: int) -> np.ndarray:
    r = np.random.default_rng(5)
    v = r.integers(0, 6, n)
    return np.column_stack([v, np.minimum(6144, 256 * v + r.lognormal(5, 0.8, n).astype(np.int64))])


def test_nobody_waits_longer_than_a_few_windows():
    samples, buffer_rows, dp = draw(6000), 8, 4
    packer = StreamPacker((18, 6144), dp, buffer_rows=buffer_rows)
    out, windows = {}, 0
    pushed_in = {}
    for sample_id, sizes in enumerate(samples.tolist()):
        pushed_in[sample_id] = windows
        packer.push(sizes, sample_id)
        rows = drain(packer)
        windows += bool(rows)
        out |= {i: windows for row in rows for pack in row for i in pack}
    assert windows > 20
    assert max(out[i] - pushed_in[i] for i in out) <= MAX_AGE + 1


def test_every_window_is_packed_with_randomness_of_its_own():
    packer, windows = StreamPacker((18, 6144), 4, buffer_rows=8), 0
    for sample_id, sizes in enumerate(draw(1500).tolist()):
        packer.push(sizes, sample_id)
        windows += bool(drain(packer))
        assert packer.state_dict()["num_windows"] == windows
    assert windows > 5
    other = StreamPacker((18, 6144), 4, buffer_rows=8)
    other.load_state_dict({**packer.state_dict(), "num_windows": windows + 1})
    packer.flush()
    other.flush()
    ours, theirs = drain(packer), drain(other)
    assert sorted(i for row in ours for pack in row for i in pack) == sorted(
        i for row in theirs for pack in row for i in pack
    )
    assert ours != theirs


def test_a_stream_is_nearly_as_even_as_the_whole():
    samples = draw(12_000)
    cost = LinearCost(patches=11.9, tokens=0.0398, tokens_sq=5.9e-7).of
    per_sample = cost(samples[:, 0], samples[:, 1])
    rows = run(StreamPacker((18, 6144), 8, cost=cost, buffer_rows=32), samples.tolist())
    streamed = np.array([[per_sample[list(pack)].sum() for pack in row] for row in rows])
    packed = pack_columns([samples[:, 0], samples[:, 1]], limits=(18, 6144), dp=8, cost=cost)
    offline = np.add.reduceat(per_sample[packed.indices], packed.offsets[:-1]).reshape(-1, 8)
    assert len(rows) <= 1.02 * len(offline)
    assert dist_ratio(streamed[:-1]) <= dist_ratio(offline) + 0.01


def test_samples_above_a_limit_and_settings_without_sense_are_refused():
    packer = StreamPacker((9, 60), 2)
    with pytest.raises(PackingError, match=r"sample 'a' with sizes \(10, 1\) does not fit a pack of \(9, 60\): raise"):
        packer.push((10, 1), "a")
    assert packer.num_waiting == 0
    with pytest.raises(PackingError) as error:
        StreamPacker((0,), 0, max_samples=-1, order="up", fill=3, cost=lambda v, t: v + t)
    text = str(error.value)
    for claim in ("limits (0,) hold no sample", "dp 0 packs nothing", "max_samples -1 does not fill one row", "'up'"):
        assert claim in text
    assert "fill 3 is not a share" in text
    assert "cost is not a function of 1 columns: give one that takes an array for each limit" in text
    with pytest.raises(PackingError, match="the state is of a packer with dp 2, this one has 4: use that"):
        StreamPacker((9, 60), 4).load_state_dict(packer.state_dict())
