"""The border: no file from outside names another file, or an address, that the user did not name."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from sample_sets import PixelRule, png, talk, write_jsonl

from refusals import refused

pyarrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")

from border_cases import playlists, served, spoken, write_video_set  # noqa: E402
from trimtab.address import Address, Allowed, fetch, place_inside, place_of  # noqa: E402
from trimtab.errors import SampleError, TrimtabError  # noqa: E402
from trimtab.files import write_atomically  # noqa: E402
from trimtab.samples.size import size_samples  # noqa: E402
from trimtab.specs import Clip, ClipCounts, ImageCounts  # noqa: E402


def size(data: Any, **options: Any) -> Any:
    return size_samples(data, image_rule=PixelRule(), tokenizer=None, **options)


# -- places -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "allowed", "found"),
    [
        ("a.txt", Allowed(), "in/a.txt"),
        ("sub/../a.txt", Allowed(), "in/a.txt"),
        ("absent.txt", Allowed(), "in/absent.txt"),
        ("../out.txt", Allowed(), None),
        ("link.txt", Allowed(), None),
        ("/etc/hosts", Allowed(), None),
        ("../out.txt", Allowed(outside=True), "out.txt"),
        ("s3://bucket/a.txt", Allowed(outside=True), None),
        ("http:/host/a.txt", Allowed(), None),
        ("a\0b", Allowed(outside=True, remote=True), None),
    ],
)
def test_a_name_leads_into_its_folder_or_is_refused(tmp_path, name, allowed, found):
    (tmp_path / "in" / "sub").mkdir(parents=True)
    for file in ("in/a.txt", "out.txt"):
        (tmp_path / file).write_text(file)
    (tmp_path / "in" / "link.txt").symlink_to(tmp_path / "out.txt")
    if found is None:
        with pytest.raises(SampleError):
            place_inside(name, [tmp_path / "in"], "meta.json", allowed)
        return
    place = place_inside(name, [tmp_path / "in"], "meta.json", allowed)
    assert place.resolve() == (tmp_path / found).resolve()


def test_an_address_is_opened_below_one_that_the_user_named_or_when_allowed() -> None:
    bucket = place_of("s3://bucket/sets")
    assert str(place_inside("s3://bucket/sets/a.jsonl", [bucket], "meta.json", Allowed())) == "s3://bucket/sets/a.jsonl"
    for name in ("s3://bucket/other.jsonl", "s3://bucket/sets/%2e%2e/other.jsonl", "https://host/sets/a.jsonl"):
        with refused(SampleError, "--allow-remote"):
            place_inside(name, [bucket], "meta.json", Allowed(outside=True))
        assert isinstance(place_inside(name, [bucket], "meta.json", Allowed(remote=True)), Address)


def write_meta(folder: Path, annotation: str, root: str = "") -> Path:
    meta = folder / "sets" / "meta.json"
    meta.parent.mkdir(exist_ok=True)
    meta.write_text(json.dumps({"a": {"annotation": annotation, "root": root, "repeat_time": 1}}))
    return meta


def test_a_list_of_data_sets_makes_no_request_and_reads_nothing_outside(tmp_path, monkeypatch):
    (tmp_path / "pic.png").write_bytes(png(40, 20))
    records = write_jsonl(tmp_path / "a.jsonl", [{"image": "pic.png", "conversations": talk("<image>")}])
    with served(tmp_path) as (port, asked):
        for annotation, root in (
            (f"http://127.0.0.1:{port}/a.jsonl", ""),
            (f"ftp://127.0.0.1:{port}/a.jsonl", ""),
            ("../a.jsonl", ""),
            (str(records), ""),
        ):
            with pytest.raises(SampleError):
                size(write_meta(tmp_path, annotation, root))
        inside = write_jsonl(tmp_path / "sets" / "b.jsonl", [{"image": "pic.png", "conversations": talk("<image>")}])
        for root in (f"http://127.0.0.1:{port}/", "/", str(tmp_path)):
            with pytest.raises(SampleError):
                size(write_meta(tmp_path, inside.name, root))
        assert asked == []
    monkeypatch.chdir(tmp_path / "sets")
    assert size(write_meta(tmp_path, "../a.jsonl", ".."), allow_outside=True).table.num_images.tolist() == [1]
    assert size(write_meta(tmp_path, str(records)), media_root=tmp_path).table.num_images.tolist() == [1]


def test_no_link_in_a_folder_leads_out_of_it(tmp_path: Path) -> None:
    for inner in ("out", "file", "folder", "saved", "splits"):
        (tmp_path / inner).mkdir()
    write_jsonl(tmp_path / "out" / "a.jsonl", [{"conversations": talk("hello")}])
    (tmp_path / "out" / "state.json").write_text('{"_data_files": [{"filename": "a.jsonl"}]}')
    (tmp_path / "file" / "a.jsonl").symlink_to("../out/a.jsonl")
    (tmp_path / "folder" / "in").symlink_to(tmp_path / "out")
    (tmp_path / "saved" / "state.json").symlink_to(tmp_path / "out" / "state.json")
    (tmp_path / "splits" / "dataset_dict.json").write_text('{"splits": ["in"]}')
    (tmp_path / "splits" / "in").symlink_to("../out")
    for name in ("file", "folder", "saved", "splits"):
        with refused(SampleError, "--allow-outside"):
            size(tmp_path / name)
    for name in ("file", "folder", "splits"):
        assert len(size(tmp_path / name, allow_outside=True).table) == 1
    (tmp_path / "out" / "b.jsonl").symlink_to("a.jsonl")
    (tmp_path / "out" / "state.json").unlink()
    assert len(size(tmp_path / "out").table) == 2


def test_results_are_written_to_no_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("http://host/out/plan.yaml", "s3:/bucket/x.npz"):
        with refused(TrimtabError):
            write_atomically(Path(name), b"x")
    assert list(tmp_path.iterdir()) == []
    Path("s3:").mkdir()
    write_atomically(Path("s3:/x.npz"), b"x")


# -- images of records behind addresses -------------------------------------------------------------------------------


def test_an_image_behind_an_address_is_fetched_when_that_is_allowed(tmp_path: Path) -> None:
    (tmp_path / "pic.png").write_bytes(png(40, 20))
    with served(tmp_path) as (port, asked):
        rows = [
            {"image": f"http://127.0.0.1:{port}/{name}", "conversations": talk("<image>")}
            for name in ("pic.png?v=//1", "absent.png")
        ]
        data = write_jsonl(tmp_path / "a.jsonl", rows)
        for how in ({}, {"allow_outside": True}):
            with refused(SampleError, "--allow-remote"):
                size(data, **how)
        assert asked == []
        found = size(data, allow_remote=True, on_bad="skip")
    assert (
        found.table.num_patches.tolist()
        == size(write_jsonl(tmp_path / "b.jsonl", [{**rows[0], "image": "pic.png"}])).table.num_patches.tolist()
    )
    assert [(bad.line, bad.kind) for bad in found.bad] == [(2, "path")]


@pytest.mark.parametrize("scheme", ["local", "zip", "dir", "reference", "filecache", "git", "data"])
def test_an_address_of_a_record_leads_to_no_file_here(tmp_path: Path, scheme: str) -> None:
    pytest.importorskip("fsspec", reason="the [remote] extra is not installed")
    (tmp_path / "pic.png").write_bytes(png(40, 20))
    (tmp_path / "in").mkdir()
    for name in (
        f"{scheme}://{tmp_path}/pic.png",
        f"{scheme}://pic.png::file://{tmp_path}/pic.png",
        f"memory://a::file://{tmp_path}/pic.png",
    ):
        data = write_jsonl(tmp_path / "in" / "a.jsonl", [{"image": name, "conversations": talk("<image>")}])
        with pytest.raises(SampleError):
            size(data, allow_remote=True)
        with pytest.raises(SampleError):
            size(write_meta(tmp_path, name), allow_remote=True)


def test_what_is_fetched_has_an_end(tmp_path: Path) -> None:
    """A large file, an endless one, a silent server, and addresses that lead on to a file or to themselves."""
    (tmp_path / "large").write_bytes(bytes(5000))
    (tmp_path / "secret").write_bytes(b"secret")
    with served(tmp_path) as (port, _):
        assert fetch(f"http://127.0.0.1:{port}/large", most_bytes=5000) == bytes(5000)
        with refused(SampleError, "4,999"):
            fetch(f"http://127.0.0.1:{port}/large", most_bytes=4999)
    with spoken([b"HTTP/1.1 200 OK\r\n\r\n", *[b"x" * 100] * 10_000]) as port, refused(SampleError, "0.5 s"):
        fetch(f"http://127.0.0.1:{port}/", seconds=0.5)
    with spoken([]) as port, refused(SampleError, "0.4 s"):
        fetch(f"http://127.0.0.1:{port}/", seconds=0.4)
    for place, said in ((f"file://{tmp_path}/secret", "302"), ("ftp://127.0.0.1/secret", "ftp"), ("/", "302")):
        lines = f"HTTP/1.1 302 Found\r\nLocation: {place}\r\nContent-Length: 0\r\nConnection: close\r\n\r\n"
        with spoken([lines.encode()], times=20) as port, refused(SampleError, said):
            fetch(f"http://127.0.0.1:{port}/")


def test_a_named_server_leads_on_to_itself_alone(tmp_path: Path) -> None:
    """A store that the user named does not lead readers into another network."""
    pytest.importorskip("aiohttp", reason="the [remote] extra is not installed")
    (tmp_path / "pic.png").write_bytes(png(40, 20))
    record = json.dumps({"image": "pic.png", "conversations": talk("<image>")}).encode() + b"\n"
    (tmp_path / "a.jsonl").write_bytes(record)
    with (
        served(tmp_path) as (private, asked),
        served(tmp_path, moved={"/pic.png": f"//localhost:{private}/pic.png"}) as (port, _),
    ):
        address = f"http://127.0.0.1:{port}/a.jsonl"
        with refused(SampleError, "--allow-remote"):
            size(address)
        assert asked == []
        assert size(address, allow_remote=True).table.num_images.tolist() == [1]
    with served(tmp_path, moved={"/pic.png": "/further.png", "/further.png": "/same.png"}) as (port, _):
        (tmp_path / "same.png").write_bytes(png(40, 20))
        assert size(f"http://127.0.0.1:{port}/a.jsonl").table.num_images.tolist() == [1]


def test_a_name_makes_no_line_of_its_own_in_a_message(tmp_path: Path) -> None:
    odd = "http://127.0.0.1:9/\x1b[2J\ntrimtab: all is well"
    with pytest.raises(SampleError) as fetched:
        fetch(odd)
    with pytest.raises(SampleError) as named:
        place_inside(odd, [tmp_path], "meta.json", Allowed())
    assert all(str(error.value).isprintable() for error in (fetched, named))


# -- videos -----------------------------------------------------------------------------------------------------------


class EveryClip:
    """Counts one token a frame."""

    name = "frames"

    def prepare(self, clips: Any) -> None:
        return

    def count_clip(self, clip: Clip) -> ClipCounts:
        image = ImageCounts(
            patches=clip.num_frames, tokens=clip.num_frames, tiles=1, patches_sq=1, patches_windowed=1, text=None
        )
        return ClipCounts(image=image, placeholder="<video>", soft="<video>")


def test_a_video_is_no_list_of_other_places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("av", reason="videos are read by PyAV: pip install 'trimtab[video]'")
    monkeypatch.chdir(tmp_path)
    with served(tmp_path) as (port, asked):
        files = playlists(port)
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        (tmp_path / "secret.mp4").write_bytes(b"x")
        with pytest.raises(SampleError) as caught:
            size(write_video_set(tmp_path, [*files]), clip_rule=EveryClip(), on_bad="skip")
        assert asked == []
    assert "4 video" in str(caught.value)


# -- columns ----------------------------------------------------------------------------------------------------------


def write_columns(folder: Path) -> list[Path]:
    rows = [
        {"id": f"r{n}", "conversations": talk("<image> what?" * n, "a"), "image": {"bytes": b"1234" * n, "path": None}}
        for n in range(30)
    ]
    table = pyarrow.Table.from_pylist(rows)
    with pyarrow.OSFile(str(folder / "s.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    with pyarrow.OSFile(str(folder / "f.arrow"), "wb") as sink, pyarrow.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=10)
    pytest.importorskip("pyarrow.parquet").write_table(table, folder / "p.parquet", row_group_size=10)
    return [folder / name for name in ("s.arrow", "f.arrow", "p.parquet")]


@pytest.mark.parametrize("kind", [0, 1, 2])
def test_damaged_columns_are_bad_samples_or_a_refused_file(tmp_path: Path, kind: int) -> None:
    """Wrong offsets, lengths and names: each of these once ended the process by SIGBUS or raised SystemError."""
    path = write_columns(tmp_path)[kind]
    content = path.read_bytes()
    for seed in range(40):
        draw, damaged = random.Random(seed), bytearray(content)
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(len(damaged) - 4)
            damaged[at : at + 4] = draw.choice([b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", bytes(4), draw.randbytes(4)])
        path.write_bytes(bytes(damaged))
        try:
            result = size(path, on_bad="skip")
        except SampleError:
            continue
        assert result.num_read <= 33


def test_one_wrong_offset_costs_its_group_of_rows(tmp_path: Path) -> None:
    path = tmp_path / "s.arrow"
    texts = pyarrow.array([f"text number {n}" for n in range(4)])
    batch = pyarrow.record_batch([texts], names=["id"])
    with pyarrow.OSFile(str(path), "wb") as sink, pyarrow.ipc.new_stream(sink, batch.schema) as writer:
        writer.write_batch(batch)
    content = path.read_bytes()
    offsets = b"".join(n.to_bytes(4, "little") for n in (0, 13, 26, 39, 52))
    assert content.count(offsets) == 1
    wrong = offsets.replace((26).to_bytes(4, "little"), (2**30).to_bytes(4, "little"))
    path.write_bytes(content.replace(offsets, wrong))
    with refused(SampleError, "1"):
        size(path, on_bad="skip")
