"""One record of a data set, in any of its spellings, as one conversation with its images and videos."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from enum import Enum
from pathlib import PurePosixPath
from typing import TypeVar

from trimtab.errors import shorten
from trimtab.models.images.rules import OwnSize
from trimtab.samples.problems import BadRecordError, wrong
from trimtab.samples.shapes import COLUMN_KEYS, CONVERSATION_KEYS, Columns, as_messages
from trimtab.specs import Clip
from trimtab.typed_json import parse_json

# -- videos: a file, or frames as images, and what the record says of either -------------------------------------------


VIDEO_KINDS = ("video", "video_url", "input_video")
_FPS = ("fps", "video_fps", "sample_fps")  # the last: of frames that were given as images (Qwen)
_FRAMES = ("num_frames", "nframes", "total_frames")
_DURATION = ("duration", "video_duration")
VIDEO_FACTS = ("width", "height", *_FPS, *_FRAMES, *_DURATION)
_OWN_SAMPLING = (
    *("fps", "nframes", "min_frames", "max_frames", "min_pixels", "max_pixels", "total_pixels"),
    *("resized_height", "resized_width", "video_start", "video_end"),
)
"""What a Qwen content part asks of its own video file; `fps` and `nframes` only where no facts of it are given."""
_FRAME_SUFFIXES = frozenset((".jpg", ".jpeg", ".png", ".webp", ".bmp"))


@dataclass(frozen=True, slots=True, kw_only=True)
class Video:
    """One video of a sample."""

    source: str | bytes | tuple[str | bytes, ...]  # a file, its bytes, or its frames as images
    fps: float | None = None  # of frames given as images
    clip: Clip | None = None  # what the record says of a file, so that its header need not be read
    own: tuple[tuple[str, float], ...] = ()  # what a content part asks for it: `Clip.own`


def column_videos(record: Mapping[str, object]) -> list[Video]:
    """The videos of `video` or `videos`: a path each, or a list of frames; facts next to a lone one are its own."""
    if (name := _column_of(record, "video")) is None:
        return []
    value = record[name]
    given = list(value) if isinstance(value, (list, tuple)) and not _are_frames(value) else [value]
    return [_video(item, f"'{name}'", record if len(given) == 1 else {}) for item in given]


def _column_of(record: Mapping[str, object], one: str) -> str | None:
    """Return `one` or its plural, whichever holds the record's media; None: neither."""
    present = [name for name in (one, f"{one}s") if record.get(name) not in (None, "", [])]
    if len(present) == 2 and record[one] != record[f"{one}s"]:
        raise BadRecordError("type", f"the record has both '{one}' and '{one}s', and they differ: keep one of them")
    return present[0] if present else None


def part_video(part: Mapping[str, object]) -> Video | None:
    """The video that a content part carries; None: it takes the next one of the record's field."""
    for key in ("video", "video_url", "url", "path"):
        value = part.get(key)
        if value is None:
            continue
        if key == "video_url" and isinstance(value, dict):
            value = value.get("url")
        video = _video(value, f"'{key}' of a content part", part)
        own = [name for name in _OWN_SAMPLING if part.get(name) is not None]
        if video.clip is not None or isinstance(video.source, tuple):
            own = [name for name in own if name not in ("fps", "nframes")]
        if own and isinstance(video.source, tuple):
            raise BadRecordError("type", f"a content part asks {', '.join(own)} of its frames: leave it out")
        return replace(video, own=tuple((name, _asked(part, name)) for name in own))
    return None


def _video(value: object, where: str, facts: Mapping[str, object]) -> Video:
    if isinstance(value, (list, tuple)):
        frames = tuple(_held(frame, f"a frame of {where}", _VIDEO_FORMS) for frame in value)
        if not frames:
            raise wrong(where, value, "a path, or a list of at least one frame")
        return Video(source=frames, fps=_number(facts, _FPS))
    return Video(source=_held(value, where, _VIDEO_FORMS), clip=_clip(facts))


def _asked(part: Mapping[str, object], name: str) -> float:
    number = 0.0 if name == "video_start" and part[name] in (0, "0") else _number(part, (name,))
    if number is None:
        raise wrong(f"'{name}' of a content part", part[name], "a number above 0")
    return number


