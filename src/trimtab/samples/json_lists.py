"""A file that is one JSON list, element by element: in linear time, and in the memory of its largest element."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from trimtab.errors import SampleError
from trimtab.samples.chunks import MAX_VALUES
from trimtab.samples.problems import shorten
from trimtab.typed_json import STRICT, refuse_surrogates

_BLOCK_BYTES = 1 << 22
MAX_ELEMENT = 256 << 20  # characters
_SPACE = re.compile(r"[ \t\n\r]*")
_CUT = 16  # characters: an error so near the end of what was read may be the cut of a longer element


def read_json_list(path: Path) -> Iterator[tuple[object, int]]:
    """The elements of the list, each with the number of characters read so far.

    `SampleError` where the file stops being one JSON list: what stands after that place cannot be told apart.
    """
    with path.open("rb") as file:
        text = _Text(file)
        try:
            yield from _elements(text)
        except json.JSONDecodeError as error:
            raise _broken(path, f"{error.msg} at character {text.before + error.pos}") from None
        except (ValueError, RecursionError) as error:
            told = "nested too deeply" if isinstance(error, RecursionError) else str(error)
            raise _broken(path, f"{told}, after character {text.before + text.at}") from None


def _broken(path: Path, reason: str) -> SampleError:
    return SampleError(
        f"{path} is not JSON: {shorten(reason, 160)}; fix it (one JSON list is read whole: a JSON Lines file can skip "
        "lines)"
    )


class _Text:
    """The part of a file that is being parsed: `text[at:]` is what comes next."""

    def __init__(self, file: BinaryIO) -> None:
        self._file, self._decoder = file, codecs.getincrementaldecoder("utf-8-sig")()
        self.text, self.at, self.before, self.ended = "", 0, 0, False

    def more(self) -> None:
        """Half as much again behind the rest, so that an element of any length is tried few times."""
        rest = self.text[self.at :]
        if len(rest) > MAX_ELEMENT:
            raise ValueError(f"an element is longer than {MAX_ELEMENT >> 20} Mi characters")
        if len(rest) > MAX_VALUES and sum(map(rest.count, "[{,")) > MAX_VALUES:
            raise ValueError(f"an element holds more than {MAX_VALUES:,} values")
        block = self._file.read(max(_BLOCK_BYTES, len(rest)))
        self.ended = not block
        self.before += self.at
        self.text, self.at = rest + self._decoder.decode(block, final=self.ended), 0

    def mark(self) -> str:
        """The next character that is no white space; "" at the end of the file."""
        while True:
            match = _SPACE.match(self.text, self.at)
            assert match is not None
            self.at = match.end()
            if self.at < len(self.text):
                return self.text[self.at]
            if self.ended:
                return ""
            self.more()

    def element(self) -> object:
        """One value, from here on."""
        while True:
            try:
                value, end = STRICT.raw_decode(self.text, self.at)
            except json.JSONDecodeError as error:
                is_cut = error.msg.startswith("Unterminated string") or error.pos > len(self.text) - _CUT
                if self.ended or not is_cut:
                    raise
            else:
                if end < len(self.text) or self.ended:  # else a number may go on
                    break
            self.more()
        start, self.at = self.at, end
        return refuse_surrogates(value, self.text, start, end)


def _elements(text: _Text) -> Iterator[tuple[object, int]]:
    mark = text.mark()
    assert mark == "[", "detect_format saw it"
    text.at += 1
    if text.mark() == "]":
        text.at += 1
    else:
        while mark != "]":
            text.mark()
            value = text.element()
            yield value, text.before + text.at
            mark = text.mark()
            if mark not in (",", "]"):
                raise json.JSONDecodeError("Expecting ',' delimiter", text.text, text.at)
            text.at += 1
    if text.mark():
        raise json.JSONDecodeError("Extra data", text.text, text.at)
