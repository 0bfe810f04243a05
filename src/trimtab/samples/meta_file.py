"""InternVL's meta file: one JSON object of data sets, each with its annotation file, media root and repeats.

As `build_datasets` of internvl_chat_finetune.py reads it: a repeat_time below 1 takes the first lines of the file, one
above 1 is a whole number of times.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from trimtab.address import Allowed, place_inside
from trimtab.errors import SampleError, join_problems
from trimtab.samples.problems import shorten
from trimtab.samples.rows import CONVERSATION_KEYS
from trimtab.typed_json import parse_json

_MAX_BYTES = 64 << 20  # a file of records is larger, a list of data sets is not
_MAX_REPEAT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class MetaSource:
    """One data set of a meta file."""

    name: str
    annotation: Path
    root: Path | None
    repeat: float
    max_tiles: int | None


def read_meta(path: Path, folders: Sequence[Path] = (), allowed: Allowed | None = None) -> list[MetaSource] | None:
    """The data sets that are in an epoch; None for a file of another shape. `SampleError` names every wrong field.

    Files and roots lie below the file's own folder, or below one of `folders`, unless `allowed`.
    """
    if not path.is_file() or path.stat().st_size > _MAX_BYTES:
        return None
    content = path.read_bytes()
    if not content.removeprefix(b"\xef\xbb\xbf").lstrip().startswith(b"{"):
        return None
    try:
        sets = parse_json(content)
    except ValueError as error:
        if b'"annotation"' in content and b'"root"' in content and not _is_line(content):
            raise SampleError(
                f"{path} looks like a list of data sets (InternVL's meta file) and is not JSON "
                f"({shorten(str(error))}): correct it"
            ) from None
        return None
    if not _is_meta(sets):
        return None
    problems: list[str] = []
    places = partial(place_inside, folders=[path.parent, *folders], said_by=str(path), allowed=allowed or Allowed())
    found = [_read_set(str(name), entry, places, problems) for name, entry in sets.items()]
    if problems:
        raise SampleError(join_problems([f"{path}: {problem}" for problem in problems]))
    used = [one for one in found if one is not None and one.repeat > 0]
    if not used:
        raise SampleError(
            f"{path}: repeat_time is 0 for every data set, which leaves nothing: give one a number above 0"
        )
    return used


def _is_meta(sets: Any) -> bool:
    if not isinstance(sets, dict) or any(isinstance(sets.get(key), list) for key in CONVERSATION_KEYS):
        return False
    entries = [entry for entry in sets.values() if isinstance(entry, dict)]
    return any("annotation" in entry or {"root", "repeat_time"} <= entry.keys() for entry in entries)


def _is_line(content: bytes) -> bool:
    """Whether the first line is a JSON value by itself, as in JSON Lines."""
    try:
        parse_json(content.partition(b"\n")[0])
    except ValueError:
        return False
    return True


def _read_set(name: str, entry: Any, place: Callable[[str], Path], problems: list[str]) -> MetaSource | None:
    """One data set; None where something is wrong, which goes to `problems`."""
    before = len(problems)

    def wrong(field: str, value: Any, wanted: str) -> None:
        problems.append(f"data set {shorten(name)!r}: {field} is {shorten(repr(value), 40)}: it must be {wanted}")

    if not isinstance(entry, Mapping):
        wrong("its entry", entry, "an object with 'annotation'")
        return None
    annotation, root = entry.get("annotation"), entry.get("root")
    repeat, max_tiles = entry.get("repeat_time", 1), entry.get("max_dynamic_patch")
    if not isinstance(annotation, str) or not annotation:
        wrong("annotation", annotation, "the path of a file of records")
    if root is not None and not isinstance(root, str):
        wrong("root", root, "the path of a folder")
    is_number = isinstance(repeat, int | float) and not isinstance(repeat, bool) and math.isfinite(repeat)
    if not is_number or not 0 <= repeat <= _MAX_REPEAT or (repeat > 1 and repeat != int(repeat)):
        wrong("repeat_time", repeat, f"a part from 0 to 1, or a whole number of times up to {_MAX_REPEAT}")
    if max_tiles is not None and (not isinstance(max_tiles, int) or isinstance(max_tiles, bool) or max_tiles < 1):
        wrong("max_dynamic_patch", max_tiles, "a whole number above 0")
    if not isinstance(entry.get("data_augment", False), bool):
        wrong("data_augment", entry["data_augment"], "true or false")
    length = entry.get("length", 0)
    if not isinstance(length, int) or isinstance(length, bool) or length < 0:
        wrong("length", length, "a whole number of samples")
    if len(problems) > before:
        return None
    try:
        places = place(str(annotation)), place(root) if root else None
    except SampleError as error:
        problems.append(f"data set {shorten(name)!r}: {error}")
        return None
    return MetaSource(name=name, annotation=places[0], root=places[1], repeat=float(repeat), max_tiles=max_tiles)
