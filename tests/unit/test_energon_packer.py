"""The Energon selector without Energon: lossless, within the limits, stateless."""

from __future__ import annotations

import pickle
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.adapters.energon import PackSelector, SampleSize
from trimtab.errors import PackingError


@dataclass(frozen=True)
class Sample:
    __key__: str
    tokens: int
    patches: int


def size_of(sample: Sample) -> SampleSize:
    return SampleSize(tokens=sample.tokens, patches=sample.patches)


def buffer_of(num_samples: int, seed: int = 0) -> list[Sample]:
    rng = np.random.default_rng(seed)
    tokens, patches = rng.integers(20, 900, num_samples), rng.integers(0, 2000, num_samples)
    return [Sample(f"shard/{i}", int(t), int(p)) for i, (t, p) in enumerate(zip(tokens, patches, strict=True))]


SELECTOR = PackSelector(size_of=size_of, max_patches=8000, max_tokens=4096)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 5000), st.integers(0, 9000)), max_size=60))
def test_every_sample_is_in_one_pack_and_no_pack_above_a_limit(sizes: list[tuple[int, int]]) -> None:
    samples = [Sample(str(i), tokens, patches) for i, (tokens, patches) in enumerate(sizes)]
    packs = PackSelector(size_of=size_of, max_patches=8000, max_tokens=4096, oversize="alone")(samples)
    assert sorted(int(s.__key__) for pack in packs for s in pack) == list(range(len(samples)))
    for pack in packs:
        fits = sum(s.tokens for s in pack) <= 4096 and sum(s.patches for s in pack) <= 8000
        assert fits or len(pack) == 1
        assert pack


def test_packs_of_a_buffer_are_full_in_one_of_the_two() -> None:
    samples = buffer_of(1000)
    packs = SELECTOR(samples)
    bound = max(sum(s.tokens for s in samples) / 4096, sum(s.patches for s in samples) / 8000)
    assert len(packs) <= 1.02 * bound + 1


def test_a_selector_has_no_state_and_can_be_sent_to_a_worker() -> None:
    first, other = buffer_of(200), buffer_of(150, seed=1)
    before = SELECTOR(first)
    SELECTOR(other)
    assert SELECTOR(first) == before
    assert pickle.loads(pickle.dumps(SELECTOR))(first) == before
    assert SELECTOR([]) == []


def test_a_sample_above_a_limit_is_named_by_its_key() -> None:
    samples = [*buffer_of(5), Sample("shard/long", 5000, 10)]
    with pytest.raises(
        PackingError, match=r"1 of 6 samples do not fit .*raise the limits(.|\n)*shard/long: 10 patches, 5000"
    ):
        SELECTOR(samples)


def test_a_selector_refuses_to_lose_samples() -> None:
    with pytest.raises(PackingError, match=r"oversize 'skip' would lose samples .*: choose 'error' or 'alone'"):
        PackSelector(size_of=size_of, max_patches=1, max_tokens=1, oversize="skip")  # type: ignore[arg-type]
