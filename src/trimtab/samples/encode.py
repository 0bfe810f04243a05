"""A conversation as the token ids that sizing counted, and which of them are to be learnt."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import VIDEO_MARK, Conversation, Slot
from trimtab.samples.templates import MARKS
from trimtab.samples.tokens import TokenCounter, TokenizerFiles
from trimtab.specs import ClipCounts, ImageCounts, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedConversation:
    """One row of a batch; both (tokens,)."""

    input_ids: IntArray
    learnt: npt.NDArray[np.bool_]  # what the assistant wrote, its end of turn included


@dataclass(frozen=True, slots=True, kw_only=True)
class Span:
    """Characters start <= i < stop of a text."""

    start: int
    stop: int


class ConversationEncoder:
    """Encodes conversations as their sizes were counted: the same template, tokenizer and image markup."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._counter = TokenCounter(files)

    def encode(
        self, conversation: Conversation, images: Sequence[ImageCounts], videos: Sequence[ClipCounts] = ()
    ) -> EncodedConversation:
        """Return ids with as many tokens of images and videos as their rules count.

        Learnt are the turns of `learnt_spans`; `BadRecordError` where they are not found.
        """
        rendered = self._counter.render(conversation, images, videos)
        video = videos[0].placeholder if videos else VIDEO_MARK
        text, spans = self._counter.chat(conversation, video=video), list[Span]()
        for span in learnt_spans(self._counter, conversation, video=video):
            start, stop = (self._counter.place(text, at, images, videos) for at in (span.start, span.stop))
            spans.append(Span(start=start, stop=stop))
        encoding = self._counter.encode(rendered)
        ids = np.array(encoding.ids, np.int64)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        learnt = np.zeros(len(ids), np.bool_)
        for span in spans:
            # a token that a reply shares with the prompt's last space is the reply's
            learnt |= (offsets[:, 1] > span.start) & (offsets[:, 0] < span.stop) & (offsets[:, 1] > offsets[:, 0])
        repeats = self._repeats(ids, conversation, images, videos)
        return EncodedConversation(input_ids=np.repeat(ids, repeats), learnt=np.repeat(learnt, repeats))

    def _repeats(
        self, ids: IntArray, conversation: Conversation, images: Sequence[ImageCounts], videos: Sequence[ClipCounts]
    ) -> IntArray:
        """Count how often each token stands in the row: a soft token once a feature of its image, crop or frame."""
        markup, features = self._counter.markup, defaultdict[str, list[int]](list)
        next_image, next_video = iter(images), iter(videos)
        features[markup.soft] = []
        for part in (part for message in conversation.messages for part in message.content):
            if part is None:
                image, soft = next(next_image), markup.soft
                copies = image.tiles if markup.crops is not None else 1
            elif part is Slot.VIDEO:
                video = next(next_video)
                image, soft, copies = video.image, video.soft, 1
            else:
                continue
            if image.text is not None:
                copies = image.text.count(soft)
            features[soft] += [image.tokens // copies] * copies
        repeats = np.ones(len(ids), np.int64)
        for soft, counts in features.items():
            places = np.flatnonzero(ids == self._counter.id_of(soft))
            if len(places) != len(counts):
                raise BadRecordError(
                    "placeholder",
                    f"the chat holds {soft} {len(places)} times, {len(counts)} images: keep it out of texts",
                )
            repeats[places] = counts
        return repeats


# -- what is learnt ---------------------------------------------------------------------------------------------------

_STAND_IN = "\ue0f2"  # a private character in the place of a turn's content


def learnt_spans(counter: TokenCounter, conversation: Conversation, *, video: str = VIDEO_MARK) -> list[Span]:
    """Return where the assistant's learnt turns stand in the chat's text; `BadRecordError` where that cannot be known.

    Where the template has {% generation %} blocks, they say it, as in Transformers' `return_assistant_tokens_mask`.
    Else a turn begins behind the prompt for an answer and ends with its end-of-turn token, white space behind that left
    out (nothing generates it). Its content is found by what changes in the text of the whole chat when it is another: a
    template may write earlier turns otherwise than the last one, such as without their thinking.
    """
    turns = [number for number, message in enumerate(conversation.messages) if message.role == "assistant"]
    if not turns:
        return []
    text = counter.chat(conversation, video=video)
    if not counter.has_template:
        spans = _lines(counter, conversation, turns, video)
    else:
        spans = _blocks(counter, conversation, turns, text, video) or _turns(counter, conversation, turns, text, video)
    is_learnt = [conversation.messages[turn].is_learnt for turn in turns]
    return spans if all(is_learnt) else [span for span, kept in zip(spans, is_learnt, strict=True) if kept]


def _lines(counter: TokenCounter, conversation: Conversation, turns: list[int], video: str) -> list[Span]:
    """Write turns as lines, where there is no template."""
    spans = []
    for turn in turns:
        messages = conversation.messages[:turn]
        start = len(counter.chat(replace(conversation, messages=messages), video=video)) + 1 if messages else 0
        through = counter.chat(replace(conversation, messages=conversation.messages[: turn + 1]), video=video)
        spans.append(Span(start=start, stop=len(through.rstrip())))
    return spans


def _blocks(
    counter: TokenCounter, conversation: Conversation, turns: list[int], text: str, video: str
) -> list[Span] | None:
    """Return what {% generation %} blocks write; None where the template has none."""
    start, stop = MARKS
    pieces = counter.chat(conversation, video=video, marked=True).split(start)
    if len(pieces) == 1:
        return None
    spans, at = [], len(pieces[0])
    for piece in pieces[1:]:
        own, mark, rest = piece.partition(stop)
        spans.append(Span(start=at, stop=at + len(own)))
        at += len(own) + len(rest)
        if not mark:
            raise _unknown(turns[0], "its generation blocks stand in each other")
    if at != len(text):
        raise _unknown(turns[0], "its generation blocks change what the template writes")
    if len(spans) != len(turns):
        if all(conversation.messages[turn].is_learnt for turn in turns):  # which block is whose does not matter
            return spans
        raise _unknown(turns[0], f"{len(spans)} generation blocks stand for {len(turns)} turns")
    return spans


def _turns(counter: TokenCounter, conversation: Conversation, turns: list[int], text: str, video: str) -> list[Span]:
    """Return every turn of the assistant, by what stands around its content."""
    prompt = _prompt(counter, conversation, turns[0], video)
    spans, lower = [], 0
    for turn in turns:
        messages = conversation.messages
        other = (*messages[:turn], replace(messages[turn], content=(_STAND_IN,)))
        # 1. where the content stands: there the text differs from that of the same chat with another content
        shown = counter.chat(replace(conversation, messages=(*other, *messages[turn + 1 :])), video=video)
        if _STAND_IN not in shown:
            raise _unknown(turn, "it is not written once the chat goes on")
        first = _shared(text, shown)
        same_end = min(_shared(text[::-1], shown[::-1]), len(text) - first)
        # 2. where the turn ends: behind the content comes what comes behind it where the chat ends with this turn
        through = counter.chat(replace(conversation, messages=other), video=video)
        tail, rest = through.rpartition(_STAND_IN)[2].rstrip(), text[len(text) - same_end :]
        if not rest.startswith(tail):
            tail = tail.lstrip() if rest.startswith(tail.lstrip()) else rest[: _shared(rest, tail)]
        stop = len(text) - same_end + len(tail)
        # 3. where it begins: behind the prompt for an answer, or as much of it as stands there
        start = next((at for part in prompt if (at := _behind(text, part, lower, first)) is not None), first)
        spans.append(Span(start=start, stop=len(text[:stop].rstrip())))
        lower = stop
    return spans


def _prompt(counter: TokenCounter, conversation: Conversation, turn: int, video: str) -> list[str]:
    """Return what an answer begins behind, as the template writes it; then without its last line, and so on."""
    before = replace(conversation, messages=conversation.messages[:turn] or conversation.messages)
    past = counter.chat(before, video=video)
    asked = counter.chat(before, video=video, generation_prompt=True)
    lines = asked.removeprefix(past).splitlines(keepends=True) if asked.startswith(past) else []
    parts = ["".join(lines[:number]) for number in range(len(lines), 0, -1)]
    return [part for whole in parts for part in dict.fromkeys((whole, whole.rstrip())) if part]


def _behind(text: str, part: str, lower: int, upper: int) -> int | None:
    at = text.rfind(part, lower, upper)
    return None if at < 0 else at + len(part)


def _shared(one: str, other: str) -> int:
    """Count the characters that both begin with."""
    return next((at for at, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))


def _unknown(turn: int, why: str) -> BadRecordError:
    return BadRecordError(
        "template",
        f"what is learnt of turn {turn + 1} is not known ({why}): "
        "mark it by {% generation %} in the chat template, or give labels yourself",
    )