def _clip(facts: Mapping[str, object]) -> Clip | None:
    """Return the width, height, frames a second, and frames or seconds; None where one of them is missing."""
    width, height, fps = _number(facts, ("width",)), _number(facts, ("height",)), _number(facts, _FPS[:2])
    frames, duration = _number(facts, _FRAMES), _number(facts, _DURATION)
    if frames is None and fps is not None and duration is not None:
        frames = round(duration * fps)
    if width is None or height is None or fps is None or frames is None:
        return None
    return Clip(width=int(width), height=int(height), num_frames=int(frames), fps=fps)


def _number(facts: Mapping[str, object], names: tuple[str, ...]) -> float | None:
    """The first that is a number above 0, also as text; what is none is not believed."""
    for name in names:
        value = facts.get(name)
        if isinstance(value, (int, float, str)):
            with contextlib.suppress(ValueError):
                if 0 < (number := float(value)) < 2**31:
                    return number
    return None


_VIDEO_FORMS = "a path, an object with 'bytes' or 'path', or a list of frames"
_IMAGE_FORMS = "a path, a URL, or an object with 'bytes' or 'path'"


def _held(value: object, where: str, forms: str) -> str | bytes:
    """Return the path or the bytes of an image or a video, which `datasets` keeps in an object."""
    if isinstance(value, dict):
        value = value.get("bytes") or value.get("path")
    if isinstance(value, (str, bytes)) and value:
        return value
    raise wrong(where, value, forms)


def _are_frames(values: list[object] | tuple[object, ...]) -> bool:
    """Return whether a list is one video's frames: all of it are names of images."""
    names: Iterator[object] = (value.get("path") if isinstance(value, dict) else value for value in values)
    return all(isinstance(x, str) and PurePosixPath(x).suffix.lower() in _FRAME_SUFFIXES for x in names)


T = TypeVar("T")

_ROLES = {  # ShareGPT's names next to OpenAI's
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
    "observations": "tool",
    "tool_response": "tool",
    "function_response": "tool",
    "bot": "assistant",
    "tool_call": "assistant",
    "function_call": "assistant",
    "function": "assistant",
}
_CALLS = ("tool_call", "function_call", "function")
"""Roles of ms-swift and LLaMA-Factory whose content is the JSON of what the assistant calls."""
_LEARNT = ("loss", "train", "training", "weight")
"""Fields of a turn that say whether it is learnt: ms-swift's and LLaMA-Factory's, axolotl's, OpenAI's."""
IMAGE_MARK, VIDEO_MARK = "<image>", "<video>"

TEMPLATE_FIELDS = ("enable_thinking", "documents")
_USED_KEYS = (
    *(*TEMPLATE_FIELDS, "chat_template_kwargs", "id", "image", "images", "video", "videos", *VIDEO_FACTS),
    *("system", "tools", *CONVERSATION_KEYS, "rejected_messages"),
)
_PART_KEYS = frozenset(
    (
        *("type", "text", "image_url", "image", "url", "path", "base64", "source", "detail", "cache_control", "id"),
        *("video", "video_url", *VIDEO_FACTS, *_OWN_SAMPLING),
    )
)
KNOWN_KEYS = (*_USED_KEYS, *COLUMN_KEYS)
HARMLESS_KEYS = frozenset(
    (
        *("source", "dataset", "dataset_name", "data_source", "split", "subset", "category", "task", "tag", "tags"),
        *("index", "idx", "uid", "uuid", "sample_id", "question_id", "image_id", "image_name", "url", "license"),
        *("meta", "metadata", "info", "lang", "language", "length", "num_tokens", "token_num", "image_wh", "score"),
        *("__key__", "__url__", "__index_level_0__", "height", "width", "height_list", "width_list"),
    )
)
"""Fields that say where a record comes from, or what others measured of it: they change no sample."""


class Slot(Enum):
    """What stands in a message where a video is."""

    VIDEO = VIDEO_MARK


