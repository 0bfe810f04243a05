"""Steps on devices with jitter, beside steps that are drawn and simulated one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from trimtab.options import ScheduleName
from trimtab.partition.schedules import devices_of_stages
from trimtab.partition.simulate import StageTimes, simulate_steps, spread_steps

ALL_REDUCE_S = 0.7


def case_of(*, S: int, num_steps: int, dp: int, M: int, uneven: float) -> tuple[StageTimes, np.ndarray]:
    rng = np.random.default_rng(1)
    packs = num_steps * dp * M
    size = np.exp(uneven * rng.standard_normal(packs))
    forward = np.linspace(0.9, 1.1, S)[:, None] * size
    sends = np.full((S, packs), 0.01)
    times = StageTimes(
        forward_s=forward,
        backward_s=2 * forward,
        weight_s=forward,
        send_forward_s=sends,
        send_backward_s=sends,
    )
    table = np.arange(packs).reshape(num_steps, dp, M)
    table[-1, -1, -1] = -1  # an empty slot
    return times, table


def drawn_one_by_one(
    times: StageTimes, table: np.ndarray, *, schedule: ScheduleName, P: int, tp: int, jitter: float, num: int
) -> np.ndarray:
    """Seconds of `num` steps, by the simulator that knows no jitter: every stage's times scaled before."""
    rng, S = np.random.default_rng(7), len(times.forward_s)
    device = devices_of_stages(schedule, num_devices=P, num_chunks=S // P)
    found = []
    for number in range(num):
        step = table[number % len(table)]
        ends = []
        for packs in step:
            slow = np.exp(jitter * rng.standard_normal((P, tp))).max(axis=1)[device][:, None]
            scaled = {name: getattr(times, name) * slow for name in ("forward_s", "backward_s", "weight_s")}
            alone = simulate_steps(
                replace(times, **scaled), packs[None, None], schedule=schedule, num_devices=P, all_reduce_s=ALL_REDUCE_S
            )
            ends.append(alone[0])
        found.append(max(ends))
    return np.array(found)


@pytest.mark.parametrize(
    ("schedule", "S", "P", "tp", "uneven"),
    [
        ("1F1B", 4, 4, 1, 0.2),
        ("1F1B", 1, 1, 8, 0.0),
        ("Interleaved1F1B", 4, 2, 2, 0.1),
        ("ZBVZeroBubble", 4, 2, 2, 0.3),
    ],
)
def test_mean_and_quantile_are_those_of_steps_drawn_one_by_one(
    schedule: ScheduleName, S: int, P: int, tp: int, uneven: float
) -> None:
    times, table = case_of(S=S, num_steps=6, dp=3, M=4, uneven=uneven)
    how: dict[str, Any] = {"schedule": schedule, "num_devices": P, "all_reduce_s": ALL_REDUCE_S}
    step_s = simulate_steps(times, table, **how)
    found = spread_steps(times, table, step_s, **how, stage_devices=tp, jitter=0.05)
    truth = drawn_one_by_one(times, table, schedule=schedule, P=P, tp=tp, jitter=0.05, num=1200)
    assert found.mean_s == pytest.approx(truth.mean(), rel=0.01)
    assert found.p95_s == pytest.approx(np.quantile(truth, 0.95), rel=0.015)
    assert found.mean_s > step_s.mean(), "the slowest of several is not the mean one"


def test_more_devices_and_more_jitter_take_longer_and_none_takes_what_was_planned() -> None:
    def spread(dp: int, jitter: float, seed: int = 0) -> tuple[float, float]:
        times, table = case_of(S=2, num_steps=8, dp=dp, M=4, uneven=0.0)
        step_s = simulate_steps(times, table)
        found = spread_steps(
            times, table, step_s, schedule="1F1B", num_devices=2, stage_devices=1, jitter=jitter, seed=seed
        )
        return found.mean_s / step_s.mean(), found.p95_s / step_s.mean()

    assert spread(4, 0.0) == pytest.approx((1.0, 1.0))
    means, tails = zip(*[spread(dp, 0.02) for dp in (2, 8, 64)], strict=True)
    assert 1 < means[0] < means[1] < means[2] < spread(64, 0.04)[0]
    assert all(mean < tail for mean, tail in zip(means, tails, strict=True))
    assert spread(8, 0.02) == spread(8, 0.02)
    assert spread(8, 0.02) == pytest.approx(spread(8, 0.02, seed=5), rel=3e-3)
