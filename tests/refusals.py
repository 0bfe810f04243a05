"""Refusals in tests: a test asks for the class and for names in the message; the wording stands in refusals.txt.

A refusal of a command or a call is a case of refusals.yaml, or of torch/refusals.yaml where it needs torch. Where one
needs more than that, `with refused(PlanError, "num_chunks", "2"): ...` fails where another class is raised, or where a
name is missing. The sentences are compared with tests/refusals.txt when the session ends: those that are not there are
listed, and decide nothing, for wording is no test. `pytest --rewrite-refusals` writes the file again from the tests
that it ran, so that a change of wording is read in one place.
"""

import builtins
import math
import os
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import trimtab
import trimtab.errors

SNAPSHOT = Path(__file__).with_suffix(".txt")
MOST = 600  # characters of a sentence that are kept
LONGEST = 9_000  # characters of a message, whatever was given
_SEEN: dict[str, set[str]] = defaultdict(set)  # sentences by test
_NEW: dict[str, set[str]] = {}  # of these, those that the snapshot lacks


@contextmanager
def refused(kind: type[BaseException], *names: object) -> Iterator[pytest.ExceptionInfo[BaseException]]:
    """Fail unless `kind` is raised with every name (a number, a place, an option) in its message.

    A name that is a tuple stands for several.
    """
    with pytest.raises(kind) as caught:
        yield caught
    message = str(caught.value)
    record(message)
    for name in _flat(names):
        assert name in message, f"{name!r} is not in the message: {message}"


def record(message: str, case: str | None = None) -> None:
    """Keep a sentence for the snapshot, without what differs from run to run: under its case, else under its test."""
    test = os.environ["PYTEST_CURRENT_TEST"].partition(" (")[0].partition("[")[0]
    _SEEN[case or test].add(_plain(message))


def _flat(names: Any) -> Iterator[str]:
    for name in names:
        if isinstance(name, tuple):
            yield from _flat(name)
        else:
            yield str(name)


def _plain(message: str) -> str:
    """The wording: folders of the run, addresses and numbers left out."""
    text = re.sub(r"[^\s'\"(]*pytest-of-[^\s'\":,;)]*", "PATH", message)
    text = re.sub(r"0x[0-9a-f]+", "N", text)
    text = re.sub(r"(?<![\w.])-?\d+(?:[.,]\d+)*(?:e[+-]?\d+)?(?!\w)", "N", text)
    text = text.replace("\n", "\\n")
    return text if len(text) <= MOST else f"{text[:MOST]} ..."


def read_snapshot() -> dict[str, set[str]]:
    """Sentences of refusals.txt by test."""
    found: dict[str, set[str]] = {}
    test = ""
    for line in SNAPSHOT.read_text(encoding="utf-8").split("\n") if SNAPSHOT.exists() else ():
        if line.startswith("  "):
            found[test].add(line[2:])
        elif line:
            test = line
            found[test] = set()
    return found


def _write_snapshot(content: dict[str, set[str]]) -> None:
    rows = [row for test in sorted(content) for row in (test, *(f"  {text}" for text in sorted(content[test])))]
    SNAPSHOT.write_text("\n".join([*rows, ""]), encoding="utf-8")


def _is_there(case: str) -> bool:
    """Whether a test of this name, or a case of refusals.yaml, still stands."""
    path, _, name = case.partition("::")
    if path.startswith("tests/"):
        file = SNAPSHOT.parents[1] / path
        return file.exists() and f"def {name}(" in file.read_text(encoding="utf-8")
    return case in _named_cases()


@cache
def _named_cases() -> frozenset[str]:
    """Commands and calls of both tables."""
    tables = (SNAPSHOT.with_suffix(".yaml"), SNAPSHOT.parent / "torch" / "refusals.yaml")
    groups = [group for table in tables for group in yaml.safe_load(table.read_text(encoding="utf-8"))]
    return frozenset(group.get("run") or group["call"] for group in groups)


# -- cases of a table --------------------------------------------------------------------------------------------------


def read_cases(table: Path) -> list[dict[str, Any]]:
    """Cases of refusals.yaml, or of another such table, each with what its group says."""
    groups = yaml.safe_load(table.read_text(encoding="utf-8"))
    return [
        {**group, **case, "given": {**case.get("given", {}), **group.get("given", {})}}
        for group in groups
        for case in group.get("cases", [{}])
    ]


def show(case: dict[str, Any]) -> str:
    """The name of a case in a report."""
    return f"{case.get('run') or case['call']} {case.get('files', '')} {case['given'] or ''}"[:90]


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
    assert len(message) < case.get("most", LONGEST), "what was given is shown whole"
    assert len(message.splitlines()) == case.get("lines", len(message.splitlines()))
    for name in case["names"]:
        assert name in message, f"{name!r} is not in the message: {message}"


def assert_refused(case: dict[str, Any], folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Run the call of a case in an empty folder: it raises the case's class, with its names."""
    monkeypatch.chdir(folder)
    for name, content in case.get("files", {}).items():
        write(folder / name, content)
    names: dict[str, Any] = {"np": np, "replace": replace, "Path": Path, "math": math, "trimtab": trimtab}
    names |= vars(import_module(case["near"])) if "near" in case else {}
    for module in re.findall(r"trimtab(?:\.[a-z_]\w*)+(?=\.\w)|\w+_(?:cases|configs)(?=\.)", str(case)):
        names[module] = import_module(module)
    for name, value in case["given"].items():
        names[name] = eval(value[1:], names) if str(value).startswith("=") else value
    for expression in case.get("before", ()):
        eval(expression, names)
    kind = getattr(trimtab.errors, case["raises"], None) or getattr(builtins, case["raises"], None)
    with pytest.raises(kind or eval(case["raises"], names)) as caught:
        eval(case["call"], names)
    hold(str(caught.value), case)


# -- the snapshot ------------------------------------------------------------------------------------------------------


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--rewrite-refusals", action="store_true", help="Write tests/refusals.txt from these tests.")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    """Take over what a worker of xdist has seen."""
    for test, texts in getattr(node, "workeroutput", {}).get("refusals", {}).items():
        _SEEN[test] |= set(texts)


def pytest_sessionfinish(session: pytest.Session) -> None:
    if hasattr(session.config, "workerinput"):
        session.config.workeroutput["refusals"] = {test: sorted(texts) for test, texts in _SEEN.items()}  # type: ignore[attr-defined]
        return
    known = read_snapshot()
    if session.config.getoption("--rewrite-refusals"):
        _write_snapshot({**{case: texts for case, texts in known.items() if _is_there(case)}, **_SEEN})
        return
    _NEW.update(
        {test: texts - known.get(test, set()) for test, texts in _SEEN.items() if texts - known.get(test, set())}
    )


def pytest_terminal_summary(terminalreporter: Any) -> None:
    if _NEW:
        terminalreporter.section("sentences that tests/refusals.txt lacks: pytest --rewrite-refusals")
        for test, texts in sorted(_NEW.items()):
            terminalreporter.write_line(test)
            for text in sorted(texts):
                terminalreporter.write_line(f"  {text}")