@dataclass(frozen=True, slots=True, kw_only=True)
class Message:
    """One turn; in `content` None stands for an image, `Slot.VIDEO` for a video."""

    role: str
    content: tuple[str | Slot | None, ...]
    was_text: bool  # the record gave a plain string without images and videos
    extra: tuple[tuple[str, object], ...] = ()  # other fields of the message, for the template
    is_learnt: bool = True  # of the assistant's turns; False: the record says so

    @property
    def num_images(self) -> int:
        return self.content.count(None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """One sample: turns, and one path, URL or bytes for every image in them, in order; and their videos."""

    messages: tuple[Message, ...]
    images: tuple[str | bytes, ...]
    own_sizes: tuple[OwnSize | None, ...] = ()  # of each image; none at all where no part asks for one
    videos: tuple[Video, ...] = ()
    tools: tuple[object, ...] | None = None
    arguments: tuple[tuple[str, object], ...] = ()  # of the chat template, by the record
    rejected: Conversation | None = None  # of a pair of answers, the other one
    unread: tuple[str, ...] = ()  # fields that nothing is made of


def record_id(record: object) -> str | None:
    """The record's own id as text; None without one."""
    value = record.get("id") if isinstance(record, dict) else None
    if value is None or isinstance(value, str):
        return value or None
    if isinstance(value, int) and not isinstance(value, bool):
        return str(value)
    raise wrong("id", value, "a string or a whole number")


def read_conversation(
    record: object, *, images: tuple[bytes, ...] | None = None, columns: Columns = ()
) -> Conversation:
    """Read a record in the style of LLaVA / ShareGPT (`conversations`), OpenAI (`messages`) or The Cauldron (`texts`).

    Every `<image>` in a text and every content part of type image or image_url is an image. A part may carry its image;
    the others take theirs from `image` or `images`, in order. `images` given here (members of a tar shard) replace
    those two fields and paths in parts. As many placeholders as images are asked for, neither more nor fewer. The same
    holds for `<video>`, parts of type video or video_url, and `video` or `videos`; a `<video>` in a record without
    videos is text. Records of other shapes are read as `shapes.as_messages` has them; `columns` names their fields.
    """
    if not isinstance(record, dict):
        raise wrong("the record", record, "a JSON object")
    record = as_messages(record, columns, num_images=None if images is None else len(images))
    name = next((key for key in CONVERSATION_KEYS if record.get(key) is not None), None)
    assert name is not None, "as_messages saw to it"
    turns = _rows_of(record[name])
    if name == "texts":
        turns = _cauldron_turns(turns, record)
    if not isinstance(turns, (list, tuple)) or not turns:
        raise wrong(name, turns, "a list of at least one turn")
    messages: list[Message] = []
    inline = _Inline(videos_column=column_videos(record))
    if inline.videos_column and images is None and not any(record.get(key) for key in ("image", "images")):
        inline.video_mark = VIDEO_MARK if VIDEO_MARK in str(turns) else IMAGE_MARK  # LLaVA-Video writes <image>
    if isinstance(system := record.get("system"), str) and system:
        messages.append(Message(role="system", content=(system,), was_text=True))
    for turn in turns:
        messages.append(_message(turn, name, inline))
    other = record.get("rejected_messages")
    if images is not None:  # a part's path names a member of the shard: the members are given
        inline.images = [None if isinstance(x, str) and not x.startswith("data:") else x for x in inline.images]
    column: list[str | bytes] = [*images] if images is not None else [*_column_images(record)]
    return Conversation(
        messages=tuple(messages),
        images=_join(inline.images, column, "image", IMAGE_MARK),
        own_sizes=tuple(inline.own_sizes.get(i) for i in range(len(inline.images))) if inline.own_sizes else (),
        videos=_join(inline.videos, inline.videos_column, "video", VIDEO_MARK),
        tools=_tools(record),
        arguments=_arguments(record),
        rejected=None
        if other is None
        else read_conversation({**record, name: other, "rejected_messages": None}, images=images),
        unread=(
            *(key for key, value in record.items() if value is not None and key not in _USED_KEYS),
            *(f"{name} of a content part" for name in inline.unread),
        ),
    )


def _rows_of(turns: object) -> object:
    """Return a list of turns; `datasets` stores some as one object of lists."""
    if isinstance(turns, dict) and turns and all(isinstance(column, list) for column in turns.values()):
        return [dict(zip(turns, row, strict=False)) for row in zip(*turns.values(), strict=False)]
    return turns


def _cauldron_turns(texts: object, record: Mapping[str, object]) -> object:
    """Return objects with `user` and `assistant` as two turns each; their images stand before the first text."""
    if not isinstance(texts, (list, tuple)):
        return texts
    images = record.get("images")
    marks: list[object] = [{"type": "image"} for _ in images] if isinstance(images, (list, tuple)) else []
    turns: list[object] = []
    for text in texts:
        if not isinstance(text, dict):
            raise wrong("a turn of 'texts'", text, "an object with 'user' and 'assistant'")
        for role in ("user", "assistant"):
            if not isinstance(text.get(role), str):
                raise wrong(f"'{role}' of 'texts'", text.get(role), "a string")
        question = text["user"] if turns or IMAGE_MARK in text["user"] else [*marks, text["user"]]
        turns += [{"role": "user", "content": question}, {"role": "assistant", "content": text["assistant"]}]
    return turns


@dataclass(slots=True, kw_only=True)
class _Inline:
    """What the placeholders of a record carry themselves, in order; None: they take theirs from the record's field."""

    videos_column: list[Video]
    video_mark: str = VIDEO_MARK
    images: list[str | bytes | None] = field(default_factory=list)
    own_sizes: dict[int, OwnSize] = field(default_factory=dict)  # by the image's place
    videos: list[Video | None] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)  # fields of content parts that nothing is made of


