"""A plan as data files: every planned record once, in the plan's order, read back from what was written."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from plans import size_and_plan

from refusals import refused
from trimtab import Schedule, describe, size_samples
from trimtab.adapters.data_files import (
    open_records,
    order_packs,
    read_planned,
    sources_of,
    write_jsonl,
    write_nested_packs,
)
from trimtab.errors import PlanError, SampleError
from trimtab.plan.file.yaml import load_plan, plan_to_yaml
from trimtab.samples.sources import find_sources

pytest.importorskip("PIL", reason="the demo draws its data set: pip install 'trimtab[data]'")
pytest.importorskip("tokenizers", reason="the demo builds a tokenizer: pip install 'trimtab[data]'")


@pytest.fixture(scope="module")
def drawn(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A drawn data set with lines that sizing leaves out: broken, blank, without its image."""
    from trimtab.demo import draw_dataset

    folder = draw_dataset(tmp_path_factory.mktemp("drawn"), num_samples=160)
    data = folder / "data.jsonl"
    lines = data.read_text(encoding="utf-8").splitlines()
    lost = json.loads(lines[7])
    lost |= {"id": "lost", "image": "images/gone.png"}
    for at, line in ((120, json.dumps(lost)), (60, ""), (9, "{broken"), (0, "   ")):
        lines.insert(at, line)
    data.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def planned(drawn: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return size_and_plan([drawn / "data.jsonl"], tmp_path_factory.mktemp("plan") / "plan")


def read(path: Path) -> list[Any]:
    with path.open(encoding="utf-8") as file:  # as hosts read it: U+2028 ends no line
        return [json.loads(line) for line in file]


def originals(drawn: Path) -> dict[str, dict[str, Any]]:
    found = {}
    for line in (drawn / "data.jsonl").read_text(encoding="utf-8").splitlines():
        if line.strip() and line != "{broken":
            record = json.loads(line)
            found[record["id"]] = record
    return found


# -- what is written --------------------------------------------------------------------------------------------------


def test_every_planned_record_is_written_once_in_the_order_of_the_plan(drawn, planned, tmp_path):
    result = write_jsonl(planned, tmp_path / "ordered.jsonl")
    written, plan = read(tmp_path / "ordered.jsonl"), read_planned(planned)
    assert result.num_records == len(written) == 160
    order = [r for p in plan.order for r in plan.packing.indices[plan.packing.offsets[p] : plan.packing.offsets[p + 1]]]
    assert [record["id"] for record in written] == [plan.samples.sample_id(int(row)) for row in order]
    assert "lost" not in {record["id"] for record in written}
    for record, row in zip(written, order, strict=True):
        assert record["length"] == record["num_tokens"] == plan.samples.num_tokens[row]
        rest = {name: value for name, value in record.items() if name not in ("length", "num_tokens")}
        assert rest == originals(drawn)[record["id"]]


def test_nested_packs_are_dealt_to_the_ranks_by_their_line(planned: Path, tmp_path: Path) -> None:
    result = write_nested_packs(planned, tmp_path / "packs.jsonl")
    packs, plan = read(tmp_path / "packs.jsonl"), read_planned(planned)
    assert result.num_packs == len(packs) == plan.packing.num_packs
    dp, num_microbatches = plan.schedule.table.shape[1:]
    for line, pack in enumerate(packs):
        step, rest = divmod(line, dp * num_microbatches)
        number = plan.schedule.table[step, rest % dp, rest // dp]
        rows = plan.packing.indices[plan.packing.offsets[number] : plan.packing.offsets[number + 1]]
        assert [record["id"] for record in pack] == [plan.samples.sample_id(int(row)) for row in rows]
        assert sum(record["num_tokens"] for record in pack) <= plan.packing.limits[1]
    assert sorted(r["id"] for pack in packs for r in pack) == sorted(plan.samples.ids or ())


def test_writing_twice_gives_the_same_bytes_and_leaves_nothing_else(planned: Path, tmp_path: Path) -> None:
    for name in ("a", "b"):
        write_jsonl(planned, tmp_path / name / "ordered.jsonl")
        write_nested_packs(planned, tmp_path / name / "packs.jsonl")
    for name in ("ordered.jsonl", "packs.jsonl"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    assert sorted(p.name for p in (tmp_path / "a").iterdir()) == ["ordered.jsonl", "packs.jsonl"]


# -- where records come from ------------------------------------------------------------------------------------------


def records_of(num: int, *, start: int = 0, ids: bool = True) -> list[dict[str, Any]]:
    return [
        {
            **({"id": f"r{start + i}"} if ids else {}),
            "conversations": [
                {"from": "human", "value": f"question é {start + i}\u2028" + "word " * (i % 17)},
                {"from": "gpt", "value": f"answer {start + i}"},
            ],
            "length": 1,  # a guess that must give way
            "big": 12345678901234567890123,
        }
        for i in range(num)
    ]


def write_lines(path: Path, rows: Sequence[Any], *, head: bytes = b"") -> Path:
    path.write_bytes(head + b"\n".join(json.dumps(row, ensure_ascii=False).encode() for row in rows))
    return path


def test_json_lists_parquet_and_several_files_are_found_again(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="writes a Parquet file")
    import pyarrow
    import pyarrow.parquet

    rows = [records_of(20), records_of(20, start=100), records_of(20, start=200, ids=False)]
    for row in rows[1]:
        del row["big"]
    lines = write_lines(tmp_path / "a.jsonl", rows[0], head=b"\xef\xbb\xbf\n")
    table = tmp_path / "b.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows[1]), table)
    listed = tmp_path / "c.json"
    for row in rows[2]:
        del row["big"]
    listed.write_text(json.dumps(rows[2]), encoding="utf-8")
    plan = size_and_plan([lines, table, listed], tmp_path / "plan")
    write_jsonl(plan, tmp_path / "out" / "ordered.jsonl", fields=("length",))
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["ordered.jsonl"]
    written = read(tmp_path / "out" / "ordered.jsonl")
    key = [record["conversations"][0]["value"] for record in written]
    assert sorted(key) == sorted(row["conversations"][0]["value"] for group in rows for row in group)
    assert all(record["length"] > 1 for record in written)
    assert {record.get("big") for record in written} == {12345678901234567890123, None}


@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["good", "broken", "blank", "no id", "no image"]), st.integers(0, 40))),
    st.integers(1, 3),
)
def test_any_mixture_of_good_and_bad_lines_is_found_again(tmp_path_factory, kinds, num_files):
    folder = tmp_path_factory.mktemp("mixture")
    good = records_of(num_files, start=1000)  # one per file, so that no file is empty of samples
    files = []
    for number in range(num_files):
        lines = [json.dumps(good[number])]
        for i, (kind, words) in enumerate(kinds[number::num_files]):
            row = records_of(1, start=100 * number + i, ids=kind != "no id")[0]
            row["conversations"][0]["value"] += "x " * words
            if kind == "no image":
                row["image"] = "gone.png"
            lines.append({"broken": "{", "blank": " "}.get(kind) or json.dumps(row))
        files.append(folder / f"part{number}.jsonl")
        files[-1].write_text("\r\n".join(lines), encoding="utf-8")
    model = describe("Qwen2.5-VL-7B")
    sized = size_samples(files, image_rule=model.image_rule, tokenizer=None, on_bad="skip").table
    planned: Any = SimpleNamespace(samples=sized)
    with open_records(planned, find_sources(files), folder) as record:
        found = [record(row) for row in range(len(sized))]
    again = write_lines(folder / "again.jsonl", found)
    resized = size_samples(again, image_rule=model.image_rule, tokenizer=None)
    np.testing.assert_array_equal(resized.table.num_tokens, sized.num_tokens)
    questions = [record["conversations"][1]["value"] for record in found]
    assert len(set(questions)) == len(questions)  # no record twice


