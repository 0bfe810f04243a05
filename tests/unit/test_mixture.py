"""mix_samples: shares exact to less than a sample, rows of a data set equally often, within an epoch and over them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.balance.mixture import mix_samples, share_exactly
from trimtab.errors import PackingError
from trimtab.specs import SampleTable


def make_table(n: int, first: int, *, ids=False, unit="patches") -> SampleTable:
    tokens = np.arange(first, first + n, dtype=np.int64)
    return SampleTable.of(
        4 * tokens,
        tokens,
        patches_sq=tokens**2,
        patches_windowed=tokens,
        source=np.arange(n, dtype=np.int32) % 2,
        source_names=(f"a{first}", f"b{first}"),
        ids=tuple(f"{first}-{i}" for i in range(n)) if ids else None,
        patch_unit=unit,
    )


parts = st.lists(st.tuples(st.integers(1, 40), st.floats(0.01, 10)), min_size=1, max_size=5)


@settings(max_examples=80, deadline=None)
@given(parts, st.integers(1, 300), st.integers(0, 5), st.integers(0, 3))
def test_shares_are_exact_and_rows_are_drawn_equally_often(sized, num_samples, seed, epoch):
    tables = [make_table(n, 1000 * i) for i, (n, _) in enumerate(sized)]
    weights = [w for _, w in sized]
    mixture = mix_samples(tables, weights, num_samples=num_samples, seed=seed, epoch=epoch)
    assert len(mixture.table) == num_samples == sum(part.num_drawn for part in mixture.parts)
    for i, (n, weight) in enumerate(sized):
        rows = mixture.row[mixture.part == i]
        assert abs(len(rows) - num_samples * weight / sum(weights)) < 1 + 1e-9
        times = np.bincount(rows, minlength=n)
        assert times.max() - times.min() <= 1
        assert mixture.parts[i].fewest == times.min()
        assert mixture.parts[i].num_left_out == (times == 0).sum()
        assert (mixture.table.num_tokens[mixture.part == i] == tables[i].num_tokens[rows]).all()


@settings(max_examples=30, deadline=None)
@given(parts, st.integers(1, 60), st.integers(1, 7))
def test_over_epochs_too_no_row_is_drawn_twice_more_than_another(sized, num_samples, num_epochs):
    tables = [make_table(n, 0) for n, _ in sized]
    weights = [w for _, w in sized]
    drawn = [mix_samples(tables, weights, num_samples=num_samples, epoch=e, seed=4) for e in range(num_epochs)]
    for i, (n, _) in enumerate(sized):
        times = sum(np.bincount(m.row[m.part == i], minlength=n) for m in drawn)
        assert times.max() - times.min() <= 1


def test_rows_keep_their_source_and_id_and_the_same_arguments_the_same_rows():
    tables = [make_table(10, 0, ids=True), make_table(6, 100)]
    mixture = mix_samples(tables, [1, 3], epochs=1.0, seed=1)
    assert len(mixture.table) == 16
    assert [part.num_drawn for part in mixture.parts] == [4, 12]
    assert [part.weight for part in mixture.parts] == [0.25, 0.75]
    assert mixture.table.source_names == ("a0", "b0", "a100", "b100")
    assert (mixture.table.source == 2 * mixture.part + mixture.row % 2).all()
    assert mixture.table.ids[:4] == tuple(f"0-{row}" for row in mixture.row[:4])
    assert mixture.table.ids[4:] == tuple(str(row) for row in mixture.row[4:])
    again = mix_samples(tables, [10, 30], num_samples=16, seed=1)
    assert again.row.tolist() == mixture.row.tolist()
    other = mix_samples(tables, [1, 3], seed=2)
    assert other.row.tolist() != mixture.row.tolist()


def test_equal_remainders_go_to_the_first():
    assert share_exactly(5, np.array([0.25] * 4)).tolist() == [2, 1, 1, 1]
    assert share_exactly(3, np.array([0.0, 1.0])).tolist() == [0, 3]


def test_a_weight_of_zero_leaves_a_data_set_out():
    mixture = mix_samples([make_table(3, 0), make_table(0, 0)], [1, 0], epochs=2)
    assert mixture.row.tolist() == [0, 0, 1, 1, 2, 2]


def test_mixtures_that_cannot_be_are_refused():
    with pytest.raises(PackingError, match="1 weights for 2 data sets: give one each"):
        mix_samples([make_table(1, 0), make_table(1, 0)], [1])
    with pytest.raises(PackingError, match=r"weights \(0, -1\) are no proportions: give numbers from 0"):
        mix_samples([make_table(1, 0), make_table(1, 0)], [0, -1])
    with pytest.raises(PackingError) as error:
        mix_samples([make_table(0, 0), make_table(1, 0, unit="tiles")], [1, 1], num_samples=0, epochs=0)
    assert "data set 0 has weight 1 and no samples: give it samples, or weight 0" in str(error.value)
    assert "some data sets count patches and others tiles: size them with one image rule" in str(error.value)
    assert "num_samples 0 draws nothing: give 1 or more" in str(error.value)
    assert "epochs 0 is not an amount of data: give a number above 0" in str(error.value)
