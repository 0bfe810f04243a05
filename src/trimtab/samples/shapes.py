"""Records of any shape as messages: the shapes that data sets come in, and a map of columns for all others."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trimtab.address import Address
from trimtab.errors import SampleError, shorten
from trimtab.files import read_small
from trimtab.samples.problems import BadRecordError, wrong
from trimtab.typed_json import parse_json

Columns = tuple[tuple[str, str], ...]
"""Pairs of what a field means and how it is called."""

CONVERSATION_KEYS = ("conversations", "messages", "texts")
IMAGE_MARK = "<image>"
_SHAPES = (  # question and answer, of Alpaca, ms-swift, TRL, plain tables, in this order
    ("instruction", "output"),
    ("query", "response"),
    ("prompt", "completion"),
    ("question", "answer"),
)
_ASKED = ("query", "prompt", "input", "instruction", "question", "problem")
_SAID = (
    *("response", "answer", "output", "targets", "target", "answer_key", "answers", "solution"),
    *("text", "completion", "content"),
)
"""The names by which ms-swift knows a question and its answer, where a record has one of each."""
_PAIR = ("chosen", "rejected")
_OTHERS = ("rejected_response", "rejected_messages")  # ms-swift's, of a conversation that ends in the chosen one
_CAPTIONS = ("caption", "txt", "text")
_BESIDE = ("input", "history", "system_prompt")  # of a question: more of it, turns before it, a system's turn
_OTHER_NAMES = MappingProxyType(
    {"conversation": "messages", "file_name": "image", "image_path": "image", "img": "image"}
)
"""ms-swift's; those of folders of images that `datasets` reads, and of tables."""
SHAPE_KEYS = (*(x for y in _SHAPES for x in y), *_ASKED, *_SAID, *_PAIR, *_OTHERS, *_CAPTIONS, *_BESIDE)
COLUMN_KEYS = (*CONVERSATION_KEYS, *SHAPE_KEYS, *_OTHER_NAMES)
"""Fields that shapes are made of."""
_TURN = ("role", "content")
_TAGS = ("user", "assistant", "observation", "function")
_MEANINGS = MappingProxyType(
    {
        **{name: name for name in (*CONVERSATION_KEYS, "images", "videos", "tools", "system", "input", "history")},
        **{name: name for name in ("question", "answer", "caption", "image", "video", *_PAIR, *_TURN, *_TAGS)},
    }
)
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif")


def read_columns(text: str | None) -> Columns:
    """Read question=query,answer=label as pairs; `SampleError` for a meaning that there is not.

    >>> read_columns("question=query,answer=label")
    (('question', 'query'), ('answer', 'label'))
    """
    pairs = []
    for part in (text or "").split(","):
        meaning, mark, name = (piece.strip() for piece in part.partition("="))
        if not part.strip():
            continue
        if meaning not in _MEANINGS or not mark or not name:
            raise SampleError(f"columns hold {shorten(part)!r}: write MEANING=FIELD, of {', '.join(sorted(_MEANINGS))}")
        pairs.append((meaning, name))
    return tuple(pairs)


def has_shape(names: Collection[str]) -> bool:
    """Return whether fields of these names make a conversation."""
    whole = any(key in names for key in CONVERSATION_KEYS)
    asked = any(question in names and answer in names for question, answer in _SHAPES)
    return whole or asked or any(name in names for name in (*_PAIR, *_CAPTIONS[:2]))


