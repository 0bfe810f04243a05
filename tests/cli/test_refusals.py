"""`refusals.yaml`: commands and calls that end in one sentence with the names of the case, and write nothing."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from refusals import assert_refused, hold, read_cases, show, write

Run = Any
TESTS = Path(__file__).parents[1]
CASES = read_cases(TESTS / "refusals.yaml")
COMMANDS = [case for case in CASES if "run" in case]
CALLS = [case for case in CASES if "call" in case]


@pytest.mark.filterwarnings("always::UserWarning")
@pytest.mark.parametrize("case", COMMANDS, ids=show)
def test_a_command_ends_in_one_sentence(run, drawn, planned, tmp_path, monkeypatch, case):
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
    monkeypatch.syspath_prepend(TESTS / "unit")
    assert_refused(case, tmp_path, monkeypatch)


def test_with_json_the_sentence_is_on_stdout_too(run: Run) -> None:
    result = run("describe", "no-such-model", "--json")
    assert result.code == 2
    assert result.err == f"trimtab: {result.json['error']}\n"


def test_the_table_holds_as_many_cases_as_it_should() -> None:
    assert len(COMMANDS) >= 350
    assert len(CALLS) >= 330
