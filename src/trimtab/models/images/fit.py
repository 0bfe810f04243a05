"""The image rule of a model by its processor: a formula where one gives what the processor does, else its table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from trimtab.errors import ConfigError, ImageError
from trimtab.models.images.asked import AskedImages, ask_images
from trimtab.models.images.build import UnsettledRule, declared_rules, image_rule_or_reason
from trimtab.models.images.settings import Settings
from trimtab.models.images.tiles import FixedImage
from trimtab.specs import ImageMarkup, ImageRule

NO_FILES = (
    "images of this model cannot be counted: the files of its processor were not given: put preprocessor_config.json "
    "or processor_config.json beside config.json, or pass --preprocessor"
)


def image_rule_by_processor(
    config: Mapping[str, object], files: Mapping[str, Mapping[str, Any]], settings: Mapping[str, object] | None
) -> tuple[ImageRule, ImageMarkup | None]:
    """What Transformers' processor does to images; `files`: its own by name, `settings`: those of the image processor.

    A formula of a family here is taken where it reads these files and equals the processor on every size of
    `asked.STANDARD`: it needs no Transformers afterwards.
    """
    if not files:
        if config.get("model_type") not in declared_rules():
            return UnsettledRule(reason=NO_FILES), None
        try:
            return image_rule_or_reason(config, settings), None
        except ConfigError as error:  # a family here with a part that its formula does not know
            return UnsettledRule(reason=str(error)), None
    try:
        rule, markup = ask_images(files, config)
    except ConfigError as error:
        return UnsettledRule(reason=str(error)), None
    return next((x for x in _formulas(config, settings, rule) if _equals(x, rule)), rule), markup


def _formulas(
    config: Mapping[str, object], settings: Mapping[str, object] | None, asked: AskedImages
) -> Iterator[ImageRule]:
    """Rules that these files may mean."""
    if asked.table:
        _, _, patches, tokens, tiles, *_ = asked.table[0]
        if tiles == 1:
            yield FixedImage(rows=patches, tokens=tokens)
    for build in dict.fromkeys(declared_rules().values()):
        try:
            yield build(Settings(config, settings))
        except ConfigError:  # it lacks what that family reads
            continue


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
