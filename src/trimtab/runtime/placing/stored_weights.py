"""The tensors of a model folder's safetensors files, each mapped into memory on its own and only when asked for.

A tensor that was copied to a GPU is unmapped at once, so host memory holds what is on its way and no shard twice; one
that stays mapped costs no memory before it is read, and none that the system could not take back. Nothing is unpickled.
"""

from __future__ import annotations

import json
import math
import mmap
import weakref
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import EllipsisType, MappingProxyType
from typing import Any

import torch

from trimtab.errors import ConfigError, join_problems
from trimtab.models.quote import quote

DTYPES = MappingProxyType(
    {
        "F64": torch.float64,
        "F32": torch.float32,
        "F16": torch.float16,
        "BF16": torch.bfloat16,
        "F8_E4M3": torch.float8_e4m3fn,
        "F8_E5M2": torch.float8_e5m2,
        "F8_E8M0": torch.float8_e8m0fnu,
        "I64": torch.int64,
        "I32": torch.int32,
        "I16": torch.int16,
        "I8": torch.int8,
        "U64": torch.uint64,
        "U32": torch.uint32,
        "U16": torch.uint16,
        "U8": torch.uint8,
        "BOOL": torch.bool,
    }
)
MAX_HEADER_BYTES = 100_000_000  # the format's own limit
_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies, and how to have it."""

    file: Path
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset: int  # of its first byte in the file
    num_bytes: int

    def map(self) -> torch.Tensor:
        """The tensor, in a private mapping of its pages that lasts as long as the tensor."""
        return self._map()[0]

    def _map(self) -> tuple[torch.Tensor, mmap.mmap | None]:
        if not self.num_bytes:
            return torch.empty(self.shape, dtype=self.dtype), None
        start = self.offset - self.offset % mmap.ALLOCATIONGRANULARITY
        with self.file.open("rb") as file:
            pages = mmap.mmap(
                file.fileno(), self.offset + self.num_bytes - start, access=mmap.ACCESS_COPY, offset=start
            )
        flat = torch.frombuffer(pages, dtype=torch.uint8, count=self.num_bytes, offset=self.offset - start)
        if self.offset % self.dtype.itemsize:  # files of old writers may not be aligned
            return flat.clone().view(self.dtype).view(self.shape), None
        return flat.view(self.dtype).view(self.shape), pages


@dataclass(frozen=True, slots=True, eq=False)
class LazyTensors:
    """A state dict that reads a tensor when it is asked for, and knows later which tensors are still mapped."""

    stored: Mapping[str, StoredTensor]
    _mapped: dict[int, tuple[weakref.ref[mmap.mmap], StoredTensor]] = field(default_factory=dict)

    def state_dict(self) -> dict[str, _LazyTensor]:
        return {name: _LazyTensor(stored, self._mapped) for name, stored in self.stored.items()}

    def origin(self, tensor: torch.Tensor) -> StoredTensor | None:
        """What of the files `tensor` is a mapping of; None if it was copied, cast or converted."""
        pages, stored = self._mapped.get(tensor.data_ptr(), (None, None))
        alive = pages is not None and pages() is not None  # else the address may be another tensor's by now
        return stored if alive else None


@dataclass(frozen=True, slots=True, eq=False)
class _LazyTensor:
    """What Transformers 5 uses of a safetensors slice: `lazy[...]` reads it, and before that its dtype and shape."""

    stored: StoredTensor
    mapped: dict[int, tuple[weakref.ref[mmap.mmap], StoredTensor]]

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        tensor, pages = self.stored._map()
        if pages is not None:
            self.mapped[tensor.data_ptr()] = (weakref.ref(pages), self.stored)
        return tensor

    def get_dtype(self) -> str:
        return next(name for name, dtype in DTYPES.items() if dtype == self.stored.dtype)

    def get_shape(self) -> list[int]:
        return list(self.stored.shape)


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
        written: Any = json.loads(index.read_text(encoding="utf-8"))
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
    """Every tensor of one safetensors file by its name: 8 bytes of length, a JSON header, then the values."""
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or not 0 < length <= min(MAX_HEADER_BYTES, size - 8):
            raise ConfigError(f"{path} is no safetensors file or was cut short: download it again")
        try:
            header: Any = json.loads(file.read(length))
        except ValueError:
            raise ConfigError(f"{path} has a header that is not JSON: download it again") from None
    if not isinstance(header, dict):
        raise ConfigError(f"{path} has a header that is no mapping: download it again")
    header.pop("__metadata__", None)
    return {name: _stored(path, name, entry, start=8 + length, size=size) for name, entry in header.items()}


def _stored(path: Path, name: str, entry: Any, *, start: int, size: int) -> StoredTensor:
    dtype_name = entry.get("dtype") if isinstance(entry, Mapping) else None
    dtype = DTYPES.get(dtype_name) if isinstance(dtype_name, str) else None
    if dtype is None:
        raise ConfigError(f"{path} holds {quote(name)} as {quote(dtype_name)}: save it as one of {', '.join(DTYPES)}")
    shape, offsets = entry.get("shape"), entry.get("data_offsets")
    if not _is_counts(shape) or not _is_counts(offsets) or len(offsets) != 2:
        raise ConfigError(f"{path} does not say where {quote(name)} lies: download it again")
    begin, end = offsets
    if end - begin != math.prod(shape) * dtype.itemsize or start + end > size:
        raise ConfigError(f"{path} was cut short or is damaged at {quote(name)}: download it again")
    return StoredTensor(path, name, dtype, tuple(shape), start + begin, end - begin)


def _is_counts(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(x, int) and not isinstance(x, bool) and x >= 0 for x in value)
