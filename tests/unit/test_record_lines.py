"""samples/record_lines.py: where records are, and every line of a file by its byte offset."""

from __future__ import annotations

import dataclasses
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from plan_cases import tile_samples

from trimtab.errors import SampleError
from trimtab.samples import record_lines
from trimtab.samples.record_lines import Lines, line_starts, places_of, refuse_other_files


@given(
    content=st.lists(st.sampled_from([b"\n", b"a", b" ", b"\r\n", b"\xc3\xa9", b"{}"]), min_size=1).map(b"".join),
    bom=st.booleans(),
    block=st.integers(1, 40),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_are_those_that_python_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, content: bytes, bom: bool, block: int
) -> None:
    monkeypatch.setattr(record_lines, "_SCAN_BYTES", block)
    path = tmp_path / "lines.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + content)
    with path.open("rb") as file:
        expected = [line.removeprefix(b"\xef\xbb\xbf").strip() for line in file]
    starts = line_starts(path)
    with closing(Lines(path)) as lines:
        assert [lines.read(start) for start in starts.tolist()] == expected


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert len(line_starts(tmp_path / "empty")) == 0


def test_a_table_says_where_its_records_are() -> None:
    samples = tile_samples(3)
    assert places_of(samples).file.tolist() == [0, 0, 0]
    assert places_of(samples).line.tolist() == [1, 2, 3]
    moved = dataclasses.replace(
        samples, file_index=np.array([0, 1, 1], np.int32), line=np.array([4, 1, 9]), num_files=2
    )
    assert places_of(moved).file.tolist() == [0, 1, 1]
    assert places_of(moved).line.tolist() == [4, 1, 9]


def test_as_many_files_as_were_sized_must_be_named() -> None:
    refuse_other_files(tile_samples(3), [Path("a")])
    with pytest.raises(
        SampleError, match=r"sized from 1 files, and 0 were named .none.: name the files that were sized"
    ):
        refuse_other_files(tile_samples(3), [])
