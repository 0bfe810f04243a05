"""Sizing a data set: every format gives the same sizes."""

import base64
import json
import tarfile

import numpy as np
import pytest
from sample_sets import png, talk, tar_bytes, write_jsonl
from size_cases import TALK, CoarseWhenMany, fill_folder, parquet, pyarrow, rows_of, size

from trimtab.balance.cost import PATCH_COST
from trimtab.options import ParallelDims
from trimtab.plan.decide.work import pad_documents, select_rows
from trimtab.samples.formats import read_tar
from trimtab.samples.lengths import read_lengths
from trimtab.samples.table import SizingResult, save_sizing


@pytest.fixture
def folder(tmp_path):
    return fill_folder(tmp_path)


PNG_URL = "data:image/png;base64," + base64.b64encode(png(30, 30)).decode()
TYPED = [
    {
        "role": "user",
        "content": [
            {"type": "image", "image": "a.png"},
            {"type": "text", "text": " and "},
            {"type": "image_url", "image_url": {"url": PNG_URL}},
            {"type": "text", "text": "?"},
        ],
    },
    {"role": "assistant", "content": "the cat"},
]


def test_every_format_gives_the_same_sizes(folder):
    row = {"id": "x", "conversations": TALK, "image": ["a.png", "b.png"]}
    write_jsonl(folder / "lines.jsonl", [row])
    (folder / "list.json").write_text(json.dumps([row]))
    (folder / "lines.json").write_text(json.dumps(row))
    write_jsonl(folder / "typed.jsonl", [{"id": "x", "messages": TYPED}])
    turns = [{"role": "user", "content": "<image> and <image>?"}, {"role": "assistant", "content": "the cat"}]
    write_jsonl(folder / "mixed.ndjson", [{"id": "x", "images": ["a.png", "b.png"], "messages": turns}])
    table = pyarrow.Table.from_pylist([row | {"unused": 3}])
    parquet.write_table(table, folder / "paths.parquet")
    images = [{"bytes": png(40, 20), "path": None}, {"bytes": None, "path": "b.png"}]
    parquet.write_table(pyarrow.Table.from_pylist([{**row, "image": images}]), folder / "bytes.parquet")
    record = json.dumps({"id": "x", "conversations": TALK, "image": "elsewhere/z.png"}).encode()
    members = [("x.json", record), ("x.10.png", png(30, 30)), ("x.2.png", png(40, 20)), ("x.cls", b"7")]
    (folder / "shard.tar").write_bytes(tar_bytes(members))
    names = ["lines.jsonl", "list.json", "lines.json", "typed.jsonl", "mixed.ndjson"]
    names += ["paths.parquet", "bytes.parquet", "shard.tar"]
    result = [size(folder, name) for name in names]
    expected = rows_of(result[0])
    assert expected == [[2, 4 * 17, expected[0][2], 32**2 + 36**2, 16 * 17]]
    assert expected[0][2] > 17 + 10
    for name, one in zip(names, result, strict=True):
        assert rows_of(one) == expected, name
        assert one.table.ids == ("x",)
        assert one.num_read == 1
    together = size(folder, *names)
    assert rows_of(together) == expected * len(names)
    assert together.table.source.tolist() == list(range(len(names)))
    assert together.table.source_names == tuple(names), "two stems are equal, so whole names tell them apart"
    assert together.table.ids[1] == "list.json/x"


def test_text_alone_and_captions_are_sized(folder):
    write_jsonl(
        folder / "text.jsonl", [{"conversations": talk("what?", "a cat")}, b"", b"  ", {"conversations": talk("b")}]
    )
    result = size(folder, "text.jsonl")
    assert result.table.ids is None
    assert result.table.num_patches.tolist() == [0, 0]
    assert result.assumptions == ()
    members = [("d/1.txt", b"a cat"), ("d/1.jpg", png(40, 20)), ("d/2.json", b'{"w": 1}'), ("d/2.txt", b"sun")]
    (folder / "captions.tar").write_bytes(tar_bytes(members))
    result = size(folder, "captions.tar")
    assert result.table.num_images.tolist() == [1, 0]
    assert result.table.ids == ("d/1", "d/2")


