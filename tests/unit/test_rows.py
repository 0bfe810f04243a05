"""Records become conversations, or a bad record with its reason; nothing else, whatever JSON they are."""

from contextlib import closing
from pathlib import Path

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from refusals import refused
from trimtab.errors import shorten
from trimtab.samples import records
from trimtab.samples.problems import BadRecordError, BadSample
from trimtab.samples.records import Lines, line_starts
from trimtab.samples.rows import read_conversation, record_id

ROW_KEYS = ("id", "conversations", "messages", "image", "images", "system", "tools")
TURN_KEYS = ("from", "value", "role", "content", "type", "text", "image_url", "url", "path", "bytes", "base64", "odd")
KEYS = st.sampled_from(ROW_KEYS + TURN_KEYS)
TEXTS = st.sampled_from(
    ["", "human", "gpt", "user", "assistant", "text", "image", "image_url", "<image>", "a.png", "hi"]
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | TEXTS | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)
TURNS = st.lists(
    st.fixed_dictionaries({}, optional={"from": TEXTS, "value": JSON, "role": TEXTS, "content": JSON}), max_size=3
)


@settings(max_examples=120, deadline=None)
@given(
    JSON | st.fixed_dictionaries({}, optional={"conversations": TURNS, "messages": TURNS, "image": JSON, "id": JSON})
)
def test_any_json_is_a_conversation_or_a_bad_record(value):
    try:
        record_id(value)
        conversation = read_conversation(value)
    except BadRecordError:
        return
    assert sum(message.num_images for message in conversation.messages) == len(conversation.images)
    assert all(isinstance(image, (str, bytes)) and image for image in conversation.images)


def test_parts_take_their_own_image_and_the_others_the_columns():
    content = ["a<image>b", {"type": "image"}, {"type": "image", "image": "own.png"}, {"text": "<image>"}]
    row = {
        "images": ["1", {"path": "2"}, {"bytes": b"3", "path": "x"}],
        "messages": [{"role": "user", "content": content}],
    }
    conversation = read_conversation(row)
    assert conversation.images == ("1", "2", "own.png", b"3")
    assert conversation.messages[0].content == ("a", None, "b", None, None, None)
    inside = {"type": "image", "base64": "aGk="}
    assert read_conversation({"messages": [{"role": "user", "content": [inside]}]}).images == ("data:;base64,aGk=",)


def test_images_of_a_shard_replace_those_a_row_names():
    row = {"image": "gone.png", "conversations": [{"from": "human", "value": "<image>"}]}
    assert read_conversation(row, images=(b"bytes",)).images == (b"bytes",)
    with refused(BadRecordError, "1", "0"):
        read_conversation(row, images=())


def test_a_bad_sample_reads_as_one_line():
    bad = BadSample(file="f.jsonl", line=None, id="a\nb", kind="type", reason="odd")
    assert str(bad) == r"f.jsonl (id a\x0ab): odd"
    assert shorten("x" * 90) == "x" * 77 + "..."


# -- samples/records.py: where records are, and every line of a file by its byte offset --------------------------------


@given(
    content=st.lists(st.sampled_from([b"\n", b"a", b" ", b"\r\n", b"\xc3\xa9", b"{}"]), min_size=1).map(b"".join),
    bom=st.booleans(),
    block=st.integers(1, 40),
)
@settings(max_examples=100, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_lines_are_those_that_python_reads(tmp_path, monkeypatch, content, bom, block):
    monkeypatch.setattr(records, "_SCAN_BYTES", block)
    path = tmp_path / "lines.jsonl"
    path.write_bytes((b"\xef\xbb\xbf" if bom else b"") + content)
    with path.open("rb") as file:
        expected = [line.removeprefix(b"\xef\xbb\xbf").strip() for line in file]
    starts = line_starts(path)
    with closing(Lines(path)) as lines:
        assert [lines.read(start) for start in starts.tolist()] == expected


def test_an_empty_file_has_no_lines(tmp_path: Path) -> None:
    (tmp_path / "empty").write_bytes(b"")
    assert len(line_starts(tmp_path / "empty")) == 0
