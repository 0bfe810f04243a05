"""What Transformers' handlers see of the folder's processor: the same, within the limits of this server."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from jinja2 import TemplateError

from trimtab.errors import ConfigError
from trimtab.serve.limits import ServeLimits
from trimtab.serve.pictures import decode_picture, read_data_url
from trimtab.serve.problems import RequestError

_PROBE = "trimtab asks whether this text arrives"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatProcessor:
    """A processor for conversations from outside: judges images by their headers before it decodes them, fetches and
    opens nothing, and reads special tokens within texts as text (Transformers' `sanitize_control_tokens`)."""

    def __init__(self, processor: Any, limits: ServeLimits, *, name: str) -> None:
        self.tokenizer = processor.tokenizer
        self._processor, self._limits = processor, limits
        added = [str(x) for x in self.tokenizer.added_tokens_decoder.values()]
        longest_first = sorted((x for x in added if not x.isspace()), key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._check_template(name)

    def apply_chat_template(self, conversation: list[dict[str, Any]], *, tools: Any = None, **named: Any) -> Any:
        """Inputs of the model for one conversation; `RequestError` 400 where a limit is passed."""
        self._check_texts([conversation, tools])
        shown, images, pixels_left = [], 0, self._limits.max_pixels
        for turn in conversation:
            if turn["role"] not in _ROLES:
                raise RequestError(400, f"a message's role must be one of {', '.join(_ROLES)}", param="messages")
            parts = []
            for part in turn["content"]:
                if part["type"] == "image":
                    images += 1
                    if images > self._limits.max_images:
                        raise RequestError(400, f"a request may hold {self._limits.max_images} images: send fewer")
                    picture = read_data_url(part["url"], param="messages", max_pixels=pixels_left)
                    pixels_left -= picture.num_pixels
                    parts.append({"type": "image", "image": decode_picture(picture)})
                elif part["type"] == "text":
                    parts.append(part)
                else:
                    raise RequestError(400, f"{part['type']} is not taken: send texts and images", param="messages")
            self._check_joined(parts)
            shown.append({**turn, "role": _ROLES[turn["role"]], "content": parts})
        try:
            return self._processor.apply_chat_template(shown, tools=tools, sanitize_control_tokens=True, **named)
        except (ValueError, TemplateError, NotImplementedError) as error:  # of templates and image processors
            reason = " ".join(str(error).split())[:300]
            raise RequestError(400, f"the model's processor refuses this conversation: {reason}") from None

    def _check_texts(self, values: Any) -> None:
        """Refuses more text than the limit, and special tokens where `sanitize_control_tokens` does not look: in the
        names of JSON fields."""
        characters = 0
        for text, is_name in _texts(values):
            characters += len(text)
            if is_name and self._control.search(text):
                raise RequestError(400, f"the field {text[:100]!r} names a special token: give it another name")
        if characters > self._limits.max_characters:
            raise RequestError(400, f"the texts hold more than {self._limits.max_characters:,} characters: send less")

    def _check_joined(self, parts: list[dict[str, Any]]) -> None:
        """Refuses texts that the template would join into a special token."""
        texts = [part["text"] for part in parts if part["type"] == "text"]
        alone = sum(len(self._control.findall(text)) for text in texts)
        if len(texts) > 1 and len(self._control.findall("".join(texts))) != alone:
            raise RequestError(400, "texts make a special token together: leave it out", param="messages")

    def check_prompt(self, prompt: str) -> None:
        """A prompt without a template: its special tokens would be read as such."""
        self._check_texts([prompt])
        if found := self._control.search(prompt):
            raise RequestError(400, f"the prompt holds {found[0]!r}, which is a command and no text: leave it out")

    def examples(self) -> tuple[list[Any], list[Any]]:
        """Short conversations of unlike lengths, without pictures and with none, one and two: for trying batches."""
        from PIL import Image

        def example(text: str, *colours: str) -> Any:
            shown = [{"type": "image", "image": Image.new("RGB", (96, 64), colour)} for colour in colours]
            turn = {"role": "user", "content": [*shown, {"type": "text", "text": text}]}
            return self._processor.apply_chat_template(
                [turn], add_generation_prompt=True, tokenize=True, return_dict=True, return_tensors="pt"
            )

        texts = [example("What is 2 + 2?"), example("Name three colours of the rainbow, please.")]
        try:
            return texts, [
                texts[0],
                example("What is this?", "red"),
                example("And which are these two?", "blue", "red"),
            ]
        except Exception:  # families' processors raise whatever they like, as at two images where they take one
            return texts, []

    def decode(self, tokens: Any, **named: Any) -> str:
        return str(self.tokenizer.decode(tokens, **named))

    def _check_template(self, name: str) -> None:
        """Whether the folder's chat template can write a message given as parts."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        except (ValueError, TypeError, TemplateError) as error:
            raise ConfigError(
                f"the chat template of {name} cannot be used: {error}; put a chat_template.jinja beside the model"
            ) from None
        if not self.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]:  # Transformers makes empty ones
            raise ConfigError(
                f"the tokenizer of {name} knows no words: put tokenizer.json and tokenizer_config.json beside the model"
            )
        if _PROBE not in text or "'type'" in text:
            raise ConfigError(
                f"the chat template of {name} does not write messages whose content is a list of parts: put one that "
                "does into chat_template.jinja beside the model"
            )


def _texts(value: Any) -> Iterator[tuple[str, bool]]:
    """Every text in nested lists and objects, images left out, and whether it is a field's name."""
    if isinstance(value, str):
        yield value, False
    elif isinstance(value, list):
        for x in value:
            yield from _texts(x)
    elif isinstance(value, dict):
        for name, x in value.items():
            yield name, True
            if not (name == "url" and value.get("type") == "image"):
                yield from _texts(x)
