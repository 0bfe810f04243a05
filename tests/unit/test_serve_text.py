"""Generated text in pieces: their sum is the text of all tokens, cut before the first stop."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.serve.text import TextPieces


def bytes_decode(ids: list[int]) -> str:
    """A token is a byte: characters end in the middle of tokens."""
    return bytes(ids).decode("utf-8", errors="replace")


def words_decode(ids: list[int]) -> str:
    """A token is a word with a space before it, which the first of a text loses, as SentencePiece decodes."""
    return "".join(f" w{i}" for i in ids)[1:]


def told(pieces: TextPieces, ids: list[int]) -> str:
    text = ""
    for token in ids:
        text += pieces.push(token)
        if pieces.stopped:
            return text
    return text + pieces.finish()


@settings(deadline=None, max_examples=200)
@given(st.text(alphabet=st.characters(exclude_categories=["Cs"]), max_size=40))
def test_pieces_add_up_to_the_text(text: str) -> None:
    ids = list(text.encode())
    assert told(TextPieces(bytes_decode), ids) == text


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 30), max_size=30))
def test_spaces_between_words_survive(ids: list[int]) -> None:
    assert told(TextPieces(words_decode), ids) == words_decode(ids)


@settings(deadline=None, max_examples=300)
@given(st.text("abé", max_size=30), st.lists(st.text("abé", min_size=1, max_size=4), max_size=4))
def test_text_ends_before_the_first_stop(text: str, stops: list[str]) -> None:
    pieces = TextPieces(bytes_decode, stops)
    cuts = {}
    for end in range(len(text) + 1):  # the stop that is complete first decides; of several, the one that starts first
        found = [at for stop in stops if (at := text[:end].find(stop)) >= 0]
        if found:
            cuts[end] = min(found)
            break
    assert told(pieces, list(text.encode())) == text[: next(iter(cuts.values()), len(text))]
    assert pieces.stopped == bool(cuts)


def test_what_cannot_become_a_character_comes_out_at_the_end() -> None:
    pieces = TextPieces(bytes_decode)
    assert pieces.push(0xE7) == ""
    assert pieces.push(0x8C) == ""
    assert pieces.finish() == "\N{REPLACEMENT CHARACTER}"


def test_a_piece_is_sent_as_soon_as_it_is_certain() -> None:
    pieces = TextPieces(bytes_decode, ["stop"])
    assert [pieces.push(byte) for byte in b"so st"] == ["", "so", " ", "", ""]
    assert pieces.finish() == "st"
