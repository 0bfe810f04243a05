"""Exact token counts of conversations: tokenizer.json, chat template, and the tokens each image takes."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trimtab.errors import ConfigError, shorten
from trimtab.files import read_small
from trimtab.models.families import MARKUPS
from trimtab.options import SpecialTokens
from trimtab.samples.problems import BadRecordError
from trimtab.samples.rows import VIDEO_MARK, Conversation, Message, Slot
from trimtab.samples.templates import Render, compile_template, find_template, read_json_object, read_template
from trimtab.specs import ClipCounts, ImageCounts, ImageMarkup

if TYPE_CHECKING:
    from tokenizers import Encoding, Tokenizer

BYTES_PER_TOKEN = 4
TOKENS_PER_TURN = 4
"""The estimate without a tokenizer: UTF-8 bytes / 4, and 4 tokens a turn for role and turn markers. English takes about
4 characters a token (OpenAI, "What are tokens and how to count them?"); scripts of 2-3 bytes a character take fewer
characters a token, which is why bytes are counted. It has no error band: name a tokenizer before trusting a limit.
"""

_PLAIN = ImageMarkup(placeholder="<image>", soft="<image>")  # where neither model nor tokenizer names a token
MAX_CHARACTERS = 1 << 22  # of one conversation: some million tokens, and seconds of a tokenizer
_MAX_TOKENIZER_BYTES = 256 << 20
_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenizerFiles:
    """What decides token counts, read once and handed to every worker."""

    tokenizer_json: bytes
    template: str | None
    config: tuple[tuple[str, str], ...]  # named special tokens
    added: tuple[tuple[str, tuple[str, ...]], ...]  # tokens the config adds, with their flags
    markup: ImageMarkup | None
    special_tokens: SpecialTokens


@dataclass(frozen=True, slots=True)
class Rendered:
    """A conversation's text, and the image tokens that are not written in it."""

    text: str
    num_image_tokens: int
    num_turns: int


def read_tokenizer(
    tokenizer: Path,
    *,
    chat_template: Path | None = None,
    markup: ImageMarkup | None = None,
    special_tokens: SpecialTokens = "template",
) -> TokenizerFiles:
    """The files of a tokenizer: tokenizer.json (or the folder that holds it), its config and its chat template.

    `special_tokens`: "template" adds none to what the chat template writes (a tokenizer's `apply_chat_template`);
    "processor" lets the tokenizer add its own unless the text starts with the bos token (a processor's).
    """
    path = tokenizer / "tokenizer.json" if tokenizer.is_dir() else tokenizer
    try:
        content = read_small(path, most_bytes=_MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error.strerror}; name a tokenizer.json or its folder") from None
    config_path = path.parent / "tokenizer_config.json"
    config = read_json_object(config_path) if config_path.is_file() else {}
    named = {name: text for name in _NAMED_TOKENS if (text := _content(config.get(name))) is not None}
    added: dict[str, tuple[str, ...]] = {}
    decoder = config.get("added_tokens_decoder")
    for entry in decoder.values() if isinstance(decoder, dict) else ():
        if isinstance(entry, dict) and (text := _content(entry)) is not None:
            normal = {"normalized": not entry.get("special")}
            added[text] = tuple(flag for flag in _ADDED_FLAGS if {**normal, **entry}.get(flag))
    extra = config.get("extra_special_tokens") or config.get("additional_special_tokens") or ()
    extra = extra.values() if isinstance(extra, dict) else extra if isinstance(extra, list) else ()
    for text in [*named.values(), *map(_content, extra)]:
        if text is not None:
            added.setdefault(text, ("special",))
    return TokenizerFiles(
        tokenizer_json=content,
        template=read_template(chat_template) if chat_template is not None else find_template(path),
        config=tuple(sorted(named.items())),
        added=tuple(added.items()),
        markup=markup,
        special_tokens=special_tokens,
    )