# -- what is refused --------------------------------------------------------------------------------------------------


def test_changed_or_missing_data_is_refused(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", records_of(12))
    plan = size_and_plan([data], tmp_path / "plan")
    write_lines(data, records_of(13))
    for named in (None, [data]):
        with refused(PlanError, "data.jsonl"):
            write_jsonl(plan, tmp_path / "out.jsonl", data=named)
    other = write_lines(tmp_path / "other.jsonl", records_of(11))
    with refused(SampleError, "other.jsonl", "11", "12"):
        write_jsonl(plan, tmp_path / "out.jsonl", data=[other])
    swapped = write_lines(tmp_path / "swapped.jsonl", records_of(12)[::-1])
    with refused(SampleError, "swapped.jsonl"):
        write_jsonl(plan, tmp_path / "out.jsonl", data=[swapped])
    with refused(SampleError, "1", "2"):
        write_jsonl(plan, tmp_path / "out.jsonl", data=[other, swapped])
    data.unlink()
    with refused(SampleError, "data.jsonl"):
        write_jsonl(plan, tmp_path / "out.jsonl")
    assert not (tmp_path / "out.jsonl").exists()


def test_files_of_sizes_and_shards_are_refused(planned: Path, tmp_path: Path) -> None:
    sizes = write_lines(tmp_path / "sizes.jsonl", [{"num_tokens": 3}])
    with refused(SampleError, "sizes.jsonl"):
        sources_of(read_planned(planned), [sizes])
    shard = tmp_path / "shard.tar"
    shard.write_bytes(bytes(1024))
    with refused(SampleError, "shard.tar"):
        write_jsonl(planned, tmp_path / "out.jsonl", data=[shard])


def test_bytes_in_a_column_are_refused(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow", reason="writes a Parquet file")
    import pyarrow
    import pyarrow.parquet

    rows = [row | {"thumb": b"\x00\xff"} for row in records_of(6)]
    for row in rows:
        del row["big"]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "data.parquet")
    plan = size_and_plan([tmp_path / "data.parquet"], tmp_path / "plan")
    with refused(SampleError, "1", "JSON"):
        write_jsonl(plan, tmp_path / "out.jsonl")


def test_names_are_checked(planned: Path, tmp_path: Path) -> None:
    with refused(SampleError, "packs.txt"):
        write_nested_packs(planned, tmp_path / "packs.txt")


def test_a_schedule_that_data_files_cannot_say_is_refused() -> None:
    whole = Schedule(table=np.array([[[0, 2], [1, 3]], [[4, -1], [5, -1]]]))
    assert order_packs(whole, 6).tolist() == [*range(6)]
    with refused(PlanError, "2", "3"):
        order_packs(Schedule(table=np.array([[[0], [1]]])), 3)
    with refused(PlanError):
        order_packs(Schedule(table=np.array([[[-1], [0]]])), 1)


def test_the_notes_tell_what_a_loader_would_do_to_a_short_row(tmp_path: Path) -> None:
    data = write_lines(tmp_path / "data.jsonl", records_of(3))
    plan = size_and_plan([data], tmp_path / "plan", max_patches=100, max_tokens=60)
    result = write_nested_packs(plan, tmp_path / "packs.jsonl")
    assert result.num_packs == 3
    (note,) = result.notes
    assert "3" in note
    assert "4" in note


def test_a_plan_that_packs_a_sample_twice_is_refused(planned: Path, tmp_path: Path) -> None:
    import shutil

    from trimtab.plan.file.yaml import array_bytes, name_table

    copy = tmp_path / "plan"
    shutil.copytree(planned, copy)
    indices = np.load(copy / "indices.npy")
    indices[0] = indices[1]
    content = array_bytes(indices)
    (copy / "indices.npy").write_bytes(content)
    plan = load_plan(copy)
    packing = replace(plan.decisions.packing, indices=name_table("indices.npy", content))
    changed = replace(plan, decisions=replace(plan.decisions, packing=packing))
    (copy / "plan.yaml").write_text(plan_to_yaml(changed), encoding="utf-8")
    with refused(PlanError):
        read_planned(copy)
