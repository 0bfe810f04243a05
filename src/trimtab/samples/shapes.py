"""Records of any shape as messages: the shapes that data sets come in, and a map of columns for all others."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from types import MappingProxyType
from typing import Any

from trimtab.errors import SampleError
from trimtab.samples.problems import BadRecordError, shorten, wrong

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
_PAIR = ("chosen", "rejected")
_CAPTIONS = ("caption", "txt")
_BESIDE = ("input", "history", "system_prompt")  # of a question: more of it, turns before it, a system's turn
SHAPE_KEYS = (*(name for shape in _SHAPES for name in shape), *_PAIR, *_CAPTIONS, *_BESIDE)
_MEANINGS = MappingProxyType(
    {
        **{name: name for name in (*CONVERSATION_KEYS, "images", "videos", "tools", "system", "input", "history")},
        **{name: name for name in ("question", "answer", "caption", "image", "video")},
    }
)


def read_columns(text: str | None) -> Columns:
    """question=query,answer=label as pairs; `SampleError` for a meaning that there is not.

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
    return whole or asked or any(name in names for name in (*_PAIR, *_CAPTIONS))


def as_messages(record: Mapping[str, Any], columns: Columns, *, num_images: int | None) -> Mapping[str, Any]:
    """The record with one of `CONVERSATION_KEYS`; `BadRecordError` names its fields where no shape fits.

    `num_images`: of a sample that comes with its images, such as a shard's; None: they stand in the record.
    """
    if columns:
        renamed = {meaning: record.get(name) for meaning, name in columns}
        record = {**{key: record[key] for key in record if key not in renamed}, **renamed}
    if any(record.get(key) is not None for key in CONVERSATION_KEYS):
        return record
    if num_images is None:
        num_images = _count_images(record)
    for question, answer in (("question", "answer"), *_SHAPES) if columns else _SHAPES:
        if record.get(question) is not None and record.get(answer) is not None:
            return {**record, "messages": _turns(record, question, answer, num_images)}
    if any(record.get(name) is not None for name in _PAIR):
        raise BadRecordError(
            "type",
            "the record has two answers (chosen, rejected): name one, as in --columns question=prompt,answer=chosen",
        )
    caption = next((name for name in _CAPTIONS if isinstance(record.get(name), str)), None)
    if caption is not None and num_images:
        marks = [{"type": "image"} for _ in range(num_images)]
        turns = [{"role": "user", "content": marks}, {"role": "assistant", "content": record[caption]}]
        return {**record, "messages": turns}
    held = ", ".join(map(str, record)) or "no field"
    raise BadRecordError(
        "type",
        f"neither 'conversations', 'messages', 'texts' nor another shape in the fields ({shorten(held, 120)}): "
        "say what they mean, as in --columns question=query,answer=label,image=img",
    )


def _turns(record: Mapping[str, Any], question: str, answer: str, num_images: int) -> list[dict[str, Any]]:
    """Turns before it, the question, the answer; images that no text has a place for stand first."""
    asked, said = record[question], record[answer]
    if isinstance(asked, list) and isinstance(said, list):  # both are turns
        return [*asked, *said]
    turns: list[dict[str, Any]] = []
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
    text = f"{asked}\n{more}" if isinstance(more, str) and more else asked
    is_marked = any(IMAGE_MARK in str(turn["content"]) for turn in turns) or IMAGE_MARK in text
    marks: list[Any] = [] if is_marked else [{"type": "image"} for _ in range(num_images)]
    content = [*marks, {"type": "text", "text": text}] if marks else text
    return [*turns, {"role": "user", "content": content}, {"role": "assistant", "content": said}]


def _count_images(record: Mapping[str, Any]) -> int:
    given: Any = next((record[key] for key in ("images", "image") if record.get(key) not in (None, "", [])), [])
    return len(given) if isinstance(given, (list, tuple)) else 1
