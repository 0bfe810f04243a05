"""Sizes of single images in a sample table: from data to file and back, selected, joined, left out."""

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from refusals import refused

pytest.importorskip("tokenizers", reason="the [data] extra is not installed")
pytest.importorskip("jinja2", reason="the [data] extra is not installed")
pytest.importorskip("pyarrow", reason="the [data] extra is not installed")

from sample_sets import PixelRule, png, talk, write_jsonl, write_tokenizer

from trimtab import SampleTable, size_samples
from trimtab.errors import SampleError
from trimtab.plan.decide.work import select_rows
from trimtab.samples.lengths import read_lengths
from trimtab.samples.table import SizingResult, load_table, save_sizing, table_bytes, table_from_bytes


def table_of(images: list[list[int]]) -> SampleTable:
    sums = np.array([sum(x) for x in images], np.int64)
    return SampleTable.of(
        sums,
        sums + 5,
        num_images=np.array([len(x) for x in images], np.int64),
        patches_sq=np.array([sum(p * p for p in x) for x in images], np.int64),
        patches_windowed=sums,
        image_patches=np.array([p for x in images for p in x], np.int64),
    )


def images_of(table: SampleTable) -> list[list[int]]:
    ends = np.cumsum(table.num_images)[:-1]
    return [x.tolist() for x in np.split(table.image_patches, ends)]


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(0, 900), max_size=4), min_size=1, max_size=8), st.data())
def test_rows_take_their_images_along_in_any_order_and_number(images, data):
    table = table_of(images)
    assert images_of(table_from_bytes(table_bytes(table), origin="here")) == images
    rows = data.draw(st.lists(st.integers(0, len(images) - 1), max_size=12))
    assert images_of(select_rows(table, np.array(rows, np.int64))) == [images[i] for i in rows] or not rows


def test_saved_tables_give_the_images_back(tmp_path):
    name = "t.npz"
    images = [[4, 8], [], [16, 4, 4], [0]]
    save_sizing(SizingResult(table=table_of(images)), tmp_path / name)
    assert images_of(load_table(tmp_path / name)) == images
    save_sizing(SizingResult(table=replace(table_of(images), image_patches=None)), tmp_path / name)
    assert load_table(tmp_path / name).image_patches is None


def test_images_that_do_not_add_up_are_refused(tmp_path):
    table = table_of([[4, 8], [16]])
    for wrong in ([8, 8, 12], [12, 0, 16, 0], [-4, 16, 16]):
        object.__setattr__(table, "image_patches", np.array(wrong, np.int64))
        save_sizing(SizingResult(table=table), tmp_path / "t.npz")
        with refused(SampleError):
            load_table(tmp_path / "t.npz")


def test_patches_of_a_sample_without_images_are_refused(tmp_path):
    table = table_of([[4, 8], [16]])
    object.__setattr__(table, "num_images", np.array([2, 0], np.int32))
    object.__setattr__(table, "image_patches", np.array([4, 8], np.int64))
    save_sizing(SizingResult(table=table), tmp_path / "t.npz")
    with refused(SampleError):
        load_table(tmp_path / "t.npz")


def test_sizing_records_every_image_and_leaves_out_those_of_bad_samples(tmp_path):
    (tmp_path / "a.png").write_bytes(png(40, 20))
    (tmp_path / "b.png").write_bytes(png(30, 30))
    write_tokenizer(tmp_path / "model")
    two, one = talk("<image> and <image>?", "the cat"), talk("<image>?", "a dog")
    rows = [
        {"id": "x", "conversations": two, "image": ["a.png", "b.png"]},
        {"id": "y", "conversations": one, "image": "a.png"},
        {"id": "x", "conversations": two, "image": ["b.png", "b.png"]},  # an id again, numbered
        {"id": "z", "conversations": talk("hello", "you")},
        {"id": "w", "conversations": two, "image": ["b.png", "gone.png"]},
        {"id": "v", "conversations": two, "image": ["b.png", "a.png"]},
    ]
    write_jsonl(tmp_path / "d.jsonl", rows)
    write_jsonl(tmp_path / "single.jsonl", [rows[1]])
    options = {"tokenizer": tmp_path / "model", "image_rule": PixelRule(), "resume_dir": tmp_path / "resume"}
    for _ in range(2):  # the second time from the chunks of the first
        result = size_samples([tmp_path / "d.jsonl"], on_bad="skip", **options)
        assert images_of(result.table) == [[32, 36], [32], [36, 36], [], [36, 32]]
    both = size_samples([tmp_path / "d.jsonl", tmp_path / "single.jsonl"], on_bad="skip", **options)
    assert images_of(both.table) == [[32, 36], [32], [36, 36], [], [36, 32], [32]]
    alone = size_samples([tmp_path / "single.jsonl"], **options)
    assert alone.table.image_patches is None, "one image a sample is as large as its sample"


def test_ready_made_sizes_are_counted_image_by_image_and_tables_join(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", [{"length": 99, "image_wh": [[40, 20], [30, 30]]}, {"length": 9}])
    (tmp_path / "b.json").write_text(json.dumps([{"length": 40, "image_wh": [30, 30]}]))
    write_jsonl(tmp_path / "tiles.jsonl", [{"token_num": 400, "vit_num": 2}])
    table = read_lengths([tmp_path / "a.jsonl", tmp_path / "b.json"], image_rule=PixelRule())
    assert images_of(table) == [[32, 36], [], [36]]
    save_sizing(SizingResult(table=table), tmp_path / "saved.npz")
    again = read_lengths([tmp_path / "saved.npz", tmp_path / "a.jsonl"], image_rule=PixelRule())
    assert images_of(again) == [[32, 36], [], [36], [32, 36], []]
    save_sizing(SizingResult(table=replace(table, image_patches=None)), tmp_path / "sums.npz")
    assert read_lengths([tmp_path / "sums.npz", tmp_path / "a.jsonl"], image_rule=PixelRule()).image_patches is None
    assert read_lengths([tmp_path / "tiles.jsonl"]).image_patches is None
