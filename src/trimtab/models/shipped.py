"""Descriptions of published models that come with trimtab, found by the names that people use for them."""

from __future__ import annotations

import difflib
import json
import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from types import MappingProxyType
from typing import Any

_ENDINGS = re.compile(r"[-_](instruct|it|hf|chat|thinking|pt|base|bf16)$", re.IGNORECASE)


@cache
def shipped_models() -> tuple[str, ...]:
    """Names that `describe` knows without a file."""
    return tuple(sorted(_lines()))


def find_shipped(name: str) -> str | None:
    """The shipped name that `name` stands for: with or without a hub's prefix, an -Instruct, and in any case.

    >>> from trimtab.models.shipped import find_shipped
    >>> find_shipped("Qwen/Qwen2.5-VL-7B-Instruct"), find_shipped("qwen2.5-vl-7b"), find_shipped("Qwen2.5-VL-8B")
    ('Qwen2.5-VL-7B', 'Qwen2.5-VL-7B', None)
    """
    if name in shipped_models():
        return name
    own = name.rstrip("/").rpartition("/")[2]
    while True:
        found = _by_spelling().get(_spelling(own))
        if found is not None:
            return found
        shorter = _ENDINGS.sub("", own)
        if shorter == own:
            return None
        own = shorter


def suggest_shipped(name: str) -> str:
    """ " did you mean NAME", for a name that is not known; empty where none is near."""
    own = _spelling(_ENDINGS.sub("", name.rpartition("/")[2]))
    near = difflib.get_close_matches(own, list(_by_spelling()), n=1, cutoff=0.75)
    return f" (did you mean {_by_spelling()[near[0]]}?)" if near else ""


def read_shipped(name: str) -> Mapping[str, Any]:
    """A shipped description, its published configuration under `config`."""
    data: Mapping[str, Any] = json.loads(_lines()[name])
    return data


@cache
def _lines() -> Mapping[str, str]:
    """The descriptions by name, as JSON: one file, because files compressed one by one took a tenth of a megabyte."""
    text = resources.files("trimtab.models").joinpath("zoo", "models.jsonl").read_text(encoding="utf-8")
    return MappingProxyType({json.loads(line)["name"]: line for line in text.strip().split("\n")})


def _spelling(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name.casefold())


@cache
def _by_spelling() -> Mapping[str, str]:
    names = json.loads(resources.files("trimtab.models").joinpath("zoo", "names.json").read_bytes())
    also = {_spelling(other): name for name, others in names.items() for other in others}
    return MappingProxyType({**also, **{_spelling(name): name for name in shipped_models()}})
