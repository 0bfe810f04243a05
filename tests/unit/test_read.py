"""Ready-made lengths become a table, and rows that cannot are listed; saved tables come back as they were."""

import json
from pathlib import Path

import numpy as np
import pytest

from refusals import refused
from yaml_tables import read_table

pyarrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
parquet = pytest.importorskip("pyarrow.parquet", reason="the [data] extra is not installed")

from sample_sets import PixelRule, write_jsonl  # noqa: E402

from trimtab.errors import SampleError  # noqa: E402
from trimtab.samples.formats import read_json_list  # noqa: E402
from trimtab.samples.lengths import read_lengths  # noqa: E402
from trimtab.samples.problems import BadSample  # noqa: E402
from trimtab.samples.size import size_samples  # noqa: E402
from trimtab.samples.table import (  # noqa: E402
    SizingResult,
    load_sizing,
    load_table,
    pack_arrays,
    save_sizing,
)
from trimtab.specs import SampleTable  # noqa: E402

DATA = Path(__file__).parents[3] / "shared" / "data"
COLUMNS = ("num_images", "num_patches", "num_tokens", "patches_sq", "patches_windowed")

needs_data = pytest.mark.skipif(not DATA.is_dir(), reason="../shared/data is not there")


def write_parquet(path, **columns):
    parquet.write_table(pyarrow.table(columns), path)
    return path


def columns_of(table):
    return {name: getattr(table, name).tolist() for name in COLUMNS}


# -- ready-made lengths -----------------------------------------------------------------------------------------------


@needs_data
def test_the_public_lengths_are_read_as_their_readme_says():
    files = [DATA / f"{name}_lengths.json" for name in ("ai2d_train_12k", "chartqa_train_18k", "docvqa_train_10k")]
    table = read_lengths(files)
    assert len(table) == 40_941
    assert table.source_names == tuple(file.stem for file in files)
    assert np.bincount(table.source).tolist() == [12_413, 18_317, 10_211]
    means = [
        round(float(column[table.source == source].mean()), 2 if column is table.num_patches else 0)
        for column in (table.num_patches, table.num_tokens)
        for source in range(3)
    ]
    assert means == [2.49, 4.75, 4.62, 691, 1305, 1465]
    assert table.patch_unit == "tiles"
    assert (table.patches_sq == table.num_patches).all()
    assert table.ids is None


@needs_data
def test_the_mixture_is_read_whole_and_by_source():
    path = DATA / "mixture_1m24_lengths.parquet"
    table = read_lengths(path)
    assert len(table) == 1_238_054
    raw = parquet.read_table(path)
    assert (table.num_tokens == raw.column("token_num").to_numpy()).all()
    assert (table.num_patches == raw.column("vit_num").to_numpy()).all()
    rows = range(0, len(table), 97)
    assert [table.source_names[table.source[row]] for row in rows] == raw.column("source").take([*rows]).to_pylist()
    assert table.num_tokens.dtype == np.int64


def test_json_jsonl_and_parquet_give_the_same_table(tmp_path):
    rows = [{"vit_num": 5, "token_num": 900, "image_flags": 5}, {"vit_num": 1, "token_num": 30, "image_flags": 0}]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    write_jsonl(tmp_path / "b.jsonl", [rows[0], b"", rows[1]])
    write_parquet(tmp_path / "c.parquet", vit_num=[5, 1], token_num=[900, 30], image_flags=[5, 0])
    expected = {
        "num_images": [1, 0],
        "num_patches": [5, 1],
        "num_tokens": [900, 30],
        "patches_sq": [5, 1],
        "patches_windowed": [5, 1],
    }
    for name in ("a.json", "b.jsonl", "c.parquet"):
        assert columns_of(read_lengths(tmp_path / name)) == expected, name
    together = read_lengths([tmp_path / "a.json", tmp_path / "c.parquet"])
    assert together.source.tolist() == [0, 0, 1, 1]
    assert together.source_names == ("a", "c")


