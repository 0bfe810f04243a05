"""The body of a chat request: from bytes to checked data, or one sentence about what is wrong with it."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from trimtab.serve.limits import ServeLimits
from trimtab.serve.pictures import Picture, read_data_url
from trimtab.serve.problems import RequestError

Role = Literal["system", "user", "assistant"]

_ROLES: dict[str, Role] = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_READ = frozenset(
    ("model", "messages", "max_tokens", "max_completion_tokens", "temperature", "top_p", "seed", "stop", "stream")
) | {"stream_options", "user"}
# fields of OpenAI's that are not offered, and the values that ask for nothing
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "n": (1,),
    "frequency_penalty": (0, 0.0),
    "presence_penalty": (0, 0.0),
    "logprobs": (False,),
    "logit_bias": ({},),
    "tools": ([],),
    "tool_choice": ("none", "auto"),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "store": (False,),
}
_MAX_MESSAGES = 1024
_MAX_STOPS = 4
_MAX_STOP_LENGTH = 256
_MAX_TEMPERATURE = 2.0
_MAX_VALUES = 100_000  # of a body beside the characters of its texts, each of which may be a comma


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message: texts and pictures in the order they were given."""

    role: Role
    parts: tuple[str | Picture, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatRequest:
    """A chat request that passed every check that needs no model."""

    turns: tuple[Turn, ...]
    max_new_tokens: int
    temperature: float | None = None  # None: as the model's generation_config.json says; 0: the likeliest token
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    stream: bool = False
    include_usage: bool = False

    @property
    def pictures(self) -> list[Picture]:
        return [part for turn in self.turns for part in turn.parts if isinstance(part, Picture)]


def parse_chat(body: bytes, *, model: str, limits: ServeLimits, markers: Sequence[str] = ()) -> ChatRequest:
    """The request in `body`; raises `RequestError` (400, 404 for another model's name).

    `markers` are the tokenizer's special tokens: a text that holds one is refused, because the tokenizer would read
    it as a change of speaker or as the place of an image. Fields that are null count as absent.
    """
    fields = _object(_json(body, limits), "the body", None)
    unknown = sorted(set(fields) - _READ - set(_NEUTRAL))
    if unknown:
        _refuse(f"unknown field {', '.join(map(repr, unknown))[:200]}: leave it out", unknown[0][:100])
    for name, neutral in _NEUTRAL.items():
        if name in fields and json.dumps(fields[name]) not in map(json.dumps, neutral):
            _refuse(f"{name} is not offered by this server: leave it out", name)
    if fields.get("model", model) != model:
        raise RequestError(
            404, f"this server has one model, {model!r}: ask for it by that name", param="model", code="model_not_found"
        )
    if not isinstance(fields.get("user", ""), str):
        _refuse("user must be a text", "user")
    stream = _flag(fields, "stream")
    return ChatRequest(
        turns=_turns(fields.get("messages"), limits, marker_pattern(markers)),
        max_new_tokens=_max_new_tokens(fields, limits),
        temperature=_number(fields, "temperature", 0.0, _MAX_TEMPERATURE),
        top_p=_number(fields, "top_p", 0.0, 1.0, above=True),
        seed=_whole(fields, "seed", -(2**63), 2**63 - 1),
        stop=_stops(fields.get("stop")),
        stream=stream,
        include_usage=_stream_options(fields.get("stream_options"), stream),
    )


# -- messages ---------------------------------------------------------------------------------------------------------


def _turns(messages: object, limits: ServeLimits, markers: re.Pattern[str]) -> tuple[Turn, ...]:
    if not isinstance(messages, list) or not messages:
        _refuse("messages must be a list of at least one message", "messages")
    if len(messages) > _MAX_MESSAGES:
        _refuse(f"{len(messages)} messages are more than {_MAX_MESSAGES}: send fewer", "messages")
    turns: list[Turn] = []
    num_images, pixels_left, characters_left = 0, limits.max_pixels, limits.max_characters
    for i, entry in enumerate(messages):
        where = f"messages[{i}]"
        message = _object(entry, where, where)
        role = message.get("role")
        if not isinstance(role, str) or role not in _ROLES:
            _refuse(f"{where}.role must be one of {', '.join(_ROLES)}", f"{where}.role")
        unknown = sorted(set(message) - {"role", "content", "name"})
        if unknown:
            _refuse(f"{where} has a field {unknown[0][:100]!r} that is not offered: leave it out", where)
        if not isinstance(message.get("name", ""), str):
            _refuse(f"{where}.name must be a text", f"{where}.name")
        parts: list[str | Picture] = []
        for place, part in _parts(message.get("content"), f"{where}.content"):
            if isinstance(part, str):
                parts.append(_text(part, place, markers))
                characters_left -= len(part)
                if characters_left < 0:
                    _refuse(f"the texts hold more than {limits.max_characters:,} characters: send less", place)
                continue
            if _ROLES[role] != "user":
                _refuse(f"{place} is an image of the {role}: only the user may show images", place)
            num_images += 1
            if num_images > limits.max_images:
                _refuse(f"a request may hold {limits.max_images} images: send fewer", place)
            picture = read_data_url(part.url, param=place, max_pixels=pixels_left)
            pixels_left -= picture.num_pixels
            parts.append(picture)
        turns.append(Turn(role=_ROLES[role], parts=tuple(parts)))
    if turns[-1].role != "user":
        _refuse("the last message must be the user's: the assistant's answer comes next", "messages")
    return tuple(turns)


@dataclass(frozen=True, slots=True)
class _ImageUrl:
    url: str


def _parts(content: object, where: str) -> list[tuple[str, str | _ImageUrl]]:
    """(place in the body, text or image) of a message's content."""
    if isinstance(content, str):
        return [(where, content)]
    if not isinstance(content, list) or not content:
        _refuse(f"{where} must be a text or a list of parts", where)
    parts: list[tuple[str, str | _ImageUrl]] = []
    for i, entry in enumerate(content):
        place = f"{where}[{i}]"
        part = _object(entry, place, place)
        kind = part.get("type")
        if kind == "text" and isinstance(part.get("text"), str) and set(part) == {"type", "text"}:
            parts.append((place, part["text"]))
        elif kind == "image_url" and set(part) == {"type", "image_url"}:
            image = part["image_url"]
            url = image.get("url") if isinstance(image, dict) else image
            if not isinstance(url, str) or (isinstance(image, dict) and not _is_detailed(image)):
                _refuse(f'{place}.image_url must be {{"url": "data:image/..."}}', place)
            parts.append((place, _ImageUrl(url)))
        else:
            _refuse(
                f'{place} must be {{"type": "text", "text": ...}} or {{"type": "image_url", "image_url": ...}}', place
            )
    return parts


def _is_detailed(image: Mapping[str, Any]) -> bool:
    """OpenAI's `detail` is taken and makes no difference: the model's own processor says how large an image gets."""
    return set(image) <= {"url", "detail"} and image.get("detail", "auto") in ("auto", "low", "high")


def _text(text: str, where: str, markers: re.Pattern[str]) -> str:
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        _refuse(f"{where} holds half of a surrogate pair, which is no character: send valid Unicode", where)
    if found := markers.search(text):
        _refuse(f"{where} holds {found[0]!r}, which this model reads as a command and not as text: leave it out", where)
    return text


def marker_pattern(markers: Sequence[str]) -> re.Pattern[str]:
    """Finds every marker, the longest where several start; nothing if there are none."""
    longest_first = sorted((marker for marker in markers if marker), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


# -- how to answer ----------------------------------------------------------------------------------------------------


def _max_new_tokens(fields: Mapping[str, Any], limits: ServeLimits) -> int:
    names = [name for name in ("max_completion_tokens", "max_tokens") if name in fields]
    if len(names) > 1:
        _refuse("max_tokens and max_completion_tokens say the same: give one of them", "max_tokens")
    if not names:
        return limits.max_new_tokens
    return _whole(fields, names[0], 1, limits.max_new_tokens) or limits.max_new_tokens


def _stops(stop: object) -> tuple[str, ...]:
    stops = [stop] if isinstance(stop, str) else [] if stop is None else stop
    if not isinstance(stops, list) or len(stops) > _MAX_STOPS:
        _refuse(f"stop must be a text or a list of up to {_MAX_STOPS}", "stop")
    for text in stops:
        if not isinstance(text, str) or not 0 < len(text) <= _MAX_STOP_LENGTH:
            _refuse(f"each stop must be a text of 1 to {_MAX_STOP_LENGTH} characters", "stop")
    return tuple(stops)


def _stream_options(options: object, stream: bool) -> bool:
    if options is None:
        return False
    if not stream:
        _refuse("stream_options are for streams: set stream to true", "stream_options")
    given = _object(options, "stream_options", "stream_options")
    if not set(given) <= {"include_usage"}:
        _refuse("stream_options takes include_usage alone", "stream_options")
    return _flag(given, "include_usage")


def _flag(fields: Mapping[str, Any], name: str) -> bool:
    value = fields.get(name, False)
    if not isinstance(value, bool):
        _refuse(f"{name} must be true or false", name)
    return value


def _whole(fields: Mapping[str, Any], name: str, low: int, high: int) -> int | None:
    value = fields.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
        _refuse(f"{name} must be a whole number from {low} to {high}", name)
    return value


def _number(fields: Mapping[str, Any], name: str, low: float, high: float, *, above: bool = False) -> float | None:
    value = fields.get(name)
    if value is None:
        return None
    fits = isinstance(value, int | float) and not isinstance(value, bool) and low <= value <= high
    if not fits or (above and value == low):
        _refuse(
            f"{name} must be a number {'above' if above else 'from'} {low:g} {'up to' if above else 'to'} {high:g}",
            name,
        )
    assert math.isfinite(value), "the bounds are finite"
    return float(value)


# -- JSON -------------------------------------------------------------------------------------------------------------


def _json(body: bytes, limits: ServeLimits) -> object:
    """What the body says. Its values are counted before any is made: an empty list takes 2 bytes here, 60 in memory."""
    if sum(body.count(mark) for mark in b"[{,") > limits.max_characters + _MAX_VALUES:
        _refuse(f"the body holds more than {_MAX_VALUES:,} values beside its texts: send less", None)
    try:
        return json.loads(body, parse_constant=_no_constant, object_pairs_hook=_no_twin)
    except RecursionError:
        reason = "it is nested too deeply"
    except UnicodeDecodeError:
        reason = "it is not UTF-8"
    except (json.JSONDecodeError, _NotJsonError) as error:
        reason = str(error)[:200]
    except ValueError:  # Python's own limit for whole numbers
        reason = "a number has thousands of digits"
    raise RequestError(400, f"the body is not JSON: {reason}; send one JSON object")


class _NotJsonError(ValueError):
    """What Python's reader would let pass."""


def _no_constant(name: str) -> NoReturn:
    raise _NotJsonError(f"{name} is no JSON number")


def _no_twin(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object whose names differ: readers disagree on which of two counts."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twin = next(name for name in found if names.count(name) > 1)
        raise _NotJsonError(f"an object names {twin[:100]!r} twice")
    return found


def _object(value: object, what: str, param: str | None) -> dict[str, Any]:
    """The fields that are set: null counts as absent."""
    if not isinstance(value, dict):
        _refuse(f"{what} must be a JSON object", param)
    return {name: field for name, field in value.items() if field is not None}


def _refuse(message: str, param: str | None) -> NoReturn:
    raise RequestError(400, message, param=param)
