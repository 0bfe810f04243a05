"""A plan's packs as the data of trainers that pack for themselves: Energon shards of packs, and a plug-in for ms-swift.

Energon gives rank r the r-th of as many equal runs of its samples, one after the other. So shards hold the packs of
rank 0 first, then those of rank 1, each rank's in its own order: a rank then reads its packs in the order of the plan.
ms-swift reads samples in the order of a file and packs them: the plug-in puts the plan's packs in the place of its own.
Read at megatron-energon 7.4.1 and ms-swift 4.6.0.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.adapters.data_files import WrittenData, open_records, read_planned, rows_of_pack, sources_of, write_jsonl
from trimtab.errors import PlanError, SampleError
from trimtab.files import open_atomically, write_atomically, written_together
from trimtab.options import ReadingOptions
from trimtab.samples.media import MediaFolders
from trimtab.samples.problems import BadRecordError
from trimtab.samples.records import places_of
from trimtab.samples.rows import read_conversation
from trimtab.samples.shapes import read_columns
from trimtab.samples.sources import whole_root

# -- Energon ----------------------------------------------------------------------------------------------------------


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

    A sample is json {"pack", "samples"} with the records as they are, and img0, img1, ... of all of them in order.
    `ranks`: data-parallel ranks of the run; None: the plan's. Raises `PlanError` where they do not divide the packs,
    `SampleError` for a record whose image cannot be read.
    """
    planned, reading = read_planned(plan), reading or ReadingOptions()
    dp, num_packs = ranks or planned.schedule.table.shape[1], planned.packing.num_packs
    if num_packs % dp:
        raise PlanError(
            f"{num_packs} packs were to be shared by {dp} ranks, and Energon gives every rank equally many: name a "
            "number of ranks that divides them, or plan again with --dp for yours"
        )
    sources = sources_of(planned, data, reading.media_root, reading.allowed)
    files = [source.file for source in sources]
    whole = whole_root(sources, reading.media_root)
    media = MediaFolders(whole, allow_outside=reading.allow_outside, exif=reading.exif)
    order = [place for rank in range(dp) for place in range(rank, num_packs, dp)]
    written = []
    _remove_index(out)
    with open_records(files, planned.samples, folder=out) as records:

        def conversation(row: int) -> tuple[dict[str, Any], list[bytes]]:
            record = json.loads(records.read(row))
            said = read_conversation(record, columns=read_columns(reading.columns))
            if said.videos:
                raise BadRecordError("video", "it holds a video, and these packs carry only images: leave it out")
            source = sources[int(places_of(planned.samples).file[row])]
            folder = media.of(source.file, source.media_root)
            return record, [folder.read(image) for image in said.images]

        for start in range(0, num_packs, packs_per_shard):
            path = out / f"packs-{start // packs_per_shard:06}.tar"
            with open_atomically(path) as file, tarfile.open(fileobj=file, mode="w") as tar:
                for place in order[start : start + packs_per_shard]:
                    samples = []
                    for row in rows_of_pack(planned, place):
                        try:
                            samples.append(conversation(row))
                        except BadRecordError as error:
                            raise SampleError(f"sample {planned.samples.sample_id(row)}: {error}") from None
                    for name, content in _members(place, samples):
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
    """First what makes Energon read a folder, then what it has written to index the shards of an older export."""
    (out / ".nv-meta" / "dataset.yaml").unlink(missing_ok=True)
    for pattern in ("packs-*.tar.idx", *(f".nv-meta/{name}" for name in _INDEX)):
        for file in out.glob(pattern):
            file.unlink()


def _members(place: int, samples: Sequence[tuple[dict[str, Any], list[bytes]]]) -> Iterator[tuple[str, bytes]]:
    """Yield name and bytes of everything in one pack."""
    content = {"pack": place, "samples": [record for record, _ in samples]}
    yield "json", json.dumps(content, ensure_ascii=False).encode()
    images = [image for _, found in samples for image in found]
    for number, image in enumerate(images):
        kind = "png" if image.startswith(b"\x89PNG") else "jpg"
        yield f"img{number}.{kind}", image


_INDEX = (".info.*", "index.*", "split.*")  # counts, places and parts of the shards: webdataset/config.py at 7.4.1
_DATASET = "__module__: megatron.energon\n__class__: CrudeWebdataset\n"  # of which type the samples are


# -- ms-swift ---------------------------------------------------------------------------------------------------------

_PLUGIN = '''"""The packs of a trimtab plan, for ms-swift's --external_plugins; records.jsonl holds their samples."""

import swift.dataset.packing as packing

ENDS = {ends}  # number of samples up to the end of every pack
_init = packing.PackingDataset.__init__


def init(self, template, dataset, *args, **kwargs):
    _init(self, template, dataset, *args, **kwargs)
    lengths = [sum(length) if isinstance(length, list) else length for length in dataset["lengths"]]
    if len(lengths) != ENDS[-1]:
        raise ValueError(
            f"{{ENDS[-1]}} samples were planned, and ms-swift holds {{len(lengths)}}: some were left out, or it is "
            "other data; train with --strict true, without a validation set, and only with records.jsonl"
        )
    packs = [list(range(start, stop)) for start, stop in zip([0, *ENDS], ENDS)]
    totals = [sum(lengths[number] for number in pack) for pack in packs]
    if max(totals) > self.packing_length:
        raise ValueError(
            f"a pack has {{max(totals)}} tokens here, more than --packing_length {{self.packing_length}}: size and "
            "plan with the template of this run"
        )
    self.packed_idx, self.packed_length = packs, totals


packing.PackingDataset.__init__ = init
'''


def write_swift_packs(plan: Path, out: Path, *, data: Sequence[Path] | None = None) -> WrittenData:
    """`records.jsonl`, the samples pack by pack, and `planned_packs.py` for --external_plugins of ms-swift."""
    planned = read_planned(plan)
    ends = np.cumsum(np.diff(planned.packing.offsets)[planned.order])
    plugin = out / "planned_packs.py"
    with written_together():
        written = write_jsonl(plan, out / "records.jsonl", data=data, fields=())
        write_atomically(plugin, _PLUGIN.format(ends=ends.tolist()))
    notes = (
        *written.notes,
        f"train with --dataset {out / 'records.jsonl'} --external_plugins {plugin}, beside what `trimtab export "
        "ms-swift` prints; a plug-in is code: look at it",
    )
    return WrittenData(
        files=(*written.files, plugin), num_records=written.num_records, num_packs=written.num_packs, notes=notes
    )
