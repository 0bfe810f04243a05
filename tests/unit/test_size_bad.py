"""Sizing a data set: every kind of bad sample is named and left out, and nothing else is raised."""

import json
import os
from pathlib import Path

import pytest
import yaml
from sample_sets import png, png_of, talk, tar_bytes, write_jsonl, write_tokenizer
from size_cases import GOOD, fill_folder, parquet, pyarrow, size

from refusals import refused
from trimtab.errors import SampleError


@pytest.fixture
def folder(tmp_path):
    return fill_folder(tmp_path)


BAD_ROWS = yaml.safe_load(Path(__file__).with_name("bad_rows.yaml").read_text(encoding="utf-8"))


def row_of(case):
    """A row of the table, as JSON or as bytes."""
    if "repeat" in case:
        parts = case["repeat"]
        return "".join(text * times for text, times in zip(parts[::2], parts[1::2], strict=True)).encode()
    if "text" in case or "hex" in case:
        return case["text"].encode() if "text" in case else bytes.fromhex(case["hex"])
    if "good" in case:
        return {**case["good"], **GOOD}
    if "user" in case:
        return {"messages": [{"role": "user", "content": case["user"]}]}
    return case["row"] if "row" in case else {"conversations": talk(case["say"]), **case.get("more", {})}


@pytest.fixture
def trap(folder):
    return fill_trap(folder)


def fill_trap(folder):
    """Everything a hostile row can name."""
    outside = folder.parent / "outside.png"
    outside.write_bytes(png(9, 9))
    (folder / "link.png").symlink_to(outside)
    (folder / "inner.png").symlink_to("sub/c.png")
    (folder / "away").symlink_to(folder.parent)
    (folder / "empty.png").touch()
    os.mkfifo(folder / "fifo.png")
    (folder / "cut.png").write_bytes(png(40, 20)[:-5])
    (folder / "bomb.png").write_bytes(png_of(60_000, 60_000))
    (folder / "sliver.png").write_bytes(png(500, 2))
    template = "{% for m in messages %}{% if 'refuse' in m.content %}{{ raise_exception('refused') }}{% endif %}"
    template += "{% if m.content is string %}{{ m.content }}{% else %}{% for c in m.content %}{{ '<|image_pad|>' if "
    write_tokenizer(folder / "model", template + "c.type == 'image' else c.text }}{% endfor %}{% endif %}{% endfor %}")
    return folder


@pytest.fixture(scope="module")
def hostile(tmp_path_factory):
    """All bad rows in one file, a good one before each: the folder, and what sizing says."""
    folder = tmp_path_factory.mktemp("hostile") / "media"
    folder.mkdir()
    fill_trap(fill_folder(folder))
    write_jsonl(folder / "data.jsonl", [row for bad in BAD_ROWS.values() for row in (GOOD, row_of(bad))])
    return folder, size(folder, "data.jsonl", on_bad="skip", max_tokens=200)


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_and_left_out(hostile, name):
    folder, result = hostile
    line = 2 * list(BAD_ROWS).index(name) + 2
    kind = BAD_ROWS[name].get("kind")
    found = [bad for bad in result.bad if bad.line == line]
    if kind is None and not found:  # parsers differ in how large a number they take
        return
    assert len(found) == 1
    assert found[0].file == str(folder / "data.jsonl")
    if kind is not None:
        assert found[0].kind == kind
        assert all(word in found[0].reason for word in BAD_ROWS[name].get("names", ()))
    assert all(ord(c) >= 32 for c in str(found[0])), "control characters reach the terminal"


def test_good_rows_among_bad_ones_are_kept(hostile):
    folder, result = hostile
    assert result.num_read == 2 * len(BAD_ROWS)
    assert len(result.bad) + len(result.table) == result.num_read
    kept = [f"data:{2 * n + 1}" for n in range(len(BAD_ROWS))]
    assert [name for name in result.table.ids if name.startswith("data:")] == kept
    with refused(SampleError, "on_bad='skip", "skip", len(result.bad), result.num_read):
        size(folder, "data.jsonl", max_tokens=200)


def test_all_bad_rows_are_listed_at_once(trap):
    write_jsonl(trap / "data.jsonl", [{"id": f"i{n}", "messages": []} for n in range(30)] + [GOOD])
    with pytest.raises(SampleError) as caught:
        size(trap, "data.jsonl")
    lines = str(caught.value).splitlines()
    assert {"30", "31"} < set(lines[0].split())
    assert lines[1].startswith(f"{trap / 'data.jsonl'}:1 (id i0): ")
    assert len(lines) == 2  # one for what is wrong with all of them
    assert "29" in lines[1].split("(and ")[1]


