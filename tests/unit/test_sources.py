"""Data as people have it: every format read by sizing and by a plan's records, or refused by a sentence."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from sample_sets import PixelRule, png, talk, write_jsonl

from refusals import refused

pyarrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
pytest.importorskip("pyarrow.parquet")

from trimtab.errors import SampleError  # noqa: E402
from trimtab.plan.file.records import PlannedRecords  # noqa: E402
from trimtab.samples.rows import read_conversation  # noqa: E402
from trimtab.samples.shapes import columns_next_to  # noqa: E402
from trimtab.samples.size import size_samples  # noqa: E402
from trimtab.samples.sources import find_sources, source_labels  # noqa: E402
from trimtab.samples.table import SizingResult, load_sizing, save_sizing  # noqa: E402

IMAGES = [(40, 20), (30, 30), (100, 100)]
PATCHES = [32, 36, 400]


def size(data: Any, **options: Any) -> SizingResult:
    return size_samples(data, image_rule=PixelRule(), tokenizer=None, **options)


def read_back(result: SizingResult) -> list[Any]:
    """The records of the table's rows, as a run reads them."""
    files = [Path(file.path) for file in result.files]
    records = PlannedRecords(result.table, files)
    return [read_conversation(records[row]) for row in range(len(records))]


def rows() -> list[dict[str, Any]]:
    """Three records that carry their images."""
    turns = talk("<image> what?", "a cat")
    return [
        {"id": f"r{n}", "conversations": turns, "image": {"bytes": png(*s), "path": None}} for n, s in enumerate(IMAGES)
    ]


def check(result: SizingResult, named: str) -> None:
    """The three records, sized and found again."""
    assert result.table.num_patches.tolist() == PATCHES
    assert result.table.source_names == (named,)
    assert [conversation.images for conversation in read_back(result)] == [(png(*size),) for size in IMAGES]


# -- InternVL's meta file ---------------------------------------------------------------------------------------------


def write_meta(folder: Path, **changes: Any) -> Path:
    """Sources a (twice, images below pics/) and b (half of its five lines), as InternVL's shell scripts name them."""
    for name in ("pics", "notes"):
        (folder / name).mkdir(exist_ok=True)
    (folder / "pics" / "a.png").write_bytes(png(40, 20))
    write_jsonl(
        folder / "notes" / "a.jsonl",
        [{"id": n, "image": "a.png", "conversations": talk(f"<image> {n}")} for n in range(2)],
    )
    write_jsonl(folder / "notes" / "b.jsonl", [{"conversations": talk(f"b {n}" * (n + 1))} for n in range(5)])
    sets = {
        "a": {"root": "pics/", "annotation": "notes/a.jsonl", "data_augment": False, "repeat_time": 2, "length": 2},
        "b": {"root": "", "annotation": str(folder / "notes" / "b.jsonl"), "repeat_time": 0.5},
    }
    for key, value in changes.items():
        name, _, field = key.partition("_")
        sets[name][field] = value
    meta = folder / "meta.json"
    meta.write_text(
        json.dumps({name: {k: v for k, v in entry.items() if v is not ...} for name, entry in sets.items()}, indent=2)
    )
    return meta


def test_a_meta_file_leads_to_its_sources_roots_and_repeats(tmp_path: Path) -> None:
    result = size(write_meta(tmp_path))
    table = result.table
    assert [table.source_names[source] for source in table.source] == ["a"] * 4 + ["b"] * 2
    assert table.ids == ("a/0", "a/1", "a/0#2", "a/1#2", "b:1", "b:2")
    assert table.num_patches.tolist() == [32] * 4 + [0] * 2
    assert [str(file.media_root) for file in result.files] == [str(tmp_path / "pics"), "None"]
    records = PlannedRecords(table, [Path(file.path) for file in result.files])
    assert [records[row]["conversations"][0]["value"][-1] for row in range(6)] == list("010101")
    save_sizing(result, tmp_path / "sizes.npz")
    assert load_sizing(tmp_path / "sizes.npz").files == result.files


def test_records_that_look_like_a_meta_file_stay_records(tmp_path: Path) -> None:
    record = {"conversations": talk("what?"), "extra": {"annotation": "x", "root": "y"}}
    path = tmp_path / "one.json"
    path.write_text(json.dumps(record))
    assert len(size(path).table) == 1


# -- media roots ------------------------------------------------------------------------------------------------------


def test_chunks_of_another_media_root_are_not_taken(tmp_path: Path) -> None:
    for name, sides in zip("ab", IMAGES, strict=False):
        (tmp_path / name).mkdir()
        (tmp_path / name / "x.png").write_bytes(png(*sides))
    file = write_jsonl(tmp_path / "data.jsonl", [{"image": "x.png", "conversations": talk("<image>")}])
    for name, patches in zip("ab", PATCHES, strict=False):
        kept = size([file], media_root=tmp_path / name, resume_dir=tmp_path / "kept")
        assert kept.table.num_patches.tolist() == [patches]


# -- columns ----------------------------------------------------------------------------------------------------------


def cauldron(**changes: Any) -> dict[str, Any]:
    image = {"bytes": png(40, 20), "path": None}
    texts = [
        {"user": "What?", "assistant": "A cat.", "source": "x"},
        {"user": "Sure?", "assistant": "No.", "source": "x"},
    ]
    return {"images": [image, image], "texts": texts} | changes


