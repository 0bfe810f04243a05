"""Named arrays and strings as the bytes of an .npz: no pickle, nothing compressed, equal input to equal bytes."""

from __future__ import annotations

import io
import json
import math
import zipfile
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Arrays = dict[str, npt.NDArray[Any]]


def pack_arrays(arrays: Mapping[str, npt.NDArray[Any]], meta: Mapping[str, Any]) -> bytes:
    """An .npz with its metadata as JSON; equal input gives equal bytes."""
    assert not any(array.dtype.hasobject for array in arrays.values()), "it would be pickled"
    buffer = io.BytesIO()
    text = json.dumps(meta, sort_keys=True).encode()
    # without `allow_pickle`, which NumPy before 2.2 writes as an array of that name
    np.savez(buffer, meta=np.frombuffer(text, np.uint8), **arrays)  # type: ignore[arg-type]  # its types know 2.2
    return buffer.getvalue()


def unpack_arrays(content: bytes) -> tuple[Arrays, dict[str, Any]]:
    """What `pack_arrays` wrote; raises ValueError, KeyError or BadZipFile on anything else."""
    _refuse_inflated(content)
    with np.load(io.BytesIO(content), allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    meta = json.loads(arrays.pop("meta").tobytes())
    if not isinstance(meta, dict):
        raise ValueError("its metadata is no object")
    return arrays, meta


def _refuse_inflated(content: bytes) -> None:
    """`ValueError` for arrays that would take more memory than the file has bytes; before they take any.

    We compress nothing, so both words on an array's size, the archive's and the array's own, are below the file's size.
    """
    advice = "and a table is not compressed"
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        packed = [entry.file_size for entry in archive.infolist() if entry.compress_type != zipfile.ZIP_STORED]
        if packed:
            raise ValueError(f"its {len(content)} bytes hold compressed arrays of {sum(packed)}, {advice}")
        for entry in archive.infolist():
            with archive.open(entry) as file:
                version = np.lib.format.read_magic(file)
                read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
                shape, _, dtype = read(file)
            declared = math.prod(shape) * dtype.itemsize
            if declared > len(content):
                raise ValueError(f"its {len(content)} bytes declare an array of {declared}, {advice}")


def pack_strings(name: str, strings: Sequence[str]) -> Arrays:
    """Strings as one block of UTF-8 and their ends: no pickle, no padding to the longest."""
    encoded = [text.encode() for text in strings]
    ends = np.cumsum([len(text) for text in encoded], dtype=np.int64)
    return {f"{name}_utf8": np.frombuffer(b"".join(encoded), np.uint8), f"{name}_ends": ends}


def unpack_strings(name: str, arrays: Mapping[str, npt.NDArray[Any]]) -> list[str]:
    block, ends = arrays[f"{name}_utf8"].tobytes(), arrays[f"{name}_ends"].tolist()
    return [block[start:end].decode() for start, end in zip([0, *ends[:-1]], ends, strict=bool(ends))]
