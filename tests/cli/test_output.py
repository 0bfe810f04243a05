"""Tests of cli/ (output, demo): progress on a terminal and in a log, and the demo as text and as one JSON object."""

import json
import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.cli import output

Run = Any


class Terminal:
    """A terminal's stderr, that keeps what was written."""

    def __init__(self) -> None:
        self.written = ""

    def write(self, text: str) -> int:
        self.written += text
        return len(text)

    def flush(self) -> None:
        pass

    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("show_after_s", [0.0, 3600.0])
def test_a_terminal_shows_a_bar_of_long_work_alone(monkeypatch: pytest.MonkeyPatch, show_after_s: float) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setattr(output, "_SHOW_AFTER_S", show_after_s)
    with output.progress("sizing") as advance:
        advance(3, 12)
        advance(12, 12)
    assert ("sizing" in terminal.written, "12/12" in terminal.written) == (show_after_s == 0.0,) * 2


def test_a_log_has_lines_of_work_and_none_of_work_that_is_soon_done(monkeypatch, capsys):
    with output.progress("sizing") as advance:
        advance(1, 2000)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(output, "_LINE_EVERY_S", 0.0)
    with output.progress("sizing") as advance:
        advance(1500, 2000)
    assert capsys.readouterr().err == "sizing: 1,500 of 2,000\n"


def test_json_holds_no_number_that_json_does_not_know(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json({"peak": np.float64("inf"), 3: np.int64(7), "files": {Path("a.npz")}, "loss": float("nan")})
    assert json.loads(capsys.readouterr().out) == {"peak": None, "3": 7, "files": ["a.npz"], "loss": None}


def test_the_demo_is_drawn_sized_planned_and_told(run: Run, tmp_path: Path) -> None:
    words = ["demo", "--num-samples", "60", "--cluster", "16xA100-80GB", "--out"]
    told = run(*words, tmp_path / "text")
    assert told.code == 0, told.err
    assert f"report: {tmp_path / 'text' / 'plan' / 'report.html'}" in told.out
    assert "--num-samples 60 --seed 0" in (tmp_path / "text" / "plan" / "plan.yaml").read_text(encoding="utf-8")
    found = run(*words, tmp_path / "json", "--model", "Qwen2.5-VL-7B", "--json").json
    assert (found["num_samples"], found["data"]) == (60, str(tmp_path / "json" / "data" / "data.jsonl"))
    assert run("check", tmp_path / "json" / "plan").code == 0


def test_what_further_ranks_of_a_machine_find_wrong_is_told_by_its_first(run, monkeypatch):
    for words in (["describe", "no-such-model"], ["describe", "--no-such-option"]):
        monkeypatch.setenv("LOCAL_RANK", "0")
        first = run(*words)
        assert (first.code, "no-such" in first.err) == (2, True)
        monkeypatch.setenv("LOCAL_RANK", "1")
        assert (run(*words).code, run(*words).err) == (2, "")


def test_samples_left_out_of_packs_are_counted(run: Run, planned: Path) -> None:
    most = ["--max-patches", 3000, "--max-tokens", 2000]
    packed = run("pack", planned / "samples.npz", *most, "--set", "oversize=skip")
    assert packed.code == 0, packed.err
    assert re.search(r"\b\d+ oversize samples left out, as asked", packed.out), packed.out
