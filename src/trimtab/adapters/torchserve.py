"""A placed model for TorchServe 0.12: a handler and its settings, packed by `torch-model-archiver`.

TorchServe is archived: no release since 0.12.0 (2024), and its README says that vulnerabilities may not be fixed.
"""

import json
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from importlib import resources
from pathlib import Path
from typing import get_args

from trimtab.errors import ConfigError
from trimtab.files import read_small, write_atomically, written_together
from trimtab.options import MapRule
from trimtab.typed_json import parse_json
from trimtab.units import MIB, parse_bytes

_HANDLER = "torchserve_handler.py"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.-]*")
_AS_EVER = {"low_cpu_mem_usage": True, "offload_state_dict": True, "revision": "main"}  # so it loads anyway
# A worker holds the whole map and sees every device, so `parallelType`, which shares devices out, is unset.
_WORKER = "minWorkers: 1\nmaxWorkers: 1\nbatchSize: 1\nresponseTimeout: 300\nstartupTimeout: 1800\n"
# TorchServe's own default, 6.5 MB, is less than two photographs.
_SERVER = f"max_request_size={32 * MIB}\nmax_response_size={32 * MIB}\n"


@dataclass(frozen=True, slots=True, kw_only=True)
class Recipe:
    """How the handler loads the model, in the words of TorchServe's own recipe for large models."""

    model_name: str
    model_path: str
    device_map: Mapping[str, int | str] | MapRule = "auto"
    runs_on: Mapping[str, int | str] = field(default_factory=dict)  # ours: of modules on "cpu" or "disk"
    max_memory: Mapping[str, str] | None = None  # {"0": "20GiB", "cpu": "64GiB"}
    offload_folder: str | None = None  # from the unpacked archive
    torch_dtype: str | None = None  # the model's own
    max_length: int | str = 256  # new tokens, as the recipe's handler takes it

    def __post_init__(self) -> None:
        folder, places = Path(self.model_path), self.device_map
        if not (folder / "config.json").is_file() or not any(folder.glob("*.safetensors")):
            raise ConfigError(f"{folder} holds no config.json with safetensors: name the folder of a saved model")
        if not _NAME.fullmatch(self.model_name):
            raise ConfigError(f"{self.model_name!r} cannot stand in a URL: use letters, digits, _ . and -")
        if isinstance(places, str):
            if places not in get_args(MapRule):
                raise ConfigError(f"device_map {places!r} is no rule: choose one of {', '.join(get_args(MapRule))}")
        elif self.max_memory is not None:
            raise ConfigError("max_memory does nothing next to a device map: leave one of them out")
        elif "disk" in places.values() and self.offload_folder is None:
            raise ConfigError("the device map places modules on disk: name an offload_folder in the recipe")


def read_recipe(path: Path) -> dict[str, object]:
    """Return fields of `Recipe` from a setup_config.json of TorchServe's recipe.

    Its `model_path` starts from the file's own folder. `ConfigError` for a key that the handler would not honour.
    """
    try:
        found = dict(parse_json(read_small(path)))
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(f"{path} holds no object of keys ({error}): give the recipe's setup_config.json") from None
    takes = {
        "model_name": lambda x: isinstance(x, str),
        "model_path": lambda x: isinstance(x, str),
        "device_map": lambda x: isinstance(x, str | dict),
        "max_memory": lambda x: isinstance(x, dict) and all(parse_bytes(str(size)) for size in x.values()),
        "offload_folder": lambda x: isinstance(x, str),
        "torch_dtype": lambda x: x in ("bfloat16", "float16", "float32"),
        "max_length": lambda x: str(x).isdecimal(),
    }
    for key, value in found.items():
        if not (takes[key](value) if key in takes else _AS_EVER.get(key) == value):
            raise ConfigError(
                f"{path} has {key} {json.dumps(value)}, which the handler would not honour: leave it out (it honours "
                f"{', '.join(takes)}, and {json.dumps(_AS_EVER)})"
            )
    if "model_name" in found:
        found["model_name"] = found["model_name"].rpartition("/")[2]  # without the owner on the Hub
    if "model_path" in found:
        found["model_path"] = str((path.parent / found["model_path"]).resolve())
    return {key: value for key, value in found.items() if key in takes}


def export_torchserve(recipe: Recipe, out: Path) -> Path:
    """Write OUT/NAME.mar by torch-model-archiver, and the handler and settings that it holds next to it."""
    archiver = shutil.which("torch-model-archiver")
    if archiver is None:
        raise ConfigError("torch-model-archiver is not installed: pip install torch-model-archiver==0.12.0")
    files = {
        _HANDLER: resources.files("trimtab.serve").joinpath(_HANDLER).read_text(encoding="utf-8"),
        "setup_config.json": json.dumps(asdict(recipe), indent=2) + "\n",
        "model-config.yaml": _WORKER,
        "config.properties": _SERVER,
    }
    with written_together():
        for name, text in files.items():
            write_atomically(out / name, text)
    archive = out / f"{recipe.model_name}.mar"
    words = [archiver, f"--model-name={recipe.model_name}", "--version=1.0", f"--handler={out / _HANDLER}"]
    words += [f"--extra-files={out / 'setup_config.json'}", f"--config-file={out / 'model-config.yaml'}"]
    with tempfile.TemporaryDirectory(dir=out) as aside:
        done = subprocess.run([*words, "--export-path", aside], capture_output=True, text=True)  # noqa: S603
        if done.returncode != 0:
            raise ConfigError(f"torch-model-archiver failed: {' '.join(done.stderr.split())[-300:]}")
        Path(aside, archive.name).replace(archive)
    return archive
