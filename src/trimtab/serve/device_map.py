"""Reading a device map: which module of a model lies where."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trimtab.errors import ConfigError


@dataclass(frozen=True, slots=True)
class WrittenMap:
    """A device map as a file has it."""

    device_map: dict[str, int | str]  # module path -> a GPU's number, "cpu" or "disk"
    runs_on: dict[str, int | str]  # of modules on "cpu" or "disk": the GPU they are copied to, or "cpu"


def read_device_map(path: Path) -> WrittenMap:
    """A JSON file's map: the bare mapping, or what `trimtab map` wrote with where the rest runs."""
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}; write it with trimtab map --json") from None
    found: dict[str, Any] = content if isinstance(content, dict) else {}
    whole = "device_map" in found
    placed = _devices(found["device_map"] if whole else found, path)
    if not placed:
        raise ConfigError(f"{path} holds no device map: write it with trimtab map --json")
    if not whole:
        return WrittenMap(placed, {})
    computed = found.get("run_on_cpu", [])
    runs_on = _devices(found.get("runs_on", {}), path)
    if not isinstance(computed, list) or not all(isinstance(x, str) for x in computed):
        raise ConfigError(f"{path} has a run_on_cpu that is no list of modules: write it with trimtab map --json")
    return WrittenMap(placed, {**runs_on, **dict.fromkeys(computed, "cpu")})


def _devices(places: object, path: Path) -> dict[str, int | str]:
    if not isinstance(places, dict):
        raise ConfigError(f"{path} holds no device map: write it with trimtab map --json")
    for module, device in places.items():
        if isinstance(device, bool) or not isinstance(device, int | str):
            raise ConfigError(
                f"{path} places {module!r} on {device!r}, which is no device: write a number, cpu or disk"
            )
    return places
