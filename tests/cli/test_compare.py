"""`trimtab compare`, and `plan` on several clusters; report/ (compared). Needs the [data] extra."""

from pathlib import Path
from typing import Any

import pytest

from trimtab.plan.file.yaml import load_plan
from trimtab.report.plan_tables import device_hours, differences

Run = Any


@pytest.fixture
def two(run: Run, drawn: Path, tmp_path: Path) -> tuple[Path, Any]:
    """Plans of one run on two clusters, and what was printed; a third cluster is too small."""
    words = ["plan", "Qwen2.5-VL-7B", drawn / "data.jsonl", "--tokenizer", drawn / "tokenizer.json"]
    result = run(*words, "--cluster", "8xH100, 16xH100,1xA10", "--out", tmp_path, "--json")
    assert result.code == 0, result.err
    return tmp_path, result


def test_clusters_are_planned_with_one_batch_and_priced_in_device_hours(two: tuple[Path, Any], run: Run) -> None:
    out, result = two
    rows = result.json["plans"]
    assert list(rows) == ["8xH100", "16xH100"]
    assert "1xA10: " in result.err
    plans = {name: load_plan(out / name) for name in rows}
    assert {plan.decisions.packing.global_batch for plan in plans.values()} == {240}  # all of the data
    assert {name: rows[name]["device_hours"] for name in rows} == {
        name: int(name.split("x")[0]) * plan.estimates.epoch_s / 3600 for name, plan in plans.items()
    }
    cheapest = min(plans, key=lambda name: device_hours(plans[name]))
    assert f"fewest device-hours: {cheapest}" in result.err
    # the command of each plan makes that plan again
    command = plans["16xH100"].command.split()
    assert command[command.index("--cluster") + 1] == "16xH100"
    again = out / "again"
    assert run(*command[1:], "--out", again).code == 0
    assert load_plan(again) == plans["16xH100"]


def test_plans_are_compared_by_what_differs(two: tuple[Path, Any], run: Run) -> None:
    out, _ = two
    small, large = load_plan(out / "8xH100"), load_plan(out / "16xH100")
    assert differences({"a": small, "b": small}) == {}
    found = differences({"a": small, "b": large})
    assert found["inputs.cluster.num_nodes"] == ("1", "2")
    assert found["decisions.parallel.dp"] == (str(small.decisions.parallel.dp), str(large.decisions.parallel.dp))
    assert not any(place.startswith("inputs.model") for place in found)
    shown = run("compare", out / "8xH100", out / "16xH100")
    assert shown.code == 0
    assert "inputs.cluster.num_nodes" in shown.out
    assert set(run("compare", out / "8xH100", out / "16xH100", "--json").json["differs"]) == set(found)
