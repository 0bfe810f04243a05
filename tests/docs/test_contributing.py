"""CONTRIBUTING.md: its table of places is true; docs/developers/extending.md: its three diffs apply and work."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
EXTENDING = (ROOT / "docs" / "developers" / "extending.md").read_text(encoding="utf-8")


def places() -> list[tuple[str, str]]:
    """File and name of every `path/file.py`: `name` of the table."""
    table = TEXT.partition("## Where is ...?")[2].partition("\n## ")[0]
    named = re.findall(r"`([\w/]+\.py)`(?:: `(\w+)`)?", table)
    assert len(named) >= 10
    return named


@pytest.mark.parametrize(("file", "name"), places())
def test_what_one_looks_for_is_where_the_table_says(file: str, name: str) -> None:
    source = (ROOT / "src" / "trimtab" / file).read_text(encoding="utf-8")
    assert not name or re.search(rf"^ *(?:def|class) {name}\b", source, re.M)


@pytest.fixture(scope="module")
def changed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the source with every diff of the page applied."""
    folder = tmp_path_factory.mktemp("contributed")
    shutil.copytree(ROOT / "src", folder / "src", ignore=shutil.ignore_patterns("__pycache__"))
    diffs = "".join(re.findall(r"^```diff\n(.*?)^```$", EXTENDING, re.S | re.M))
    applied = subprocess.run(
        ["git", "apply", "-p0"], cwd=folder, input=diffs, capture_output=True, text=True, check=False
    )
    assert applied.returncode == 0, applied.stderr
    return folder


@pytest.mark.integration
@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("from trimtab.models.families import family_of; print(family_of('my_vlm').pack.sees)", "images"),
        (
            "from trimtab.adapters.frameworks import find_target; print(find_target('my-framework').title)",
            "My framework",
        ),
        ("from trimtab.cli.app import app; app(['options', 'plan'])", "warm_steps=N"),
        ("from trimtab.cli.app import app; app(['export', '--help'])", "Print My framework's settings for PLAN."),
        ("from trimtab import PlanOptions; PlanOptions(warm_steps=0)", "warm_steps must be at least 1, not 0"),
    ],
)
def test_the_diffs_of_the_page_do_what_it_says(changed: Path, code: str, expected: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(changed / "src")}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False)
    assert expected in done.stdout + done.stderr
