"""The small plan of tests/golden, for the tests of its file."""

from __future__ import annotations

from pathlib import Path

from trimtab.plan.file.yaml import load_plan
from trimtab.plan.plan import Plan

GOLDEN = Path(__file__).parents[1] / "golden" / "plan_v1_0.yaml"


def small_plan() -> Plan:
    return load_plan(GOLDEN)
