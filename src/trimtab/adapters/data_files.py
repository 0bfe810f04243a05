"""A plan as data files, for hosts that need no code of ours: records in order, packs as lists, packs as arrays.

The order of packs is the schedule's, row by row: step 0 micro-batch 0 of ranks 0, 1, ..., then micro-batch 1 of them,
and so on. A loader that deals line i to rank i mod dp, as PyTorch's DistributedSampler without shuffling and
Accelerate with one line a batch do, then gives every rank its own packs in the order of the plan.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
import numpy.typing as npt

from trimtab.address import Allowed
from trimtab.errors import PlanError, SampleError
from trimtab.files import fingerprint_file, open_atomically, open_passing, write_atomically, written_together
from trimtab.plan.file.reload import find_data_files, load_packs, read_samples, refuse_no_records
from trimtab.plan.file.yaml import array_bytes, open_plan, pack_contents
from trimtab.plan.plan import Plan
from trimtab.samples.problems import BadRecordError, shorten
from trimtab.samples.records import (
    Lines,
    detect_format,
    places_of,
    read_records,
    refuse_other_files,
    row_starts,
    rows_of,
)
from trimtab.samples.rows import record_id
from trimtab.samples.sources import MediaRoot, SourceFile, find_sources
from trimtab.specs import IntArray, Packing, SampleTable, Schedule

# -- the records of a data set, found again ---------------------------------------------------------------------------
# JSON Lines are read in place. A JSON list or a Parquet file is first written out as JSON Lines, into a file that goes
# when the work is done; a list is held in memory for that, as in sizing. Else memory is the names and positions of the
# samples, and no record is held.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Records:
    """The record of each row of a sample table, as JSON."""

    _file: IntArray
    _start: IntArray  # byte at which the record's line begins
    _lines: tuple[Lines | None, ...]  # None: no record in the file

    def read(self, row: int) -> bytes:
        """The record as JSON on one line, without the line's end."""
        lines = self._lines[int(self._file[row])]
        assert lines is not None, "the row's file is empty"
        return lines.read(int(self._start[row]))


def find_records(files: Sequence[Path], samples: SampleTable) -> IntArray:
    """Of each row the number of its record in its file, from 0, blank lines aside; files of any format that is sized.

    Rows are found by file and line, and their ids compared. Exact or refused: raises `SampleError` where a record is
    missing or has another id than the sample.
    """
    refuse_other_files(samples, files)
    places, named = places_of(samples), ", ".join(map(str, files))
    numbers, num_read, num_broken = np.full(len(samples), -1, np.int64), 0, 0
    for index, path in enumerate(files):
        rows = np.flatnonzero(places.file == index)
        rows = rows[np.argsort(places.line[rows], kind="stable")]
        lines, at = places.line[rows].tolist(), 0
        for number, (line, own) in enumerate(_ids_in(path)):
            num_read += 1
            num_broken += own is None
            while at < len(lines) and lines[at] == line:  # one row, or as many as the record is repeated
                if own is not None and _is_sample(samples, int(rows[at]), own):
                    numbers[rows[at]] = number
                at += 1
    if samples.ids is None and (num_read != len(samples) or num_broken):
        raise SampleError(
            f"the plan holds {len(samples)} samples without ids, hence all of its data, and {named} "
            f"{'hold' if len(files) > 1 else 'holds'} {num_read} records"
            f"{f', {num_broken} of them broken' if num_broken else ''}: name the files that were planned, in order"
        )
    wrong = np.flatnonzero(numbers < 0)
    if len(wrong):
        raise SampleError(
            f"{len(wrong)} of the plan's {len(samples)} samples, such as {shorten(samples.sample_id(int(wrong[0])))}, "
            f"are not on the lines of {named} where they were sized (line {places.line[wrong[0]]}): name the files "
            "that were planned, in their order, or plan again"
        )
    return numbers


