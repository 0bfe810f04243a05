"""Every format behind an address: a server on this machine that gives ranges, read by fsspec's own driver and files.

Needs [data], [remote] and aiohttp, fsspec's driver of http://.
"""

import io
import json
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("fsspec", reason="the [remote] extra is not installed")
pytest.importorskip("aiohttp", reason="fsspec reads http:// by aiohttp: pip install aiohttp")
pyarrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
parquet = pytest.importorskip("pyarrow.parquet")
image = pytest.importorskip("PIL.Image", reason="the [data] extra is not installed")

from border_cases import served  # noqa: E402
from trimtab import describe, size_samples  # noqa: E402
from trimtab.address import Allowed, place_of  # noqa: E402
from trimtab.errors import SampleError  # noqa: E402
from trimtab.plan.file.records import PlannedRecords  # noqa: E402
from trimtab.samples.lengths import read_lengths  # noqa: E402
from trimtab.samples.sources import find_sources  # noqa: E402
from trimtab.samples.table import table_bytes  # noqa: E402

pytestmark = [
    pytest.mark.integration,
    pytest.mark.filterwarnings("ignore"),  # aiohttp closes its session late
]
RULE = describe("Qwen2.5-VL-7B").image_rule
NUM_RECORDS = 3000  # more than one chunk of a JSON Lines file


def encoded(width: int) -> bytes:
    file = io.BytesIO()
    image.new("RGB", (width, 56)).save(file, "PNG")
    return file.getvalue()


def records(*, carried: bool) -> list[dict[str, Any]]:
    pictures = [encoded(56 * (n + 1)) for n in range(3)]
    turns = [{"from": "human", "value": "<image> what?" + "x" * 800}, {"from": "gpt", "value": "a cat" + "x" * 300}]
    if carried:
        rows = [{"image": {"bytes": pictures[n % 3], "path": None}, "conversations": turns} for n in range(60)]
    else:
        rows = [{"image": [f"pics/{n % 3}.png"], "conversations": turns} for n in range(NUM_RECORDS)]
        for row in rows[6:]:  # images are fetched one by one
            row.update(image=[], conversations=turns[1:] * 2)
    return [{"id": f"r{n}", **row} for n, row in enumerate(rows)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    (folder / "pics").mkdir()
    for n in range(3):
        (folder / "pics" / f"{n}.png").write_bytes(encoded(56 * (n + 1)))
    rows = records(carried=False)
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "list.json").write_text(json.dumps(rows))
    table = pyarrow.Table.from_pylist(records(carried=True))
    parquet.write_table(table, folder / "rows.parquet", row_group_size=25)
    for name, make in (("stream.arrow", pyarrow.ipc.new_stream), ("file.feather", pyarrow.ipc.new_file)):
        with pyarrow.OSFile(str(folder / name), "wb") as sink, make(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=25)
    with tarfile.open(folder / "shard.tar", "w") as archive:
        for n, row in enumerate(records(carried=True)):
            record = json.dumps({key: value for key, value in row.items() if key != "image"}).encode()
            for name, content in ((f"{n}.json", record), (f"{n}.png", row["image"]["bytes"])):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                archive.addfile(member, io.BytesIO(content))
    (folder / "lengths.jsonl").write_text("".join(f'{{"num_tokens": {n + 1}}}\n' for n in range(50)))
    parquet.write_table(pyarrow.table({"num_tokens": list(range(1, 51))}), folder / "lengths.parquet")
    return folder


@pytest.fixture
def server(folder: Path) -> Iterator[tuple[str, list[str]]]:
    with served(folder) as (port, asked):
        yield f"http://127.0.0.1:{port}", asked


def size(data: Any, **options: Any) -> Any:
    return size_samples(data, image_rule=RULE, tokenizer=None, **options)


NAMES = ["data.jsonl", "list.json", "rows.parquet", "stream.arrow", "file.feather", "shard.tar"]


@pytest.mark.parametrize("name", NAMES)
def test_every_format_is_sized_behind_http_as_on_the_disk(folder, server, name):
    address, asked = server
    near, far = size(folder / name), size(f"{address}/{name}", workers=2)
    assert table_bytes(near.table) == table_bytes(far.table)
    assert far.files[0].blake2b == near.files[0].blake2b
    assert any("bytes=" in line for line in asked), "it was read in ranges"


@pytest.mark.parametrize("name", [name for name in NAMES if name != "shard.tar"])
def test_records_are_read_back_behind_http(folder: Path, server: tuple[str, list[str]], name: str) -> None:
    address, _ = server
    sized = size(folder / name)
    far, near = (PlannedRecords(sized.table, [place_of(f"{where}/{name}")]) for where in (address, folder))
    for row in (0, len(sized.table) // 2, len(sized.table) - 1):
        assert far[row] == near[row]


@pytest.mark.parametrize("name", ["lengths.jsonl", "lengths.parquet"])
def test_lengths_are_read_behind_http(server: tuple[str, list[str]], name: str) -> None:
    assert read_lengths(place_of(f"{server[0]}/{name}")).num_tokens.tolist() == list(range(1, 51))


def test_a_list_of_data_sets_opens_an_address_when_that_is_allowed(tmp_path, server):
    address, asked = server
    meta = tmp_path / "meta.json"
    meta.write_text(json.dumps({"a": {"annotation": f"{address}/data.jsonl", "root": address, "repeat_time": 1}}))
    with pytest.raises(SampleError, match="--allow-remote"):
        size(meta)
    assert asked == []
    assert [str(x.file) for x in find_sources(meta, None, Allowed(remote=True))] == [f"{address}/data.jsonl"]
    assert size(meta, allow_remote=True).table.num_images.tolist() == [1] * 6 + [0] * (NUM_RECORDS - 6)


def test_a_server_that_is_gone_is_one_sentence(folder: Path) -> None:
    with served(folder) as (port, _):
        address = f"http://127.0.0.1:{port}"
    for name in ("data.jsonl", "rows.parquet"):
        with pytest.raises(SampleError) as caught:
            size(f"{address}/{name}")
        assert "\n" not in str(caught.value)
        assert address in str(caught.value)
