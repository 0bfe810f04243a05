"""`trimtab export` of data files, word by word. Needs the [data] extra."""

import json
from pathlib import Path
from typing import Any

Run = Any

NUM_SAMPLES = 240


def test_each_data_format_is_written_and_told(run: Run, planned: Path, tmp_path: Path) -> None:
    for verb, out, files in (("jsonl", tmp_path / "ordered.jsonl", 1), ("qwen-packs", tmp_path / "packs.jsonl", 1)):
        result = run("export", verb, planned, "--out", out, "--json")
        assert result.code == 0, result.err
        assert result.json["num_records"] == NUM_SAMPLES
        assert len(result.json["files"]) == files
        assert all(Path(name).is_file() for name in result.json["files"])
    with (tmp_path / "packs.jsonl").open(encoding="utf-8") as file:
        assert sum(len(json.loads(line)) for line in file) == NUM_SAMPLES
