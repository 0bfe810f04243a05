"""Refusals in tests: a test asks for the class and for names in the message; the wording stands in refusals.txt.

A refusal of a command or a call is a case of refusals.yaml. Where one needs more than that, `with refused(PlanError,
"num_chunks", "2"): ...` fails where another class is raised, or where a name is missing. The sentences are compared
with tests/refusals.txt when the session ends: those that are not there are listed, and decide nothing, for wording is
no test. `pytest --rewrite-refusals` writes the file again from the tests that it ran, so that a change of wording is
read in one place.
"""

from __future__ import annotations

import os
import re
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import yaml

SNAPSHOT = Path(__file__).with_suffix(".txt")
MOST = 600  # characters of a sentence that are kept
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
    groups = yaml.safe_load(SNAPSHOT.with_suffix(".yaml").read_text(encoding="utf-8"))
    return any(case in (group.get("run"), group.get("call")) for group in groups)


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
