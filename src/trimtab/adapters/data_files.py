"""A plan as data files, for hosts that need no code of ours: records in order, packs as lists, packs as shards.

The order of packs is the schedule's, row by row: step 0 micro-batch 0 of ranks 0, 1, ..., then micro-batch 1 of them,
and so on. A loader that gives line i to rank i mod dp, as PyTorch's DistributedSampler without shuffling and
Accelerate with one line a batch do, then gives every rank its own packs in the order of the plan.
Energon gives rank r the r-th of as many equal runs of its samples. So shards hold the packs of rank 0 first, then those
of rank 1, each rank's in its own order. ms-swift reads samples in the order of a file and packs them: the plug-in puts
the plan's packs in the place of its own. Read at megatron-energon 7.4.1 and ms-swift 4.6.0.
"""

from __future__ import annotations

import io
import json
import re
import tarfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.address import place_of
from trimtab.errors import PlanError, SampleError, shorten
from trimtab.files import fingerprint_file, open_atomically, open_passing, write_atomically, written_together
from trimtab.options import ReadingOptions
from trimtab.plan.file.records import PlannedRecords, find_data_files, refuse_no_records, refuse_roots
from trimtab.plan.file.reload import load_packs, read_samples
from trimtab.plan.file.yaml import open_plan
from trimtab.plan.plan import Plan
from trimtab.samples.media import MediaFolders
from trimtab.samples.problems import BadRecordError
from trimtab.samples.records import detect_format, file_numbers, rows_of
from trimtab.samples.rows import read_conversation, record_id
from trimtab.samples.shapes import columns_next_to, read_columns
from trimtab.samples.sources import SourceFile, find_sources
from trimtab.specs import IntArray, Packing, SampleTable, Schedule

# -- what is planned --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PacksInOrder:
    """The packs of a plan and the sizes of their samples."""

    plan: Plan
    folder: Path  # that the plan lies in
    samples: SampleTable
    packing: Packing
    schedule: Schedule
    order: IntArray  # packs in the order in which the ranks run them, see the module

    def rows(self, place: int) -> list[int]:
        """Return the rows of the sample table in the pack that is the `place`-th in order."""
        pack = self.order[place]
        rows: list[int] = self.packing.indices[self.packing.offsets[pack] : self.packing.offsets[pack + 1]].tolist()
        return rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WrittenData:
    """Files that were written, and what to know before using them."""

    files: tuple[Path, ...]
    num_records: int
    num_packs: int
    notes: tuple[str, ...] = ()


def read_planned(path: Path) -> PacksInOrder:
    """Return the packs of the plan at `path` (the file or its folder); `PlanError` unless each is run exactly once."""
    plan, folder = open_plan(path)
    samples = read_samples(plan, folder)
    packs = load_packs(folder, plan.decisions.packing, times=np.ones(len(samples), np.int64))
    if not plan.inputs.data.mixture and len(np.unique(packs.packing.indices)) != len(packs.packing.indices):
        raise PlanError(f"the packs in {folder} hold a sample twice: plan again")
    return PacksInOrder(
        plan=plan,
        folder=folder,
        samples=samples,
        packing=packs.packing,
        schedule=packs.schedule,
        order=order_packs(packs.schedule, packs.packing.num_packs),
    )


def order_packs(schedule: Schedule, num_packs: int) -> IntArray:
    """Return packs row by row: place i is run by rank i mod dp. Empty slots may only stand at the end."""
    slots = schedule.table.transpose(0, 2, 1).reshape(-1)
    used = slots >= 0
    order: IntArray = slots[used].astype(np.int64)
    if not np.array_equal(np.sort(order), np.arange(num_packs)):
        raise PlanError(f"the schedule runs {len(order)} packs, of {num_packs} not each exactly once: plan again")
    if not used[: len(order)].all():
        raise PlanError("the schedule has an empty slot before a pack, which no order of a file leaves out: plan again")
    return order


def sources_of(
    planned: PacksInOrder,
    data: Sequence[Path] | None,
    reading: ReadingOptions = ReadingOptions(),  # noqa: B008 - frozen
) -> list[SourceFile]:
    """Return the files with the plan's records: those that the plan leads to, or `data` unless they have changed."""
    if data is None:
        return find_data_files(planned.plan, planned.folder, allowed=reading.allowed)
    given = find_sources(data, reading.media_root, reading.allowed)
    refuse_no_records([source.file for source in given])
    # a file of another name, such as a copy with other answers, is known only by its lines and ids
    for source, file in zip(given, planned.plan.inputs.data.files, strict=False):
        if source.file.name == Path(file.path).name and fingerprint_file(source.file) != file.blake2b:
            raise PlanError(f"{source.file} changed since the plan was made: run `trimtab plan` again")
    return given


# -- the records of rows ----------------------------------------------------------------------------------------------


