"""Data behind addresses: sized, saved and read again by fsspec's local:// as from the disk, or refused."""

from __future__ import annotations

import importlib
import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from sample_sets import PixelRule, png, talk

from refusals import refused

fsspec = pytest.importorskip("fsspec", reason="the [remote] extra is not installed")

from trimtab.address import Address, Allowed, place_of  # noqa: E402
from trimtab.errors import SampleError  # noqa: E402
from trimtab.plan.file.records import PlannedRecords  # noqa: E402
from trimtab.samples.media import MediaFolders  # noqa: E402
from trimtab.samples.problems import BadRecordError  # noqa: E402
from trimtab.samples.size import size_samples  # noqa: E402
from trimtab.samples.table import SizingResult, table_bytes  # noqa: E402

RECORDS = [{"image": f"pics/{n}.png", "conversations": talk(f"<image> {n}")} for n in range(3)]

OPEN = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # readers hold files to their end


def size(data: Any, **options: Any) -> SizingResult:
    return size_samples(data, image_rule=PixelRule(), tokenizer=None, **options)


@pytest.fixture
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The address of a folder, as a driver of fsspec reads it: the same data as in the folder `near`."""
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
    files = {"data.jsonl": lines, "list.json": json.dumps(RECORDS).encode()}
    files |= {f"pics/{n}.png": png(10 * n + 10, 20) for n in range(3)}
    for name, content in files.items():
        for folder in ("near", "bucket"):
            (tmp_path / folder / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / folder / name).write_bytes(content)
    (tmp_path / "secret.png").write_bytes(png(9, 9))
    monkeypatch.chdir(tmp_path)
    return "local://bucket"


@OPEN
@pytest.mark.parametrize("name", ["data.jsonl", "list.json"])
def test_an_address_is_read_as_the_file_is(store: str, tmp_path: Path, name: str) -> None:
    near, far = size(tmp_path / "near" / name), size(f"{store}/{name}")
    assert table_bytes(near.table) == table_bytes(far.table)
    assert [file.path for file in far.files] == [f"{store}/{name}"]
    assert far.files[0].blake2b == near.files[0].blake2b
    assert table_bytes(size((tmp_path / "near" / name).as_uri()).table) == table_bytes(near.table)
    again = pickle.loads(pickle.dumps(PlannedRecords(far.table, [place_of(far.files[0].path)])))
    assert [again[row]["image"] for row in (2, 0, 1)] == [f"pics/{n}.png" for n in (2, 0, 1)]
    folder = MediaFolders(None, allowed=Allowed(), exif="ignore").of(again.place(0).file)
    assert folder.read(again[2]["image"]) == png(30, 20)


@OPEN
def test_columns_and_folders_are_read_behind_an_address(store: str, tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "set").mkdir()
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), tmp_path / "set" / "train-0.parquet")
    far = size("local://set", media_root=store)
    near = size(tmp_path / "set", media_root=tmp_path / "near")
    assert far.table.num_patches.tolist() == near.table.num_patches.tolist()
    assert far.table.source_names == ("set",)


def test_finished_chunks_are_kept_behind_an_address(store, tmp_path, monkeypatch):
    kept = place_of("local://chunks")
    first = size(f"{store}/data.jsonl", resume_dir=kept)
    assert len(list(kept.iterdir())) == 1
    monkeypatch.setattr("trimtab.samples.sizer._SizingChild.size", None)  # nothing is read again
    assert table_bytes(size(f"{store}/data.jsonl", resume_dir=kept).table) == table_bytes(first.table)


def test_a_plan_leads_to_its_addresses(store: str) -> None:
    from trimtab.cli.report import data_files
    from trimtab.plan.file.yaml import record_to_yaml
    from trimtab.samples.sources import find_sources

    (source,) = find_sources(f"{store}/data.jsonl")
    (file,) = data_files([replace(source, media_root=place_of(store))])
    assert (file.path, file.media_root) == (f"{store}/data.jsonl", store)
    assert store in record_to_yaml(file)


def test_no_image_lies_outside_the_address(store: str, tmp_path: Path) -> None:
    folder = MediaFolders(place_of(store), allowed=Allowed(), exif="ignore").of(tmp_path)
    assert folder.image_size(f"{store}/pics/0.png") == (10, 20)
    assert folder.image_size("pics/../pics/0.png") == (10, 20)
    outside = ("../secret.png", "/secret.png", "s3://bucket/pics/0.png", "%2e%2e/secret.png", "local://secret.png")
    for name in outside:
        with pytest.raises(BadRecordError) as caught:
            folder.image_size(name)
        assert caught.value.kind == "path"
        assert store in str(caught.value)
    with refused(BadRecordError, "absent.png"):
        folder.image_size("absent.png")
    allowed = MediaFolders(place_of(store), allowed=Allowed(outside=True), exif="ignore").of(tmp_path)
    assert allowed.image_size("../secret.png") == (9, 9)
    with pytest.raises(BadRecordError):  # another store is another place than the user named
        allowed.image_size("s3://bucket/pics/0.png")


def test_lines_are_read_through_the_files_of_fsspec_itself(tmp_path: Path) -> None:
    """They take no size in `readline`, as those of s3fs, gcsfs and hf:// do not."""
    from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

    class Buffered(AbstractBufferedFile):  # type: ignore[misc]
        def _fetch_range(self, start: int, end: int) -> bytes:
            return (tmp_path / "data.jsonl").read_bytes()[start:end]

    class Store(AbstractFileSystem):  # type: ignore[misc]
        protocol = "buffered"

        def _open(self, path: str, mode: str = "rb", **_: Any) -> Buffered:
            return Buffered(self, path, mode, size=(tmp_path / "data.jsonl").stat().st_size)

    fsspec.register_implementation("buffered", Store, clobber=True)
    (tmp_path / "data.jsonl").write_bytes(b'{"a": 1}\n{"b": 2}\n')
    with place_of("buffered://bucket/data.jsonl").open("rb") as file:
        assert (file.readline(4), file.readline(), file.tell(), file.read()) == (b'{"a"', b": 1}\n", 9, b'{"b": 2}\n')


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("absent://bucket/a.jsonl", ("absent://bucket/a.jsonl", "absent://")),
        ("nowhere://bucket/a.jsonl", "nowhere://"),
        ("local://bucket/absent.jsonl", "local://bucket/absent.jsonl"),
    ],
)
def test_an_address_that_cannot_be_read_is_quoted_whole(address, sentence, monkeypatch):
    absent = {"class": "trimtab_absent_driver.Files", "err": "Install it"}
    monkeypatch.setitem(importlib.import_module("fsspec.registry").known_implementations, "absent", absent)
    for given in (address, Path(address)):  # a Path has lost a slash
        with refused(SampleError, sentence):
            size(given)