def as_messages(record: Mapping[str, Any], columns: Columns, *, num_images: int | None) -> Mapping[str, Any]:
    """The record with one of `CONVERSATION_KEYS`; `BadRecordError` names its fields where no shape fits.

    A pair of answers has the turns with the one under "messages" and those with the other under "rejected_messages".
    Fields that a shape is made of are gone. `num_images`: of a sample that comes with its images, such as a shard's;
    None: they stand in the record.
    """
    record = _renamed(record, columns)
    if num_images is None:
        num_images = _count_images(record)
    if all(record.get(name) is not None for name in _PAIR):
        turns = [_answered(record, record[name], num_images, replaces=name == "rejected") for name in _PAIR]
        return {
            **_without(record, *CONVERSATION_KEYS, *_PAIR, *_ASKED, *_BESIDE),
            "messages": turns[0],
            "rejected_messages": turns[1],
        }
    if record.get("rejected_response") is not None:
        whole = as_messages(_without(record, "rejected_response"), (), num_images=num_images)
        turns = _answered(whole, record["rejected_response"], num_images, replaces=True)
        return {**whole, "rejected_messages": turns}
    if any(record.get(key) is not None for key in CONVERSATION_KEYS):
        return record
    if (shape := _flat_shape(record)) is not None:
        return {**_without(record, *shape, *_BESIDE), "messages": _turns(record, *shape, num_images)}
    caption = next((name for name in _CAPTIONS if isinstance(record.get(name), str)), None)
    if caption is not None and num_images:
        marks = [{"type": "image"} for _ in range(num_images)]
        turns = [{"role": "user", "content": marks}, {"role": "assistant", "content": record[caption]}]
        return {**_without(record, caption), "messages": turns}
    held = ", ".join(map(str, record)) or "no field"
    raise BadRecordError(
        "type",
        f"no shape of data fits the fields ({shorten(held, 120)}): say what they mean, as in --columns "
        f"{_proposed(record)}",
    )


def _renamed(record: Mapping[str, Any], columns: Columns) -> dict[str, Any]:
    """Return the record under the names that are known here, its turns as well."""
    if columns:
        named = {meaning: record.get(name) for meaning, name in columns if meaning not in (*_TURN, *_TAGS)}
        gone = {*named, *(name for _, name in columns)}
        record = {**{key: record[key] for key in record if key not in gone}, **named}
    held = dict(record)
    for name, meaning in _OTHER_NAMES.items():
        if name in held and held.get(meaning) is None and not (meaning == "image" and "images" in held):
            held[meaning] = held.pop(name)
    tags = {meaning: name for meaning, name in columns if meaning in (*_TURN, *_TAGS)}
    if tags:
        for key in (*CONVERSATION_KEYS, *_PAIR):
            held[key] = _plain_turns(held.get(key), tags)
    if isinstance(turns := held.get("messages"), list):
        held["messages"] = [turn for given in turns for turn in _both_of(given)]
    return held


def _plain_turns(turns: Any, tags: Mapping[str, str]) -> Any:
    """Return turns whose fields and roles have names of their own as `role` and `content`."""
    if isinstance(turns, dict):
        return _plain_turns([turns], tags)[0]
    if not isinstance(turns, list):
        return turns
    roles = {tags[meaning]: meaning for meaning in _TAGS if meaning in tags}
    fields = {tags.get(name, name): name for name in _TURN}
    plain = [{fields.get(k, k): v for k, v in turn.items()} if isinstance(turn, dict) else turn for turn in turns]
    return [{**x, "role": roles.get(x["role"], x["role"])} if _has_role(x) else x for x in plain]


def _has_role(turn: Any) -> bool:
    return isinstance(turn, dict) and isinstance(turn.get("role"), str)


def _both_of(turn: Any) -> Iterator[Any]:
    """Yield the two turns of one object with a question and its answer, as `conversation` has them; else the turn."""
    if not isinstance(turn, dict) or not {"human", "user"} & turn.keys() or "role" in turn or "from" in turn:
        yield turn
        return
    for role, names in (
        ("system", ("system",)),
        ("user", ("human", "user")),
        ("assistant", ("assistant", "gpt", "bot")),
    ):
        if (name := next((name for name in names if turn.get(name)), None)) is not None:
            yield {"role": role, "content": turn[name]}


