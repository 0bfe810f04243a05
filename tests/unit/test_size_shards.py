"""Sizing by the shard: any number of them, in any order, joined to the bytes of one pass."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from sample_sets import PixelRule, talk, write_jsonl

from trimtab.samples import records
from trimtab.samples.size import size_samples
from trimtab.samples.table import SizingResult, save_sizing


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Two files of 11 and 4 chunks or so, with bad and blank lines."""
    monkeypatch.setattr(records, "CHUNK_BYTES", 500)
    rows: list[Any] = [{"id": str(n), "conversations": talk("cat " * (n % 7))} for n in range(90)]
    rows[7], rows[40] = b"", b"broken"
    return [write_jsonl(tmp_path / "a.jsonl", rows), write_jsonl(tmp_path / "b.jsonl", rows[:30])]


def size(files: list[Path], **options: Any) -> SizingResult:
    return size_samples(files, image_rule=PixelRule(), tokenizer=None, on_bad="skip", **options)


def test_shards_sized_apart_are_joined_to_the_bytes_of_one_pass(
    files: list[Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = tmp_path / "kept"
    told = [size(files, shard=(number, 3), resume_dir=kept) for number in (2, 3, 1, 2)]  # one of them twice
    assert {len(result.table) for result in told} == {0}
    save_sizing(size(files), tmp_path / "whole.npz")
    num_chunks = sum(len(list(records.list_chunks(file))) for file in files)
    assert sum(int(result.assumptions[0].split()[-4]) for result in told[:3]) == len(list(kept.iterdir())) == num_chunks
    monkeypatch.setattr("trimtab.samples.sizer._SizingChild.size", None)  # nothing is read again
    save_sizing(size(files, resume_dir=kept), tmp_path / "joined.npz")
    assert (tmp_path / "joined.npz").read_bytes() == (tmp_path / "whole.npz").read_bytes()
