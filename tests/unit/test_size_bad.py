"""Sizing a data set: every kind of bad sample is named and left out, and nothing else is raised."""

import json
import os

import pytest
from sample_sets import png, png_of, talk, tar_bytes, write_jsonl, write_tokenizer
from size_cases import GOOD, TALK, fill_folder, parquet, pyarrow, size

from refusals import refused
from trimtab.errors import SampleError


@pytest.fixture
def folder(tmp_path):
    return fill_folder(tmp_path)


def user(content):
    return {"messages": [{"role": "user", "content": content}]}


BAD_ROWS = {
    "broken json": (b'{"id": 1', "json", "not JSON"),
    "not utf-8": (b'{"id": "\xff"}', "json", "not JSON"),
    "a number that is none": (b'{"conversations": NaN}', "json", "not JSON"),
    "lone surrogate": (b'{"conversations": [{"from": "human", "value": "\\ud800"}]}', "json", "not JSON"),
    "deep": (b'{"conversations": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "json", "JSON"),
    "huge number": (b'{"id": ' + b"9" * 10_000 + b"}", None, None),
    "null": (b"null", "type", "the record is None"),
    "list": ([GOOD], "type", "the record is list"),
    "number": (3, "type", "the record is 3"),
    "text": ("conversations", "type", "the record is 'conversations'"),
    "no conversation": ({"id": "q"}, "type", "none of 'conversations', 'messages' and 'texts'"),
    "empty conversation": ({"conversations": []}, "type", "at least one turn"),
    "conversation of text": ({"conversations": "hi"}, "type", "'hi'"),
    "turn of text": ({"conversations": ["hi"]}, "type", "a turn of 'conversations' is 'hi'"),
    "no role": ({"conversations": [{"value": "x"}]}, "type", "'role' is None"),
    "odd role": ({"conversations": [{"from": "narrator", "value": "x"}]}, "type", "'from' is 'narrator'"),
    "role of list": ({"conversations": [{"from": ["human"], "value": "x"}]}, "type", "'from' is list"),
    "no value": ({"conversations": [{"from": "human"}]}, "type", "'value' is None"),
    "number value": ({"conversations": [{"from": "human", "value": 3.5}]}, "type", "'value' is 3.5"),
    "odd part": (user([{"type": "audio", "audio": "x"}]), "type", "audio is not sized"),
    "video of a model without its files": (
        user([{"type": "video", "video": "x.mp4"}]),
        "video",
        "name the model's folder",
    ),
    "video without a placeholder": (
        {"conversations": talk("hello"), "video": "x.mp4"},
        "placeholder",
        "0 video placeholders and 1",
    ),
    "a sampling of its own": (
        user([{"type": "video", "video": "x.mp4", "nframes": 8}]),
        "type",
        "sampling of its own (nframes)",
    ),
    "video of number": ({"conversations": talk("<video>"), "video": 7}, "type", "'video' is 7"),
    "two fields of videos": (
        {"conversations": talk("<video>"), "video": "a", "videos": ["b"]},
        "type",
        "differ: keep one",
    ),
    "part of number": (user([7]), "type", "a content part is 7"),
    "part without text": (user([{"type": "text"}]), "type", "'text' of a content part is None"),
    "image of number": ({"conversations": talk("<image>"), "image": 7}, "type", "'image' is 7"),
    "image of list": ({"conversations": talk("<image>"), "image": [["a.png"]]}, "type", "'image' is list"),
    "both image columns": (
        {"conversations": talk("<image>"), "image": "a.png", "images": ["b.png"]},
        "type",
        "both 'image' and 'images'",
    ),
    "odd id": ({"id": 1.5, **GOOD}, "type", "id is 1.5"),
    "id of bool": ({"id": True, **GOOD}, "type", "id is True"),
    "image without placeholder": ({**GOOD, "image": "a.png"}, "placeholder", "0 image placeholders and 1 images"),
    "placeholder without image": ({"conversations": talk("<image>")}, "placeholder", "1 image placeholders and 0"),
    "too few images": ({"conversations": TALK, "image": ["a.png"]}, "placeholder", "2 image placeholders and 1"),
    "too many images": (
        {"conversations": talk("<image>"), "image": ["a.png", "b.png"]},
        "placeholder",
        "1 image placeholders and 2",
    ),
    "token in text": ({"conversations": talk("<|image_pad|>")}, "placeholder", "keep the token out"),
    "system refused": ({"conversations": [{"from": "system", "value": "refuse me"}]}, "template", "refuses it"),
    "missing": ({"conversations": talk("<image>"), "image": "absent.png"}, "path", "No such file"),
    "null byte": ({"conversations": talk("<image>"), "image": "a\0.png"}, "path", "embedded null"),
    "long name": ({"conversations": talk("<image>"), "image": "x" * 5000}, "path", "name too long"),
    "folder": ({"conversations": talk("<image>"), "image": "sub"}, "image", "folder or a device"),
    "fifo": ({"conversations": talk("<image>"), "image": "fifo.png"}, "image", "folder or a device"),
    "dot": ({"conversations": talk("<image>"), "image": "."}, "image", "folder or a device"),
    "above": ({"conversations": talk("<image>"), "image": "../outside.png"}, "path", "outside the media folder"),
    "around": ({"conversations": talk("<image>"), "image": "sub/../../outside.png"}, "path", "outside"),
    "absolute": ({"conversations": talk("<image>"), "image": "/etc/hostname"}, "path", "outside the media folder"),
    "file url": ({"conversations": talk("<image>"), "image": "file:///etc/hostname"}, "path", "outside"),
    "symlink out": ({"conversations": talk("<image>"), "image": "link.png"}, "path", "outside the media folder"),
    "folder link out": ({"conversations": talk("<image>"), "image": "away/outside.png"}, "path", "outside"),
    "http": ({"conversations": talk("<image>"), "image": "http://169.254.169.254/x.png"}, "path", "on the network"),
    "s3": ({"conversations": talk("<image>"), "image": "s3://bucket/x.png"}, "path", "on the network"),
    "data url without comma": ({"conversations": talk("<image>"), "image": "data:image/png"}, "image", "comma"),
    "data url not base64": ({"conversations": talk("<image>"), "image": "data:;base64,!!"}, "image", "not base64"),
    "data url of text": ({"conversations": talk("<image>"), "image": "data:,hello"}, "image", "not an image"),
    "empty image": ({"conversations": talk("<image>"), "image": "empty.png"}, "image", "is empty"),
    "cut image": ({"conversations": talk("<image>"), "image": "cut.png"}, "image", "truncated"),
    "bomb": ({"conversations": talk("<image>"), "image": "bomb.png"}, "image", "more than 178956970"),
    "sliver": ({"conversations": talk("<image>"), "image": "sliver.png"}, "image", "longer than 100 times"),
    "long": ({"conversations": talk("cat " * 300)}, "length", "more than max_tokens 200"),
    "terminal codes": ({"conversations": talk("<image>"), "image": "\x1b[2J\u202e.png"}, "path", r"\x1b[2J\x202e"),
}


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
    write_jsonl(folder / "data.jsonl", [row for bad, _, _ in BAD_ROWS.values() for row in (GOOD, bad)])
    return folder, size(folder, "data.jsonl", on_bad="skip", max_tokens=200)


@pytest.mark.parametrize("name", BAD_ROWS)
def test_a_bad_row_is_named_and_left_out(hostile, name):
    folder, result = hostile
    line = 2 * list(BAD_ROWS).index(name) + 2
    _, kind, reason = BAD_ROWS[name]
    found = [bad for bad in result.bad if bad.line == line]
    if kind is None and not found:  # parsers differ in how large a number they take
        return
    assert len(found) == 1
    assert found[0].file == str(folder / "data.jsonl")
    if kind is not None:
        assert found[0].kind == kind
        assert reason in found[0].reason
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
    assert "10" in lines[-1]


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


def test_repeated_ids_are_refused_or_numbered(folder):
    write_jsonl(folder / "data.jsonl", [{"id": n, **GOOD} for n in ("a", 7, "a", "7", "a", "a#2")])
    result = size(folder, "data.jsonl", on_bad="skip")
    assert [(bad.line, bad.id, bad.kind) for bad in result.bad] == [(3, "a", "id"), (4, "7", "id"), (5, "a", "id")]
    assert "line 1 has this id too" in result.bad[0].reason
    numbered = size(folder, "data.jsonl", unique_ids=False)
    assert len(set(numbered.table.ids)) == 6
    assert numbered.table.ids[:5] == ("a", "7", "a#2", "7#2", "a#3")
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
    assert result.table.ids == ("1", "4")
    assert [(bad.line, bad.id, bad.kind) for bad in result.bad] == [(2, "2", "id"), (3, "3", "id"), (5, "1", "id")]
    first = "the shard holds 2.json more than once in a row, and a loader would keep one: give each its own name"
    assert result.bad[0].reason == first
    assert "the shard holds 3.JPG, 3.jpg more than once" in result.bad[1].reason
    with refused(SampleError, "3", "5"):
        size(folder, "a.tar")
