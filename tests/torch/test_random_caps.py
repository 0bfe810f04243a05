"""Plans from traced bytes never hold more than their cap when a real model runs them. Needs torch and Transformers."""

from __future__ import annotations

import numpy as np
import pytest
from traced_families import find_layers, kept_bytes

from random_caps import draw_model, held_bytes, run_capped


@pytest.mark.parametrize(
    ("case", "attention", "dtype"),
    [
        ("internvl qwen2", "eager", "fp32"),
        ("gemma3", "sdpa", "bf16"),
        ("qwen2_5_vl", "sdpa", "bf16"),
    ],
)
def test_no_plan_under_a_random_cap_holds_more_than_the_cap(case, attention, dtype):
    rng = np.random.default_rng(1)
    made = draw_model(rng, case, attention, dtype)
    runs = [run_capped(made, rng) for _ in range(4)]
    assert all(run.utilisation <= 1 for run in runs)
    assert any(run.tiers for run in runs)
    assert max(ratio for run in runs for ratio in run.saved_ratio) > 0.99  # nothing is to spare where it is fullest
    # the meter itself: nothing recomputed, one stage, is what autograd keeps
    assert held_bytes(made.model, made.inputs, [find_layers(made.model)]) == [kept_bytes(made.model, made.inputs, [])]
