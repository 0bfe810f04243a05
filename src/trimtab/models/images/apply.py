"""Rules at work: on many images at once, under a user's own limits, on images that share a sample."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trimtab.errors import ConfigError, ImageError, join_problems
from trimtab.models.images.native import GlmSmartResize, SmartResize
from trimtab.models.images.tiles import DynamicTiling
from trimtab.models.images.unsettled import UnsettledRule
from trimtab.models.quote import quote
from trimtab.specs import AskedRule, ImageRule, ImageRuleBySample, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CountColumns:
    """`ImageCounts` of many images, one column per field."""

    patches: IntArray
    tokens: IntArray
    tiles: IntArray
    patches_sq: IntArray
    patches_windowed: IntArray


def count_many(rule: ImageRule, widths: npt.ArrayLike, heights: npt.ArrayLike) -> CountColumns:
    """Counts of image i from (widths[i], heights[i]); every distinct size is counted once.

    Raises one `ImageError` that names all sizes that cannot be counted.
    """
    sizes = np.stack([_whole_numbers(widths), _whole_numbers(heights)], axis=1)
    distinct, inverse = np.unique(sizes, axis=0, return_inverse=True)
    table = np.zeros((len(distinct), 5), np.int64)
    problems = []
    if isinstance(rule, AskedRule):
        rule.prepare([(width, height) for width, height in distinct.tolist()])
    for row, (width, height) in enumerate(distinct.tolist()):
        try:
            c = rule.count(width, height)
        except ImageError as error:
            problems.append(str(error))
        else:
            table[row] = c.patches, c.tokens, c.tiles, c.patches_sq, c.patches_windowed
    if problems:
        raise ImageError(join_problems(problems))
    patches, tokens, tiles, patches_sq, patches_windowed = np.ascontiguousarray(table[inverse.reshape(-1)].T)
    return CountColumns(
        patches=patches, tokens=tokens, tiles=tiles, patches_sq=patches_sq, patches_windowed=patches_windowed
    )


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
    return rule.in_sample(num_images) if isinstance(rule, ImageRuleBySample) else rule


def _whole_numbers(values: npt.ArrayLike) -> IntArray:
    array = np.asarray(values)
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ImageError(
            f"cannot count images of sizes with shape {array.shape} and type {array.dtype}: "
            "widths and heights are two columns of whole numbers: pass integer arrays"
        )
    return array.astype(np.int64)


def _no_such_limit(rule: ImageRule, what: str, value: int, whose: str) -> ConfigError:
    return ConfigError(f"cannot set {what} {value} on image rule {rule.name}: {whose}: leave {what} out")
