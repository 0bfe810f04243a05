"""files.py: files written whole or not at all, and told apart."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trimtab.files import fingerprint_file, open_atomically, write_atomically


def test_a_file_appears_whole_with_the_folders_it_needs(tmp_path: Path) -> None:
    target = tmp_path / "a" / "b.txt"
    write_atomically(target, "text é")
    assert target.read_bytes() == "text é".encode()
    assert [p.name for p in target.parent.iterdir()] == ["b.txt"]


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = tmp_path / "plan.yaml"
    write_atomically(target, "old")

    def fail(self: Path, other: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(target, "new")
    assert target.read_text(encoding="utf-8") == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["plan.yaml"]


def test_a_file_written_in_pieces_appears_at_the_end_or_not_at_all(tmp_path: Path) -> None:
    target = tmp_path / "new" / "data.jsonl"
    with open_atomically(target) as file:
        file.write(b"one ")
        file.flush()
        assert not target.exists()
        file.write(b"two")
    assert target.read_bytes() == b"one two"
    with pytest.raises(TypeError, match="bytes-like"), open_atomically(target) as file:
        file.writelines([b"half", "text"])  # type: ignore[list-item]
    assert target.read_bytes() == b"one two"
    assert [p.name for p in target.parent.iterdir()] == ["data.jsonl"]


def test_writers_of_one_name_do_not_meet_and_the_last_one_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Processes of two machines that share a folder may have one number."""
    monkeypatch.setattr(os, "getpid", lambda: 7)
    target = tmp_path / "run.jsonl"
    with open_atomically(target) as first, open_atomically(target) as second:
        first.write(b"first")
        second.write(b"second")
        assert len(list(tmp_path.iterdir())) == 2
    assert target.read_bytes() == b"first"
    assert [p.name for p in tmp_path.iterdir()] == ["run.jsonl"]
    plain = tmp_path / "plain"
    plain.touch()
    assert target.stat().st_mode == plain.stat().st_mode, "what the umask gives"


def test_a_folder_is_no_file_to_write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for path in (Path("."), Path(".."), Path("/"), tmp_path):
        with pytest.raises(IsADirectoryError, match="Is a directory"):
            write_atomically(path, "text")
    assert list(tmp_path.iterdir()) == []


def test_a_fingerprint_sees_size_head_and_tail(tmp_path: Path) -> None:
    file = tmp_path / "data"
    content = bytearray(3 * 2**20)
    file.write_bytes(content)
    before = fingerprint_file(file)
    for position in (0, 2**20 - 1, 2**21, len(content) - 1):
        changed = bytearray(content)
        changed[position] = 1
        file.write_bytes(changed)
        assert fingerprint_file(file) != before
    file.write_bytes(content + b"\0")
    assert fingerprint_file(file) != before
    file.write_bytes(b"")
    assert fingerprint_file(file) != before
