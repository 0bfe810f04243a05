"""Plan files: YAML in fixed key order, a row a line, large tables as .npy next to it; complete, or not there."""

from __future__ import annotations

import dataclasses
import io
import sys
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import numpy as np
import numpy.typing as npt

from trimtab.address import is_below
from trimtab.errors import PlanError, join_problems, refuse_type
from trimtab.files import blake2b, is_there
from trimtab.plan.plan import PLAN_VERSION, Plan, TableFile
from trimtab.specs import Packing, Schedule
from trimtab.typed_json import ReadNumber, parse_yaml, read_typed

if TYPE_CHECKING:
    from _typeshed import DataclassInstance


_MAX_BYTES = 16 * 2**20
_MAX_INLINE_KEYS = 7

# -- writing --------------------------------------------------------------------------------------------------------


def array_bytes(array: npt.NDArray[Any]) -> bytes:
    """Return one table as the content of a .npy file; the same array gives the same bytes."""
    buffer = io.BytesIO()
    np.save(buffer, np.ascontiguousarray(array), allow_pickle=False)
    return buffer.getvalue()


def pack_contents(packing: Packing, schedule: Schedule) -> dict[str, bytes]:
    """Return file name -> content of the three tables."""
    return {
        "offsets.npy": array_bytes(packing.offsets.astype(np.int64)),
        "indices.npy": array_bytes(packing.indices.astype(np.int64)),
        "schedule.npy": array_bytes(schedule.table.astype(np.int64)),
    }


def name_table(name: str, content: bytes) -> TableFile:
    """Return what the plan says of a table that lies next to it."""
    return TableFile(file=name, blake2b=blake2b(content))


def load_array(folder: Path, table: TableFile) -> npt.NDArray[Any]:
    """Read a .npy table that a plan names; see `read_table`."""
    return read_npy(io.BytesIO(read_table(folder, table)), folder / table.file)