def test_without_a_tokenizer_the_estimate_is_stated(folder):
    write_jsonl(folder / "data.jsonl", [{"conversations": TALK, "image": ["a.png", "b.png"]}])
    result = size(folder, "data.jsonl", tokenizer=None)
    assert not result.table.tokens_exact
    assert "estimated" in result.assumptions[0]
    assert "EXIF orientation is ignored" in result.assumptions[1]
    assert "EXIF orientation is applied" in size(folder, "data.jsonl", exif="apply").assumptions[0]


def test_a_rule_for_samples_of_several_images_is_asked(folder):
    write_jsonl(
        folder / "data.jsonl",
        [{"conversations": talk("<image>"), "image": "a.png"}, {"conversations": TALK, "image": ["a.png", "b.png"]}],
    )
    result = size(folder, "data.jsonl", image_rule=CoarseWhenMany())
    assert result.table.num_patches.tolist() == [32, 8]


def tar_header(name, size, kind=tarfile.REGTYPE):
    found = tarfile.TarInfo(name)
    found.size, found.type = size, kind
    return found.tobuf()


def test_a_tar_holds_folders_and_no_member_larger_than_itself(tmp_path):
    """A folder is passed over; a header that claims a terabyte ends the shard, and nothing of that size is read."""
    start = tar_header("images", 0, tarfile.DIRTYPE) + tar_header("s.txt", 9) + b"a caption".ljust(512, b"\0")
    (tmp_path / "good.tar").write_bytes(start + bytes(1024))
    (tmp_path / "bad.tar").write_bytes(start + tar_header("t.txt", 1 << 40) + bytes(1024))
    (tmp_path / "empty.tar").write_bytes(bytes(1024))
    (good,), (first, bad) = read_tar(tmp_path / "good.tar"), read_tar(tmp_path / "bad.tar")
    assert (good.key, good.problem, first) == ("s", None, good)
    assert str(bad.problem).startswith(f"the tar ends here: member t.txt claims {1 << 40} bytes")
    assert list(read_tar(tmp_path / "empty.tar")) == []


def test_a_pair_of_answers_is_priced_as_its_two_sequences(folder):
    """In work, cost, rows taken out, padding, and a table that is saved and joined again."""
    ask = {"role": "user", "content": "What is this? " * 20}
    yes, no = ({"messages": [ask, {"role": "assistant", "content": answer}]} for answer in ("yes " * 30, "no " * 90))
    pair = {**yes, "rejected_response": "no " * 90}
    write_jsonl(folder / "pairs.jsonl", [yes, pair])
    write_jsonl(folder / "apart.jsonl", [yes, no])
    table, apart = (size(folder, f"{name}.jsonl").table for name in ("pairs", "apart"))
    chosen, rejected = apart.num_tokens.tolist()
    assert table.num_tokens.tolist() == [chosen, chosen + rejected]
    assert table.second_tokens.tolist() == [0, rejected]
    for window in (None, 50):
        expected, found = apart.work(token_window=window), table.work(token_window=window)
        assert found[0].tolist() == expected[0].tolist()
        assert found[1].tolist() == expected.sum(axis=0).tolist()
    assert PATCH_COST.of_samples(table)[1] == pytest.approx(PATCH_COST.of_samples(apart).sum())
    assert PATCH_COST.of_samples(table, np.array([1])) == pytest.approx(PATCH_COST.of_samples(apart).sum())
    assert select_rows(table, np.array([1])).second_tokens.tolist() == [rejected]
    padded = pad_documents(table, ParallelDims(cp=2))
    assert padded.num_tokens[1] == pad_documents(apart, ParallelDims(cp=2)).num_tokens.sum()
    save_sizing(SizingResult(table=table), folder / "a.npz")
    again = read_lengths([folder / "a.npz", folder / "a.npz"])
    assert again.second_tokens.tolist() == [0, rejected, 0, rejected]
    assert apart.second_tokens is None