def test_links_inside_and_outside_asked_for_are_followed(trap):
    rows = [{"conversations": talk("<image>"), "image": name} for name in ("inner.png", "sub/../sub/c.png")]
    write_jsonl(trap / "data.jsonl", rows)
    assert size(trap, "data.jsonl").table.num_patches.tolist() == [400, 400]
    rows = [
        {"conversations": talk("<image>"), "image": name} for name in ("link.png", str(trap.parent / "outside.png"))
    ]
    write_jsonl(trap / "data.jsonl", rows)
    assert size(trap, "data.jsonl", allow_outside=True).table.num_patches.tolist() == [4, 4]
    rows = [
        {"conversations": talk("<image>"), "image": f"{trap.name}/{name}"} for name in ("link.png", "../outside.png")
    ]
    write_jsonl(trap / "data.jsonl", rows)
    assert size(trap, "data.jsonl", media_root=trap.parent).table.num_patches.tolist() == [4, 4]
    write_jsonl(trap / "data.jsonl", [{"conversations": talk("<image>"), "image": "c.png"}])
    assert size(trap, "data.jsonl", media_root=trap / "sub").table.num_patches.tolist() == [400]


def test_repeated_ids_are_numbered_and_said_once(folder):
    write_jsonl(folder / "data.jsonl", [{"id": n, **GOOD} for n in ("a", 7, "a", "7", "a", "a#2")])
    result = size(folder, "data.jsonl")
    assert result.table.ids == ("a", "7", "a#3", "7#2", "a#4", "a#2")
    assert sum("a#2" in said and said.startswith("3 ") for said in result.assumptions) == 1
    write_jsonl(folder / "data.jsonl", [{"id": n, **GOOD} for n in ("a", "a")])
    (folder / "meta.json").write_text(json.dumps({"x": {"annotation": "data.jsonl", "root": ".", "repeat_time": 2}}))
    assert len(set(size(folder, "meta.json").table.ids)) == 4
    write_jsonl(folder / "more.jsonl", [{"id": "a", **GOOD}])
    write_jsonl(folder / "data.jsonl", [{"id": "a", **GOOD}])
    assert size(folder, "data.jsonl", "more.jsonl").table.ids == ("data/a", "more/a")


def test_broken_shards_keep_what_came_before(folder):
    good = json.dumps(GOOD).encode()
    whole = tar_bytes([("1.json", good), ("2.json", good), ("3.json", b"{"), ("4.json", b"{}"), ("5.txt", b"\xff")])
    (folder / "a.tar").write_bytes(whole)
    result = size(folder, "a.tar", on_bad="skip")
    assert [(bad.line, bad.id, bad.kind) for bad in result.bad] == [
        (3, "3", "json"),
        (4, "4", "type"),
        (5, "5", "type"),
    ]
    for cut in (2048, 2148, 2700, 5120):
        (folder / "a.tar").write_bytes(whole[:cut])
        result = size(folder, "a.tar", on_bad="skip")
        assert len(result.table) >= 1
        assert "the tar ends here" in result.bad[-1].reason, cut
    rows = [GOOD] * 3000
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "p.parquet", row_group_size=1500, compression=None)
    content = bytearray((folder / "p.parquet").read_bytes())
    content[60:400] = bytes(340)
    (folder / "p.parquet").write_bytes(bytes(content))
    with refused(SampleError):
        size(folder, "p.parquet")


def test_members_of_one_name_are_a_bad_sample_and_lose_nothing_silently(folder):
    good, image = json.dumps(GOOD).encode(), {"conversations": talk("<image>"), "image": "x"}
    members = [
        ("1.json", good),
        ("2.json", good), ("2.json", good),
        ("3.json", json.dumps(image).encode()), ("3.jpg", png(9, 9)), ("3.JPG", png(40, 20)), ("3.jpg", png(8, 8)),
        ("4.json", good),
        ("1.json", good),
    ]  # fmt: skip
    (folder / "a.tar").write_bytes(tar_bytes(members))
    result = size(folder, "a.tar", on_bad="skip")
    assert result.table.ids == ("1", "4", "1#2")
    assert [(bad.line, bad.id, bad.kind) for bad in result.bad] == [(2, "2", "id"), (3, "3", "id")]
    first = "the shard holds 2.json more than once in a row, and a loader would keep one: give each its own name"
    assert result.bad[0].reason == first
    assert "the shard holds 3.JPG, 3.jpg more than once" in result.bad[1].reason
    with refused(SampleError, "2 of 5"):
        size(folder, "a.tar")
