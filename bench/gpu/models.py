"""Published models as Transformers builds them: the configuration that ships with a description, and the description.

InternVL's names remote code; its fields are translated into those of Transformers' own class.
"""

import copy
from typing import Any

from trimtab.models.asking.internvl_chat import chat_config
from trimtab.models.describe import describe
from trimtab.models.description import read_shipped
from trimtab.specs import ModelSpec

_TILES = {"min_patches": 1, "max_patches": 12, "size": {"height": 448, "width": 448}}


def published(name: str) -> tuple[dict[str, Any], ModelSpec]:
    """Return the configuration and the description of a shipped model."""
    config = copy.deepcopy(dict(read_shipped(name)["config"]))
    if config["model_type"] != "internvl_chat":
        return config, describe(name)
    config = {**chat_config(config).to_dict(), "model_type": "internvl"}
    return config, describe(copy.deepcopy(config), preprocessor=_TILES, name=name)
