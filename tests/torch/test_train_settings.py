"""Tests of training/settings.py: what is refused, and the learning rate of each step; needs torch."""

from __future__ import annotations

from itertools import pairwise

import pytest

from trimtab.runtime.training.settings import TrainSettings, rate_factor


def test_the_learning_rate_rises_and_decays():
    factors = [rate_factor(step, 10, 2, "cosine") for step in range(1, 11)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert all(a >= b for a, b in pairwise(factors[1:]))
    assert factors[-1] > 0
    assert [rate_factor(step, 6, 2, "linear") for step in (3, 4, 5, 6)] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rate_factor(1, 6, 0, "constant") == 1.0


@pytest.mark.parametrize(
    ("asked", "cpu", "cuda"), [(None, "float32", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16")]
)
def test_products_are_in_float32_on_a_cpu_unless_asked_otherwise(tmp_path, asked, cpu, cuda):
    settings = TrainSettings(plan=tmp_path, model=tmp_path, dtype=asked)
    assert (settings.dtype_on("cpu"), settings.dtype_on("cuda")) == (cpu, cuda)
