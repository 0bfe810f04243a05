"""plan/exchange.py: gradient exchange and optimizer, by hand."""

from __future__ import annotations

import pytest

from trimtab.costs.devices import parse_cluster
from trimtab.costs.profile import profile_model
from trimtab.models.describe import describe
from trimtab.plan.exchange import step_overhead_s
from trimtab.specs import ParallelDims, Stage


def test_overhead_is_ring_exchange_and_optimizer_traffic_of_the_largest_rank() -> None:
    model, cluster = describe("Qwen2.5-VL-7B"), parse_cluster("32xA100-80GB")
    profile = profile_model(model, cluster.device, dims=ParallelDims(dp=16, pp=2))
    middle = len(profile.layers) // 2
    stages = [Stage(index=0, start=0, stop=middle), Stage(index=1, start=middle, stop=len(profile.layers))]
    most = max(sum(x.num_params for x in profile.layers[s.start : s.stop]) for s in stages)
    exchange = 15 / 16 * most * 6 / cluster.node_link_bytes_per_s
    optimizer = most / 16 * 28 / cluster.device.memory_bytes_per_s
    assert step_overhead_s(profile, stages, cluster, 1) == pytest.approx(exchange + optimizer)
    unsharded = 15 / 16 * most * 8 / cluster.node_link_bytes_per_s + most * 28 / cluster.device.memory_bytes_per_s
    assert step_overhead_s(profile, stages, cluster, 0) == pytest.approx(unsharded)


def test_a_frozen_model_exchanges_nothing() -> None:
    model, cluster = describe("Qwen2.5-VL-7B"), parse_cluster("8xA100-80GB")
    towers = frozenset({"vision", "projector", "language"})
    profile = profile_model(model, cluster.device, dims=ParallelDims(dp=8), frozen_towers=towers)  # type: ignore[arg-type]
    assert step_overhead_s(profile, [Stage(index=0, start=0, stop=len(profile.layers))], cluster, 1) == 0.0
