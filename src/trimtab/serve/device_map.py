"""Reading a device map: which module of a model lies where."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from trimtab.errors import ConfigError
from trimtab.files import read_small
from trimtab.typed_json import parse_json


@dataclass(frozen=True, slots=True)
class WrittenMap:
    """A device map as a file has it; whether it fits a model is seen when that is loaded."""

    device_map: dict[str, int | str] | None  # module path -> a GPU's number, "cpu" or "disk"; None: all on one device
    runs_on: dict[str, int | str]  # of modules on "cpu" or "disk": the GPU they are copied to, or "cpu"


def read_device_map(path: Path) -> WrittenMap:
    """A JSON file's map: the bare mapping, or what `trimtab map` wrote with where the rest runs."""
    try:
        content = parse_json(read_small(path))
        placed = content.get("device_map", content)
        runs_on = {**content.get("runs_on", {}), **dict.fromkeys(content.get("run_on_cpu", []), "cpu")}
        if not placed or not all(type(x) in (int, str) for x in [*placed.values(), *runs_on.values()]):
            raise ValueError("its devices are neither numbers, cpu nor disk")
        if not all(isinstance(name, str) for name in runs_on):
            raise ValueError("run_on_cpu names something else than modules")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no device map ({error}): write it with trimtab map --json") from None
    return WrittenMap(placed, runs_on)
