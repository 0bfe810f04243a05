"""An image rule as the text that a table of sizes keeps, and what two such texts say otherwise."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass

from trimtab.specs import ImageRule

_MOST_SHOWN = 60  # characters of a setting in a message


def write_rule(rule: ImageRule) -> str:
    """Kind and settings as JSON; equal rules give equal text."""
    settings = {f.name: getattr(rule, f.name) for f in fields(rule) if f.compare} if is_dataclass(rule) else {}
    return json.dumps({"name": rule.name, **settings, "kind": type(rule).__name__}, sort_keys=True, default=repr)


def tell_apart(saved: str, own: str) -> tuple[str, str]:
    """What two unequal rules, as `write_rule` wrote them, say otherwise: settings, or the rules' names."""
    try:
        first, second = json.loads(saved), json.loads(own)
    except ValueError:
        return "an earlier version of trimtab", "this one"
    if first["kind"] != second["kind"]:
        return f"the rule {first['name']}", f"the rule {second['name']}"
    unlike = [name for name in first if first[name] != second[name]]
    said = [", ".join(f"{name} {rule[name]}"[:_MOST_SHOWN] for name in unlike) for rule in (first, second)]
    return said[0], said[1]
