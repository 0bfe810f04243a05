"""Balanced training and inference of vision-language models: measure, decide, apply.

Every public name stands in `__init__.pyi` beside this file, once, and is loaded when it is first used, so that
`import trimtab` costs next to nothing and loads no torch.
"""

from __future__ import annotations

from functools import cache
from typing import Any

__version__ = "0.1.0"


@cache
def _homes() -> dict[str, tuple[str, str]]:
    """Module and name there of every public name."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def __getattr__(name: str) -> Any:
    if name == "__all__":
        return sorted(_homes())
    if name.startswith("__") or name not in _homes():
        raise AttributeError(f"module 'trimtab' has no attribute {name!r}")
    from importlib import import_module

    module, there = _homes()[name]
    return getattr(import_module(module), there)


def __dir__() -> list[str]:
    return sorted([*globals(), *_homes()])
