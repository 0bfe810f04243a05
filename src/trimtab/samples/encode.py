"""A conversation as the token ids that sizing counted, and which of them are to be learnt."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import Conversation, Slot
from trimtab.samples.tokens import TokenCounter, TokenizerFiles
from trimtab.specs import ClipCounts, ImageCounts, IntArray


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class EncodedConversation:
    """One row of a batch; both (tokens,)."""

    input_ids: IntArray
    learnt: npt.NDArray[np.bool_]  # what the assistant wrote, its end of turn included


@dataclass(frozen=True, slots=True, kw_only=True)
class _Span:
    """Characters start <= i < stop of a text."""

    start: int
    stop: int


@dataclass(frozen=True, slots=True, kw_only=True)
class _Media:
    """What stands at the placeholders of a chat, of each kind in order."""

    images: Sequence[ImageCounts]
    videos: Sequence[ClipCounts]


class ConversationEncoder:
    """Encodes conversations as their sizes were counted: the same template, tokenizer and image markup."""

    def __init__(self, files: TokenizerFiles) -> None:
        self._counter = TokenCounter(files)
        self._has_template = files.template is not None

    def encode(
        self, conversation: Conversation, images: Sequence[ImageCounts], videos: Sequence[ClipCounts] = ()
    ) -> EncodedConversation:
        """Ids with as many tokens of images and videos as their rules count.

        `BadRecordError` where the assistant's turns are not found.

        A turn is what the template adds between the chat before it, with the prompt for an answer, and the chat up to
        its end, white space at that end left out (nothing generates it).
        """
        media = _Media(images=images, videos=videos)
        rendered = self._counter.render(conversation, images, videos)
        spans = self._turns(conversation, media, rendered.text)
        encoding = self._counter.encode(rendered)
        ids = np.array(encoding.ids, np.int64)
        offsets = np.array(encoding.offsets, np.int64).reshape(-1, 2)
        learnt = np.zeros(len(ids), np.bool_)
        for span in spans:
            # a token that a reply shares with the prompt's last space is the reply's
            learnt |= (offsets[:, 1] > span.start) & (offsets[:, 0] < span.stop) & (offsets[:, 1] > offsets[:, 0])
        repeats = self._repeats(ids, conversation, media)
        return EncodedConversation(input_ids=np.repeat(ids, repeats), learnt=np.repeat(learnt, repeats))

    def _repeats(self, ids: IntArray, conversation: Conversation, media: _Media) -> IntArray:
        """How often each token stands in the row: a soft token once for each feature of its image, crop or frame."""
        markup, features = self._counter.markup, defaultdict[str, list[int]](list)
        images, videos = iter(media.images), iter(media.videos)
        features[markup.soft] = []
        for part in (part for message in conversation.messages for part in message.content):
            if part is None:
                image, soft = next(images), markup.soft
                copies = image.tiles if markup.crops is not None else 1
            elif part is Slot.VIDEO:
                video = next(videos)
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
                    f"the chat holds {soft} {len(places)} times for {len(counts)} images, crops and frames: "
                    "keep the token out of the texts",
                )
            repeats[places] = counts
        return repeats

    def _turns(self, conversation: Conversation, media: _Media, text: str) -> list[_Span]:
        messages, spans = conversation.messages, []
        for position, message in enumerate(messages):
            if message.role != "assistant":
                continue
            past = self._rendered(conversation, media, position)
            before = self._rendered(conversation, media, position, generation_prompt=self._has_template)
            through = self._rendered(conversation, media, position + 1)
            start, stop = len(before), len(through.rstrip())
            if not through.startswith(before):  # a prompt that ends in a space which the turn writes itself
                start = len(before.rstrip())
            if before == past and self._has_template:  # no prompt: the turn begins where its own text does
                own = "".join(part for part in message.content if isinstance(part, str)).strip()
                start, before = max(start, through.find(own, start)), through
            if through[:start] != before[:start] or text[:stop] != through[:stop]:
                raise BadRecordError(
                    "template",
                    f"turn {position + 1} stands elsewhere once the chat goes on, so what the assistant wrote cannot "
                    "be told: use a chat template that keeps earlier turns as they are, or give labels yourself",
                )
            spans.append(_Span(start=start, stop=stop))
        return spans

    def _rendered(
        self, conversation: Conversation, media: _Media, stop: int, *, generation_prompt: bool = False
    ) -> str:
        """The text of the first `stop` turns."""
        messages = conversation.messages[:stop]
        if not messages:
            return ""
        images = media.images[: sum(message.num_images for message in messages)]
        videos = media.videos[: sum(message.num_videos for message in messages)]
        part = replace(conversation, messages=messages)
        text = self._counter.render(part, images, videos, generation_prompt=generation_prompt).text
        return text if self._has_template or stop == len(conversation.messages) else text + "\n"
