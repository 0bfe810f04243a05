"""One record of a data set, in any of its spellings, as one conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from trimtab.samples.problems import BadRecordError, shorten

_ROLES = {  # ShareGPT's names beside OpenAI's
    "human": "user",
    "user": "user",
    "gpt": "assistant",
    "assistant": "assistant",
    "chatgpt": "assistant",
    "model": "assistant",
    "system": "system",
    "developer": "system",
    "tool": "tool",
    "observation": "tool",
}
IMAGE_MARK = "<image>"

CONVERSATION_KEYS = ("conversations", "messages", "texts")
KNOWN_KEYS = ("id", "image", "images", "system", "tools", *CONVERSATION_KEYS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn; in `content` None stands for an image."""

    role: str
    content: tuple[str | None, ...]
    was_text: bool  # the record gave a plain string without images
    extra: tuple[tuple[str, object], ...] = ()  # other fields of the message, for the template

    @property
    def num_images(self) -> int:
        return self.content.count(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One sample: turns, and one path, URL or bytes for every image in them, in order."""

    messages: tuple[Message, ...]
    images: tuple[str | bytes, ...]
    tools: tuple[object, ...] | None = None


def record_id(record: object) -> str | None:
    """The record's own id as text; None without one."""
    value = record.get("id") if isinstance(record, dict) else None
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise _wrong("id", value, "a string or a whole number")


def read_conversation(record: object, *, images: tuple[bytes, ...] | None = None) -> Conversation:
    """A record in the style of LLaVA / ShareGPT (`conversations`), OpenAI (`messages`) or The Cauldron (`texts`).

    Every `<image>` in a text and every content part of type image or image_url is an image. A part may carry its image;
    the others take theirs from `image` or `images`, in order. `images` given here (members of a tar shard) replace
    those two fields and paths in parts. As many placeholders as images are asked for, neither more nor fewer.
    """
    if not isinstance(record, dict):
        raise _wrong("the record", record, "a JSON object")
    name = next((key for key in CONVERSATION_KEYS if record.get(key) is not None), None)
    if name is None:
        raise BadRecordError("type", "the record has none of 'conversations', 'messages' and 'texts': add one of them")
    turns = _rows_of(record[name])
    if name == "texts":
        turns = _cauldron_turns(turns, record)
    if not isinstance(turns, (list, tuple)) or not turns:
        raise _wrong(name, turns, "a list of at least one turn")
    messages: list[Message] = []
    inline: list[str | bytes | None] = []
    if isinstance(system := record.get("system"), str) and system:
        messages.append(Message(role="system", content=(system,), was_text=True))
    for turn in turns:
        messages.append(_message(turn, name, inline))
    if images is not None:  # a part's path names a member of the shard: the members are given
        inline = [None if isinstance(image, str) and not image.startswith("data:") else image for image in inline]
    column: list[str | bytes] = [*images] if images is not None else [*_column_images(record)]
    return Conversation(messages=tuple(messages), images=_join(inline, column), tools=_tools(record))


def _rows_of(turns: object) -> object:
    """A list of turns; `datasets` stores some as one object of lists."""
    if isinstance(turns, dict) and turns and all(isinstance(column, list) for column in turns.values()):
        return [dict(zip(turns, row, strict=False)) for row in zip(*turns.values(), strict=False)]
    return turns


def _cauldron_turns(texts: object, record: Mapping[str, object]) -> object:
    """Objects with `user` and `assistant` as two turns each; their images stand before the first text."""
    if not isinstance(texts, (list, tuple)):
        return texts
    images = record.get("images")
    marks: list[object] = [{"type": "image"} for _ in images] if isinstance(images, (list, tuple)) else []
    turns: list[object] = []
    for text in texts:
        if not isinstance(text, dict):
            raise _wrong("a turn of 'texts'", text, "an object with 'user' and 'assistant'")
        for role in ("user", "assistant"):
            if not isinstance(text.get(role), str):
                raise _wrong(f"'{role}' of 'texts'", text.get(role), "a string")
        question = text["user"] if turns or IMAGE_MARK in text["user"] else [*marks, text["user"]]
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": text["assistant"]}]
    return turns


def _message(turn: object, where: str, inline: list[str | bytes | None]) -> Message:
    if not isinstance(turn, dict):
        raise _wrong(f"a turn of '{where}'", turn, "a JSON object")
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    role = turn.get(role_key)
    known = _ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise _wrong(f"'{role_key}'", role, "one of " + ", ".join(_ROLES))
    content = turn.get(content_key)
    extra = tuple((k, v) for k, v in turn.items() if k not in (role_key, content_key) and v is not None)
    if content is None and extra and known == "assistant":
        return Message(role=known, content=(), was_text=True, extra=extra)  # a tool call without text
    if isinstance(content, str):
        parts = tuple(_split_text(content, inline))
        return Message(role=known, content=parts, was_text=None not in parts, extra=extra)
    if not isinstance(content, (list, tuple)):
        raise _wrong(f"'{content_key}'", content, "a string or a list of parts")
    return Message(role=known, content=tuple(_parts(content, inline)), was_text=False, extra=extra)


def _split_text(text: str, inline: list[str | bytes | None]) -> Iterator[str | None]:
    if IMAGE_MARK not in text:
        yield text
        return
    pieces = text.split(IMAGE_MARK)
    for position, piece in enumerate(pieces):
        if position:
            inline.append(None)
            yield None
        if piece:
            yield piece


def _parts(content: list[object] | tuple[object, ...], inline: list[str | bytes | None]) -> Iterator[str | None]:
    for part in content:
        if isinstance(part, str):
            yield from _split_text(part, inline)
            continue
        if not isinstance(part, dict):
            raise _wrong("a content part", part, "a string or a JSON object")
        kind = part.get("type")
        if kind in ("text", "input_text") or (kind is None and isinstance(part.get("text"), str)):
            text = part.get("text")
            if not isinstance(text, str):
                raise _wrong("'text' of a content part", text, "a string")
            yield from _split_text(text, inline)
        elif kind in ("image", "image_url", "input_image"):
            inline.append(_part_image(part))
            yield None
        else:
            raise _wrong("'type' of a content part", kind, "text, image or image_url (video and audio are not sized)")


def _part_image(part: Mapping[str, object]) -> str | bytes | None:
    for key in ("image_url", "image", "url", "path", "base64"):
        value = part.get(key)
        if value is None:
            continue
        if key == "base64" and isinstance(value, str):
            return "data:;base64," + value
        if key == "image_url" and isinstance(value, dict):
            value = value.get("url")
        return _image(value, f"'{key}' of a content part")
    return None


def _column_images(record: Mapping[str, object]) -> Iterator[str | bytes]:
    present = [key for key in ("image", "images") if record.get(key) not in (None, "", [])]
    if len(present) == 2 and record["image"] != record["images"]:
        raise BadRecordError("type", "the record has both 'image' and 'images', and they differ: keep one of them")
    for key in present[:1]:
        value = record[key]
        for item in value if isinstance(value, (list, tuple)) else [value]:
            yield _image(item, f"'{key}'")


def _image(value: object, where: str) -> str | bytes:
    if isinstance(value, dict):  # an image of Hugging Face datasets: bytes, or else a path
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, bytes)) and value:
        return value
    raise _wrong(where, value, "a path, a URL, or an object with 'bytes' or 'path'")


def _join(inline: list[str | bytes | None], column: list[str | bytes]) -> tuple[str | bytes, ...]:
    num_open = inline.count(None)
    if num_open != len(column):
        raise BadRecordError(
            "placeholder",
            f"{num_open} image placeholders and {len(column)} images: "
            f"write {IMAGE_MARK} (or a content part of type image) once for every image",
        )
    rest = iter(column)
    return tuple(image if image is not None else next(rest) for image in inline)


def _tools(record: Mapping[str, object]) -> tuple[object, ...] | None:
    tools = record.get("tools")
    return tuple(tools) if isinstance(tools, (list, tuple)) and tools else None


def _wrong(what: str, value: object, wanted: str) -> BadRecordError:
    shown = shorten(repr(value), 40) if isinstance(value, (str, int, float, bool, type(None))) else type(value).__name__
    return BadRecordError("type", f"{what} is {shown}: it must be {wanted}")
