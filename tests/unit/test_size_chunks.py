"""Sizing a data set: chunks, workers and interruptions change no byte."""

import json
import os

import pytest
from sample_sets import PixelRule, png, talk, write_jsonl, write_tokenizer
from size_cases import GOOD, CoarseWhenMany, fill_folder, parquet, pyarrow, rows_of, size

from trimtab.samples import records
from trimtab.samples.table import load_sizing, save_sizing


@pytest.fixture
def folder(tmp_path):
    return fill_folder(tmp_path)


def test_chunks_cut_lines_nowhere(folder, monkeypatch):
    rows = [{"id": str(n), "conversations": talk("cat " * (n % 7))} if n % 5 else b"" for n in range(40)]
    rows[11] = b"broken"
    write_jsonl(folder / "data.jsonl", rows)
    (folder / "data.jsonl").write_bytes(
        b"\xef\xbb\xbf" + (folder / "data.jsonl").read_bytes().replace(b"\n", b"\r\n")[:-2]
    )
    whole = size(folder, "data.jsonl", on_bad="skip")
    assert whole.bad[0].line == 12
    assert len(whole.table) == 31
    for step in (1, 7, 64, 333):
        monkeypatch.setattr(records, "CHUNK_BYTES", step)
        cut = size(folder, "data.jsonl", on_bad="skip")
        assert rows_of(cut) == rows_of(whole)
        assert cut.table.ids == whole.table.ids
        assert cut.bad == whole.bad


def test_a_line_too_long_is_listed_and_stepped_over(folder, monkeypatch):
    monkeypatch.setattr(records, "MAX_LINE_BYTES", 500)
    monkeypatch.setattr(records, "CHUNK_BYTES", 600)
    write_jsonl(folder / "data.jsonl", [GOOD, b'"' + b"x" * 5000 + b'"', GOOD])
    found = list(records.read_records(folder / "data.jsonl"))
    assert [(record.line, record.problem and record.problem.kind) for record in found] == [
        (1, None),
        (2, "json"),
        (3, None),
    ]


@pytest.fixture
def large(folder):
    """Some 400 samples in three files of three formats, some of them bad, and chunks small enough to be many."""
    rows = [
        {
            "id": f"n{n}",
            "conversations": talk("<image> cat " * (n % 3), "sun " * (n % 11)),
            "image": ["a.png"] * (n % 3),
        }
        for n in range(200)
    ]
    rows[17]["image"] = "absent.png"
    write_jsonl(folder / "data.jsonl", rows)
    (folder / "list.json").write_text(json.dumps(rows[:130]))
    parquet.write_table(pyarrow.Table.from_pylist(rows[20:90]), folder / "rows.parquet", row_group_size=10)
    return folder


def saved(folder, name, **options):
    options = {"on_bad": "skip", "max_tokens": 60, "image_rule": CoarseWhenMany(), **options}
    result = size(folder, "data.jsonl", "list.json", "rows.parquet", **options)
    save_sizing(result, folder / name)
    return (folder / name).read_bytes()


def small_chunks(monkeypatch):
    monkeypatch.setattr(records, "CHUNK_BYTES", 2000)
    monkeypatch.setattr(records, "CHUNK_RECORDS", 10)


def test_workers_and_chunks_change_no_byte(large, monkeypatch):
    expected = saved(large, "one.npz")
    small_chunks(monkeypatch)
    assert saved(large, "cut.npz") == expected
    seen = []
    assert saved(large, "two.npz", workers=2, progress=lambda *pair: seen.append(pair)) == expected
    assert len(seen) > 20
    assert seen == sorted(seen)
    total = sum((large / name).stat().st_size for name in ("data.jsonl", "list.json", "rows.parquet"))
    assert {pair[1] for pair in seen} == {total}
    assert seen[-1][0] > 0.98 * total
    result = load_sizing(large / "one.npz")
    assert {bad.kind for bad in result.bad} == {"path", "length"} or {bad.kind for bad in result.bad} == {"placeholder"}
    assert result.num_read == 200 + 130 + 70 == len(result.table) + len(result.bad)


class StopError(Exception):
    pass


