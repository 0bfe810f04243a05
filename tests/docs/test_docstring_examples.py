"""Every `>>>` example of the source runs, and every public name has one or a file under examples/ that shows it."""

from __future__ import annotations

import doctest
import importlib
import inspect
from pathlib import Path

import pytest

import trimtab

SOURCE = Path(trimtab.__file__).parent
EXAMPLES = Path(__file__).parents[2] / "examples"
MODULES = sorted(
    ".".join(("trimtab", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")
    for path in SOURCE.rglob("*.py")
    if ">>> " in path.read_text(encoding="utf-8")
)


@pytest.mark.parametrize("module", MODULES)
def test_examples_run(module: str) -> None:
    found = doctest.testmod(importlib.import_module(module), optionflags=doctest.ELLIPSIS)
    assert found.attempted >= 1
    assert found.failed == 0


SHOWN_BY = {"PlanDetails": "make_plan"}  # what a function returns is shown where that is


def test_every_public_name_has_an_example() -> None:
    shown = "".join(path.read_text(encoding="utf-8") for path in EXAMPLES.glob("*.py"))
    pages = "".join(path.read_text(encoding="utf-8") for path in (EXAMPLES.parent / "docs").glob("*.md"))
    missing = []
    for name in trimtab.__all__:
        value = getattr(trimtab, name)
        plain = not callable(value) or (inspect.isclass(value) and issubclass(value, Exception))
        value = getattr(trimtab, SHOWN_BY.get(name, name))
        if not plain and ">>> " not in (value.__doc__ or "") and name not in shown and name not in pages:
            missing.append(name)
    assert not missing
