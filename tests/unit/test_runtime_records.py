"""`plan/file/records.py`: a plan's rows lead to the records they were sized from, whatever was left out."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
from plans import size_and_plan
from sample_sets import PixelRule, talk, write_jsonl

from refusals import refused
from trimtab import SampleTable, size_samples
from trimtab.errors import SampleError
from trimtab.plan.file.records import PlannedRecords, open_records
from trimtab.samples.table import SizingResult, load_table, save_sizing, table_bytes


def record(name: str) -> dict[str, object]:
    return {"name": name, "conversations": talk(f"who is {name}", name * 3)}


def size(*files: Path, **options: object) -> SizingResult:
    return size_samples(list(files), image_rule=PixelRule(), tokenizer=None, on_bad="skip", **options)


def names(records: PlannedRecords) -> list[str]:
    return [item["name"] for item in records]


def test_left_out_and_blank_lines_shift_nothing(tmp_path: Path) -> None:
    bad = {"name": "bad", "conversations": "no list"}
    lines = [b"\xef\xbb\xbf" + json.dumps(record("a")).encode(), bad, b"", b"{broken", record("b"), bad, record("c")]
    file = write_jsonl(tmp_path / "data.jsonl", lines)
    result = size(file)
    assert len(result.bad) == 3
    records = PlannedRecords(result.table, [file])
    assert names(records) == ["a", "b", "c"]
    assert [str(records.place(row)) for row in range(3)] == [f"{file}:{line}" for line in (1, 5, 7)]
    assert result.table.ids == ("data:1", "data:5", "data:7")


def test_a_last_line_without_an_end_and_many_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trimtab.samples.records.CHUNK_BYTES", 200)
    monkeypatch.setattr("trimtab.samples.records._SCAN_BYTES", 64)
    wanted = [f"n{i}" * (1 + i % 7) for i in range(60)]
    rows: list[object] = [record(name) if i % 9 else b"[" for i, name in enumerate(wanted)]
    file = write_jsonl(tmp_path / "data.jsonl", rows)
    file.write_bytes(file.read_bytes().rstrip(b"\n"))
    for workers in (1, 2):
        assert names(PlannedRecords(size(file, workers=workers).table, [file])) == [
            name for i, name in enumerate(wanted) if i % 9
        ]


def test_files_of_every_kind_together(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="Parquet needs pyarrow: pip install 'trimtab[data]'")
    import pyarrow
    import pyarrow.parquet

    bad: dict[str, object] = {"name": "bad", "conversations": []}
    lines = write_jsonl(tmp_path / "a.jsonl", [record("a"), bad, record("b")])
    listed = tmp_path / "b.json"
    listed.write_text(json.dumps([bad, record("c"), record("d")]))
    table = pyarrow.Table.from_pylist([record(name) for name in "efghij"])
    pyarrow.parquet.write_table(table, tmp_path / "c.parquet", row_group_size=2)
    files = [lines, listed, tmp_path / "c.parquet"]
    result = size(*files)
    records = PlannedRecords(result.table, files)
    assert names(records) == list("abcdefghij")
    assert [records[row]["name"] for row in (9, 0, 5, 2, 9)] == ["j", "a", "f", "c", "j"]
    assert (records.place(2).file, records.place(2).line) == (listed, 2)
    again = pickle.loads(pickle.dumps(records))  # as a spawned worker gets it
    assert again[7]["name"] == "h"


def test_places_are_saved_and_outlive_a_second_sizing(tmp_path: Path) -> None:
    files = [write_jsonl(tmp_path / f"{n}.jsonl", [b"[", record(n), b"[", record(n + n)]) for n in "abc"]
    saved = []
    for number, part in enumerate((files[:2], files[2:])):
        saved.append(tmp_path / f"sizes{number}.npz")
        save_sizing(size(*part), saved[-1])
    first = load_table(saved[0])
    assert (first.num_files, first.file_index.tolist(), first.line.tolist()) == (2, [0, 0, 1, 1], [2, 4, 2, 4])
    joined = size(*saved).table
    assert names(PlannedRecords(joined, files)) == ["a", "aa", "b", "bb", "c", "cc"]
    save_sizing(SizingResult(table=joined), tmp_path / "joined.npz")
    assert names(PlannedRecords(load_table(tmp_path / "joined.npz"), files)) == ["a", "aa", "b", "bb", "c", "cc"]


def test_a_clean_file_needs_no_columns_of_places(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", [record("a"), record("b")])
    table = size(file).table
    assert table.line is None
    assert table.file_index is None
    assert b"file_index" not in table_bytes(table)
    assert names(PlannedRecords(table, [file])) == ["a", "b"]


def test_line_starts_are_found_once_and_again_for_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", [record("a"), b"[", record("b")])
    table = size(file).table
    assert names(PlannedRecords(table, [file], index_dir=tmp_path)) == ["a", "b"]
    assert len(list(tmp_path.glob("line-starts-*.npy"))) == 1
    with monkeypatch.context() as patched:
        patched.setattr("trimtab.plan.file.records.row_starts", lambda *_: pytest.fail("the file was read again"))
        assert names(PlannedRecords(table, [file], index_dir=tmp_path)) == ["a", "b"]
    write_jsonl(file, [record("longer"), b"[", record("b")])
    assert names(PlannedRecords(table, [file], index_dir=tmp_path)) == ["longer", "b"]


def test_the_records_of_a_plan_folder(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", [record("a"), b"[", *(record(f"b{i}") for i in range(20))])
    size_and_plan([file], tmp_path / "plan", max_tokens=200, max_patches=1000)
    for records in (open_records(tmp_path / "plan"), open_records(tmp_path / "plan" / "plan.yaml", [file])):
        assert names(records) == ["a", *(f"b{i}" for i in range(20))]
        np.testing.assert_array_equal(records.samples.num_tokens, size(file).table.num_tokens)
    file.rename(tmp_path / "moved.jsonl")
    with refused(SampleError, "data.jsonl"):
        open_records(tmp_path / "plan")
    assert names(open_records(tmp_path / "plan", [tmp_path / "moved.jsonl"]))[1] == "b0"


def test_a_table_of_your_own_is_row_for_row(tmp_path: Path) -> None:
    file = write_jsonl(tmp_path / "data.jsonl", [{"name": "a"}, {"name": "b"}])
    assert names(PlannedRecords(SampleTable.of([1, 1], [1, 1]), [file])) == ["a", "b"]
