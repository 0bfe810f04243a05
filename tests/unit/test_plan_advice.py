"""Tests of plan/decide/advice.py: where nothing fits, each change that is named was tried and makes a plan fit."""

import numpy as np
import pytest

from trimtab.costs.devices import parse_cluster
from trimtab.errors import PartitionError
from trimtab.models.describe import describe
from trimtab.plan.build import make_plan
from trimtab.plan.decide.advice import possible_changes
from trimtab.plan.options import PlanOptions
from trimtab.specs import SampleTable

SAMPLES = SampleTable.of(np.full(64, 1024), np.full(64, 500))


@pytest.mark.parametrize(
    ("name", "devices", "options", "helps"),
    [
        ("Qwen2.5-VL-7B", "1xRTX4090", PlanOptions(), {"--lora r=16,bits=4"}),
        ("Qwen2.5-VL-7B", "8xA100-40GB", PlanOptions(zero_stage=0, tp=1, pp=1), {"--zero-stage 3", "--lora r=16"}),
        (
            "Qwen2.5-VL-7B",
            "4xA100-80GB",
            PlanOptions(dp=4, zero_stage=1),
            {"leave --dp open", "--set optimizer=adamw_8bit"},
        ),
    ],
)
def test_each_change_that_is_named_makes_a_plan_fit(name, devices, options, helps):
    model, cluster = describe(name), parse_cluster(devices)
    with pytest.raises(PartitionError) as refused:
        make_plan(model, SAMPLES, cluster, options)
    message = str(refused.value)
    said = message.rpartition("first: ")[2].removesuffix(".").split("; ")
    assert helps <= set(said)
    for change in possible_changes(SAMPLES, cluster, options):
        if change.said in said:
            assert make_plan(model, change.samples, change.cluster, change.options).variants[-1].fits


def test_a_framework_is_told_nothing_that_it_has_not() -> None:
    narrowed = PlanOptions(zero_stages=(1, 0), schedules=("1F1B",))
    said = [change.said for change in possible_changes(SAMPLES, parse_cluster("1xA100-80GB"), narrowed)]
    assert not any("lora" in word or "optimizer" in word or "zero" in word for word in said)