@contextmanager
def open_records(files: Sequence[Path], samples: SampleTable, *, folder: Path) -> Iterator[Records]:
    """The samples' records as JSON; found and refused as by `find_records`. `folder` takes the passing JSON Lines."""
    with ExitStack() as stack:
        sources: list[Path] = []
        for path in files:
            kind, source = detect_format(path), path
            if kind == "tar":
                raise SampleError(
                    f"{path} is a tar shard, whose images lie beside the record and go into no JSON: export npy, and "
                    "read the records in your own loader"
                )
            if kind != "jsonl":
                spill = stack.enter_context(open_passing(folder, ".jsonl"))
                _spill(path, spill)
                spill.flush()
                source = Path(spill.name)
            sources.append(source)
        find_records(sources, samples)
        opened = tuple(
            None if source.stat().st_size == 0 else stack.enter_context(closing(Lines(source))) for source in sources
        )
        yield Records(_file=places_of(samples).file, _start=row_starts(samples, sources), _lines=opened)


# -- reading ----------------------------------------------------------------------------------------------------------


def _ids_in(path: Path) -> Iterator[tuple[int, str | None]]:
    """Line and own id of every record, blank lines aside: "" without one, None for a record that no table can hold."""
    for record in read_records(path):
        if record.blank:
            continue
        try:
            usable = record.problem is None and isinstance(record.value, dict)
            own = record_id(record.value) or record.key or "" if usable else None
        except BadRecordError:
            own = None
        yield record.line, own


def _spill(path: Path, spill: BinaryIO) -> None:
    """Every record of the file as one line."""
    for number, value in enumerate(rows_of(path)):
        try:
            text = json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
        except (TypeError, ValueError):
            name = _odd_field(value)
            raise SampleError(
                f"field {name!r} of record {number + 1} of {path} was to be written as JSON, which has no such value: "
                "keep images as files and name their paths, or export npy and read the records in your own loader"
            ) from None
        spill.write(text + b"\n")


def _odd_field(record: object) -> str:
    for name, value in record.items() if isinstance(record, Mapping) else ():
        try:
            json.dumps(value, allow_nan=False)
        except (TypeError, ValueError):
            return str(name)
    return ""


def _is_sample(samples: SampleTable, row: int, own: str) -> bool:
    """Whether sizing may have called a record of this id so: perhaps behind its file's name, perhaps numbered."""
    if samples.ids is None:
        return True
    name = samples.ids[row]
    if not own:
        return name.rpartition(":")[2].isdigit()
    stem, mark, number = name.rpartition("#")
    names = [name, stem] if mark and number.isdigit() else [name]
    return any(x == own or x.endswith("/" + own) for x in names)


