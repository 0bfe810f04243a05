"""`hostile.yaml`: input from outside that must end in one sentence, an exit code, and nothing half-written."""

from __future__ import annotations

import os
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

Run = Any
CASES = yaml.safe_load(Path(__file__).with_name("hostile.yaml").read_text(encoding="utf-8"))


def write(path: Path, content: Any, planned: Path) -> None:
    """One file of a case: its text, or how it is made."""
    path.parent.mkdir(exist_ok=True)
    if isinstance(content, str):
        path.write_text(content, encoding="utf-8")
    elif "hex" in content:
        path.write_bytes(bytes.fromhex(content["hex"]))
    elif "repeat" in content:  # text, how often, text, how often, ...
        parts = content["repeat"]
        path.write_text("".join(text * times for text, times in zip(parts[::2], parts[1::2], strict=True)))
    elif "link" in content:
        path.symlink_to(content["link"])
    elif "pipe" in content:
        os.mkfifo(path)
    elif "folder" in content:
        path.mkdir()
    else:  # a good plan, in which one text stands for another
        old, new = content["plan"]
        shutil.copytree(planned, path)
        text = (path / "plan.yaml").read_text(encoding="utf-8")
        assert old in text, "the case changes nothing"
        (path / "plan.yaml").write_text(text.replace(old, new, 1), encoding="utf-8")


@pytest.mark.filterwarnings("always::UserWarning")
@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case['run'][:50]} {str(case.get('files', ''))[:40]}")
def test_hostile_input_ends_in_one_sentence(
    run: Run, drawn: Path, planned: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, content in case.get("files", {}).items():
        write(tmp_path / name, content, planned)
    before = sorted(tmp_path.rglob("*"))
    places = {"tokenizer": drawn / "tokenizer.json", "table": planned / "samples.npz", "plan": planned}
    places["data"] = drawn / "data.jsonl"
    words = [
        re.sub(r"\{(data|tokenizer|table|plan)\}", lambda m: str(places[m[1]]), x) for x in shlex.split(case["run"])
    ]
    result = run(*words)
    assert result.code == case["exit"], result
    assert "Traceback" not in result.err
    assert re.search(case["says"], " ".join((result.err + result.out).split())), result
    assert sorted(tmp_path.rglob("*")) == before, "something was written"


def test_with_json_the_sentence_is_on_stdout_too(run: Run) -> None:
    result = run("describe", "no-such-model", "--json")
    assert result.code == 2
    assert result.err == f"trimtab: {result.json['error']}\n"


def test_the_corpus_holds_as_many_cases_as_it_should() -> None:
    assert len(CASES) >= 320