@pytest.mark.parametrize("key", ["num_tokens", "length", "token_num"])
def test_image_wh_goes_through_the_rule(tmp_path, key):
    rows = [
        {"id": "p", key: 300, "image_wh": [[40, 20], [30, 30]]},
        {"id": 7, key: 50},
        {"id": "r", key: 70, "image_wh": [100, 100]},
    ]
    (tmp_path / "a.json").write_text(json.dumps(rows))
    expected = {
        "num_images": [2, 0, 1],
        "num_patches": [68, 0, 400],
        "num_tokens": [300, 50, 70],
        "patches_sq": [32**2 + 36**2, 0, 400**2],
        "patches_windowed": [16 * 17, 0, 1600],
    }
    table = read_lengths(tmp_path / "a.json", image_rule=PixelRule())
    assert columns_of(table) == expected
    assert table.ids == ("p", "7", "r")
    sized = size_samples(tmp_path / "a.json", image_rule=PixelRule(), tokenizer=None)
    assert columns_of(sized.table) == expected
    sizes = pyarrow.array([[[40, 20], [30, 30]], None, [[100, 100]]], pyarrow.list_(pyarrow.list_(pyarrow.int32())))
    write_parquet(tmp_path / "b.parquet", **{key: [300, 50, 70], "image_wh": sizes})
    assert columns_of(read_lengths(tmp_path / "b.parquet", image_rule=PixelRule())) == expected
    with refused(SampleError, "image_wh"):
        read_lengths(tmp_path / "a.json")


def test_text_lengths_join_either_unit_but_units_do_not_mix(tmp_path):
    (tmp_path / "text.json").write_text('[{"length": 5}]')
    (tmp_path / "tiles.json").write_text('[{"token_num": 5, "vit_num": 2}]')
    (tmp_path / "wh.json").write_text('[{"length": 5, "image_wh": [[10, 10]]}]')
    assert read_lengths([tmp_path / "text.json", tmp_path / "tiles.json"]).patch_unit == "tiles"
    both = [tmp_path / "text.json", tmp_path / "wh.json"]
    assert read_lengths(both, image_rule=PixelRule()).patch_unit == "patches"
    with refused(SampleError):
        read_lengths([*both, tmp_path / "tiles.json"], image_rule=PixelRule())


def test_sources_are_named_by_column(tmp_path):
    write_parquet(tmp_path / "a.parquet", length=[1, 2, 3, 4], source=["x", "y", None, "x"])
    (tmp_path / "b.json").write_text('[{"length": 5, "source": "y"}, {"length": 6, "source": "z"}]')
    table = read_lengths([tmp_path / "a.parquet", tmp_path / "b.json"])
    assert [table.source_names[code] for code in table.source] == ["x", "y", "no source", "x", "y", "z"]


@pytest.mark.parametrize(("row", "reason"), read_table("records", "bad_lengths").values())
@pytest.mark.parametrize("suffix", ["json", "jsonl"])
def test_a_bad_length_is_named(tmp_path, row, reason, suffix):
    rows = [{"length": 3}, row, {"length": 4}, row]
    path = tmp_path / f"a.{suffix}"
    if suffix == "json":
        path.write_text(json.dumps(rows))
    else:
        write_jsonl(path, rows)
    with pytest.raises(SampleError) as caught:
        read_lengths(path, image_rule=PixelRule())
    first, line = str(caught.value).splitlines()  # those alike in one
    assert {"2", "4"} < set(first.split())
    assert line.startswith(f"{path}:2: ")
    assert reason in line
    assert line.endswith("(and 1 more like it)")
    skipped = size_samples(path, image_rule=PixelRule(), tokenizer=None, on_bad="skip")
    assert skipped.table.num_tokens.tolist() == [3, 4]
    assert [bad.line for bad in skipped.bad] == [2, 4]
    assert skipped.table.ids == ("a:1", "a:3")


def test_json_is_strict(tmp_path):
    (tmp_path / "a.json").write_text('[{"length": 5, "id": "\\ud83d\\ude00"}]')
    assert read_lengths(tmp_path / "a.json").ids == ("\U0001f600",)
    for text in ('[{"length": NaN}]', '[{"length": 5, "id": "\\ud800"}]', "[" * 100_000, '[{"length": 1e}]', "[\xff]"):
        (tmp_path / "a.json").write_bytes(text.encode("latin-1"))
        with refused(SampleError, "JSON"):
            list(read_json_list(tmp_path / "a.json"))


# -- saved tables -----------------------------------------------------------------------------------------------------


def result_of(num_samples=5, ids=True):
    rng = np.random.default_rng(num_samples)
    numbers = {name: rng.integers(0, 1000, num_samples) for name in COLUMNS}
    table = SampleTable(
        **numbers,
        ids=tuple(f"é{n}\n" for n in range(num_samples)) if ids else None,
        source=rng.integers(0, 2, num_samples).astype(np.int32),
        source_names=("a", "b", "empty"),
        tokens_exact=False,
    )
    bad = BadSample(file="f", line=3, id=None, kind="image", reason="truncated")
    return SizingResult(table=table, bad=(bad,), assumptions=("estimated",))


