"""Records of every shape that data sets come in, and a map of columns for all others."""

import json
from pathlib import Path
from typing import Any

import pytest
from sample_sets import PixelRule, png, write_jsonl

from trimtab.samples.rows import read_conversation
from trimtab.samples.shapes import read_columns
from trimtab.samples.size import size_samples
from yaml_tables import read_table


@pytest.mark.parametrize("given", read_table("records", "shapes"))
def test_a_record_of_any_shape_is_a_conversation(given: dict[str, Any]) -> None:
    found = read_conversation(given["record"], columns=read_columns(given.get("columns", "")))
    assert [[message.role, list(message.content)] for message in found.messages] == given["turns"]
    assert len(found.images) == sum(message.num_images for message in found.messages)


def test_flat_columns_are_sized_and_fields_that_are_not_read_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="the [data] extra is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    (tmp_path / "a.png").write_bytes(png(40, 20))
    rows = [{"q": "What?", "label": "A cat.", "img": "a.png", "mood": "calm", "source": "x"} for _ in range(3)]
    write_jsonl(tmp_path / "d.jsonl", rows)
    parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "d.parquet")
    how: Any = {"image_rule": PixelRule(), "tokenizer": None, "columns": "question=q,answer=label,image=img"}
    lines = size_samples(tmp_path / "d.jsonl", **how)
    assert lines.table.num_images.tolist() == [1, 1, 1]
    named = [told for told in lines.assumptions if "mood" in told]
    assert len(named) == 1
    assert "source" not in named[0]
    assert "label" not in named[0]
    columns = size_samples(tmp_path / "d.parquet", **how)
    assert columns.table.num_tokens.tolist() == lines.table.num_tokens.tolist()
    assert any("mood" in told for told in columns.assumptions)


def test_a_field_that_the_chosen_shape_leaves_is_unread() -> None:
    record = {"messages": [{"role": "user", "content": "What?"}], "answer": "A cat.", "source": "x"}
    assert set(read_conversation(record).unread) == {"answer", "source"}
    assert read_conversation({"query": "What?", "response": "A cat.", "history": []}).unread == ()


# -- fields that change a sample --------------------------------------------------------------------------------------

TOOLS = [{"type": "function", "function": {"name": "tide"}}]


@pytest.mark.parametrize("tools", [TOOLS, TOOLS[0], json.dumps(TOOLS), json.dumps(TOOLS[0])])
def test_tools_are_a_list_or_the_same_as_text(tools: Any) -> None:
    record = {"tools": tools, "messages": [{"role": "user", "content": "What?"}]}
    assert read_conversation(record).tools == tuple(TOOLS)


@pytest.mark.parametrize("field", ["loss", "train", "training", "weight"])
def test_a_turn_says_whether_it_is_learnt(field: str) -> None:
    said = [{"role": "assistant", "content": "a", field: value} for value in (True, False, 1, 0)]
    assert [message.is_learnt for message in read_conversation({"messages": said}).messages] == [True, False] * 2


def test_arguments_of_a_record_go_to_its_template() -> None:
    record = {"chat_template_kwargs": {"enable_thinking": False}, "messages": [{"role": "user", "content": "What?"}]}
    assert read_conversation(record).arguments == (("enable_thinking", False),)
