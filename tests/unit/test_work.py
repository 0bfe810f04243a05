"""plan/decide/work.py: what micro-batches ask of the layers."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from plan_cases import tile_samples

from trimtab import Packing, SampleTable, describe, pack_samples
from trimtab.plan.decide.work import (
    PATCHES,
    TOKENS,
    TOKENS_SQ,
    extreme_rows,
    in_patches,
    limit_work,
    packed_work,
    padded_work,
)


def lengths(tiles: list[int], tokens: list[int]) -> SampleTable:
    return SampleTable.of(tiles, tokens, patches_sq=np.array(tiles), patch_unit="tiles")


def test_packed_and_padded_work_by_hand() -> None:
    samples = lengths([1, 2, 3], [10, 20, 40]).work()
    packing = Packing(offsets=np.array([0, 2, 3]), indices=np.array([2, 0, 1]), limits=(9, 99))
    packed, padded = packed_work(packing, samples), padded_work(packing, samples)
    assert packed[:, 0].tolist() == [1, 1]
    assert packed[:, PATCHES].tolist() == padded[:, PATCHES].tolist() == [4, 2]
    assert packed[:, TOKENS].tolist() == [50, 20]
    assert packed[:, TOKENS_SQ].tolist() == [1700, 400]
    assert padded[:, TOKENS].tolist() == [80, 20]
    assert padded[:, TOKENS_SQ].tolist() == [3200, 400]


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10_000))
def test_no_pack_asks_more_than_limit_work_says(seed: int) -> None:
    samples = tile_samples(60, seed)
    work = samples.work(token_window=512)
    limits = (int(samples.num_patches.max()) + 500, int(samples.num_tokens.max()) + 100)
    packs = packed_work(pack_samples(samples, limits=limits, dp=2).packing, work)
    bounds = [limit_work(rows, *limits) for rows in (work, packs, extreme_rows(work))]
    for bound in bounds:
        assert (packs <= bound * (1 + 1e-12)).all()
    np.testing.assert_array_equal(bounds[0], bounds[2])


def test_tiles_become_the_models_patches() -> None:
    samples = in_patches(lengths([0, 1, 5], [10, 300, 1300]), describe("InternVL-Chat-V1-5"))
    assert samples.num_patches.tolist() == [0, 1025, 5 * 1025]
    assert samples.patches_sq.tolist() == [0, 1025**2, 5 * 1025**2]
    assert samples.patch_unit == "patches"
