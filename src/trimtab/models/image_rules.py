"""A model's own files to its image rule: by the formula of its family, or as its processor answers."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from trimtab.errors import ConfigError, ImageError, UnknownModelError, quote
from trimtab.models.families.known import FAMILIES, family_of
from trimtab.models.images.asked import AskedImages, ask_images
from trimtab.models.images.reading import Fields, LackingFileError
from trimtab.models.images.tiles import FixedImage
from trimtab.models.images.unsettled import UnsettledRule
from trimtab.specs import ImageMarkup, ImageRule

NO_FILES = (
    "images of this model cannot be counted: the files of its processor were not given: put preprocessor_config.json "
    "or processor_config.json beside config.json, or pass --set preprocessor"
)


def image_rule(config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> ImageRule:
    """The rule of a model, from its config.json and, where that does not settle it, its preprocessor_config.json.

    Use its `count(width, height)` to know the patches and tokens of an image from nothing but its size in pixels.

    Nothing is filled from a class default: a setting given nowhere, or two that contradict each other, raise a
    `ConfigError` with all problems at once. Two switches follow the processor instead of the file: InternVL's, Gemma's.

    >>> pixels = {"min_pixels": 3136, "max_pixels": 12845056}
    >>> rule = image_rule({"model_type": "qwen2_vl"}, {"patch_size": 14, "merge_size": 2, **pixels})
    >>> rule.count(448, 448).tokens
    256
    """
    build = family_of(config.get("model_type")).image_rule
    if build is None:
        names = ", ".join(name for name, family in FAMILIES.items() if family.image_rule is not None)
        raise UnknownModelError(
            f"no image rule for model_type {quote(config.get('model_type'))}: known are {names}: check `model_type` in "
            "config.json"
        )
    return build(Fields.of_model(config, preprocessor))


def image_rule_or_reason(config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> ImageRule:
    """`image_rule`, or an `UnsettledRule` where nothing is wrong but that preprocessor_config.json was not given."""
    try:
        return image_rule(config, preprocessor)
    except LackingFileError as error:
        return UnsettledRule(reason=str(error))


def image_rule_by_processor(
    config: Mapping[str, object], files: Mapping[str, Mapping[str, Any]], settings: Mapping[str, object] | None
) -> tuple[ImageRule, ImageMarkup | None]:
    """What Transformers' processor does to images; `files`: its own by name, `settings`: those of the image processor.

    A family whose formula and text of an image are both declared is not asked about. Of another, a formula of any
    family here is taken where it reads these files and equals the processor on every size of `asked.STANDARD`: it
    needs no Transformers afterwards.
    """
    family = family_of(config.get("model_type"))
    own: ImageRule = UnsettledRule(reason=NO_FILES)
    if family.image_rule is not None:
        try:
            own = image_rule_or_reason(config, settings)
        except ConfigError as error:
            own = UnsettledRule(reason=str(error))
    is_settled = not isinstance(own, UnsettledRule)
    if not files or (is_settled and family.markup is not None):
        return own, None
    try:
        rule, markup = ask_images(files, config)
    except ConfigError as error:
        return own if is_settled else UnsettledRule(reason=str(error)), None
    return next((x for x in _formulas(config, settings, rule) if _equals(x, rule)), rule), markup


def _formulas(
    config: Mapping[str, object], settings: Mapping[str, object] | None, asked: AskedImages
) -> Iterator[ImageRule]:
    """Rules that these files may mean."""
    if asked.table:
        _, _, patches, tokens, tiles, *_ = asked.table[0]
        if tiles == 1:
            yield FixedImage(rows=patches, tokens=tokens)
    for build in dict.fromkeys(family.image_rule for family in FAMILIES.values() if family.image_rule is not None):
        with contextlib.suppress(ConfigError):  # it lacks what that family reads
            yield build(Fields.of_model(config, settings))


def _equals(rule: ImageRule, asked: AskedImages) -> bool:
    """On every standard size; a text of its own and other counts in company are no formula's."""
    if asked.by_sample or len(asked.texts) > 1:
        return False
    for width, height, *row in asked.table:
        try:
            found = rule.count(width, height)
        except ImageError:
            return False
        if [found.patches, found.tokens, found.tiles, found.patches_sq] != row[:4]:
            return False
    return bool(asked.table)