Field = Literal["length", "num_tokens", "num_patches", "pack"]
FIELDS: tuple[Field, ...] = ("length", "num_tokens", "num_patches", "pack")
"""What a record can be told: tokens under two names (InternVL reads `length`, Qwen's finetuning code `num_tokens`), ViT
patches, and the number of its pack in the order of the packs."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlannedPacks:
    """The packs of a plan and the sizes of their samples."""

    plan: Plan
    folder: Path  # that the plan lies in
    samples: SampleTable
    packing: Packing
    schedule: Schedule
    order: IntArray  # packs in the order in which the ranks run them, see the module


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenData:
    """Files that were written, and what to know before using them."""

    files: tuple[Path, ...]
    num_records: int
    num_packs: int
    notes: tuple[str, ...] = ()


def read_planned(path: Path) -> PlannedPacks:
    """The packs of the plan at `path` (the file or its folder); `PlanError` unless each of them is run exactly once."""
    plan, folder = open_plan(path)
    samples = read_samples(plan, folder)
    packs = load_packs(folder, plan.decisions.packing, times=np.ones(len(samples), np.int64))
    if not plan.inputs.data.mixture and len(np.unique(packs.packing.indices)) != len(packs.packing.indices):
        raise PlanError(f"the packs in {folder} hold a sample twice, and data files say each once: plan again")
    return PlannedPacks(
        plan=plan,
        folder=folder,
        samples=samples,
        packing=packs.packing,
        schedule=packs.schedule,
        order=order_packs(packs.schedule, packs.packing.num_packs),
    )


def order_packs(schedule: Schedule, num_packs: int) -> IntArray:
    """Packs row by row: place i is run by rank i mod dp. Empty slots may only stand at the end."""
    slots = schedule.table.transpose(0, 2, 1).reshape(-1)
    used = slots >= 0
    order = slots[used]
    if not np.array_equal(np.sort(order), np.arange(num_packs)):
        raise PlanError(
            f"the schedule runs {len(order)} packs, of {num_packs} not each exactly once, and data files say each "
            "once: plan again"
        )
    if not used[: len(order)].all():
        raise PlanError(
            "the schedule has an empty slot before a pack, and packs in the order of a file leave none out: plan again"
        )
    result: IntArray = order.astype(np.int64)
    return result


def sources_of(
    planned: PlannedPacks, data: Sequence[Path] | None, media_root: MediaRoot = None, allowed: Allowed | None = None
) -> list[SourceFile]:
    """The files with the plan's records: those that the plan leads to, or `data`; `PlanError` if they have changed."""
    if data is None:
        return find_data_files(planned.plan, planned.folder, media_root=media_root, allowed=allowed)
    given = find_sources(data, media_root, allowed)
    refuse_no_records([source.file for source in given])
    # a file of another name, such as a copy with other answers, is known only by its lines and ids
    changed = [
        str(source.file)
        for source, file in zip(given, planned.plan.inputs.data.files, strict=False)
        if source.file.name == Path(file.path).name and fingerprint_file(source.file) != file.blake2b
    ]
    if changed:
        raise PlanError(f"{', '.join(changed)} changed since the plan was made: run `trimtab plan` again")
    return given


def data_of(planned: PlannedPacks, data: Sequence[Path] | None) -> list[Path]:
    """The paths of `sources_of`."""
    return [source.file for source in sources_of(planned, data)]


# -- records ----------------------------------------------------------------------------------------------------------


def write_jsonl(
    plan: Path,
    out: Path,
    *,
    data: Sequence[Path] | None = None,
    fields: Sequence[Field] = ("length", "num_tokens"),
) -> WrittenData:
    """The plan's records as JSON Lines, each with `fields` added (or overwritten); otherwise their own bytes.

    One file, pack after pack in the order of the packs.
    """
    planned = read_planned(plan)
    with (
        open_records(data_of(planned, data), planned.samples, folder=out.parent) as records,
        open_atomically(out) as file,
    ):
        for place in range(len(planned.order)):
            file.writelines(line + b"\n" for line in _lines(planned, records, place, fields))
    return _exported(planned, (out,), ragged=False)


def write_nested_packs(plan: Path, out: Path, *, data: Sequence[Path] | None = None) -> WrittenData:
    """JSON Lines of packs, each a list of records: what the Qwen-VL finetuning code reads with `data_packing`."""
    if out.suffix != ".jsonl":
        raise SampleError(
            f"{out} was to hold a list of records a line, and hosts tell JSON Lines by the name: end it in .jsonl"
        )
    planned = read_planned(plan)
    with (
        open_records(data_of(planned, data), planned.samples, folder=out.parent) as records,
        open_atomically(out) as file,
    ):
        for place in range(len(planned.order)):
            file.write(b"[" + b", ".join(_lines(planned, records, place, ("num_tokens",))) + b"]\n")
    return _exported(planned, (out,), ragged=True)


def rows_of_pack(planned: PlannedPacks, place: int) -> list[int]:
    """Rows of the sample table in the pack that is the `place`-th in order."""
    packing, pack = planned.packing, planned.order[place]
    rows: list[int] = packing.indices[packing.offsets[pack] : packing.offsets[pack + 1]].tolist()
    return rows