def _message(turn: object, where: str, inline: _Inline) -> Message:
    if not isinstance(turn, dict):
        raise wrong(f"a turn of '{where}'", turn, "a JSON object")
    role_key, content_key = ("from", "value") if "from" in turn else ("role", "content")
    role = turn.get(role_key)
    known = _ROLES.get(role) if isinstance(role, str) else None
    if known is None:
        raise wrong(f"'{role_key}'", role, "one of " + ", ".join(_ROLES))
    content = turn.get(content_key)
    if role in _CALLS:
        turn, content = {**turn, "tool_calls": _calls(content)}, None
    extra = tuple((k, v) for k, v in turn.items() if k not in (role_key, content_key, *_LEARNT) and v is not None)
    is_learnt, parts = _is_learnt(turn, known), tuple[str | Slot | None, ...]()
    if isinstance(content, str):
        parts = tuple(_split_text(content, inline))
    elif isinstance(content, (list, tuple)):
        parts = tuple(_parts(content, inline))
    elif content is not None or not extra or known != "assistant":  # else a tool call alone
        raise wrong(f"'{content_key}'", content, "a string or a list of parts")
    is_text = not isinstance(content, (list, tuple)) and all(isinstance(part, str) for part in parts)
    return Message(role=known, content=parts, was_text=is_text, extra=extra, is_learnt=is_learnt)


def _calls(content: object) -> list[object]:
    """Return JSON text of one call or several as `tool_calls`."""
    try:
        read = parse_json(str(content).encode("utf-8", "surrogatepass"))
    except ValueError:
        read = None
    calls = read if isinstance(read, list) else [read]
    if not all(isinstance(call, dict) and "name" in call for call in calls):
        raise wrong("the content of a tool call", content, 'JSON such as {"name": "f", "arguments": {}}')
    return [{"type": "function", "function": call} for call in calls]


def _is_learnt(turn: Mapping[str, object], role: str) -> bool:
    """Return what the turn says of its own loss: `loss`, `train`, `training` or `weight`, true or false, 1 or 0."""
    said = {name: turn[name] for name in _LEARNT if turn.get(name) is not None}
    for name, value in said.items():
        if value not in (0, 1):
            raise wrong(f"'{name}' of a turn", value, "true or false, or 1 or 0: turns are learnt or not")
        if role != "assistant" and value and name != "weight":
            raise BadRecordError("type", f"'{name}' of a {role}'s turn is {value}: only assistants' turns are learnt")
    if len({bool(value) for value in said.values()}) > 1:
        raise BadRecordError("type", f"a turn says both of its loss ({', '.join(said)}): keep one of these fields")
    return all(said.values())


def _split_text(text: str, inline: _Inline) -> Iterator[str | Slot | None]:
    marks = {inline.video_mark, IMAGE_MARK} if inline.videos_column else {IMAGE_MARK}
    if not any(mark in text for mark in marks):
        yield text
        return
    for piece in re.split(f"({'|'.join(marks)})", text):
        if inline.videos_column and piece == inline.video_mark:
            inline.videos.append(None)
            yield Slot.VIDEO
        elif piece == IMAGE_MARK:
            inline.images.append(None)
            yield None
        elif piece:
            yield piece


