"""Every `>>>` example of the source runs, and every public name has one or a file under examples/ that shows it."""

import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest

import trimtab
from trimtab import errors, public

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


SHOWN_BY = {  # what a function takes or returns is shown where that function is
    "PlanDetails": "make_plan",
    "Plan": "write_plan",
    "load_plan": "write_plan",
    "check_plan": "write_plan",
    "load_profile": "save_profile",
    "SizingResult": "load_sizing",
    "save_sizing": "load_sizing",
    "SplitProblem": "split_stages",
    "Timeline": "simulate",
    "Placement": "place",
}
HOMES = {name: home for home in map(importlib.import_module, public.MODULES) for name in home.__all__}
HOMES |= {
    name: errors
    for name, value in vars(errors).items()
    if inspect.isclass(value) and issubclass(value, errors.TrimtabError)
}
PUBLIC = [name for name, home in HOMES.items() if callable(getattr(home, name))]


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_says_when_to_use_it_and_shows_it(name: str) -> None:
    """With an example of its own or of the function that uses it, or a page or file that CI runs."""
    value = getattr(HOMES[name], name)
    told = inspect.getdoc(value) or ""
    shown = inspect.getdoc(getattr(HOMES[SHOWN_BY.get(name, name)], SHOWN_BY.get(name, name))) or ""
    is_error = inspect.isclass(value) and issubclass(value, Exception)
    assert re.search(r"\b(Use|Call|Give) (it|this|the same|its|`)|^Raised by", told, re.M), (
        "it does not say when to use it"
    )
    files = re.findall(r"(?:examples|docs)/[\w-]+\.(?:py|md)", told)
    assert ">>> " in shown or is_error or files, "it has no example"
    for file in files:
        assert re.search(rf"\b{name}\b", (EXAMPLES.parent / file).read_text(encoding="utf-8")), (
            f"{file} does not show it"
        )
