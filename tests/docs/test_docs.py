"""README and docs: every `sh` and `python` block runs, in page order, in a folder that holds the demo's output.

Needs the [data] extra. Blocks that install something are what `.ci/run` itself does; other languages are not run.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCE = re.compile(r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$", re.S | re.M)

pytest.importorskip("PIL", reason="the demo draws its data set: pip install 'trimtab[data]'")
pytest.importorskip("tokenizers", reason="the demo builds a tokenizer: pip install 'trimtab[data]'")


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [Block(m["language"], m["code"], text.count("\n", 0, m.start()) + 1) for m in FENCE.finditer(text)]


def run(arguments: list[str], folder: Path, timeout_s: float = 300) -> subprocess.CompletedProcess[str]:
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    return subprocess.run(
        arguments, cwd=folder, env=environment, capture_output=True, text=True, timeout=timeout_s, check=False
    )


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`trimtab demo` on few samples."""
    folder = tmp_path_factory.mktemp("demo") / "trimtab-demo"
    result = run([sys.executable, "-m", "trimtab", "demo", "--num-samples", "300", "--out", folder.name], folder.parent)
    assert result.returncode == 0, result.stderr
    return folder


def is_install(code: str) -> bool:
    return "pip install" in code or "git clone" in code or ".ci/run" in code


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_snippet_runs(page: Path, demo: Path, tmp_path: Path) -> None:
    (tmp_path / "trimtab-demo").symlink_to(demo)
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    for block in blocks(page):
        if block.language == "sh" and not is_install(block.code):
            result = run(["bash", "-euo", "pipefail", "-c", block.code], tmp_path)
        elif block.language == "python":
            result = run([sys.executable, "-W", "error", "-c", block.code], tmp_path)
        else:
            continue
        assert result.returncode == 0, f"{page.name}:{block.line}\n{result.stdout}\n{result.stderr}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_to_a_file_of_the_project_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_the_file_tree_of_the_readme_is_the_projects() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"<!-- tree -->\s*```text\n(.*?)```", text, re.S)
    assert match is not None, "the README has no file tree"
    shown = set(re.findall(r"(?:^|(?<=\s))[a-z_]+(?:/|\.py)(?=\s)", match[1]))
    source = ROOT / "src" / "trimtab"
    rooms = {f"{p.name}/" for p in source.iterdir() if p.is_dir() and p.name != "__pycache__"}
    rooms |= {p.name for p in source.glob("*.py") if not p.name.startswith("__")}
    assert shown == rooms


def test_the_readme_names_every_verb() -> None:
    help_text = run([sys.executable, "-m", "trimtab", "--help"], ROOT).stdout
    verbs = re.findall(r"^  ([a-z][a-z-]+) {2,}", help_text, re.M)
    assert len(verbs) >= 9, help_text
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    for verb in verbs:
        assert f"trimtab {verb}" in readme, f"the README does not say what `trimtab {verb}` does"


def test_ci_runs_the_readmes_own_test_command() -> None:
    assert "<!-- test command -->" in (ROOT / "README.md").read_text(encoding="utf-8")
    assert "<!-- test command -->" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")


_MANY_PROCESSES = ("train_on_two_stages.py",)  # most of a minute: among the integration tests


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(path, id=path.name, marks=[pytest.mark.integration] if path.name in _MANY_PROCESSES else [])
        for path in sorted((ROOT / "examples").glob("*.py"))
    ],
)
def test_every_example_runs(example: Path, tmp_path: Path) -> None:
    result = run([sys.executable, "-W", "error", str(example)], tmp_path)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert result.stdout
