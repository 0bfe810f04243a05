"""Rules at work: under a user's own limits, on images that share a sample."""

from __future__ import annotations

from dataclasses import replace

from trimtab.errors import ConfigError, quote
from trimtab.models.images.native import GlmSmartResize, SmartResize
from trimtab.models.images.tiles import DynamicTiling
from trimtab.models.images.unsettled import UnsettledRule
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