def test_fsspec_itself_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with refused(SampleError):
        size("s3://bucket/a.jsonl")


def test_an_address_is_a_path_of_its_text() -> None:
    address = place_of("s3://bucket/x/a.tar.gz?version=1")
    assert isinstance(address, Address)
    assert (str(address.parent), address.name, address.suffix) == ("s3://bucket/x", "a.tar.gz?version=1", ".gz")
    assert (str(address.parent / "b.json"), str(place_of("memory://a").parent)) == ("s3://bucket/x/b.json", "memory://")
    assert pickle.loads(pickle.dumps(address)) == address == place_of(Path(str(address)))
    assert not isinstance(place_of("C:/x"), Address)


def test_lengths_and_saved_tables_are_read_behind_an_address(store: str, tmp_path: Path) -> None:
    from trimtab.samples.lengths import read_lengths
    from trimtab.samples.table import save_sizing, sized_files

    (tmp_path / "bucket" / "lengths.jsonl").write_bytes(b'{"num_tokens": 7}\n{"num_tokens": 9}\n')
    assert read_lengths(place_of(f"{store}/lengths.jsonl")).num_tokens.tolist() == [7, 9]
    sized = size(f"{store}/data.jsonl")
    save_sizing(sized, tmp_path / "bucket" / "sizes.npz")
    saved = place_of(f"{store}/sizes.npz")
    assert table_bytes(read_lengths(saved)) == table_bytes(sized.table)
    assert sized_files(saved) == sized.files