@contextmanager
def open_records(
    planned: PacksInOrder, sources: Sequence[SourceFile], folder: Path
) -> Iterator[Callable[[int], Mapping[str, Any]]]:
    """Yield a function from a row to its record; `SampleError` for one with another id than the sample.

    A JSON list or a file of columns first becomes JSON Lines in `folder`, in a file that goes when the work is done.
    """
    with ExitStack() as stack:
        files = [stack.enter_context(_as_lines(source.file, folder)) for source in sources]
        records = PlannedRecords(planned.samples, files)

        def read(row: int) -> Mapping[str, Any]:
            place = records.place(row)
            named = f"{sources[files.index(place.file)].file}:{place.line}"
            try:
                record = records[row]
                if isinstance(record, Mapping) and _is_sample(planned.samples, row, record_id(record) or ""):
                    return record
                problem = "another record is there"
            except BadRecordError as error:
                problem = str(error)
            raise SampleError(
                f"sample {shorten(planned.samples.sample_id(row))} is not in {named} ({problem}): name the planned "
                "files, in order"
            )

        yield read


@contextmanager
def _as_lines(path: Path, folder: Path) -> Iterator[Path]:
    if detect_format(path) in ("jsonl", "tar"):  # the latter is refused where rows are read
        yield path
        return
    with open_passing(folder, ".jsonl") as lines:
        for number, value in enumerate(rows_of(path), 1):
            try:
                lines.write(json.dumps(value, ensure_ascii=False, allow_nan=False).encode() + b"\n")
            except (TypeError, ValueError) as error:
                raise SampleError(f"{path}: record {number} is no JSON ({error}): name images by path") from None
        lines.flush()
        yield Path(lines.name)


def _is_sample(samples: SampleTable, row: int, own: str) -> bool:
    """Return whether sizing may have called a record of this id so: perhaps behind its file's name, or numbered."""
    if samples.ids is None:
        return True
    name = samples.ids[row]
    if not own:
        return name.rpartition(":")[2].isdigit()
    return any(x == own or x.endswith("/" + own) for x in (name, _NUMBERS.sub("", name)))


# -- records in order -------------------------------------------------------------------------------------------------


def write_jsonl(
    plan: Path, out: Path, *, data: Sequence[Path] | None = None, fields: Sequence[str] = ("length", "num_tokens")
) -> WrittenData:
    """Write the plan's records as JSON Lines, pack after pack, each with its tokens under the names `fields`.

    InternVL reads `length`, Qwen's finetuning code `num_tokens`.
    """
    planned = read_planned(plan)
    with open_records(planned, sources_of(planned, data), out.parent) as record, open_atomically(out) as file:
        for place in range(len(planned.order)):
            file.writelines(line + b"\n" for line in _lines(planned, record, place, fields))
    return _exported(planned, (out,), ragged=False)


def write_nested_packs(plan: Path, out: Path, *, data: Sequence[Path] | None = None) -> WrittenData:
    """Write JSON Lines of packs, each a list of records: what the Qwen-VL finetuning code reads with `data_packing`."""
    if out.suffix != ".jsonl":
        raise SampleError(f"{out} does not end in .jsonl, by which the host knows JSON Lines: give it that ending")
    planned = read_planned(plan)
    with open_records(planned, sources_of(planned, data), out.parent) as record, open_atomically(out) as file:
        for place in range(len(planned.order)):
            file.write(b"[" + b", ".join(_lines(planned, record, place, ("num_tokens",))) + b"]\n")
    return _exported(planned, (out,), ragged=True)


def _lines(
    planned: PacksInOrder, record: Callable[[int], Mapping[str, Any]], place: int, fields: Sequence[str]
) -> Iterator[bytes]:
    for row in planned.rows(place):
        tokens = dict.fromkeys(fields, int(planned.samples.num_tokens[row]))
        yield json.dumps({**record(row), **tokens}, ensure_ascii=False).encode()


def _exported(planned: PacksInOrder, files: tuple[Path, ...], *, ragged: bool) -> WrittenData:
    packing, dp = planned.packing, planned.schedule.table.shape[1]
    notes = []
    if ragged and (short := packing.num_packs % dp):
        notes.append(f"the last row has {short} packs for {dp} ranks: a sampler repeats packs, or leaves them out")
    if repeated := len(packing.indices) - len(np.unique(packing.indices)):
        notes.append(f"{repeated} records are repeats, drawn by the plan's weights: the host must take ids twice")
    if missing := planned.plan.decisions.packing.num_oversize:
        notes.append(f"{missing} samples are larger than a pack and were left out of the plan by choice")
    return WrittenData(files=files, num_records=len(packing.indices), num_packs=packing.num_packs, notes=tuple(notes))


# -- Energon ----------------------------------------------------------------------------------------------------------


_NUMBERS = re.compile(r"(#\d+)+$")  # of ids that stand more than once, and of repeats
_INDEX = (".info.*", "index.*", "split.*")  # counts, places and parts of the shards: webdataset/config.py at 7.4.1
_DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"  # of which type the samples are


