"""Generated tokens as text, piece by piece: what was sent never changes, and a stop text is never sent."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[list[int]], str]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"


class TextPieces:
    """Turns tokens into pieces whose concatenation is the text of all tokens, up to the first stop text.

    A token may hold part of a character, and a tokenizer may write a token otherwise at the start of a text: so each
    piece is the difference between two decodings that start at the same earlier token. Only the tail is decoded:
    the cost does not grow with the answer.
    """

    def __init__(self, decode: Decode, stops: Sequence[str] = ()) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []
        self._from, self._told = 0, 0  # tokens where the decoding starts; tokens whose text was taken
        self._held = ""  # text that may be the start of a stop
        self.stopped = False  # a stop text came

    def push(self, token: int) -> str:
        """Text that is certain after this token: often empty."""
        self._ids.append(token)
        return self._sift(self._taken(final=False), final=False)

    def finish(self) -> str:
        """The rest of the text, unfinished characters as U+FFFD."""
        return self._sift(self._taken(final=True), final=True)

    def _taken(self, *, final: bool) -> str:
        told = self._decode(self._ids[self._from : self._told])
        text = self._decode(self._ids[self._from :])
        if len(text) <= len(told) or (text.endswith(_UNFINISHED) and not final):
            return ""
        self._from, self._told = self._told, len(self._ids)
        return text[len(told) :]

    def _sift(self, piece: str, *, final: bool) -> str:
        if self.stopped:
            return ""
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.stopped, self._held = True, ""
            return text[: min(found)]
        keep = 0 if final else max((_overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that a `stop` could start with."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if stop.startswith(text[-n:])), 0)