def read_npy(source: Path | io.BytesIO, path: Path, *, mmap_mode: Literal["r"] | None = None) -> npt.NDArray[Any]:
    """Return an array without Python objects; `path` names it in the error."""
    try:
        array: npt.NDArray[Any] = np.load(source, mmap_mode=mmap_mode, allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise PlanError(f"the table {path} is no .npy array ({error}): run `trimtab plan` again") from error
    return array


def read_table(folder: Path, table: TableFile) -> bytes:
    """The content of a table; its hash must be the plan's."""
    path = table_path(folder, table.file)
    content = path.read_bytes()
    if blake2b(content) != table.blake2b:
        raise PlanError(f"the plan's table {path} is not the one the plan was made with: run `trimtab plan` again")
    return content


def table_path(folder: Path, name: str) -> Path:
    """Return a table's place, in the plan's own folder and nowhere else."""
    path = folder / name
    if Path(name).name != name:
        raise PlanError(f"table {name!r} lies outside the plan's folder: keep it there")
    if not is_there(path):
        raise PlanError(f"the table {path} is missing: give the folder that `trimtab plan` or `pack --out` wrote")
    if path.is_symlink() and not is_below(path, folder):
        raise PlanError(f"table {path} is a link that leads out of the plan's folder: put the file there")
    return path


def plan_to_yaml(plan: Plan) -> str:
    """The plan as text; the same plan gives the same bytes on every machine."""
    return record_to_yaml(plan)


def record_to_yaml(record: DataclassInstance) -> str:
    """Return a plan, or another record of the same kind of file, a key of the text for each field."""
    import yaml

    class Dumper(yaml.SafeDumper):
        def ignore_aliases(self, _data: Any) -> bool:
            return True

        def increase_indent(self, flow: bool = False, indentless: bool = False) -> None:  # noqa: ARG002
            super().increase_indent(flow, indentless=False)  # list entries stand to the right of their key

    tag = "tag:yaml.org,2002:"
    Dumper.add_representer(_Row, lambda own, row: own.represent_mapping(f"{tag}map", row.items(), flow_style=True))
    Dumper.add_representer(_Line, lambda own, line: own.represent_sequence(f"{tag}seq", line, flow_style=True))
    Dumper.add_representer(_Quoted, lambda own, text: own.represent_scalar(f"{tag}str", str(text), style='"'))
    Dumper.add_representer(_Prose, lambda own, text: own.represent_scalar(f"{tag}str", str(text), style=">"))
    written = ""
    for field in dataclasses.fields(record):
        value, width = getattr(record, field.name), 1_000_000  # a row is a line, however long
        if field.name == "summary":
            value, width = _Prose(value), 100
        content = {field.name: _plain(value, name=field.name)}
        written += yaml.dump(content, Dumper=Dumper, sort_keys=False, width=width, allow_unicode=True)
    return written


class _Row(dict[str, Any]):
    """A mapping on one line."""


class _Line(list[Any]):
    """A list on one line."""


class _Quoted(str):
    """A string that another YAML reader might take for a number."""

    __slots__ = ()


class _Prose(str):
    """Sentences, folded over lines."""

    __slots__ = ()


def _plain(value: Any, *, name: str, in_list: bool = False) -> Any:
    """Return dataclasses as mappings in field order; a list's entries and short mappings take one line each.

    A field that has a default and holds it is left out: it came after the first plans.
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        entries = {
            f.name: _plain(getattr(value, f.name), name=f.name)
            for f in dataclasses.fields(value)
            if f.default is dataclasses.MISSING or getattr(value, f.name) != f.default
        }
        flat = not any(isinstance(v, dict | list) for v in entries.values())
        return _Row(entries) if in_list or (flat and len(entries) <= _MAX_INLINE_KEYS) else entries
    if isinstance(value, tuple):
        of_words = all(isinstance(v, str) and " " not in v for v in value)
        return (_Line if of_words else list)(_plain(v, name=name, in_list=True) for v in value)
    if name.endswith(("blake2b", "version")):
        return _Quoted(value)
    return value


# -- reading --------------------------------------------------------------------------------------------------------


def read_file(path: Path | str, what: str, *, wrote: str) -> tuple[str, str]:
    """Read path and text of a file of this kind ("plan"), or of `plan.yaml` in a folder; `wrote` is its command."""
    refuse_type(what, path, Path | str, f"the path of a {what}.yaml")
    path = Path(path)
    path = path / f"{what}.yaml" if path.is_dir() else path
    if not path.is_file():
        raise PlanError(f"there is no {what} at {path}: give a {what}.yaml, or the folder that `{wrote}` wrote")
    if path.stat().st_size > _MAX_BYTES:
        raise PlanError(f"{path} has {path.stat().st_size} bytes, more than any {what}: give a {what}.yaml")
    try:
        return str(path), path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is not text: give a {what}.yaml") from error


def load_plan(path: Path | str) -> Plan:
    """The plan in a file, or in the `plan.yaml` of a folder; all problems of the file are named at once.

    Use it to read the decisions of a plan in your own code; `write_plan` has an example. Raises `PlanError`.
    """
    origin, text = read_file(path, "plan", wrote="trimtab plan")
    return plan_from_yaml(text, origin=origin)


def open_plan(path: Path | str) -> tuple[Plan, Path]:
    """The plan of `load_plan`, and the folder that it and its tables lie in."""
    return load_plan(path), plan_folder(Path(path))


def plan_folder(path: Path) -> Path:
    """The folder of a plan that is named by it, or by its file."""
    return path if path.is_dir() else path.parent


def unknown_keys(path: Path | str) -> list[str]:
    """List places of keys that nothing reads: `load_plan` warns of them, `check_plan` takes them for mistakes."""
    origin, text = read_file(path, "plan", wrote="trimtab plan")
    unknown: list[str] = []
    plan_from_yaml(text, origin=origin, unknown=unknown)
    return unknown


def plan_from_yaml(text: str, *, origin: str = "the plan", unknown: list[str] | None = None) -> Plan:
    """Parse and validate a plan; an unknown major version or wrong type is an error.

    An unknown key is a warning, or goes to `unknown`.
    """
    version = ("plan_version", PLAN_VERSION)
    plan = record_from_yaml(
        text, Plan, origin=origin, version=version, verb="plan", read_number=_read_number, unknown=unknown
    )
    for place, rows in (("decisions.stages", plan.decisions.stages), ("estimates.variants", plan.estimates.variants)):
        if not rows:
            raise PlanError(f"{origin}: {place} is empty: make the plan again")
    return plan


_CHECKED_ELSEWHERE = ("seed", "num_skipped", "weight")
_ABOVE_ZERO = (
    *("dp", "pp", "tp", "cp", "ep", "etp", "num_microbatches", "num_chunks", "num_steps", "num_nodes"),
    *("devices_per_node", "node_link_bytes_per_s", "memory_bytes", "degree", "pooling", "memory_error", "step_ms"),
    "epoch_s",
)


def _read_number(place: str, kind: Any, value: float, problems: list[str]) -> float:
    """Read a number of a plan: it is finite and not negative, and not 0 where others are divided by it."""
    name = place.rpartition(".")[2]
    if name not in _CHECKED_ELSEWHERE and not 0 <= value <= sys.float_info.max:
        problems.append(f"{place} is {str(value)[:40]}, not a finite number of 0 or more")
        return value
    if value == 0 and name in _ABOVE_ZERO:
        problems.append(f"{place} is 0, and a plan has 1 or more: make the plan again")
    return value if kind is int else float(value)


_Record = TypeVar("_Record")


def record_from_yaml(
    text: str,
    kind: type[_Record],
    *,
    origin: str,
    version: tuple[str, str],
    verb: str,
    read_number: ReadNumber = lambda _place, kind, value, _problems: kind(value),
    unknown: list[str] | None = None,
) -> _Record:
    """Read what `record_to_yaml` wrote of `kind`; `version`: its key and our own value, `verb` the one that writes it.

    The file is called a `verb` in messages too.
    """
    try:
        content = parse_yaml(text)
    except ValueError as error:
        raise PlanError(f"{origin} is not YAML ({error}): give a {verb} that `trimtab {verb}` wrote") from None
    if not isinstance(content, dict):
        raise PlanError(f"{origin} holds no mapping at its top: give a {verb} that `trimtab {verb}` wrote")
    key_name, ours = version
    written = content.get(key_name)
    if not isinstance(written, str):
        raise PlanError(f"{origin} has no {key_name} in quotes: give a {verb} that `trimtab {verb}` wrote")
    if written.split(".")[0] != ours.split(".")[0]:
        raise PlanError(f"{origin} has {key_name} {written}, this trimtab reads {ours}: make the {verb} again")
    problems, strange = list[str](), list[str]()
    record = read_typed(kind, content, "", problems, read_number=read_number, unknown=strange)
    if problems:
        raise PlanError(join_problems([f"{origin}: {problem}" for problem in problems]))
    if unknown is not None:
        unknown += strange
    else:
        for key in strange:
            warnings.warn(f"{origin}: key {key} is unknown and ignored", stacklevel=2)
    assert isinstance(record, kind)
    return record