def _parts(content: list[object] | tuple[object, ...], inline: _Inline) -> Iterator[str | Slot | None]:
    for part in content:
        if isinstance(part, str):
            yield from _split_text(part, inline)
            continue
        if not isinstance(part, dict):
            raise wrong("a content part", part, "a string or a JSON object")
        kind = part.get("type")
        inline.unread += [name for name, value in part.items() if value is not None and name not in _PART_KEYS]
        if kind in ("text", "input_text") or (kind is None and isinstance(part.get("text"), str)):
            text = part.get("text")
            if not isinstance(text, str):
                raise wrong("'text' of a content part", text, "a string")
            yield from _split_text(text, inline)
        elif kind in ("image", "image_url", "input_image"):
            own = _own_size(part)
            if own is not None:
                inline.own_sizes[len(inline.images)] = own
            inline.images.append(_part_image(part))
            yield None
        elif kind in VIDEO_KINDS:
            inline.videos.append(part_video(part))
            yield Slot.VIDEO
        else:
            kinds = "text, image, image_url, video or video_url (audio is not sized)"
            raise wrong("'type' of a content part", kind, kinds)


def _own_size(part: Mapping[str, object]) -> OwnSize | None:
    """Return the size that a part asks for its image; None: it asks for none."""
    asked = {name.name: part[name.name] for name in fields(OwnSize) if part.get(name.name) is not None}
    for name, value in asked.items():
        if _number(part, (name,)) is None or isinstance(value, (bool, str)):
            raise wrong(f"'{name}' of a content part", value, "a number above 0")
    sides = asked.keys() & {"resized_height", "resized_width"}
    if len(sides) == 1:
        raise BadRecordError("type", f"a content part gives {sides.pop()} alone: give both sides, or neither")
    return OwnSize(**{name: _number(part, (name,)) for name in asked}) if asked else None


def _part_image(part: Mapping[str, object]) -> str | bytes | None:
    if isinstance(source := part.get("source"), dict):  # Anthropic's
        part = {"base64": source.get("data"), "url": source.get("url")}
    for key in ("image_url", "image", "url", "path", "base64"):
        value = part.get(key)
        if value is None:
            continue
        if key == "base64" and isinstance(value, str):
            return "data:;base64," + value
        if key == "image_url" and isinstance(value, dict):
            value = value.get("url")
        return _held(value, f"'{key}' of a content part", _IMAGE_FORMS)
    return None


def _column_images(record: Mapping[str, object]) -> Iterator[str | bytes]:
    if (name := _column_of(record, "image")) is not None:
        value = record[name]
        for item in value if isinstance(value, (list, tuple)) else [value]:
            yield _held(item, f"'{name}'", _IMAGE_FORMS)


def _join(inline: list[T | None], column: list[T], kind: str, mark: str) -> tuple[T, ...]:
    num_open = inline.count(None)
    if num_open != len(column):
        raise BadRecordError(
            "placeholder",
            f"{num_open} {kind} placeholders and {len(column)} {kind}s: write {mark} once for each",
        )
    rest = iter(column)
    return tuple(carried if carried is not None else next(rest) for carried in inline)


def _tools(record: Mapping[str, object]) -> tuple[object, ...] | None:
    """Return a list of objects, or the same as JSON text, as TRL, LLaMA-Factory and others keep it in columns."""
    tools = record.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = parse_json(tools.encode("utf-8", "surrogatepass"))
        except ValueError as error:
            raise BadRecordError("type", f"'tools' is no JSON ({shorten(str(error), 60)}): give a list") from None
    if isinstance(tools, dict):
        tools = [tools]
    if not tools:
        return None
    if not isinstance(tools, (list, tuple)) or not all(isinstance(tool, (dict, str)) for tool in tools):
        raise wrong("'tools'", tools, "a list of objects, or that as JSON text")
    return tuple(tools)


def _arguments(record: Mapping[str, object]) -> tuple[tuple[str, object], ...]:
    """Return `chat_template_kwargs`, and what TRL hands on next to it: names that templates know."""
    given = record.get("chat_template_kwargs")
    if isinstance(given, str) and given.strip():
        with contextlib.suppress(ValueError):
            given = parse_json(given.encode("utf-8", "surrogatepass"))
    if given is not None and not isinstance(given, dict):
        raise wrong("'chat_template_kwargs'", given, "an object, or that as JSON text")
    own = {name: record[name] for name in TEMPLATE_FIELDS if record.get(name) is not None}
    return tuple({**own, **(given or {})}.items())
