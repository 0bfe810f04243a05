"""`refusals.yaml`: commands and calls that end in one sentence with the names of the case, and write nothing."""

from __future__ import annotations

import builtins
import math
import os
import re
import shlex
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import trimtab
from refusals import record

Run = Any
MOST = 9_000  # characters of a message, whatever was given
TESTS = Path(__file__).parents[1]
GROUPS = yaml.safe_load((TESTS / "refusals.yaml").read_text(encoding="utf-8"))
CASES = [
    {**group, **case, "given": {**case.get("given", {}), **group.get("given", {})}}
    for group in GROUPS
    for case in group.get("cases", [{}])
]
COMMANDS = [case for case in CASES if "run" in case]
CALLS = [case for case in CASES if "call" in case]


def write(path: Path, content: Any, planned: Path | None = None) -> None:
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
        assert planned is not None
        old, new = content["plan"]
        shutil.copytree(planned, path)
        text = (path / "plan.yaml").read_text(encoding="utf-8")
        assert old in text, "the case changes nothing"
        (path / "plan.yaml").write_text(text.replace(old, new, 1), encoding="utf-8")


def hold(message: str, case: dict[str, Any]) -> None:
    """Keep the sentence for the snapshot, and look for the names."""
    record(message, case.get("run") or case["call"])
    assert len(message) < MOST, "what was given is shown whole"
    assert len(message.splitlines()) == case.get("lines", len(message.splitlines()))
    for name in case["names"]:
        assert name in message, f"{name!r} is not in the message: {message}"


def show(case: dict[str, Any]) -> str:
    return f"{case.get('run') or case['call']} {case.get('files', '')} {case['given'] or ''}"[:90]


@pytest.mark.filterwarnings("always::UserWarning")
@pytest.mark.parametrize("case", COMMANDS, ids=show)
def test_a_command_ends_in_one_sentence(
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
    assert result.code == case.get("exit", 2), result
    assert "Traceback" not in result.err
    assert sorted(tmp_path.rglob("*")) == before, "something was written"
    hold(" ".join((result.err + result.out).split()), case)


@pytest.mark.parametrize("case", CALLS, ids=show)
def test_a_call_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, case: dict[str, Any]) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(TESTS / "unit")
    for name, content in case.get("files", {}).items():
        write(tmp_path / name, content)
    names: dict[str, Any] = {"np": np, "replace": replace, "Path": Path, "math": math, "trimtab": trimtab}
    names |= vars(import_module(case["near"])) if "near" in case else {}
    for module in re.findall(r"trimtab(?:\.[a-z_]\w*)+(?=\.\w)|\w+_(?:cases|configs)(?=\.)", str(case)):
        names[module] = import_module(module)
    for name, value in case["given"].items():
        names[name] = eval(value[1:], names) if str(value).startswith("=") else value
    for expression in case.get("before", ()):
        eval(expression, names)
    kind = getattr(trimtab.errors, case["raises"], None) or getattr(builtins, case["raises"])
    with pytest.raises(kind) as caught:
        eval(case["call"], names)
    hold(str(caught.value), case)


def test_with_json_the_sentence_is_on_stdout_too(run: Run) -> None:
    result = run("describe", "no-such-model", "--json")
    assert result.code == 2
    assert result.err == f"trimtab: {result.json['error']}\n"


def test_the_table_holds_as_many_cases_as_it_should() -> None:
    assert len(COMMANDS) >= 350
    assert len(CALLS) >= 330
