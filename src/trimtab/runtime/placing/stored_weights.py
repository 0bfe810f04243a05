"""The tensors of a model folder's safetensors files, each mapped into memory on its own and only when asked for.

A tensor that was copied to a GPU is unmapped at once, so host memory holds what is on its way and no shard twice; one
that stays mapped costs no memory before it is read, and none that the system could not take back. Nothing is unpickled.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES  # its names of types; there is no public table (0.8)

from trimtab.errors import ConfigError, join_problems, quote
from trimtab.files import read_small
from trimtab.typed_json import parse_json

_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies, and how to have it.

    Transformers 5 reads it as a slice of safetensors, when its turn comes: `stored[...]`, before that dtype and shape.
    """

    file: Path
    name: str
    dtype_name: str  # as safetensors has it: "BF16"
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return _TYPES.get(self.dtype_name) or torch.uint8  # bytes, where torch has no such type

    def map(self) -> torch.Tensor:
        """The tensor, in a private mapping of its pages that lasts as long as the tensor."""
        with safe_open(self.file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(self.name)
            return tensor

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        return self.map()

    def get_dtype(self) -> str:
        return self.dtype_name

    def get_shape(self) -> list[int]:
        return list(self.shape)


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Every tensor of a model folder by its name in the files, none of them read yet.

    `ConfigError` where there are no safetensors files, a shard is missing, is cut short or lacks what the index says.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give one that holds config.json and safetensors files")
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        if not single.is_file():
            raise ConfigError(
                f"{folder} holds neither {_SINGLE} nor {_INDEX}: save the model as safetensors, no other format is read"
            )
        return open_file(single)
    files = _read_index(index)
    missing = sorted({name for name in files.values() if not (folder / name).is_file()})
    if missing:
        raise ConfigError(
            join_problems([f"{index} names {name}, which is missing: download the folder again" for name in missing])
        )
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(files.values())):
        found.update(open_file(folder / name))
    lost = sorted(set(files) - set(found))
    if lost:
        lines = [f"{index} puts {name} into {files[name]}, which lacks it: download the folder again" for name in lost]
        raise ConfigError(join_problems(lines))
    return {name: found[name] for name in files}


def _read_index(index: Path) -> dict[str, str]:
    try:
        written: Any = parse_json(read_small(index))
    except ValueError as error:
        raise ConfigError(f"{index} is not JSON ({error}): download it again") from None
    files = written.get("weight_map") if isinstance(written, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(x, str) for x in files.values()):
        raise ConfigError(f"{index} has no weight_map from tensor to file: download it again")
    outside = sorted({name for name in files.values() if Path(name).name != name or not name.endswith(".safetensors")})
    if outside:
        lines = [
            f"{index} names {quote(name)}, no safetensors file of its own folder: do not use it" for name in outside
        ]
        raise ConfigError(join_problems(lines))
    return files


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of one safetensors file by its name."""
    try:
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {name: StoredTensor(path, name, x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    except SafetensorError as error:
        raise ConfigError(
            f"{path} is no safetensors file, was cut short or is damaged ({error}): download it again"
        ) from None