def write_energon_packs(
    plan: Path,
    out: Path,
    *,
    data: Sequence[Path] | None = None,
    ranks: int | None = None,
    packs_per_shard: int = 1000,
    reading: ReadingOptions | None = None,
) -> WrittenData:
    """Write WebDataset shards with one pack a sample, for Megatron-LM and Megatron-Bridge.

    A sample is json {"pack", "rows", "samples"}, with the records as they are, and img0, img1, ... of all of them.
    `ranks`: data-parallel ranks of the run; None: the plan's. Raises `PlanError` where they do not divide the packs,
    `SampleError` for a record whose image cannot be read.
    """
    planned, reading = read_planned(plan), reading or ReadingOptions()
    dp, num_packs = ranks or planned.schedule.table.shape[1], planned.packing.num_packs
    if num_packs % dp:
        raise PlanError(f"{dp} ranks do not divide {num_packs} packs, and Energon gives each as many: choose others")
    sources = sources_of(planned, data, reading)
    root = None if reading.media_root is None else place_of(reading.media_root)
    if data is None:
        refuse_roots(sources, root, planned.folder, reading.allowed)
    media = MediaFolders(root, allowed=reading.allowed, exif=reading.exif)
    columns, file_of = read_columns(reading.columns), file_numbers(planned.samples)
    order = [place for rank in range(dp) for place in range(rank, num_packs, dp)]
    written = []
    _remove_index(out)
    with open_records(planned, sources, out) as record:

        def with_images(row: int) -> tuple[Mapping[str, Any], list[bytes]]:
            own, source = record(row), sources[int(file_of[row])]
            try:
                conversation = read_conversation(own, columns=columns or columns_next_to(source.file))
                if conversation.videos:
                    raise BadRecordError("video", "it holds a video, and these packs carry only images: leave it out")
                folder = media.of(source.file, source.media_root)
                return own, [folder.read(image) for image in conversation.images]
            except BadRecordError as error:
                raise SampleError(f"sample {planned.samples.sample_id(row)}: {error}") from None

        for start in range(0, num_packs, packs_per_shard):
            path = out / f"packs-{start // packs_per_shard:06}.tar"
            with open_atomically(path) as file, tarfile.open(fileobj=file, mode="w") as tar:
                for place in order[start : start + packs_per_shard]:
                    rows = planned.rows(place)
                    for name, content in _members(place, rows, [with_images(row) for row in rows]):
                        member = tarfile.TarInfo(f"pack-{place:09}.{name}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
            written.append(path)
    for older in {*out.glob(f"packs-{'[0-9]' * 6}.tar")} - {*written}:
        older.unlink()
    write_atomically(out / ".nv-meta" / "dataset.yaml", _DATASET)  # without it Energon reads nothing
    written.append(out / ".nv-meta" / "dataset.yaml")
    notes = (
        f"index it once: energon prepare --non-interactive --split-parts 'train:.*' --skip-dataset-yaml {out}",
        f"read it on {dp} ranks with num_workers 0 or 1, shuffle_buffer_size=None, max_samples_per_sequence=None, "
        "shuffle_over_epochs_multiplier=None, parallel_shard_iters=1, and without a packing buffer",
    )
    return WrittenData(files=tuple(written), num_records=len(planned.packing.indices), num_packs=num_packs, notes=notes)


def _remove_index(out: Path) -> None:
    """Remove what makes Energon read a folder, then what it has written to index the shards of an older export."""
    (out / ".nv-meta" / "dataset.yaml").unlink(missing_ok=True)
    for pattern in ("packs-*.tar.idx", *(f".nv-meta/{name}" for name in _INDEX)):
        for file in out.glob(pattern):
            file.unlink()


def _members(
    place: int, rows: Sequence[int], samples: Sequence[tuple[Mapping[str, Any], list[bytes]]]
) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of everything in one pack."""
    content = {"pack": place, "rows": rows, "samples": [record for record, _ in samples]}
    yield "json", json.dumps(content, ensure_ascii=False).encode()
    images = [image for _, found in samples for image in found]
    for number, image in enumerate(images):
        kind = "png" if image.startswith(b"\x89PNG") else "jpg"
        yield f"img{number}.{kind}", image


# -- ms-swift ---------------------------------------------------------------------------------------------------------


def write_swift_packs(plan: Path, out: Path, *, data: Sequence[Path] | None = None) -> WrittenData:
    """Write `records.jsonl`, the samples pack by pack, and `planned_packs.py` for --external_plugins of ms-swift."""
    planned = read_planned(plan)
    ends = np.cumsum(np.diff(planned.packing.offsets)[planned.order])
    plugin = out / "planned_packs.py"
    with written_together():
        written = write_jsonl(plan, out / "records.jsonl", data=data, fields=())
        template = files("trimtab.adapters").joinpath("swift_plugin.txt").read_text(encoding="utf-8")
        write_atomically(plugin, template.format(ends=ends.tolist()))
    notes = (
        *written.notes,
        f"train with --dataset {out / 'records.jsonl'} --external_plugins {plugin} and what `trimtab export ms-swift` "
        "prints; a plug-in is code: look at it",
    )
    return WrittenData(
        files=(*written.files, plugin), num_records=written.num_records, num_packs=written.num_packs, notes=notes
    )