def _lines(planned: PlannedPacks, records: Records, place: int, fields: Sequence[Field]) -> list[bytes]:
    """The records of one pack, the fields added."""
    unknown = [name for name in fields if name not in FIELDS]
    if unknown:
        raise SampleError(f"field {unknown[0]!r} is unknown to a plan: choose of {', '.join(FIELDS)}")
    lines = []
    for row in rows_of_pack(planned, place):
        tokens, patches = int(planned.samples.num_tokens[row]), int(planned.samples.num_patches[row])
        every = {"length": tokens, "num_tokens": tokens, "num_patches": patches, "pack": place}
        lines.append(_with_fields(records.read(row), {name: every[name] for name in fields}))
    return lines


def _with_fields(record: bytes, values: dict[str, int]) -> bytes:
    """The record with the values at its end; its other bytes stay, unless it has one of the fields already."""
    if not values:
        return record
    content = json.loads(record)
    if not content.keys().isdisjoint(values):
        kept = {name: value for name, value in content.items() if name not in values}
        return json.dumps(kept | values, ensure_ascii=False).encode()
    body = record[:-1].rstrip()
    return body + (b", " if content else b"") + json.dumps(values).encode()[1:]


def _exported(planned: PlannedPacks, files: tuple[Path, ...], *, ragged: bool) -> WrittenData:
    packing, dp = planned.packing, planned.schedule.table.shape[1]
    notes = []
    short = packing.num_packs % dp
    if ragged and short:
        notes.append(
            f"the last row has {short} packs for {dp} ranks: a sampler that fills it up repeats packs, one with "
            "drop_last leaves them out"
        )
    repeated = len(packing.indices) - len(np.unique(packing.indices))
    if repeated:
        notes.append(
            f"{repeated} of the records are repeats, drawn by the plan's weights: a host must take an id several times"
        )
    missing = planned.plan.decisions.packing.num_oversize
    if missing:
        notes.append(f"{missing} samples are larger than a pack and were left out of the plan by choice")
    return WrittenData(files=files, num_records=len(packing.indices), num_packs=packing.num_packs, notes=tuple(notes))


# -- arrays -----------------------------------------------------------------------------------------------------------


def write_arrays(plan: Path, out: Path, *, data: Sequence[Path] | None = None) -> WrittenData:
    """Packs, schedule and the places of their records as .npy, for a loader of the user's own.

    Pack p holds rows `indices[offsets[p]:offsets[p + 1]]`; row i is record `record[i]` (from 0, blank lines aside) of
    `files[file[i]]` in manifest.json; `schedule[step, rank, microbatch]` is a pack or -1. manifest.json comes last.
    """
    planned = read_planned(plan)
    files = data_of(planned, data)
    samples = planned.samples
    arrays: dict[str, npt.NDArray[Any]] = {
        "file.npy": places_of(samples).file.astype(np.int32),
        "record.npy": find_records(files, samples),
        "num_tokens.npy": samples.num_tokens,
        "num_patches.npy": samples.num_patches,
        "num_images.npy": samples.num_images,
    }
    contents = pack_contents(planned.packing, planned.schedule) | {n: array_bytes(a) for n, a in arrays.items()}
    parallel = planned.plan.decisions.parallel
    manifest = {
        "files": [str(path) for path in files],
        "dp": parallel.dp,
        "max_patches": planned.packing.limits[0],
        "max_tokens": planned.packing.limits[1],
        "num_samples": len(samples),
        "num_packs": planned.packing.num_packs,
    }
    contents["manifest.json"] = (json.dumps(manifest, indent=1, ensure_ascii=False) + "\n").encode()
    with written_together():
        for name, content in contents.items():
            write_atomically(out / name, content)
    return _exported(planned, tuple(out / name for name in contents), ragged=False)
