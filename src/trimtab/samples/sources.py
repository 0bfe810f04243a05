"""What a user names as data - files, folders, addresses, lists of data sets - as files of records.

`_FOLDERS` lists the kinds of folders and how each is recognised; formats of files are in `records.FORMATS`.
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trimtab.address import Address, Allowed, is_below, place_inside, place_of
from trimtab.errors import SampleError, join_problems, refuse_type, shorten
from trimtab.files import read_small
from trimtab.samples.problems import BadRecordError, parse_record
from trimtab.samples.records import format_of_name
from trimtab.samples.shapes import CONVERSATION_KEYS, INFO, Columns, columns_next_to, is_info, listed_sets
from trimtab.samples.table import is_saved_table, source_names_of
from trimtab.typed_json import parse_json, read_typed

# -- InternVL's meta file ----------------------------------------------------------------------------------------------

# One JSON object of data sets. As `build_datasets` of internvl_chat_finetune.py reads it: a repeat_time below 1 takes
# the first lines of the file, one above 1 is a whole number of times.


_MAX_BYTES = 64 << 20  # a file of records is larger, a list of data sets is not
_MAX_REPEAT = 10_000


@dataclass(frozen=True, slots=True, kw_only=True)
class SourceFile:
    """One file of records, and what was said of it."""

    file: Path
    named: Path  # what the user named: the file, or what led to it
    name: str | None = None  # of its source; None: called after what was named
    media_root: Path | None = None  # that was stated for it; None: the user's one folder, or the file's own
    repeat: float = 1.0  # how often its samples are in an epoch; below 1: so much of its beginning
    max_tiles: int | None = None  # of an image, as a list of data sets says
    columns: Columns = ()  # of its records, as a list of data sets says
    note: str | None = None  # what of the named place is not read


@dataclass(frozen=True, slots=True, kw_only=True)
class _MetaEntry:
    """A data set as a meta file says it."""

    annotation: str
    root: str | None = None
    repeat_time: float = 1.0
    max_dynamic_patch: int | None = None
    data_augment: bool = False
    length: int = 0


def read_meta(path: Path, folders: Sequence[Path] = (), allowed: Allowed | None = None) -> list[SourceFile] | None:
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
                f"{path}, as InternVL's meta file, is no JSON ({shorten(str(error))}): correct it"
            ) from None
        return None
    if not _is_meta(sets):
        return None
    problems: list[str] = []
    places = partial(place_inside, folders=[path.parent, *folders], said_by=str(path), allowed=allowed or Allowed())
    found = [_read_set(path, str(name), entry, places, problems) for name, entry in sets.items()]
    if problems:
        raise SampleError(join_problems([f"{path}: {problem}" for problem in problems]))
    used = [one for one in found if one is not None and one.repeat > 0]
    if not used:
        raise SampleError(f"{path}: repeat_time is 0 for every data set: give one a number above 0")
    return used


def _is_meta(sets: Any) -> bool:
    if not isinstance(sets, dict) or any(isinstance(sets.get(key), list) for key in CONVERSATION_KEYS):
        return False
    entries = [entry for entry in sets.values() if isinstance(entry, dict)]
    return any("annotation" in entry or {"root", "repeat_time"} <= entry.keys() for entry in entries)


def _is_line(content: bytes) -> bool:
    """Return whether the first line is a JSON value by itself, as in JSON Lines."""
    try:
        parse_json(content.partition(b"\n")[0])
    except ValueError:
        return False
    return True


def _read_set(
    meta: Path, name: str, entry: Any, place: Callable[[str], Path], problems: list[str]
) -> SourceFile | None:
    """Return one data set; None where something is wrong, which goes to `problems`."""
    wrong: list[str] = []
    found: _MetaEntry | None = read_typed(_MetaEntry, entry, "", wrong, read_number=_read_number, unknown=[])
    if found is not None and not found.annotation:
        wrong.append("annotation: expected the path of a file of records")
    if found is not None and not wrong:
        try:
            places = place(found.annotation), place(found.root) if found.root else None
        except SampleError as error:
            wrong.append(str(error))
    problems += [f"data set {shorten(name)!r}: {problem}" for problem in wrong]
    if found is None or wrong:
        return None
    how: dict[str, Any] = {"repeat": found.repeat_time, "max_tiles": found.max_dynamic_patch}
    return SourceFile(file=places[0], named=meta, name=name, media_root=places[1], **how)


def _read_number(place: str, kind: Any, value: float, problems: list[str]) -> float:
    is_repeat = place == "repeat_time"
    most, least = (_MAX_REPEAT, 0) if is_repeat else (2**62, int(place == "max_dynamic_patch"))
    if not least <= value <= most or (is_repeat and value > 1 and value != int(value)):
        problems.append(f"{place} is {value}: give a number from {least} to {most}, above 1 a whole one")
    return float(value) if kind is float else value


_OTHER_SPLIT = re.compile(r"(^|[-._])(test(ing)?|eval(uation)?|val(id(ation)?)?|dev)([-._0-9]|$)", re.IGNORECASE)
_MAX_DEPTH = 4  # folders in folders
_NO_DATA = ("dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "config.json")


def find_sources(
    data: Path | str | Sequence[Path | str], media_root: Path | str | None = None, allowed: Allowed | None = None
) -> list[SourceFile]:
    """Return the files of records behind what the user named, in its order; `SampleError` where there are none.

    What a list of data sets names lies below its folder or `media_root`, or is `allowed`.
    """
    named = list(data) if isinstance(data, Sequence) and not isinstance(data, str) else [data]
    if not named:
        raise SampleError("no data file was named: name at least one")
    for one in named:
        refuse_type("data", one, Path | str, "the path of a data file")
    roots = [] if media_root is None else [place_of(media_root)]
    return [source for one in named for source in _sources_of(one, roots, allowed or Allowed())]


def source_labels(sources: Sequence[SourceFile]) -> list[str]:
    """The name of the source that each file belongs to."""
    places = list(dict.fromkeys(source.named for source in sources if source.name is None))
    names = dict(zip(places, source_names_of(places), strict=True)) if places else {}
    return [names[source.named] if source.name is None else source.name for source in sources]


# -- files and folders ------------------------------------------------------------------------------------------------


def _sources_of(
    name: Path | str, roots: Sequence[Path], allowed: Allowed, *, listed_in: Path | None = None
) -> Iterator[SourceFile]:
    place = place_of(name)
    if is_saved_table(place) or (isinstance(place, Address) and format_of_name(place) not in (None, "json")):
        yield SourceFile(file=place, named=place)
    elif place.name == INFO and is_info(place):
        yield from _in_info(place, roots, allowed)
    elif place.is_dir():
        named = place if place.stem.strip(".") else place.resolve()
        yield from _in_folder(place, named, 0, allowed)
    elif place.name.endswith(".json") and (listed := read_meta(place, roots, allowed)) is not None:
        if listed_in is not None:
            raise SampleError(f"{listed_in}: annotation {place} is a list of data sets itself: name files of records")
        for entry in listed:
            for source in _sources_of(entry.file, roots, allowed, listed_in=place):
                yield replace(entry, file=source.file, columns=source.columns, note=source.note)
    else:
        yield SourceFile(file=place, named=place, columns=columns_next_to(place))


def _in_info(info: Path, roots: Sequence[Path], allowed: Allowed) -> Iterator[SourceFile]:
    """The data sets of LLaMA-Factory's list whose files are here; its images lie below its folder."""
    for listed in listed_sets(info):
        file = place_inside(listed.file, [info.parent, *roots], str(info), allowed)
        root = None if roots or file.parent == info.parent else info.parent
        for source in _sources_of(file, roots, allowed):
            yield replace(
                source, named=info, name=listed.name, media_root=root, columns=listed.columns, note=listed.note
            )


