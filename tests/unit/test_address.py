"""Data behind addresses: sized, saved and read again by fsspec's memory:// as from the disk, or refused."""

from __future__ import annotations

import importlib
import json
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sample_sets import PixelRule, png, talk

fsspec = pytest.importorskip("fsspec", reason="the [remote] extra is not installed")

from trimtab.address import Address, place_of  # noqa: E402
from trimtab.errors import SampleError  # noqa: E402
from trimtab.runtime.data.records import PlannedRecords  # noqa: E402
from trimtab.samples.media_folders import MediaFolders  # noqa: E402
from trimtab.samples.problems import BadRecordError  # noqa: E402
from trimtab.samples.size import size_samples  # noqa: E402
from trimtab.samples.table import SizingResult, table_bytes  # noqa: E402

RECORDS = [{"image": f"pics/{n}.png", "conversations": talk(f"<image> {n}")} for n in range(3)]


def size(data: Any, **options: Any) -> SizingResult:
    return size_samples(data, image_rule=PixelRule(), tokenizer=None, **options)


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Path]:
    """The same data below memory://bucket and in a folder, which is returned."""
    memory = fsspec.filesystem("memory")
    lines = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
    files = {"data.jsonl": lines, "list.json": json.dumps(RECORDS).encode()}
    files |= {f"pics/{n}.png": png(10 * n + 10, 20) for n in range(3)}
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(content)
        memory.pipe_file(f"/bucket/{name}", content)
    memory.pipe_file("/secret.png", png(9, 9))
    yield tmp_path
    memory.rm("/", recursive=True)


@pytest.mark.parametrize("name", ["data.jsonl", "list.json"])
def test_an_address_is_read_as_the_file_is(store: Path, name: str) -> None:
    near, far = size(store / name), size(f"memory://bucket/{name}")
    assert table_bytes(near.table) == table_bytes(far.table)
    assert [file.path for file in far.files] == [f"memory://bucket/{name}"]
    assert far.files[0].blake2b == near.files[0].blake2b
    assert table_bytes(size((store / name).as_uri()).table) == table_bytes(near.table)
    again = pickle.loads(pickle.dumps(PlannedRecords(far.table, [place_of(far.files[0].path)])))
    assert [again[row]["image"] for row in (2, 0, 1)] == [f"pics/{n}.png" for n in (2, 0, 1)]
    folder = MediaFolders(None, allow_outside=False, exif="ignore").of(again.place(0).file)
    assert folder.read(again[2]["image"]) == png(30, 20)


def test_columns_and_folders_are_read_behind_an_address(store: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.Table.from_pylist(RECORDS), store / "a.parquet")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/set/train-0.parquet", (store / "a.parquet").read_bytes())
    far = size("memory://set", media_root="memory://bucket")
    assert far.table.num_patches.tolist() == size(store / "a.parquet").table.num_patches.tolist()
    assert far.table.source_names == ("set",)


def test_finished_chunks_are_kept_behind_an_address(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = place_of("memory://chunks")
    first = size("memory://bucket/data.jsonl", resume_dir=kept)
    assert len(list(kept.iterdir())) == 1
    monkeypatch.setattr("trimtab.samples.records._read_lines", None)  # nothing is read again
    assert table_bytes(size("memory://bucket/data.jsonl", resume_dir=kept).table) == table_bytes(first.table)


def test_a_plan_leads_to_its_addresses(store: Path, tmp_path: Path) -> None:
    from trimtab.cli.show import data_files
    from trimtab.plan.file.yaml import record_to_yaml
    from trimtab.samples.sources import find_sources

    sources = find_sources("memory://bucket/data.jsonl", "memory://bucket/data.jsonl=memory://bucket")
    (file,) = data_files(sources)
    assert (file.path, file.media_root) == ("memory://bucket/data.jsonl", "memory://bucket")
    assert "memory://bucket" in record_to_yaml(file)


def test_no_image_lies_outside_the_address(store: Path) -> None:
    folder = MediaFolders(place_of("memory://bucket"), allow_outside=False, exif="ignore").of(store)
    assert folder.image_size("memory://bucket/pics/0.png") == (10, 20)
    assert folder.image_size("pics/../pics/0.png") == (10, 20)
    for name in ("../secret.png", "/secret.png", "memory://secret.png", "s3://bucket/pics/0.png", "%2e%2e/secret.png"):
        with pytest.raises(BadRecordError, match="lies outside the media folder memory://bucket"):
            folder.image_size(name)
    with pytest.raises(BadRecordError, match=r"image absent.png cannot be read below memory://bucket: No such file"):
        folder.image_size("absent.png")
    allowed = MediaFolders(place_of("memory://bucket"), allow_outside=True, exif="ignore").of(store)
    assert allowed.image_size("../secret.png") == (9, 9)


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        (
            "absent://bucket/a.jsonl",
            r"absent://bucket/a.jsonl was named, .* no driver for absent:// here \(Install it\)",
        ),
        ("nowhere://bucket/a.jsonl", r"no driver for nowhere:// here \(Protocol not known: nowhere\)"),
        ("memory://bucket/absent.jsonl", r"cannot read memory://bucket/absent.jsonl: No such file"),
    ],
)
def test_an_address_that_cannot_be_read_is_quoted_whole(
    address: str, sentence: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    absent = {"class": "trimtab_absent_driver.Files", "err": "Install it"}
    monkeypatch.setitem(importlib.import_module("fsspec.registry").known_implementations, "absent", absent)
    for given in (address, Path(address)):  # a Path has lost a slash
        with pytest.raises(SampleError, match=sentence):
            size(given)


def test_fsspec_itself_may_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "fsspec", None)
    with pytest.raises(
        SampleError, match=r"fsspec, which reads such addresses, is not installed: pip install 'trimtab"
    ):
        size("s3://bucket/a.jsonl")


def test_an_address_is_a_path_of_its_text() -> None:
    address = place_of("s3://bucket/x/a.tar.gz?version=1")
    assert isinstance(address, Address)
    assert (str(address.parent), address.name, address.suffix) == ("s3://bucket/x", "a.tar.gz?version=1", ".gz")
    assert (str(address.parent / "b.json"), str(place_of("memory://a").parent)) == ("s3://bucket/x/b.json", "memory://")
    assert pickle.loads(pickle.dumps(address)) == address == place_of(Path(str(address)))
    assert not isinstance(place_of("C:/x"), Address)


def test_lengths_and_saved_tables_are_read_behind_an_address(store: Path) -> None:
    from trimtab.samples.read import read_lengths
    from trimtab.samples.table import save_sizing, sized_files

    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/lengths.jsonl", b'{"num_tokens": 7}\n{"num_tokens": 9}\n')
    assert read_lengths(place_of("memory://bucket/lengths.jsonl")).num_tokens.tolist() == [7, 9]
    sized = size("memory://bucket/data.jsonl")
    save_sizing(sized, store / "sizes.npz")
    memory.pipe_file("/bucket/sizes.npz", (store / "sizes.npz").read_bytes())
    saved = place_of("memory://bucket/sizes.npz")
    assert table_bytes(read_lengths(saved)) == table_bytes(sized.table)
    assert sized_files(saved) == sized.files
