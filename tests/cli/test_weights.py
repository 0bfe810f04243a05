"""`--set weights`: sources drawn in proportion, packed, planned, written and read. Needs the [data] extra."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

Run = Any
WORDS = ["--cluster", "8xA100-80GB", "--pp", "2", "--set", "num_microbatches=2", "--set", "source_key=source"]
WORDS += ["--set", "schedule=1F1B"]
WEIGHTS = "chart=0,page=1,photo=1,screenshot=2,multi-image=1,text=5"


@pytest.fixture(scope="module")
def lengths(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """40 samples of source web, 10 of docs; record i has 100 + i tokens."""
    path = tmp_path_factory.mktemp("lengths") / "sizes.jsonl"
    rows = [{"vit_num": 1, "token_num": 100 + i, "source": "docs" if i % 5 == 0 else "web"} for i in range(50)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def test_pack_draws_by_weight(run: Run, lengths: Path, tmp_path: Path) -> None:
    limits = ["--max-patches", "8", "--max-tokens", "1024", "--dp", "2"]
    words = ["pack", lengths, *limits, "--set", "weights=web=0.5,docs=2", "--set", "num_drawn=60"]
    result = run(*words, "--out", tmp_path / "packs")
    assert result.code == 0, result.err
    indices = np.load(tmp_path / "packs" / "indices.npy")
    times = np.bincount(indices, minlength=50)  # rows of the file, not of what was drawn
    assert times[::5].sum() == 48
    assert set(times[::5].tolist()) == {4, 5}
    assert times.sum() == 60
    found = run(*words, "--json").json
    assert found["mixture"] == [
        {"name": "docs", "weight": 2.0, "num_rows": 10, "num_drawn": 48},
        {"name": "web", "weight": 0.5, "num_rows": 40, "num_drawn": 12},
    ]
    assert found["num_packed"] == 60
    assert "mixture" not in run("pack", lengths, *limits, "--json").json


def test_a_mixed_plan_is_written_checked_exported_and_read(run: Run, drawn: Path, tmp_path: Path) -> None:
    words = ["plan", "Qwen2.5-VL-7B", drawn / "data.jsonl", "--tokenizer", drawn / "tokenizer.json", *WORDS]
    result = run(*words, "--set", f"weights={WEIGHTS}", "--out", tmp_path / "plan")
    assert result.code == 0, result.err
    assert run("check", tmp_path / "plan").code == 0
    assert run("report", tmp_path / "plan").code == 0
    assert WEIGHTS in (tmp_path / "plan" / "plan.yaml").read_text(encoding="utf-8")
    exported = run("export", "jsonl", tmp_path / "plan", "--out", tmp_path / "all.jsonl", "--json").json
    assert exported["num_records"] == 240
    assert len(exported["notes"]) == 1

    from trimtab.adapters.data_files import read_planned
    from trimtab.plan.file.records import open_records

    planned, records = read_planned(tmp_path / "plan"), open_records(tmp_path / "plan")
    expected = Counter(records[row]["id"] for row in planned.packing.indices.tolist())
    with (tmp_path / "all.jsonl").open(encoding="utf-8") as file:
        written = [json.loads(line) for line in file]
    assert Counter(record["id"] for record in written) == expected
    assert max(expected.values()) > 1
    assert Counter(record["source"] for record in written)["text"] == 120
    packs = run("export", "qwen-packs", tmp_path / "plan", "--out", tmp_path / "packs.jsonl", "--json").json
    assert packs["num_records"] == 240


@pytest.fixture(scope="module")
def mixed(plan_drawn: Callable[..., Path]) -> Path:
    return plan_drawn("--pp 2", "num_microbatches=2", "source_key=source", f"weights={WEIGHTS}")


def without_mixture(plan: Any) -> Any:
    return replace(plan, inputs=replace(plan.inputs, data=replace(plan.inputs.data, mixture=())))


def test_what_fit_writes_is_checked(run: Run, mixed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Were the mixture lost, it would not pass for a plan."""
    from trimtab.plan.file import reload

    def lose(*parts: object, **more: object) -> Any:
        made = assemble(*parts, **more)  # type: ignore[arg-type]
        return replace(made, plan=without_mixture(made.plan))

    assemble = reload.assemble_plan
    monkeypatch.setattr(reload, "assemble_plan", lose)
    result = run("export", "deepspeed", mixed, "--fit", tmp_path / "fit", "--json")
    assert result.code == 2
    assert "fit does not hold" in result.json["error"]


def test_pack_chooses_limits_as_omnibal_does_and_packs_sets_apart(run: Run, lengths: Path) -> None:
    paper = run("pack", lengths, "--set", "limits_by=paper", "--dp", "2", "--json").json
    assert paper["limits"] == [[1, 149]]
    isf = ["pack", lengths, "--set", "limits_by=search", "--set", "mean_batch=3", "--dp", "2", "--method", "isf"]
    found = run(*isf, "--set", "apart=true", "--json").json
    assert (len(found["limits"]), found["num_packed"]) == (2, 50)
    whole = run(*isf, "--set", "iterations=2", "--set", "oversize=skip", "--json").json
    assert [step["number"] for step in whole["iterations"]] == [1, 2]
    assert whole["iterations"][1]["num_packs"] == whole["num_packs"]
