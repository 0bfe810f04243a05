"""LLaMA-Factory's list of data sets, `dataset_info.json`: their files, and what their columns mean."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from trimtab.address import Address
from trimtab.errors import SampleError
from trimtab.files import read_small
from trimtab.samples.problems import shorten
from trimtab.samples.shapes import Columns
from trimtab.typed_json import parse_json

INFO = "dataset_info.json"
_ALPACA = {"prompt": "question", "query": "input", "response": "answer", "history": "history"}
_COMMON = {name: name for name in ("system", "tools", "images", "videos", "chosen", "rejected")}
_TAGS = {
    "role_tag": "role",
    "content_tag": "content",
    "user_tag": "user",
    "assistant_tag": "assistant",
    "observation_tag": "observation",
    "function_tag": "function",
}
"""Its words for columns and tags, and ours; `DatasetAttr` of its data/parser.py (ff6d4d12) has the defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSet:
    """One data set whose file is here."""

    name: str
    file: str
    columns: Columns
    note: str | None  # what of the entry is not followed


def is_info(path: Path) -> bool:
    """Return whether it is LLaMA-Factory's, and not the file of that name that `datasets` writes."""
    return bool(_entries(path))


def listed_sets(path: Path) -> list[ListedSet]:
    """The data sets of the list that are files; the others are named in a note, and refused where there is none."""
    entries = _entries(path)
    away = [name for name, entry in entries.items() if not isinstance(entry.get("file_name"), str)]
    note = f"of {path} these data sets are no files, and not read: {shorten(', '.join(away))}" if away else None
    found = []
    for name, entry in entries.items():
        if name in away:
            continue
        odd = [key for key in ("num_samples", "subset", "folder") if entry.get(key) is not None]
        own = f"{path}: {', '.join(odd)} of {name} is not followed, all of the file is read" if odd else note
        found.append(ListedSet(name=name, file=entry["file_name"], columns=_columns_of(entry), note=own))
    if not found:
        raise SampleError(f"{path} names no file: every data set is elsewhere ({shorten(', '.join(away))})")
    return found


@cache
def columns_beside(file: Path) -> Columns:
    """What the columns of a data file mean by the list in its folder, or in the one above; (): by none."""
    for folder in () if isinstance(file, Address) else (file.parent, file.parent.parent):
        if is_info(folder / INFO):
            for entry in _entries(folder / INFO).values():
                if isinstance(name := entry.get("file_name"), str) and folder / name == file:
                    return _columns_of(entry)
    return ()


def _entries(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the data sets by name; none of a file that is missing, or holds something else."""
    try:
        sets = parse_json(read_small(path)) if path.is_file() else None
    except (OSError, ValueError):
        return {}
    kinds = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}
    if not isinstance(sets, dict) or not all(isinstance(x, dict) and kinds & x.keys() for x in sets.values()):
        return {}
    return sets


def _columns_of(entry: Mapping[str, Any]) -> Columns:
    """Return what an entry says; a column that it leaves out is not read, as LLaMA-Factory does."""
    is_alpaca = entry.get("formatting", "alpaca") == "alpaca"
    meanings = {**(_ALPACA if is_alpaca else {"messages": "messages"}), **_COMMON}
    given = entry.get("columns")
    if not isinstance(given, dict):
        given = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
    pairs = [(meaning, str(given.get(name) or "")) for name, meaning in meanings.items()]
    tags = {} if is_alpaca else entry.get("tags")
    return (*pairs, *_tagged(tags if isinstance(tags, dict) else {}))


def _tagged(tags: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((meaning, str(tags[name])) for name, meaning in _TAGS.items() if tags.get(name))
