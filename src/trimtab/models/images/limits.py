"""Image rules under a user's own limits and on images that share a sample, and rules as text for a table of sizes."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass, replace
from typing import Any

from trimtab.errors import ConfigError, quote
from trimtab.models.images.rules import DynamicTiling, GlmSmartResize, SmartResize, UnsettledRule
from trimtab.specs import ImageRule


def with_limits(rule: ImageRule, *, max_pixels: int | None = None, max_tiles: int | None = None) -> ImageRule:
    """The same rule under a tighter (or looser) limit of the user's.

    `max_pixels` is that of the processor (for GLM: pixels of all temporal copies); `max_tiles` leaves the thumbnail
    or overview out of count. Where the rule's least size exceeds the new limit, the least size gives way.
    """
    for what, value in (("max_pixels", max_pixels), ("max_tiles", max_tiles)):
        if value is not None and type(value) is not int:
            raise ConfigError(
                f"{what} is {quote(value)}, and a limit of images is a whole number: give one, or leave it out"
            )
    if isinstance(rule, UnsettledRule) and (max_pixels is not None or max_tiles is not None):
        raise ConfigError(rule.reason)
    if max_pixels is not None:
        if not isinstance(rule, SmartResize | GlmSmartResize):
            raise _no_such_limit(rule, "max_pixels", max_pixels, "it belongs to smart_resize rules")
        rule = replace(rule, max_pixels=max_pixels, min_pixels=min(rule.min_pixels, max_pixels))
    if max_tiles is not None:
        if not isinstance(rule, DynamicTiling):
            raise _no_such_limit(rule, "max_tiles", max_tiles, "it belongs to InternVL's tiles")
        rule = replace(rule, max_tiles=max_tiles, min_tiles=min(rule.min_tiles, max_tiles))
    return rule


def rule_in_sample(rule: ImageRule, num_images: int) -> ImageRule:
    """The rule for each image of a sample that holds `num_images`.

    Only LLaVA-OneVision's rule tells samples apart, see `AnyRes.in_sample`.
    """
    if not hasattr(rule, "in_sample"):  # isinstance of a protocol takes 0.1 ms, a third of sizing lengths
        return rule
    own: ImageRule = rule.in_sample(num_images)
    return own


def _no_such_limit(rule: ImageRule, what: str, value: int, whose: str) -> ConfigError:
    return ConfigError(f"cannot set {what} {value} on image rule {rule.name}: {whose}: leave {what} out")


# -- a rule as text ---------------------------------------------------------------------------------------------------


_MOST_SHOWN = 60  # characters of a setting in a message


def write_rule(rule: ImageRule) -> str:
    """Kind and settings as JSON; equal rules give equal text."""
    settings: dict[str, Any] = (
        {f.name: getattr(rule, f.name) for f in fields(rule) if f.compare} if is_dataclass(rule) else {}
    )
    return json.dumps({"name": rule.name, **settings, "kind": type(rule).__name__}, sort_keys=True, default=repr)


def tell_apart(saved: str, own: str) -> tuple[str, str]:
    """Return what two unequal rules, as `write_rule` wrote them, say otherwise: settings, or the rules' names."""
    try:
        first, second = json.loads(saved), json.loads(own)
    except ValueError:
        return "an earlier version of trimtab", "this one"
    if first["kind"] != second["kind"]:
        return f"the rule {first['name']}", f"the rule {second['name']}"
    unlike = [name for name in first if first[name] != second[name]]
    said = [", ".join(f"{name} {rule[name]}"[:_MOST_SHOWN] for name in unlike) for rule in (first, second)]
    return said[0], said[1]
