"""Damage of files and of values: random, and by the seed the same again."""

import copy
import random
from collections.abc import Iterator
from typing import Any

_WORDS = (
    *(b"null", b"true", b"-1", b"0", b"1e999", b"99999999999999999999", b'""', b"[]", b"{}", b'"\\ud800"', b"NaN"),
    *(b"\xff\xfe", b"\0", b"\xef\xbb\xbf", b"\r", b"&a *a", b"!!python/object:os.system x", b"<image>", b"<video>"),
)


def damaged(content: bytes, draw: random.Random, *, head: int = 2**20) -> bytes:
    """The content with a few bytes flipped, cut, doubled, or replaced by words that readers stumble over."""
    changed = bytearray(content)
    for _ in range(draw.randint(1, 4)):
        at, kind = draw.randrange(min(len(changed), head) + 1), draw.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << draw.randrange(8)
        elif kind == 1:
            del changed[at : at + draw.choice((1, 2, 40, 10**6))]
        elif kind == 2:
            changed[at:at] = changed[at : at + draw.choice((1, 8, 200))]
        elif kind == 3:
            end = at + draw.randrange(12)
            changed[at:end] = draw.choice(_WORDS)
        elif kind == 4:
            changed[at : at + 4] = draw.randbytes(4)
        else:  # another part of the same content
            start = draw.randrange(len(changed) + 1)
            changed[at:at] = changed[start : start + draw.randrange(60)]
    return bytes(changed)


_ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, 10**30, -(10**30), 0.5, 1e-300, 1e300, float("inf"), float("nan")),
    *("", "0", "cpu", "disk", "\ud800", "\u202e", "\0", "a\nb", "../../x", "{{ 7 * 7 }}", "x" * 5000),
    *([], {}, [[]], [None], {"": 0}, {"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}),
)


def reshaped(value: Any, draw: random.Random, names: tuple[str, ...] = ()) -> Any:
    """A value of JSON with one to three of its parts taken out, doubled, put elsewhere, renamed, added or made odd."""
    changed = copy.deepcopy(value)
    for _ in range(draw.randint(1, 3)):
        places = list(_places(changed))
        holder, key = draw.choice(places) if places else (None, None)
        kind = draw.randrange(6)
        if holder is None or kind == 0:
            if isinstance(changed, dict) and names:
                changed[draw.choice(names)] = copy.deepcopy(draw.choice(_ODD))
            elif not places:
                return draw.choice(_ODD)
        elif kind == 1:
            del holder[key]
        elif kind == 2:  # what stands elsewhere
            there, name = draw.choice(places)
            holder[key] = copy.deepcopy(there[name])
        elif kind == 3 and isinstance(holder, list):
            holder[key:key] = [holder[key]] * draw.choice((1, 3, 40))
        elif kind == 3:
            holder[str(draw.choice((*names, *_WORDS)))] = holder.pop(key)
        else:
            holder[key] = copy.deepcopy(draw.choice(_ODD))
    return changed


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """Holder and key of every part."""
    entries = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, part in entries:
        yield value, key
        yield from _places(part)