@pytest.mark.parametrize("ids", [True, False])
@pytest.mark.parametrize("num_samples", [0, 5])
def test_a_saved_result_comes_back(tmp_path, num_samples, ids):
    result = result_of(num_samples, ids)
    path = tmp_path / "table.npz"
    save_sizing(result, path)
    back = load_sizing(path)
    assert columns_of(back.table) == columns_of(result.table)
    assert (back.table.ids, back.table.source_names) == (result.table.ids, result.table.source_names)
    assert back.table.source.tolist() == result.table.source.tolist()
    assert (back.table.patch_unit, back.table.tokens_exact) == ("patches", False)
    assert (back.bad, back.assumptions, back.num_read) == (result.bad, result.assumptions, result.num_read)
    assert columns_of(read_lengths(path)) == columns_of(result.table)
    again = tmp_path / "again.npz"
    save_sizing(back, again)
    assert again.read_bytes() == path.read_bytes()
    save_sizing(SizingResult(table=result.table), again)
    assert load_table(again).ids == result.table.ids


def test_saved_tables_join_others(tmp_path):
    save_sizing(SizingResult(table=result_of().table), tmp_path / "a.npz")
    save_sizing(SizingResult(table=result_of(3, ids=False).table), tmp_path / "b.npz")
    table = read_lengths([tmp_path / "a.npz", tmp_path / "b.npz"])
    assert len(table) == 8
    assert table.ids[5] == "b:1"
    assert not table.tokens_exact
    assert set(table.source_names) <= {"a", "b", "empty"}


def test_damaged_tables_are_refused(tmp_path):
    good = {name: np.arange(3) for name in COLUMNS} | {"source": np.zeros(3, np.int32)}
    good |= {"id_utf8": np.empty(0, np.uint8), "id_ends": np.empty(0, np.int64)}
    meta = {
        "version": "1", "patch_unit": "patches", "tokens_exact": True, "source_names": ["a"], "has_ids": False,
        "num_read": 3, "assumptions": [], "bad": [],
    }  # fmt: skip
    odd = {"file": "f", "line": 1, "id": None, "kind": "odd", "reason": "x"}
    cases = {
        "empty": b"",
        "text": b"PK nonsense",
        "version": pack_arrays(good, meta | {"version": "2"}),
        "unit": pack_arrays(good, meta | {"patch_unit": "acres"}),
        "no list": pack_arrays(good, meta | {"assumptions": 3}),
        "lacking": pack_arrays(good, {"version": "1"}),
        "kind": pack_arrays(good, meta | {"bad": [odd]}),
        "short": pack_arrays(good | {"num_tokens": np.arange(2)}, meta),
        "negative": pack_arrays(good | {"num_tokens": np.array([1, -1, 2])}, meta),
        "source": pack_arrays(good | {"source": np.ones(3, np.int32)}, meta),
        "float": pack_arrays(good | {"num_tokens": np.ones(3)}, meta),
        "ids": pack_arrays(good, meta | {"has_ids": True}),
    }
    path = tmp_path / "table.npz"
    for content in cases.values():
        path.write_bytes(content)
        with refused(SampleError):
            load_table(path)
    path.write_bytes(pack_arrays(good, meta))
    assert len(load_table(path)) == 3
    import io

    buffer = io.BytesIO()
    np.savez(buffer, meta=np.array([{"a": 1}], object))
    path.write_bytes(buffer.getvalue())
    with refused(SampleError):
        load_table(path)
    refuse_inflated(path, good)


def refuse_inflated(path, good):
    """Zeros that a zip makes small, and an array whose header says more than follows it: neither takes memory."""
    import io
    import tracemalloc
    import zipfile

    packed, lying = io.BytesIO(), io.BytesIO()
    np.savez_compressed(packed, **good, meta=np.zeros(50_000_000, np.uint8))
    header = io.BytesIO()
    np.lib.format.write_array_header_1_0(header, {"descr": "<i8", "fortran_order": False, "shape": (10**12,)})
    with zipfile.ZipFile(lying, "w") as archive:
        archive.writestr("num_tokens.npy", header.getvalue())
    for content, said in (
        (packed.getvalue(), "hold compressed arrays of 5000"),
        (lying.getvalue(), "declare an array of 8000000000000,"),
    ):
        path.write_bytes(content)
        tracemalloc.start()
        with refused(SampleError, len(content), said):
            load_table(path)
        assert tracemalloc.get_traced_memory()[1] < 5_000_000
        tracemalloc.stop()
