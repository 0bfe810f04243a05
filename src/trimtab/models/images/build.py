"""A model's own files to its image rule: the family in `model_type` decides which settings are read, and where."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from trimtab.errors import ConfigError, UnknownModelError
from trimtab.models.images.settings import LackingFileError, Settings
from trimtab.models.quote import quote
from trimtab.specs import ImageCounts, ImageRule


def declared_rules() -> dict[str, Callable[[Settings], ImageRule]]:
    """By `model_type`, what reads a family's settings."""
    from trimtab.models.families.known import FAMILIES  # families are made of the rules of this folder

    return {name: family.image_rule for name, family in FAMILIES.items() if family.image_rule is not None}


def image_rule(config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> ImageRule:
    """The rule of a model, from its config.json and, where that does not settle it, its preprocessor_config.json.

    A `preprocess` mapping inside `config` stands in for the second file; where both speak, the file wins. Nothing
    is filled from a class default: a setting given nowhere, or two that contradict each other, raise a `ConfigError`
    with all problems at once. Two switches follow the processor instead of the file, those of InternVL and Gemma 3.
    """
    model_type = config.get("model_type")
    rules = declared_rules()
    build = rules.get(model_type) if isinstance(model_type, str) else None
    if build is None:
        names = ", ".join(rules)
        raise UnknownModelError(
            f"no image rule for model_type {quote(model_type)}: known are {names}: check `model_type` in config.json"
        )
    return build(Settings(config, preprocessor))


def image_rule_or_reason(config: Mapping[str, object], preprocessor: Mapping[str, object] | None = None) -> ImageRule:
    """`image_rule`, or an `UnsettledRule` where nothing is wrong but that preprocessor_config.json was not given."""
    try:
        return image_rule(config, preprocessor)
    except LackingFileError as error:
        return UnsettledRule(reason=str(error))


@dataclass(frozen=True, slots=True, kw_only=True)
class UnsettledRule:
    """Stands for the rule of a model whose files do not settle it, until an image has to be counted."""

    reason: str  # the message of the ConfigError that `image_rule` raised
    name: str = "unsettled"

    def count(self, width: int, height: int) -> ImageCounts:  # noqa: ARG002 - the protocol's arguments
        raise ConfigError(self.reason)
