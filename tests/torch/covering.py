"""Few of many cases: those that between them show every value of every field. Imports nothing but the standard library.

The plain test command runs the covering cases, the tests marked `integration` all the others.
"""

from collections.abc import Hashable, Sequence
from typing import Any, TypeVar

import pytest

C = TypeVar("C")


def covering(cases: Sequence[C], values: Sequence[str]) -> list[C]:
    """In their order, each case that shows a value of one of the fields `values` that none before it shows.

    Example: (a, 1), (a, 2), (b, 1), (b, 2) -> (a, 1), (a, 2), (b, 1).
    """
    seen: set[tuple[str, Hashable]] = set()
    chosen = []
    for case in cases:
        shown = {(name, getattr(case, name)) for name in values}
        if shown - seen:
            chosen.append(case)
            seen |= shown
    return chosen


def others_integration(cases: Sequence[Any], plain: Sequence[Any], name: Any = str) -> list[Any]:
    """Parameters of a test: all cases, those outside of `plain` marked `integration`."""
    return [pytest.param(x, id=name(x), marks=[] if x in plain else [pytest.mark.integration]) for x in cases]
