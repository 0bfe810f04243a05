"""Small models as description files, `describe` as on a machine without Transformers, and edits of nested data."""

import copy
from pathlib import Path

from trimtab.models.describe import describe as describe_or_ask
from trimtab.specs import ModelSpec

FOLDER = Path(__file__).parent / "described"


def describe(source: object, **options: object) -> ModelSpec:
    """As on a machine without Transformers: tests/torch/test_asked.py has the other half."""
    return describe_or_ask(source, ask=False, **options)


def small(name: str, **options: object) -> ModelSpec:
    """One of `described/`: what Transformers answered on a small configuration."""
    return describe(FOLDER / f"small-{name}.json", **options)


def edit(data: dict, path: str, value: object) -> dict:
    """A copy with another value at a dotted path; `...` takes the field out."""
    result = copy.deepcopy(data)
    *parents, key = path.split(".")
    target = result
    for part in parents:
        target = target[int(part)] if isinstance(target, list) else target[part]
    if isinstance(target, list):
        target[int(key)] = value
    elif value is ...:
        del target[key]
    else:
        target[key] = value
    return result


"""Values that no field of a model's file expects, and `...`, which takes the field out."""
DAMAGE = [
    *(None, True, 0, -1, 1, 3, 7, 10**9, 2**31, 10**400, 1.5, 0.0, -2.5, 1e308, float("nan")),
    *("", "x", [], [1], [[1]], [[1, 1]], {}, {"a": 1}, ...),
]