def test_the_cauldrons_parquet_is_read(tmp_path: Path) -> None:
    rows = [cauldron(), cauldron(images=[]), cauldron(images=None)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "c.parquet")
    result = size(tmp_path / "c.parquet")
    assert result.table.num_images.tolist() == [2, 0, 0]
    first = read_back(result)[0]
    assert [message.role for message in first.messages] == ["user", "assistant"] * 2
    assert first.messages[0].content == (None, None, "What?")  # the images stand before the text
    assert first.messages[2].content == ("Sure?",)
    bad = [{"user": "What?", "assistant": None}], ["What?"]
    for texts, sentence in zip(bad, ("'assistant' of 'texts' is None", "a turn of 'texts' is 'What"), strict=True):
        with pytest.raises(SampleError, match=sentence):
            read_conversation(cauldron(texts=texts))


def test_turns_that_are_stored_as_columns_are_turns() -> None:
    """What `datasets` makes of Sequence({"from": ..., "value": ...})."""
    turns = {"from": ["human", "gpt"], "value": ["what?", "a cat"]}
    assert read_conversation({"conversations": turns}) == read_conversation({"conversations": talk("what?", "a cat")})


def write_stream(path: Path, records: list[dict[str, Any]]) -> Path:
    table = pyarrow.Table.from_pylist(records)
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)
    return path


def save_to_disk(folder: Path, **state: Any) -> Path:
    """As `datasets.Dataset.save_to_disk` writes it (5.2)."""
    folder.mkdir(parents=True)
    write_stream(folder / "data-00000-of-00001.arrow", rows())
    files = {"_data_files": [{"filename": "data-00000-of-00001.arrow"}], "_split": "train", **state}
    (folder / "state.json").write_text(json.dumps(files))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_arrow_streams_files_and_saved_datasets_are_read(tmp_path: Path) -> None:
    check(size(write_stream(tmp_path / "s.arrow", rows())), "s")
    table = pyarrow.Table.from_pylist(rows())
    with pyarrow.OSFile(str(tmp_path / "f.feather"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=1)
    check(size(tmp_path / "f.feather"), "f")
    check(size(save_to_disk(tmp_path / "saved")), "saved")
    save_to_disk(tmp_path / "splits" / "train")
    save_to_disk(tmp_path / "splits" / "test")
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    result = size(tmp_path / "splits")
    check(result, "splits")
    assert f"of {tmp_path / 'splits'} the other splits are not read (test)" in result.assumptions


def test_damaged_arrow_is_refused(tmp_path: Path) -> None:
    path = write_stream(tmp_path / "s.arrow", rows())
    path.write_bytes(path.read_bytes()[:700])
    with refused(SampleError):
        size(path)
    (tmp_path / "e.arrow").write_bytes(b"")
    with refused(SampleError):
        size(tmp_path / "e.arrow")


# -- folders ----------------------------------------------------------------------------------------------------------


def test_a_folder_of_files_is_one_source_and_one_without_data_is_refused(tmp_path, monkeypatch):
    for name in ("train-0.parquet", "train-1.parquet", "test-0.parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist([cauldron()]), tmp_path / name)
    (tmp_path / "README.md").write_text("x")
    result = size(tmp_path)
    assert (len(result.table), result.table.source_names) == (2, (tmp_path.stem,))
    assert [source.file.name for source in find_sources(tmp_path)] == ["train-0.parquet", "train-1.parquet"]
    write_jsonl(tmp_path / "x.jsonl", [])
    with refused(SampleError):
        size(tmp_path)
    (tmp_path / "x.jsonl").unlink()
    monkeypatch.chdir(tmp_path)
    assert size(".").table.source_names == (tmp_path.stem,)
    (tmp_path / "train-2.parquet").symlink_to("nowhere")
    with refused(SampleError, "train-2.parquet"):
        size(".")
    shutil.rmtree(tmp_path)
    tmp_path.mkdir()
    with refused(SampleError):
        size(tmp_path)


def test_a_data_set_without_a_name_is_a_source(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "a.jsonl", [{"conversations": talk("hello")}])
    (tmp_path / "meta.json").write_text(json.dumps({"": {"annotation": "a.jsonl", "root": "", "repeat_time": 1}}))
    assert source_labels(find_sources(tmp_path / "meta.json")) == [""]


def test_a_list_of_llama_factory_is_not_taken_for_what_datasets_writes(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "d.jsonl", [{"q": "What?", "a": "A cat."}])
    info = tmp_path / "dataset_info.json"
    info.write_text(json.dumps({"builder_name": "json", "splits": {}, "features": {"q": {}, "a": {}}}))
    assert [(source.file.name, source.columns) for source in find_sources(tmp_path)] == [("d.jsonl", ())]
    sets = {"cats": {"file_name": "d.jsonl", "columns": {"prompt": "q", "response": "a"}, "num_samples": 5}}
    info.write_text(json.dumps({**sets, "far": {"hf_hub_url": "some/where"}}))
    columns_next_to.cache_clear()
    (named,) = find_sources(info)
    assert named.name == "cats"
    assert "num_samples" in str(named.note)
    assert {("question", "q"), ("answer", "a"), ("system", "")} <= set(named.columns)
    assert find_sources(tmp_path / "d.jsonl")[0].columns == named.columns
