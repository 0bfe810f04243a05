"""What a model folder's config.json may not say to a server: names that a loader would fetch or resolve, sizes of no
model."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError
from trimtab.files import read_small, refuse_special
from trimtab.typed_json import parse_json

_DTYPE = re.compile(r"auto|(torch\.)?b?float\d+\w*")
_LARGEST = 10**7  # ten times the largest vocabulary; positions, which may be more, are no "size"


def check_config(folder: Path) -> None:
    """Refuses in a sentence, before any loader reads the folder; what else is wrong the loaders say."""
    if not folder.is_dir():  # which a loader would take for a name on the Hub
        raise ConfigError(f"{folder} is no folder: give one that holds config.json and safetensors files")
    for file in folder.iterdir():  # a loader would wait for ever
        refuse_special(file)
    try:
        content = parse_json(read_small(folder / "config.json"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError):
        return  # as the loaders say
    except ValueError as error:  # what a loader reads otherwise than we do is not checked
        raise ConfigError(f"{folder / 'config.json'} is not strict JSON ({error}): do not use this folder") from None
    for name, value in _fields(content):
        if name.endswith("_implementation") and isinstance(value, str) and "/" in value:
            reason = "a kernel to fetch from the Hub"
        elif name in ("dtype", "torch_dtype") and not (isinstance(value, str) and _DTYPE.fullmatch(value)):
            reason = "no type of weights"
        elif name.endswith(("_size", "_layers")) and isinstance(value, int) and abs(value) > _LARGEST:
            reason = "larger than that of any model"
        else:
            continue
        raise ConfigError(f"{folder / 'config.json'} has {name} {str(value)[:100]!r}, {reason}: do not use this folder")


def _fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Every field that is set, of nested objects too."""
    if isinstance(value, dict):
        for name, field in value.items():
            if field is not None:
                yield name, field
            yield from _fields(field)
    elif isinstance(value, list):
        for item in value:
            yield from _fields(item)