def _flat_shape(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the fields that hold a question and its answer; None: there are none, or more than one of a kind."""
    held = [name for name in record if record[name] is not None]
    for question, answer in (("question", "answer"), *_SHAPES):
        if question in held and answer in held:
            return question, answer
    asked, said = ([name for name in names if name in held] for names in (_ASKED, _SAID))
    return (asked[0], said[0]) if len(asked) == 1 and len(said) == 1 else None


def _without(record: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {key: value for key, value in record.items() if key not in names}


def _answered(record: Mapping[str, Any], answer: Any, num_images: int, *, replaces: bool) -> Any:
    """Return the turns that end in one of two answers: a text, a turn, turns, or the whole conversation.

    A second answer `replaces` the one that the conversation ends in.
    """
    before = next((record[key] for key in CONVERSATION_KEYS if record.get(key) is not None), None)
    asked = next((record[name] for name in _ASKED if record.get(name) is not None), None)
    turns = [answer] if isinstance(answer, dict) else answer
    if before is None and isinstance(turns, list):
        begins = turns[0].get("role", turns[0].get("from")) if turns and isinstance(turns[0], dict) else None
        if begins in ("system", "user", "human"):
            return turns
        before = asked if isinstance(asked, list) else [{"role": "user", "content": asked}]
    if before is None:
        name = next((name for name in _ASKED if record.get(name) is not None), "prompt")
        return _turns({**record, "answer": answer}, name, "answer", num_images)
    if replaces and isinstance(before, list) and before and isinstance(before[-1], dict):
        before = before[:-1] if before[-1].get("role", before[-1].get("from")) in ("assistant", "gpt") else before
    return [*before, *turns] if isinstance(turns, list) else [*before, {"role": "assistant", "content": answer}]


def _proposed(record: Mapping[str, Any]) -> str:
    """Return a map that may do, of the record's own fields."""
    turns = [name for name, x in record.items() if isinstance(x, list) and x and all(isinstance(y, dict) for y in x)]
    texts = [name for name, x in record.items() if isinstance(x, str) and name != "id"]
    images = [name for name in texts if record[name].lower().endswith(IMAGE_SUFFIXES)]
    images += [name for name, x in record.items() if isinstance(x, dict) and {"bytes", "path"} & x.keys()]
    texts = [name for name in texts if name not in images]
    pairs = [("messages", turns[0])] if turns else [*zip(("question", "answer"), texts, strict=False)]
    pairs += [("image", name) for name in images[:1]]
    said = [f"{meaning}={shorten(name, 30)}" for meaning, name in pairs]
    return ",".join(said) if len(said) > 1 or turns else "question=query,answer=label,image=img"


def _turns(record: Mapping[str, Any], question: str, answer: str, num_images: int) -> list[dict[str, Any]]:
    """Turns before it, the question, the answer; images that no text has a place for stand first."""
    asked, said = record[question], record[answer]
    if isinstance(asked, list) and isinstance(said, list):  # both are turns
        return [*asked, *said]
    turns: list[dict[str, Any]] = []
    if isinstance(said, list) and said and isinstance(said[0], str):  # several answers: the first, as ms-swift takes it
        said = said[0]
    if isinstance(record.get("system_prompt"), str) and record["system_prompt"]:
        turns.append({"role": "system", "content": record["system_prompt"]})
    for pair in record.get("history") or ():
        if not isinstance(pair, (list, tuple)) or len(pair) != 2:
            raise wrong("a turn of 'history'", pair, "a question and an answer")
        turns += [{"role": "user", "content": pair[0]}, {"role": "assistant", "content": pair[1]}]
    for name, value in ((question, asked), (answer, said)):
        if not isinstance(value, str):
            raise wrong(f"'{name}'", value, "a string")
    more = record.get("input") if question != "input" else None
    text = "\n".join(x for x in (asked, more) if isinstance(x, str) and x)
    is_marked = any(IMAGE_MARK in str(turn["content"]) for turn in turns) or IMAGE_MARK in text
    marks: list[Any] = [] if is_marked else [{"type": "image"} for _ in range(num_images)]
    content = [*marks, {"type": "text", "text": text}] if marks else text
    return [*turns, {"role": "user", "content": content}, {"role": "assistant", "content": said}]


def _count_images(record: Mapping[str, Any]) -> int:
    given: Any = next((record[key] for key in ("images", "image") if record.get(key) not in (None, "", [])), [])
    return len(given) if isinstance(given, (list, tuple)) else 1


# -- LLaMA-Factory's list of data sets --------------------------------------------------------------------------------


INFO = "dataset_info.json"
_ALPACA = {"prompt": "question", "query": "input", "response": "answer", "history": "history"}
_COMMON = {name: name for name in ("system", "tools", "images", "videos", "chosen", "rejected")}
_THEIR_TAGS = {f"{name}_tag": name for name in (*_TURN, *_TAGS)}
"""Its words for columns and tags, and ours; `DatasetAttr` of its data/parser.py (ff6d4d12) has the defaults."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ListedSet:
    """One data set whose file is here."""

    name: str
    file: str
    columns: Columns
    note: str | None  # what of the entry is not followed


def is_info(path: Path) -> bool:
    """Return whether it is LLaMA-Factory's, and not the file of that name that `datasets` writes."""
    return bool(_entries(path))


def listed_sets(path: Path) -> list[ListedSet]:
    """The data sets of the list that are files; the others are named in a note, and refused where there is none."""
    entries = _entries(path)
    away = [name for name, entry in entries.items() if not isinstance(entry.get("file_name"), str)]
    note = f"of {path} these data sets are no files, and not read: {shorten(', '.join(away))}" if away else None
    found = []
    for name, entry in entries.items():
        if name in away:
            continue
        odd = [key for key in ("num_samples", "subset", "folder") if entry.get(key) is not None]
        own = f"{path}: {', '.join(odd)} of {name} is not followed, all of the file is read" if odd else note
        found.append(ListedSet(name=name, file=entry["file_name"], columns=_columns_of(entry), note=own))
    if not found:
        raise SampleError(f"{path} names no file: every data set is elsewhere ({shorten(', '.join(away))})")
    return found


@cache
def columns_next_to(file: Path) -> Columns:
    """Return what the columns of a data file mean by the list in its folder, or in the one above; (): by none."""
    for folder in () if isinstance(file, Address) else (file.parent, file.parent.parent):
        if is_info(folder / INFO):
            for entry in _entries(folder / INFO).values():
                if isinstance(name := entry.get("file_name"), str) and folder / name == file:
                    return _columns_of(entry)
    return ()


def _entries(path: Path) -> Mapping[str, Mapping[str, Any]]:
    """Return the data sets by name; none of a file that is missing, or holds something else."""
    try:
        sets = parse_json(read_small(path)) if path.is_file() else None
    except (OSError, ValueError):
        return {}
    kinds = {"file_name", "hf_hub_url", "ms_hub_url", "om_hub_url", "script_url", "cloud_file_name"}
    if not isinstance(sets, dict) or not all(isinstance(x, dict) and kinds & x.keys() for x in sets.values()):
        return {}
    return sets


def _columns_of(entry: Mapping[str, Any]) -> Columns:
    """Return what an entry says; a column that it leaves out is not read, as LLaMA-Factory does."""
    is_alpaca = entry.get("formatting", "alpaca") == "alpaca"
    meanings = {**(_ALPACA if is_alpaca else {"messages": "messages"}), **_COMMON}
    given = entry.get("columns")
    if not isinstance(given, dict):
        given = {"prompt": "instruction", "query": "input", "response": "output", "messages": "conversations"}
    pairs = [(meaning, str(given.get(name) or "")) for name, meaning in meanings.items()]
    tags = {} if is_alpaca else entry.get("tags")
    return (*pairs, *_tagged(tags if isinstance(tags, dict) else {}))


def _tagged(tags: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    yield from ((meaning, str(tags[name])) for name, meaning in _THEIR_TAGS.items() if tags.get(name))
