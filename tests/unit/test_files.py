"""files.py: files written whole or not at all, and told apart."""

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from refusals import refused
from trimtab.files import _sweep, fingerprint_file, open_atomically, write_atomically, written_together


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
    with refused(OSError):
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
    with refused(TypeError), open_atomically(target) as file:
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
        with refused(IsADirectoryError):
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


def test_a_full_disk_a_file_limit_and_a_read_only_folder_name_the_file_and_leave_nothing(tmp_path, monkeypatch):
    target = tmp_path / "new" / "folder" / "plan.yaml"
    for number in (errno.ENOSPC, errno.EFBIG, errno.EROFS):

        def sync(_: int, number: int = number) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", sync)
        with pytest.raises(OSError) as caught:
            write_atomically(target, b"never")
        assert (caught.value.errno, caught.value.filename) == (number, str(target))
        assert list(tmp_path.iterdir()) == []


def test_files_written_together_appear_together_or_not_at_all(tmp_path: Path) -> None:
    for name in ("table", "plan"):
        write_atomically(tmp_path / name, "old")

    @written_together()
    def fail() -> None:
        write_atomically(tmp_path / "table", "new")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"table": "old", "plan": "old"}
    with written_together():
        write_atomically(tmp_path / "table", "new")
        with written_together():
            write_atomically(tmp_path / "plan", "new")
        assert (tmp_path / "plan").read_text() == "old"
    assert {p.name: p.read_text() for p in tmp_path.iterdir()} == {"table": "new", "plan": "new"}


@pytest.mark.parametrize("calls", range(5))
def test_a_kill_while_files_take_their_names_mixes_no_old_with_new(tmp_path, monkeypatch, calls):
    """The process ends at any call that changes the folder's names."""
    for name in ("a", "b", "head"):
        write_atomically(tmp_path / name, "old")

    class Killed(BaseException):
        pass

    left = calls

    def counted(act: Callable[..., object]) -> Callable[..., object]:
        def call(self: Path, *args: object, **how: object) -> object:
            nonlocal left
            if self.suffix != ".tmp" or args:  # not the removal of what is aside, which a kill would leave out
                left -= 1
                if left < 0:
                    raise Killed
            return act(self, *args, **how)

        return call

    @written_together()
    def write() -> None:
        for name in ("a", "b", "head"):
            write_atomically(tmp_path / name, "new")
        monkeypatch.setattr(Path, "unlink", counted(Path.unlink))
        monkeypatch.setattr(Path, "replace", counted(Path.replace))

    with pytest.raises(Killed):
        write()
    found = {p.name: p.read_text() for p in tmp_path.iterdir()}
    assert len(set(found.values())) <= 1
    assert "head" not in found or len(found) == 3


def test_what_a_killed_writer_left_is_swept_and_a_live_writers_file_stays(tmp_path: Path) -> None:
    code = (
        "import os, pathlib, trimtab.files as f\n"
        f"with f.open_atomically(pathlib.Path({str(tmp_path / 'plan')!r})) as file: os._exit(9)"
    )
    assert subprocess.run([sys.executable, "-c", code]).returncode == 9
    assert len(list(tmp_path.iterdir())) == 1
    with open_atomically(tmp_path / "live") as file:
        assert len(list(tmp_path.iterdir())) == 1
        _sweep.cache_clear()
        write_atomically(tmp_path / "other", b"")
        file.write(b"whole")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["live", "other"]


def test_a_link_stays_and_its_file_is_written_and_a_pipe_is_written_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "far")
    write_atomically(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "far").read_text() == "text"
    write_atomically(Path(os.devnull), "text")
    assert Path(os.devnull).is_char_device()
    with refused(OSError):
        write_atomically(Path("/dev/full"), "text")
