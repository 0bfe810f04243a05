"""What the plain test command leaves to the tests marked `integration`: long tests, and most cases of long families.

One table instead of marks in fifty files, so that it can be weighed as a whole. Nothing is lost: `.ci/run` runs the
rest in its section `processes`. A test of more than 4 s belongs here, unless it is the only guard of a claim of the
README.
"""

from collections import defaultdict
from pathlib import Path

import pytest
import yaml

KEPT: dict[str, int | list[str]] = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))


def mark_the_rest(items: list[pytest.Item]) -> None:
    """Marks what the table leaves out as `integration`."""
    by_function: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        by_function[item.nodeid.partition("[")[0].removeprefix("tests/")].append(item)
    for name, kept in KEPT.items():
        found = by_function.get(name, [])
        if isinstance(kept, int):
            stays = {round(i * (len(found) - 1) / max(kept - 1, 1)) for i in range(min(kept, len(found)))}
        else:
            stays = {number for number, item in enumerate(found) if item.name.partition("[")[2][:-1] in kept}
        for number, item in enumerate(found):
            if number not in stays:
                item.add_marker("integration")
