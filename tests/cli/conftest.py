"""A small drawn data set, and the command line run in this process. Needs the [data] extra."""

import json
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("PIL", reason="the demo draws its data set: pip install 'trimtab[data]'")
pytest.importorskip("tokenizers", reason="the demo builds a tokenizer: pip install 'trimtab[data]'")


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        content = json.loads(self.out)
        assert isinstance(content, dict)
        return content


Run = Callable[..., Result]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Run:
    """Run `trimtab WORDS`; nothing may escape as a traceback."""
    from trimtab.cli.main import main

    def call(*words: str | Path) -> Result:
        monkeypatch.setenv("COLUMNS", "120")
        monkeypatch.setattr(sys, "argv", ["trimtab", *map(str, words)])
        capfd.readouterr()
        try:
            main()
            code = 0
        except SystemExit as stop:
            code = stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
        captured = capfd.readouterr()
        return Result(code, captured.out, captured.err)

    return call


@pytest.fixture(scope="session")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a drawn data set: data.jsonl, images/, tokenizer.json."""
    from trimtab.demo import draw_dataset

    return draw_dataset(tmp_path_factory.mktemp("drawn"), num_samples=240)


@pytest.fixture(scope="session")
def plan_drawn(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Plan that data set in 1F1B on eight A100; the options and settings, and the folder that is written."""
    from trimtab.cli.app import app

    def plan(words: str, *settings: str) -> Path:
        out = tmp_path_factory.mktemp("planned") / "plan"
        given = ["plan", "Qwen2.5-VL-7B", drawn / "data.jsonl", "--tokenizer", drawn / "tokenizer.json", "--out", out]
        given += ["--cluster", "8xA100-80GB", *words.split()]
        given += [word for one in ("schedule=1F1B", *settings) for word in ("--set", one)]
        app([str(word) for word in given], standalone_mode=False)
        return out

    return plan


@pytest.fixture(scope="session")
def planned(plan_drawn: Callable[..., Path]) -> Path:
    """Folder of a plan for that data set."""
    return plan_drawn("--pp 2", "num_microbatches=4")


@pytest.fixture(scope="session")
def tiny(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's Qwen2.5-VL of one million parameters, with the drawn data's tokenizer."""
    from trimtab.demo import write_model

    return write_model(tmp_path_factory.mktemp("tiny"), drawn)
