"""Reading a device map: which module of a model lies where."""

from __future__ import annotations

import json
from pathlib import Path

from trimtab.errors import ConfigError


def read_device_map(path: Path) -> dict[str, int | str]:
    """Module path -> device from a JSON file: the map itself, or an object that holds it as `device_map`."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; write it with trimtab map --json") from None
    found = content.get("device_map", content) if isinstance(content, dict) else None
    if not isinstance(found, dict) or not found:
        raise ConfigError(f"{path} holds no device map: write it with trimtab map --json")
    for module, device in found.items():
        if isinstance(device, bool) or not isinstance(device, int | str):
            raise ConfigError(
                f"{path} places {module!r} on {device!r}, which is no device: write a number, cpu or disk"
            )
    return found
