"""Help that a reader of 80 columns sees whole, and messages that name only what is there."""

import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from numba import njit
from typer.testing import CliRunner

from trimtab.cli.app import app
from trimtab.cli.output import progress, told_of_compiling
from trimtab.cli.verbs import VERBS
from trimtab.samples.lengths import read_lengths
from trimtab.units import format_number

Run = Any


def help_of(*words: str) -> str:
    return CliRunner().invoke(app, [*words, "--help"], terminal_width=80, prog_name="trimtab").output


@pytest.mark.parametrize("words", [(), *((verb,) for verb in VERBS)], ids=lambda words: " ".join(words) or "trimtab")
def test_help_is_whole_at_80_columns(words: tuple[str, ...]) -> None:
    text = help_of(*words)
    assert text.startswith("Usage: trimtab")
    assert max(map(len, text.splitlines())) <= 80
    assert "..." not in re.sub(r"^  \w+\.\.\.", "", text.partition("\n")[2], flags=re.M)


def test_the_help_without_a_verb_is_the_same_without_typer(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    text = run("--help").out
    assert [line for line in text.splitlines() if line.startswith("  --")]
    assert re.findall(r"^  ([a-z][a-z-]+)  ", text.partition("Commands:")[2], re.M) == list(VERBS)
    assert {option for line in help_of().splitlines() for option in re.findall(r"--[a-z-]+", line)} == {
        *("--version", "--install-completion", "--show-completion", "--help", "--set", "--options", "--frames"),
        *("--nproc-per-node", "--no-python"),
    }


def test_plan_shows_few_options_and_lists_the_rest(run: Run) -> None:
    named = re.findall(r"^  (--[a-z-]+)", help_of("plan"), re.M)
    assert len(named) <= 27  # --help is one of them
    assert len(help_of("plan").splitlines()) <= 45  # one screen
    assert {"--cluster", "--out", "--for", "--global-batch", "--tokenizer", "--json", "--set", "--options"} <= set(
        named
    )
    listed = {row["name"]: row for row in run("options", "plan", "--json").json["settings"]}
    assert listed["schedule"]["type"].startswith("1F1B|")
    assert listed["max_tokens"]["default"] is None
    assert "max_tokens=N" in run("options", "plan").out


def test_settings_are_completed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    for typed, offered in (("max_t", "max_tokens="), ("order=", "order=sorted")):
        monkeypatch.setenv("_TRIMTAB_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", f"trimtab plan --set {typed}")
        monkeypatch.setenv("COMP_CWORD", "3")
        with pytest.raises(SystemExit):
            app(prog_name="trimtab")
        assert offered in capsys.readouterr().out.split()


def test_a_package_that_is_missing_or_of_another_version_is_named(run, drawn, tmp_path, monkeypatch):
    own: list[Any] = []  # a child that waits already has the real one
    monkeypatch.setattr("trimtab.limited._idle", lambda _: own)
    monkeypatch.syspath_prepend(tmp_path)
    fake = tmp_path / "tokenizers.py"
    fake.write_text("raise ModuleNotFoundError('it is not there', name='tokenizers')")
    words = ("size", drawn / "data.jsonl", "--model", "Qwen2.5-VL-7B", "--tokenizer", drawn / "tokenizer.json")
    monkeypatch.setitem(sys.modules, "tokenizers", None)  # type: ignore[arg-type]  # as if it were not there
    missing = run(*words)
    assert missing.code == 2
    assert "pip install 'trimtab[data]'" in missing.err
    fake.write_text("__version__ = '0.1'")
    old = ModuleType("tokenizers")
    old.__version__, old.__spec__ = "0.1", ModuleSpec("tokenizers", None)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokenizers", old)
    refused = run(*words)
    assert refused.code == 2
    assert all(name in refused.err for name in ("tokenizers", "0.1", "'AddedToken'", "pip install -U 'trimtab[data]'"))
    for child in own:
        child.close()


def test_other_image_sizes_are_told_by_their_limits(run: Run, drawn: Path, tmp_path: Path) -> None:
    sizes = tmp_path / "sizes.npz"
    words = ["--tokenizer", drawn / "tokenizer.json", "--out", sizes]
    assert run("size", drawn / "data.jsonl", "--model", "Qwen2.5-VL-7B", "--max-pixels", "200704", *words).code == 0
    for model, message in (
        ("Qwen2.5-VL-7B", "max_pixels 12845056 of Qwen2.5-VL-7B"),
        ("InternVL-Chat-V1-5", "the rule qwen_smart_resize"),
    ):
        refused = run("plan", model, sizes, "--cluster", "8xA100-80GB")
        assert refused.code == 2
        assert message in refused.err
        assert "(" not in refused.err


def test_pack_advises_options_that_it_has(run: Run, tmp_path: Path) -> None:
    own = set(re.findall(r"--[a-z-]+", help_of("pack")))
    lengths, bad = tmp_path / "lengths.jsonl", tmp_path / "bad.jsonl"
    rows = [{"token_num": 300 + i % 7, "vit_num": 1} for i in range(40)] + [{"token_num": 60_000, "vit_num": 3}]
    lengths.write_text("".join(json.dumps(row) + "\n" for row in rows))
    bad.write_text('{"token_num": -5, "vit_num": 1}\n')
    above = run("pack", lengths, "--max-patches", "8", "--max-tokens", "4000")
    broken = run("pack", bad, "--max-patches", "8", "--max-tokens", "4000")
    for refused in (above, broken):
        assert refused.code == 2
        assert set(re.findall(r"--[a-z-]+", refused.err)) <= own
    with pytest.raises(Exception, match=r"\(1 type\): fix them\n"):
        read_lengths([bad])


def test_progress_without_a_terminal_is_plain_lines(monkeypatch, capsys):
    clock = iter((0.0, 1.0, 10.5, 10.5, 12.0))
    monkeypatch.setattr("trimtab.cli.output.time.monotonic", lambda: next(clock))
    with progress("sizing") as advance:
        for done in (10, 2000, 3000):
            advance(done, 4000)
    assert capsys.readouterr().err == "sizing: 2,000 of 4,000\n"


def test_compiling_is_told_once_and_only_where_it_happens(capsys: pytest.CaptureFixture[str]) -> None:
    double = njit(lambda x: 2 * x)
    with told_of_compiling():
        assert (double(2), double(2.5)) == (4, 5.0)
    assert capsys.readouterr().err == "compiling, once on this machine: some seconds\n"
    with told_of_compiling():
        assert double(3) == 6
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(
    ("value", "text"), [(0.125, "0.125"), (42.857, "42.9"), (999.4, "999"), (999.7, "1,000"), (2048.0, "2,048")]
)
def test_numbers_have_no_exponent(value: float, text: str) -> None:
    assert format_number(value) == text