def _in_folder(folder: Path, named: Path, depth: int, allowed: Allowed) -> Iterator[SourceFile]:
    """The files of a folder of any kind; of splits, all but those for tests. No link leads out, unless allowed."""
    entries = {entry.name: entry for entry in folder.iterdir() if not entry.name.startswith(".")}
    links = [] if isinstance(folder, Address) or allowed.outside else [x for x in entries.values() if x.is_symlink()]
    if out := [link for link in links if not is_below(link, folder)]:
        raise SampleError(
            f"{out[0]} leads out of its folder: name what it leads to, or --allow-outside for a file you trust"
        )
    kind = next((read for marker, read in _FOLDERS.items() if marker in entries), None)
    found = None if kind is None else kind(folder, named, entries[next(m for m in _FOLDERS if m in entries)])
    if found is not None:
        yield from found
        return
    files = sorted(name for name in entries if name not in _NO_DATA and format_of_name(entries[name]) is not None)
    files = [name for name in files if not entries[name].is_dir()]  # a link to nowhere is named when it is read
    if files:
        kinds = sorted({str(format_of_name(entries[name])) for name in files})
        if len(kinds) > 1:
            raise SampleError(f"{folder} holds files of several formats ({', '.join(kinds)}): name the files to read")
        kept, note = _without_other_splits(files, folder)
        yield from (SourceFile(file=entries[name], named=named, note=note) for name in kept)
        return
    inner = sorted(name for name, entry in entries.items() if not name.startswith("_") and entry.is_dir())
    kept, note = _without_other_splits(inner, folder)
    if not kept or depth == _MAX_DEPTH:
        raise SampleError(f"{folder} holds no data: name .jsonl, .json, .parquet, .arrow, .tar or saved `datasets`")
    for name in kept:  # one folder in it is the same data; of several each is a source
        found_in = _in_folder(entries[name], named if len(kept) == 1 else named / name, depth + 1, allowed)
        yield from (replace(source, note=source.note or note) for source in found_in)


