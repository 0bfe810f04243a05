"""Tests of training/settings.py: what is refused, and the learning rate of each step; needs torch."""

from __future__ import annotations

from itertools import pairwise

import pytest

from refusals import refused
from trimtab.errors import TrimtabError
from trimtab.runtime.training.settings import TrainSettings, rate_factor


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"optimizer": "Adamm"}, ("Adamm", "torch.optim")),
        ({"steps": 0, "keep": 0}, ("steps", "keep")),
        ({"learning_rate": float("nan")}, ("learning_rate", "--lr", "0")),
        ({"optimizer": "LBFGS"}, ("LBFGS",)),
        (
            {"max_grad_norm": -1.0, "warmup_steps": -1},
            ("warmup_steps", "max_grad_norm", "1.0"),
        ),
        ({"seed": 99999999999999999999}, ("99999999999999999999",)),
        ({"save_every": 2, "save": False}, ("--save-every",)),
    ],
)
def test_bad_settings_are_named_together(tmp_path, change, names):
    with refused(TrimtabError, names):
        TrainSettings(plan=tmp_path / "plan", model=tmp_path / "model", out=tmp_path / "no", **change)
    assert not (tmp_path / "no").exists()


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
