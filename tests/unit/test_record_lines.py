"""samples/records.py: where records are, and every line of a file by its byte offset."""

from contextlib import closing
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trimtab.samples import records
from trimtab.samples.records import Lines, line_starts


@given(
    content=st.lists(st.sampled_from([b"\n", b"a", b" ", b"\r\n", b"\xc3\xa9", b"{}"]), min_size=1).map(b"".join),
    bom=st.booleans(),
    block=st.integers(1, 40),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_are_those_that_python_reads(tmp_path, monkeypatch, content, bom, block):
    monkeypatch.setattr(records, "_SCAN_BYTES", block)
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
