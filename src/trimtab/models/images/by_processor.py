"""Image rule of a model that no family here describes, by the processor that makes its pixels."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType

from trimtab.errors import ConfigError
from trimtab.models.images.build import FAMILIES, UnsettledRule
from trimtab.models.images.settings import LackingFileError, Settings
from trimtab.specs import ImageRule

PROCESSORS: Mapping[str, Callable[[Settings], ImageRule]] = MappingProxyType(
    {
        "Qwen2VLImageProcessor": FAMILIES["qwen3_vl"],
        "Glm4vImageProcessor": FAMILIES["glm4v"],
        "Glm46VImageProcessor": FAMILIES["glm46v"],
    }
)
"""By `image_processor_type` of preprocessor_config.json; a class that ends in Fast makes the same pixels."""


def image_rule_by_processor(
    config: Mapping[str, object], preprocessor: Mapping[str, object] | None
) -> ImageRule | None:
    """The rule that FAMILIES or a known processor gives; None where neither does, or where the files do not fit it."""
    settings = Settings(config, preprocessor)
    name = settings.value("file", "image_processor_type")
    known = ("glm4v", "glm46v")  # of which the layers are asked for, and the images counted here
    model_type = str(config.get("model_type"))
    build = FAMILIES[model_type] if model_type in known else PROCESSORS.get(str(name).removesuffix("Fast"))
    if build is None:
        return None
    try:
        return build(settings)
    except LackingFileError as error:
        return UnsettledRule(reason=str(error))
    except ConfigError:
        return None
