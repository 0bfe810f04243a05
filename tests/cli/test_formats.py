"""The command line on data as people have it: InternVL's meta file, shards of a sizing pass. Needs [data]."""

import json
from pathlib import Path
from typing import Any

import pytest

from trimtab.address import Allowed
from trimtab.plan.file.records import open_records
from trimtab.plan.file.yaml import load_plan

Run = Any


@pytest.fixture
def meta(drawn: Path, tmp_path: Path) -> Path:
    """The drawn data in two sources, one of them three times, images elsewhere than the records."""
    lines = (drawn / "data.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, part in (("first", lines[:40]), ("second", lines[40:60])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    sets = {
        "web": {"root": str(drawn), "annotation": "first.jsonl", "repeat_time": 1, "data_augment": False},
        "docs": {"root": str(drawn), "annotation": "second.jsonl", "repeat_time": 3, "data_augment": False},
    }
    (tmp_path / "meta.json").write_text(json.dumps(sets, indent=1), encoding="utf-8")
    return tmp_path / "meta.json"


def test_a_plan_of_a_meta_file_knows_repeats_and_roots(run: Run, drawn: Path, meta: Path, tmp_path: Path) -> None:
    words = [
        *("--tokenizer", drawn / "tokenizer.json", "--cluster", "8xA100-80GB"),
        *("--pp", "2", "--set", "num_microbatches=2"),
    ]
    made = run("plan", "Qwen2.5-VL-7B", meta, *words, "--allow-outside", "--out", tmp_path / "plan")
    assert made.code == 0, made.err
    data = load_plan(tmp_path / "plan").inputs.data
    assert data.num_samples == 40 + 3 * 20
    assert [(Path(file.path).name, file.media_root) for file in data.files] == [
        ("first.jsonl", str(drawn)),
        ("second.jsonl", str(drawn)),
    ]
    records = open_records(tmp_path / "plan")
    assert records.media_root(99) == drawn
    assert records[40] == records[60] == records[80]
    assert open_records(tmp_path / "plan", [meta], allowed=Allowed(outside=True)).media_root(0) == drawn
    assert run("check", tmp_path / "plan").code == 0
    written = run("export", "jsonl", tmp_path / "plan", "--out", tmp_path / "planned.jsonl")
    assert written.code == 0, written.err
    assert len((tmp_path / "planned.jsonl").read_text(encoding="utf-8").splitlines()) == 100