def test_an_interrupted_pass_goes_on_where_it_was(large, monkeypatch):
    expected = saved(large, "whole.npz")
    small_chunks(monkeypatch)

    def stop_after(count):
        calls = []

        def progress(done, total):
            calls.append(done)
            if len(calls) == count:
                raise StopError

        return progress

    kept = large / "kept"
    for count in (1, 9):
        with pytest.raises(StopError):
            saved(large, "never.npz", resume_dir=kept, progress=stop_after(count))
    files = sorted(kept.iterdir())
    assert len(files) >= 9
    before = {file: file.stat().st_mtime_ns for file in files}
    files[0].write_bytes(b"torn")
    files[1].write_bytes(files[2].read_bytes()[:-30])
    assert saved(large, "resumed.npz", resume_dir=kept) == expected
    assert all(file.stat().st_mtime_ns == before[file] for file in files[2:]), "a finished chunk was sized again"
    assert all(file.stat().st_mtime_ns > before[file] for file in files[:2]), "a torn chunk was trusted"


def test_other_settings_or_other_data_take_nothing_over(large, monkeypatch):
    small_chunks(monkeypatch)
    kept = large / "kept"
    saved(large, "a.npz", resume_dir=kept)
    count = len(list(kept.iterdir()))
    saved(large, "b.npz", resume_dir=kept, image_rule=PixelRule(cell=20))
    assert len(list(kept.iterdir())) == 2 * count
    assert load_sizing(large / "b.npz").table.num_patches.sum() < load_sizing(large / "a.npz").table.num_patches.sum()
    write_tokenizer(large / "model", config={"note": 1}, post=True)
    saved(large, "c.npz", resume_dir=kept)
    assert len(list(kept.iterdir())) == 3 * count
    rows = (large / "data.jsonl").read_bytes()
    (large / "data.jsonl").write_bytes(rows.replace(b"sun sun", b"mat mat"))
    saved(large, "d.npz", resume_dir=kept)
    assert len(list(kept.iterdir())) > 3 * count
    changed = saved(large, "e.npz")
    assert (large / "d.npz").read_bytes() == changed


def test_an_image_that_changed_is_sized_again(folder):
    write_jsonl(
        folder / "data.jsonl",
        [{"id": name, "conversations": talk("<image>"), "image": f"{name}.png"} for name in ("own", "new")],
    )
    (folder / "own.png").write_bytes(png(40, 40))
    result = size(folder, "data.jsonl", resume_dir=folder / "kept", on_bad="skip")
    assert result.table.ids == ("own",)
    (folder / "own.png").write_bytes(png(80, 40))
    (folder / "new.png").write_bytes(png(40, 40))
    with pytest.warns(UserWarning, match="changed"):
        again = size(folder, "data.jsonl", resume_dir=folder / "kept", on_bad="skip")
    assert rows_of(again) == rows_of(size(folder, "data.jsonl"))
    assert rows_of(size(folder, "data.jsonl", resume_dir=folder / "kept")) == rows_of(again)


def test_a_record_that_ends_its_process_is_bad(folder):
    rows = [{"conversations": talk("<image>"), "image": name} for name in ("a.png", "b.png", "a.png")]
    write_jsonl(folder / "data.jsonl", rows)
    for workers in (1, 2):
        result = size(folder, "data.jsonl", image_rule=Dying(), workers=workers, on_bad="skip")
        assert [(bad.line, bad.kind) for bad in result.bad] == [(2, "reader")]
        assert result.table.line.tolist() == [1, 3]


class Dying(PixelRule):
    def count(self, width, height):
        if width == height:
            os._exit(9)
        return super().count(width, height)


def test_a_row_nested_deeper_than_processes_hand_on_is_bad(folder):
    deep = "[" * 900 + "]" * 900
    rows = ", ".join([json.dumps(GOOD), f'{{"conversations": {deep}}}', json.dumps(GOOD)])
    (folder / "list.json").write_text(f"[{rows}]")
    result = size(folder, "list.json", on_bad="skip")
    assert [bad.line for bad in result.bad] == [2]
    assert len(result.table) == 2
