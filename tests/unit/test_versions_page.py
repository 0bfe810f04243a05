"""The page of Transformers' versions is what their results say."""

import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

from bench.versions import COMMANDS, PAGE, VERSIONS, make_page, read_results  # noqa: E402


def test_the_page_is_what_the_results_say():
    assert PAGE.read_text(encoding="utf-8") == make_page(read_results())


def test_every_example_was_run_under_the_version_that_this_project_is_made_with():
    newest = read_results()["versions"][VERSIONS[-1]]
    examples = {f"examples/{path.name}" for path in (ROOT / "examples").glob("*.py")}
    assert newest.keys() == examples | COMMANDS.keys()
    assert set(newest.values()) == {"yes"}
