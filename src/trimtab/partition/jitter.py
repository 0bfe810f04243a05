"""Steps on devices that are not equally fast: the step as expected, and that of which one in twenty takes longer.

The time of each device in each step is its own, exp(jitter z) times the planned with z normal. Jitter of single kernels
averages out over the thousands of a step; what power and temperature do to a device's clock does not. A stage of
several devices (tp, cp) goes as the slowest of them, a pipeline as its stages let it, a step as the slowest rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from trimtab.options import ScheduleName
from trimtab.partition.replay import makespans, waves_of
from trimtab.partition.schedules import devices_of_stages
from trimtab.partition.simulate import StageTimes, block_costs
from trimtab.specs import FloatArray, IntArray

_MOST_BLOCKS = 2**21  # simulated in all: 0.1 s
_FEWEST, _MOST = 24, 512  # draws


@dataclass(frozen=True, slots=True, kw_only=True)
class StepSpread:
    """Seconds of a step on devices with jitter, over the data's own unlike steps."""

    mean_s: float
    p95_s: float


def spread_steps(
    times: StageTimes,
    table: IntArray,
    step_s: FloatArray,
    *,
    schedule: ScheduleName,
    num_devices: int,
    stage_devices: int,
    jitter: float,
    all_reduce_s: float = 0.0,
    seed: int = 0,
) -> StepSpread:
    """`StepSpread` of steps `step_s` (num_steps,), which `simulate_steps` found for the same arguments.

    Draws up to 512 steps spread over the data, each with devices of its own, and simulates their pipelines. How many
    times as long a draw took may happen to any step: mean and quantile are over all pairs. Seeded, so the same for the
    same input. Beside 4,000 steps drawn and simulated one by one: within 1 % (tests/unit/test_jitter.py).
    """
    if jitter == 0.0:
        return StepSpread(mean_s=float(step_s.mean()), p95_s=float(np.quantile(step_s, 0.95)))
    num_steps, dp, M = table.shape
    S, P = len(times.forward_s), num_devices
    waves = waves_of(schedule, num_devices=P, num_chunks=S // P, num_microbatches=M)
    draws = int(np.clip(_MOST_BLOCKS // (len(waves.stage) * dp), _FEWEST, _MOST))
    drawn = np.linspace(0, num_steps - 1, num=draws).astype(np.int64)

    # 1. The packs of every drawn step, each a column of its own, on devices of their own.
    packs = table[drawn].ravel()
    slots = np.where(packs >= 0, np.arange(len(packs)), -1).reshape(draws * dp, M)
    normal = np.random.default_rng(seed).standard_normal((P, draws * dp, stage_devices)).max(axis=2)
    slowest = np.exp(jitter * normal)[devices_of_stages(schedule, num_devices=P, num_chunks=S // P)]  # (S, draws dp)
    costs = block_costs(times, schedule)
    seconds = costs.seconds.take(packs, axis=2) * np.repeat(slowest, M, axis=1)

    # 2. Their steps, and what they would do to any other.
    pipelines = makespans(waves, seconds, costs.sends.take(packs, axis=2), slots).reshape(draws, dp).max(axis=1)
    ratios = (pipelines + all_reduce_s) / step_s[drawn]
    quantiles = np.quantile(step_s, (np.arange(200) + 0.5) / 200) if num_steps > 200 else step_s
    return StepSpread(
        mean_s=float(step_s.mean() * ratios.mean()), p95_s=float(np.quantile(np.outer(quantiles, ratios), 0.95))
    )
