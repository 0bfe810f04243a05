"""A plan's packs as the data of trainers that pack for themselves: Energon shards of packs, and a plug-in for ms-swift.

Energon gives rank r the r-th of as many equal runs of its samples, one after the other. So shards hold the packs of
rank 0 first, then those of rank 1, each rank's in its own order: a rank then reads its packs in the order of the plan.
ms-swift reads samples in the order of a file and packs them: the plug-in puts the plan's packs in the place of its own.
Read at megatron-energon 7.4.1, LLaVA-OneVision-1.5 a5eb942 and ms-swift 4.6.0.
"""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trimtab.adapters.data_files import WrittenData, read_planned, rows_of_pack, sources_of, write_jsonl
from trimtab.adapters.record_files import open_records
from trimtab.errors import PlanError, SampleError
from trimtab.files import open_atomically, write_atomically, written_together
from trimtab.options import ReadingOptions
from trimtab.samples.media_folders import MediaFolders
from trimtab.samples.problems import BadRecordError
from trimtab.samples.record_lines import places_of
from trimtab.samples.rows import IMAGE_MARK, Conversation, read_conversation
from trimtab.samples.sources import whole_root

PackLayout = Literal["records", "llava-ov"]


# -- Energon ----------------------------------------------------------------------------------------------------------


def write_energon_packs(
    plan: Path,
    out: Path,
    *,
    data: Sequence[Path] | None = None,
    ranks: int | None = None,
    layout: PackLayout = "records",
    packs_per_shard: int = 1000,
    reading: ReadingOptions | None = None,
) -> WrittenData:
    """WebDataset shards with one pack a sample, for Megatron-LM, Megatron-Bridge and LLaVA-OneVision-1.5.

    `records`: json {"pack", "samples"} with the records as they are, and img0, img1, ... of all of them in order.
    `llava-ov`: json {"prompts", "captions", "images"} as LLaVA-OneVision-1.5 reads with OFFLINE_PACKED_DATA=1 and
    OFFLINE_PACKING_VQA=1, of samples with one image, one question and one answer. `ranks`: data-parallel ranks of the
    run; None: the plan's. Raises `PlanError` where they do not divide the packs, `SampleError` for a record that the
    layout cannot hold or whose image cannot be read.
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

        def conversation(row: int) -> tuple[dict[str, Any], Conversation, list[bytes]]:
            record = json.loads(records.read(row))
            said = read_conversation(record)
            if said.videos:
                raise BadRecordError("video", "it holds a video, and these packs carry only images: leave it out")
            source = sources[int(places_of(planned.samples).file[row])]
            folder = media.of(source.file, source.media_root)
            return record, said, [folder.read(image) for image in said.images]

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
                    for name, content in _members(place, samples, layout):
                        member = tarfile.TarInfo(f"pack-{place:09}.{name}")
                        member.size = len(content)
                        tar.addfile(member, io.BytesIO(content))
            written.append(path)
    for older in {*out.glob(f"packs-{'[0-9]' * 6}.tar")} - {*written}:
        older.unlink()
    written += _describe(out, layout)
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


def _members(
    place: int, samples: Sequence[tuple[dict[str, Any], Conversation, list[bytes]]], layout: PackLayout
) -> Iterator[tuple[str, bytes]]:
    """Name and bytes of everything in one pack."""
    content: dict[str, Any] = {"pack": place, "samples": [record for record, _, _ in samples]}
    if layout == "llava-ov":
        turns = [_question_and_answer(record, said) for record, said, _ in samples]
        content = {
            "images": [f"img{number}.jpg" for number in range(len(turns))],
            "prompts": [question for question, _ in turns],
            "captions": [answer for _, answer in turns],
        }
    yield "json", json.dumps(content, ensure_ascii=False).encode()
    images = [image for _, _, found in samples for image in found]
    for number, image in enumerate(images):
        png = image.startswith(b"\x89PNG") and layout != "llava-ov"
        yield f"img{number}.{'png' if png else 'jpg'}", image


def _question_and_answer(record: dict[str, Any], said: Conversation) -> tuple[str, str]:
    turns = [(m.role, "".join(part for part in m.content if isinstance(part, str)).strip()) for m in said.messages]
    if len(said.images) != 1 or [role for role, _ in turns] != ["user", "assistant"]:
        raise SampleError(
            f"sample {record.get('id', '')!r} has {len(said.images)} images and {len(turns)} turns, and "
            "LLaVA-OneVision-1.5's offline packs hold one image, one question and one answer a sample: leave it out, "
            "or write the layout of records"
        )
    return turns[0][1].replace(IMAGE_MARK, "").strip(), turns[1][1]


_INDEX = (".info.*", "index.*", "split.*")  # counts, places and parts of the shards: webdataset/config.py at 7.4.1
_DATASET = {
    "records": "__module__: megatron.energon\n__class__: CrudeWebdataset\n",
    "llava-ov": """sample_type:
  __module__: aiak_training_llm.data.multimodal
  __class__: PackedCaptioningSample
part_filter: sample_loader.py:part_filter
sample_loader: sample_loader.py:sample_loader
""",
}
_OV_LOADER = """def sample_loader(sample: dict) -> dict:
    data = sample["json"]
    return dict(
        __key__=sample["__key__"],
        __restore_key__=sample["__restore_key__"],
        captions=data["captions"],
        prompts=data["prompts"],
        images=[sample.get(name) for name in data["images"]],
    )


def part_filter(part: str) -> bool:
    return True
"""


def _describe(out: Path, layout: PackLayout) -> list[Path]:
    """What Energon reads beside its own index: of which type the samples are. Without the last, it reads nothing."""
    contents = {"sample_loader.py": _OV_LOADER} if layout == "llava-ov" else {}
    contents["dataset.yaml"] = _DATASET[layout]
    for name, content in contents.items():
        write_atomically(out / ".nv-meta" / name, content)
    return [out / ".nv-meta" / name for name in contents]


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
