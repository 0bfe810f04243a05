"""README and docs: every `sh` and `python` block runs, in page order, in a folder that holds the demo's output.

Needs the [data] extra. A block that cannot run says why in a comment above it, `<!-- not run: REASON -->`; other
languages hold output. The README's blocks that train and serve are run by the integration tests alone.
"""

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from trimtab.public import MODULES

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"(?:^<!-- not run: (?P<reason>[^\n]+) -->\n)?(?:^<!-- [\w ]+ -->\n)?"
    r"^(?P<indent> *)```(?P<language>\w*)[^\n]*\n(?P<code>.*?)^(?P=indent)```$",
    re.S | re.M,
)
LOOKS_LIKE_CODE = re.compile(
    r"^(?:\$ )?(?:trimtab [a-z-]+ |torchrun |python |curl |pip |import \w|from [\w.]+ import |class \w|def \w)", re.M
)

pytest.importorskip("PIL", reason="the demo draws its data set: pip install 'trimtab[data]'")
pytest.importorskip("tokenizers", reason="the demo builds a tokenizer: pip install 'trimtab[data]'")


@dataclass(frozen=True)
class Block:
    language: str
    code: str
    line: int
    why_not_run: str | None

    @property
    def runs(self) -> bool:
        return self.language in ("sh", "python") and self.why_not_run is None


def blocks(page: Path) -> list[Block]:
    text = page.read_text(encoding="utf-8")
    return [
        Block(m["language"], m["code"], text.count("\n", 0, m.start()) + 1, m["reason"]) for m in FENCE.finditer(text)
    ]


def run(arguments: list[str], folder: Path, given: str = "") -> subprocess.CompletedProcess[str]:
    scripts = str(Path(sys.executable).parent)
    environment = {**os.environ, "PATH": f"{scripts}{os.pathsep}{os.environ['PATH']}", "COLUMNS": "100"}
    return subprocess.run(
        arguments, cwd=folder, env=environment, input=given, capture_output=True, text=True, check=False
    )


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`trimtab demo` on few samples."""
    folder = tmp_path_factory.mktemp("demo") / "trimtab-demo"
    result = run([sys.executable, "-m", "trimtab", "demo", "--num-samples", "300", "--out", folder.name], folder.parent)
    assert result.returncode == 0, result.stderr
    return folder


_ONE_AFTER_THE_OTHER = """
import json, sys
for line, code in json.load(sys.stdin):
    print(f"block of line {line}", file=sys.stderr)
    exec(compile(code, f"line {line}", "exec"), {"__name__": "__main__"})
"""


TRAINS = re.compile(r"torch|transformers|trimtab (train|serve)")


def run_blocks(page: Path, folder: Path, *, with_torch: bool) -> None:
    """All of a page; Python blocks that follow one another in one process, since each would import torch again."""
    found = [x for x in blocks(page) if x.runs and (with_torch or not TRAINS.search(x.code))]
    for language, together in itertools.groupby(found, key=lambda x: x.language):
        group = list(together)
        if language == "sh":
            command, given = ["bash", "-euo", "pipefail", "-c", "\n".join(x.code for x in group)], ""
        else:
            command = [sys.executable, "-W", "error", "-c", _ONE_AFTER_THE_OTHER]
            given = json.dumps([(x.line, x.code) for x in group])
        result = run(command, folder, given)
        assert result.returncode == 0, f"{page.name}:{group[0].line}\n{result.stdout}\n{result.stderr}"


def pages_that_run() -> list[Any]:
    """Pages with blocks and whether those that need torch run too; the README twice, first without them.

    Pages that run commands or need torch are among the integration tests.
    """
    readme = ROOT / "README.md"
    slow = {page for page in PAGES for x in blocks(page) if x.runs and (x.language == "sh" or TRAINS.search(x.code))}
    found = [pytest.param(readme, False, id="README.md")]
    for page in PAGES:
        if any(x.runs for x in blocks(page)):
            name = "README.md, trained" if page == readme else page.name
            found.append(pytest.param(page, True, id=name, marks=[pytest.mark.integration] * (page in slow)))
    return found


@pytest.mark.parametrize(("page", "with_torch"), pages_that_run())
def test_every_snippet_runs(page: Path, with_torch: bool, demo: Path, tmp_path: Path) -> None:
    if with_torch and "trimtab serve" in page.read_text(encoding="utf-8"):
        pytest.importorskip("uvicorn", reason="serves a model: pip install 'trimtab[serve]'")
    (tmp_path / "trimtab-demo").symlink_to(demo)
    (tmp_path / "bench").symlink_to(ROOT / "bench")
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    run_blocks(page, tmp_path, with_torch=with_torch)
    if page.name == "README.md":  # its reader is in a clone
        left = {f"/{x.name}/" if x.is_dir() else f"/{x.name}" for x in tmp_path.iterdir() if not x.is_symlink()}
        assert left - set((ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()) == set()


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CONTRIBUTING.md"], ids=lambda p: p.name)
def test_code_that_does_not_run_says_why(page: Path) -> None:
    """Commands and Python stand in `sh` and `python` blocks; only what has a reason is not run."""
    for block in blocks(page):
        hidden = block.language not in ("sh", "python", "diff") and LOOKS_LIKE_CODE.search(block.code)
        assert not hidden or block.why_not_run, f"{page.name}:{block.line} holds code in a `{block.language}` block"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_every_link_to_a_file_of_the_project_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?://|#|mailto:)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), f"{page.name} links to {target}"


NAMED_BY_HOSTS = {
    "trimtab.runtime.vision.recipe",
    "trimtab.runtime.training.energon",
}  # docs/howto-verl.md, howto-megatron.md


def test_pages_and_examples_import_only_public_names() -> None:
    code = {f"{page.name}:{x.line}": x.code for page in PAGES for x in blocks(page) if x.language == "python"}
    code |= {path.name: path.read_text(encoding="utf-8") for path in (ROOT / "examples").glob("*.py")}
    assert len(code) > 25
    for place, text in code.items():
        found = set(re.findall(r"^\s*(?:from|import) (trimtab\.[\w.]+)", text, re.M)) - NAMED_BY_HOSTS
        found -= {*MODULES, "trimtab.errors"}
        assert not found, f"{place} imports {', '.join(found)}: take public names"


def test_the_file_tree_of_the_developers_page_is_the_projects() -> None:
    text = (ROOT / "docs" / "developers" / "index.md").read_text(encoding="utf-8")
    match = re.search(r"<!-- tree -->\s*```text\n(.*?)```", text, re.S)
    assert match is not None, "the page has no file tree"
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


def examples_no_page_runs() -> list[Any]:
    """Those that need torch among the integration tests: each imports it in a process of its own, and then works."""
    shown = "".join(x.code for page in PAGES for x in blocks(page) if x.runs)
    return [
        pytest.param(path, id=path.name, marks=[pytest.mark.integration] if "torch" in path.read_text() else [])
        for path in sorted((ROOT / "examples").glob("*.py"))
        if f"examples/{path.name}" not in shown
    ]


@pytest.mark.parametrize("example", examples_no_page_runs())
def test_every_example_runs(example: Path, tmp_path: Path) -> None:
    result = run([sys.executable, "-W", "error", str(example)], tmp_path)
    assert result.returncode == 0, f"{result.stdout}\n{result.stderr}"
    assert result.stdout