_ADDED_FLAGS = ("special", "lstrip", "rstrip", "normalized", "single_word")


def _content(token: object) -> str | None:
    value = token.get("content") if isinstance(token, dict) else token
    return value if isinstance(value, str) and value else None


class TokenCounter:
    """Renders conversations and counts their tokens; holds a tokenizer, or None for the stated estimate."""

    def __init__(self, files: TokenizerFiles | None) -> None:
        self.exact = files is not None
        self.assumptions: list[str] = []
        self._tokenizer: Tokenizer | None = None
        self._render: Render | None = None
        self._add_special, self._bos = False, ""
        self._markup = _PLAIN
        self._typed = self._plain = True
        self._cuts_words, self._known = False, dict[str, int]()
        if files is None:
            self.assumptions.append(
                f"tokens are estimated: UTF-8 bytes / {BYTES_PER_TOKEN}, {TOKENS_PER_TURN} a turn, 2 markers an image"
            )
        else:
            self._load(files)

    # -- once ---------------------------------------------------------------------------------------------------------

    def _load(self, files: TokenizerFiles) -> None:
        self._tokenizer = tokenizer = _build_tokenizer(files)
        named = dict(files.config)
        self._bos = named.get("bos_token", "")
        self._add_special = files.special_tokens == "processor"
        if files.template is None:
            self._typed = self._plain = False
            self.assumptions.append(
                "the tokenizer has no chat template: the turns' texts are joined by line ends, without roles or markers"
            )
        else:
            self._render = compile_template(files.template, named)
            if "strftime_now" in files.template:
                self.assumptions.append("the chat template writes today's date: counts may differ on another day")
        self._markup = files.markup or self._derive_markup()
        if self._render is not None:
            self._probe()
        missing = [t for t in _marker_tokens(self._markup) if tokenizer.token_to_id(t) is None]
        if missing:
            tokenizer.add_special_tokens(missing)
            self.assumptions.append(
                f"the tokenizer has no {' '.join(missing)}: one token each, as if added before training"
            )

        self._cuts_words = _cuts_words(tokenizer)

    def _derive_markup(self) -> ImageMarkup:
        """The family whose placeholder the template writes for an image, else whose soft token the tokenizer knows."""
        shown = self._try([{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "probe"}]}]) or ""
        for markup in dict.fromkeys(MARKUPS.values()):
            if markup.placeholder in shown:
                return markup
        assert self._tokenizer is not None
        for markup in dict.fromkeys(MARKUPS.values()):
            if self._tokenizer.token_to_id(markup.soft) is not None:
                return markup
        self.assumptions.append("neither chat template nor tokenizer names an image token: <image> is taken")
        return _PLAIN

    def _probe(self) -> None:
        """Find out by rendering whether the template takes content as parts, as a string, or both."""
        parts = [{"type": "image"}, {"type": "text", "text": "probe"}]
        shown = self._try([{"role": "user", "content": parts}])
        is_shown = shown is not None and shown.count(self._markup.placeholder) == 1
        self._typed = shown is not None and is_shown and "probe" in shown and "'type'" not in shown
        text = self._try([{"role": "user", "content": "probe"}])
        self._plain = text is not None and "probe" in text
        if not self._typed and not self._plain:
            raise ConfigError(f"the template renders neither text nor {self._markup.placeholder}: name a chat_template")

    def _try(self, messages: list[dict[str, object]]) -> str | None:
        try:
            return self._render(messages, None) if self._render is not None else None
        except Exception:  # a template may fail in any way on the kind of content it does not take
            return None

    # -- for every sample ---------------------------------------------------------------------------------------------

    @property
    def markup(self) -> ImageMarkup:
        return self._markup

    @property
    def has_template(self) -> bool:
        return self._render is not None

    def chat(
        self,
        conversation: Conversation,
        *,
        video: str = VIDEO_MARK,
        generation_prompt: bool = False,
        marked: bool = False,
    ) -> str:
        """The chat as text, each image and each video as its placeholder."""
        if self._render is None:
            return "\n".join(self._plain_content(message, video) for message in conversation.messages)
        messages = [self._message(message, video) for message in conversation.messages]
        how: dict[str, Any] = {"generation_prompt": generation_prompt, "marked": marked}
        try:
            return self._render(messages, conversation.tools, **how, more=dict(conversation.arguments))
        except Exception as error:  # whatever a template's expressions raise on this conversation
            raise BadRecordError("template", f"the chat template refuses it: {shorten(str(error), 200)}") from None

    def render(
        self, conversation: Conversation, images: Sequence[ImageCounts], videos: Sequence[ClipCounts] = ()
    ) -> Rendered:
        """The chat as text, each image as its markers around one soft token, each video as its processor writes it."""
        video = videos[0].placeholder if videos else VIDEO_MARK
        text = self.chat(conversation, video=video)
        if len(text) > MAX_CHARACTERS:
            raise BadRecordError("length", f"its text has {len(text):,} characters, more than {MAX_CHARACTERS:,}")
        if self._tokenizer is None:
            num_tokens = sum(x.tokens for x in images) + sum(x.image.tokens for x in videos)
            text = text.replace(self._markup.placeholder, "").replace(video, "")
            return Rendered(text, num_tokens + 2 * (len(images) + len(videos)), len(conversation.messages))
        text, num_written = self._expand(text, images)
        for token in {x.soft for x in videos}:
            if self._tokenizer.token_to_id(token) is None:
                self._tokenizer.add_special_tokens([token])  # as if added before training
                self._known.clear()
        text, num_in_videos = _with_videos(text, videos)
        num_tokens = sum(x.tokens for x in images) - num_written + num_in_videos
        return Rendered(text, num_tokens, len(conversation.messages))

    def place(self, text: str, at: int, images: Sequence[ImageCounts], videos: Sequence[ClipCounts]) -> int:
        """Return where character `at` of a chat's text stands once images and videos are written out."""
        before, _ = self._expand(text[:at], images[: text.count(self._markup.placeholder, 0, at)])
        if videos:
            before, _ = _with_videos(before, videos[: before.count(videos[0].placeholder)])
        return len(before)

    def _plain_content(self, message: Message, video: str) -> str:
        written = self._markup.written or self._markup.placeholder
        return "".join(written if p is None else video if p is Slot.VIDEO else p for p in message.content)

    def _message(self, message: Message, video: str) -> dict[str, object]:
        content: object
        if self._typed and not (message.was_text and self._plain):
            content = [_part(p) for p in message.content]
        else:
            content = self._plain_content(message, video)
        extra = {k: v for k, v in message.extra if k not in ("role", "content")}
        fields: dict[str, object] = {"role": message.role, **extra}
        if message.content or not extra:
            fields["content"] = content
        thoughts = [extra[k] for k in ("reasoning_content", "thinking", "reasoning") if k in extra]
        if thoughts:  # Transformers 5.23 offers reasoning under both of these names
            fields.setdefault("thinking", thoughts[0])
            fields["reasoning_content"] = thoughts[0]
        return fields

    def _expand(self, text: str, images: Sequence[ImageCounts]) -> tuple[str, int]:
        """The text with its images as they are encoded, and how often their token is written in it."""
        markup = self._markup
        if text.count(markup.placeholder) != len(images):
            raise BadRecordError(
                "placeholder",
                f"the chat holds {markup.placeholder} {text.count(markup.placeholder)} times for {len(images)} images",
            )
        plain = not markup.before and not markup.after and markup.crops is None
        if plain and all(image.text is None for image in images):
            return text, len(images)
        pieces = text.split(markup.placeholder)
        whole = markup.before + markup.soft + markup.after
        out, num_written = [pieces[0]], 0
        for image, piece in zip(images, pieces[1:], strict=True):
            if image.text is not None:
                out += [image.text, piece]
                num_written += image.text.count(markup.soft)
                continue
            copies = image.tiles if markup.crops is not None else 1
            if markup.crops is not None and copies > 1:
                out += [markup.crops[0], whole, markup.crops[1], " ".join([whole] * (copies - 1)), piece]
            else:
                out += [whole, piece]
            num_written += copies
        return "".join(out), num_written

    def encode(self, rendered: Rendered) -> Encoding:
        """Return token ids and character offsets of one chat, one soft token for each image (or crop) in it."""
        assert self._tokenizer is not None, "there is a tokenizer"
        return self._tokenizer.encode(rendered.text, add_special_tokens=self._adds_special(rendered))

    def id_of(self, soft: str) -> int:
        """Return the id of a token that features take the place of."""
        assert self._tokenizer is not None, "there is a tokenizer"
        token: int | None = self._tokenizer.token_to_id(soft)
        assert token is not None, "added when loaded, or with the first video"
        return token

    def count(self, rendered: Sequence[Rendered]) -> list[int | BadRecordError]:
        """Return the tokens of each chat, image tokens included, or why the tokenizer refuses it.

        One batch, because a call costs as much as a short text; a batch that fails is encoded chat by chat.
        """
        if self._tokenizer is None:
            return [
                -(-len(r.text.encode()) // BYTES_PER_TOKEN) + TOKENS_PER_TURN * r.num_turns + r.num_image_tokens
                for r in rendered
            ]
        lengths: list[int | BadRecordError] = [0] * len(rendered)
        for add_special in {False, self._add_special}:
            rows = [i for i, r in enumerate(rendered) if self._adds_special(r) is add_special]
            texts = [rendered[i].text for i in rows]
            for i, length in zip(rows, self._lengths(texts, add_special), strict=True):
                lengths[i] = length if isinstance(length, BadRecordError) else length + rendered[i].num_image_tokens
        return lengths

    def _lengths(self, texts: list[str], add_special: bool) -> list[int | BadRecordError]:
        assert self._tokenizer is not None, "there is a tokenizer"
        try:
            if not add_special and (counts := self.count_by_words(texts)) is not None:
                return list(counts)
            return list(map(len, self._tokenizer.encode_batch_fast(texts, add_special_tokens=add_special)))
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # the binding raises bare Exception, and a panic that is not even that
            if len(texts) == 1:
                return [BadRecordError("template", f"the tokenizer refuses it: {shorten(str(error), 200)}")]
            return [length for text in texts for length in self._lengths([text], add_special)]

    def count_by_words(self, texts: list[str]) -> list[int] | None:
        """Return the tokens of each text by words met before, in a quarter of the time of encoding it.

        None where most words are new, which takes longer one by one, or the tokenizer is not known to go word by word.
        """
        if self._tokenizer is None or not self._cuts_words:
            return None
        if len(self._known) > _MOST_WORDS:
            self._known.clear()
        words = [_words(text) for text in texts]
        new = list({word for own in words for word in own if word not in self._known})
        if 2 * len(new) > sum(map(len, words)):
            return None
        encoded = self._tokenizer.encode_batch_fast(new, add_special_tokens=False)
        self._known.update(zip(new, map(len, encoded), strict=True))
        counts = [sum(map(self._known.__getitem__, own)) for own in words]
        for word in new:
            if len(word) > _LONG_WORD:  # lines of a script without spaces are hardly met again
                del self._known[word]
        return counts

    def _adds_special(self, rendered: Rendered) -> bool:
        return self._add_special and not (bool(self._bos) and rendered.text.startswith(self._bos))


# Words: byte-level tokenizers of GPT-2, Qwen and Llama 3 begin anew at a single space between two characters that are
# none, so the tokens of a text are those of its words, each with the space in front of it.


_MOST_WORDS, _LONG_WORD = 1 << 18, 32
_BETWEEN = re.compile(r"(?<=\S) (?=\S)")
CUTTING = tuple(  # Qwen 2 to 3, and Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
    + numbers
    + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
    for numbers in (r"\p{N}", r"\p{N}{1,3}")
)


def _words(text: str) -> list[str]:
    """Cut a text into the pieces from one single space to the next, each with its space but the first."""
    pieces = text.split(" ")
    inner = [pieces[0].lstrip(), *pieces[1:-1], pieces[-1].rstrip()]
    if "" in inner or list(map(str.strip, inner)) != inner:  # spaces next to others
        pieces = _BETWEEN.split(text)
    return [pieces[0], *[" " + piece for piece in pieces[1:]]]


def _cuts_words(tokenizer: Tokenizer) -> bool:
    """Return whether the tokens of a text are known to be those of its words."""
    if type(tokenizer.model).__name__ != "BPE" or type(tokenizer.normalizer).__name__ not in ("NoneType", "NFC"):
        return False
    added = tokenizer.get_added_tokens_decoder().values()
    if tokenizer.pre_tokenizer is None or any(t.lstrip or t.rstrip or t.single_word or " " in t.content for t in added):
        return False
    rule = json.loads(tokenizer.pre_tokenizer.__getstate__())
    first, *more = rule.get("pretokenizers", [rule])
    if first["type"] == "Split" and len(more) == 1:
        known = first["pattern"].get("Regex") in CUTTING and first["behavior"] == "Isolated" and not first["invert"]
        return known and more[0]["type"] == "ByteLevel" and not (more[0]["add_prefix_space"] or more[0]["use_regex"])
    return bool(not more and first["type"] == "ByteLevel" and first["use_regex"] and not first["add_prefix_space"])


def _part(content: str | Slot | None) -> dict[str, object]:
    if isinstance(content, str):
        return {"type": "text", "text": content}
    return {"type": "image" if content is None else "video"}


def _with_videos(text: str, videos: Sequence[ClipCounts]) -> tuple[str, int]:
    """The text with its videos as their processor writes them, and how many of their tokens are not written in it."""
    if not videos:
        return text, 0
    pieces = text.split(videos[0].placeholder)
    if len(pieces) != len(videos) + 1:
        raise BadRecordError(
            "placeholder",
            f"the chat holds {videos[0].placeholder} {len(pieces) - 1} times for {len(videos)} videos: keep it out of "
            "the texts, and use a chat template that writes videos",
        )
    out, num_left = [pieces[0]], 0
    for video, piece in zip(videos, pieces[1:], strict=True):
        written = video.image.text or ""
        out += [written, piece]
        num_left += video.image.tokens - written.count(video.soft)
    return "".join(out), num_left


def _build_tokenizer(files: TokenizerFiles) -> Tokenizer:
    from tokenizers import AddedToken, Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(files.tokenizer_json)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the binding raises bare Exception, and a panic that is not even that
        raise ConfigError(f"the tokenizer.json is not readable: {shorten(str(error), 200)}: name the model's") from None
    if dropout := getattr(tokenizer.model, "dropout", None):
        raise ConfigError(f"the tokenizer.json cuts words at random: set its model's dropout {dropout:g} to null")
    tokenizer.no_truncation()
    tokenizer.no_padding()
    known = {token.content for token in tokenizer.get_added_tokens_decoder().values()}
    tokens = [
        AddedToken(text, **{flag: flag in flags for flag in _ADDED_FLAGS})
        for text, flags in files.added
        if text not in known
    ]
    if tokens:
        tokenizer.add_tokens(tokens)
    return tokenizer


def _marker_tokens(markup: ImageMarkup) -> list[str]:
    text = markup.before + markup.soft + markup.after + (markup.written or "")
    return list(dict.fromkeys([markup.soft, *re.findall(r"<[^<>\s]+>", text)]))
