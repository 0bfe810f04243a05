"""Public names, loaded when they are first used: `import trimtab` costs next to nothing and loads no torch.

Each name stands once, in the stub (`.pyi`) next to the module that has it, which type checkers and editors read too.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

MODULES = ("trimtab", *(f"trimtab.{name}" for name in ("models", "torch", "vision", "placement", "testing")))
"""Those with a stub. The classes of `trimtab.errors` are public as well."""


@cache
def homes(file: str) -> dict[str, tuple[str, str]]:
    """Return the module and name there of every public name in the stub of a module's file."""
    import ast
    from pathlib import Path

    stub = ast.parse(Path(file).with_suffix(".pyi").read_text(encoding="utf-8"))
    return {
        alias.asname or alias.name: (node.module or "", alias.name)
        for node in stub.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def lazy_names(module: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Return `__getattr__` and `__dir__` of a module whose names are loaded when they are first used."""

    def load(name: str) -> Any:
        if name == "__all__":
            return sorted(homes(file))
        if name.startswith("__") or name not in homes(file):
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        from importlib import import_module

        home, there = homes(file)[name]
        return getattr(import_module(home), there)

    return load, lambda: sorted(homes(file))