def _without_other_splits(names: Sequence[str], folder: Path) -> tuple[list[str], str | None]:
    kept = [name for name in names if not _OTHER_SPLIT.search(name)]
    left = [name for name in names if name not in kept]
    if not kept or not left:
        return list(names), None
    return kept, f"of {folder} the other splits are not read ({shorten(', '.join(left))})"


def _read_object(path: Path) -> Mapping[str, Any]:
    try:
        content = parse_record(read_small(path))
    except BadRecordError as error:
        raise SampleError(f"{path} is {error}") from None
    if not isinstance(content, dict):
        raise SampleError(f"{path} is a JSON {type(content).__name__}: it must be an object; save the data again")
    return content


def _beside(folder: Path, name: object, field: str, index: Path) -> Path:
    """Return a file that an index names: it lies in the index's folder."""
    if not isinstance(name, str) or name in ("", ".", "..") or "/" in name or "\\" in name:
        raise SampleError(f"{index}: {field} {shorten(repr(name))} is no file in this folder: save the data again")
    if not (folder / name).is_file():
        raise SampleError(f"{index}: {field} names {shorten(name)}, which is not in the folder: fetch the data again")
    return folder / name


def _dataset_dict(folder: Path, named: Path, index: Path) -> list[SourceFile]:
    """Return a `DatasetDict`: a folder for each split."""
    splits = _read_object(index).get("splits")
    named_well = isinstance(splits, list) and all(isinstance(x, str) and re.fullmatch(r"\w[\w.-]*", x) for x in splits)
    if not splits or not isinstance(splits, list) or not named_well:
        raise SampleError(f"{index}: splits is {shorten(repr(splits))}: it must list the names of the splits' folders")
    kept, note = _without_other_splits(splits, folder)
    sources = []
    for split in kept:
        state = folder / split / "state.json"
        if not state.is_file():
            raise SampleError(f"{index}: splits names {split}, and {state} is not there: save the data again")
        sources += _saved_dataset(folder / split, named, state) or []
    return [replace(source, note=note) for source in sources]


def _saved_dataset(folder: Path, named: Path, index: Path) -> list[SourceFile] | None:
    """Return a `Dataset`: state.json lists its Arrow files."""
    state = _read_object(index)
    if "_data_files" not in state:
        return None
    files = state["_data_files"]
    if not isinstance(files, list) or not files or not all(isinstance(file, dict) for file in files):
        raise SampleError(f"{index}: _data_files is {shorten(repr(files))}: it must list objects with 'filename'")
    if state.get("_indices_files") or state.get("_indices_data_files"):
        raise SampleError(f"{index}: _indices_files chooses rows of the files: save it again after flatten_indices()")
    return [
        SourceFile(file=_beside(folder, file.get("filename"), "_data_files.filename", index), named=named)
        for file in files
    ]


_FOLDERS: Mapping[str, Callable[[Path, Path, Path], list[SourceFile] | None]] = MappingProxyType(
    {"dataset_dict.json": _dataset_dict, "state.json": _saved_dataset}
)
"""File or folder that tells the kind -> how its files are found; None: it is of another kind after all."""
