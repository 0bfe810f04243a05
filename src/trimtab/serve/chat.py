"""What Transformers' handlers see of the folder's processor: the same, within the limits of this server."""

from __future__ import annotations

import base64
import io
import json
import re
import warnings
from typing import Any

from jinja2 import TemplateError
from PIL import Image, ImageOps
from starlette.exceptions import HTTPException

from trimtab.errors import ConfigError
from trimtab.samples.headers import image_size
from trimtab.serve.limits import ServeLimits

_DATA_URL = re.compile(r"data:image/[a-z0-9.+-]+(;[a-z]+=[a-z0-9.-]+)*;base64,", re.IGNORECASE)
_MAX_RATIO = 200  # as Qwen-VL's processors have it; CLIP's would make 336 x 34 million pixels of 1 x 100,000
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # Pillow opens no other
_PROBE = "trimtab asks whether this text arrives"
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


class ChatProcessor:
    """A processor for conversations from outside: judges images by their headers before it decodes them, fetches and
    opens nothing, and reads special tokens within texts as text (Transformers' `sanitize_control_tokens`)."""

    def __init__(self, processor: Any, limits: ServeLimits, *, name: str) -> None:
        self._processor, self._limits, self.tokenizer = processor, limits, processor.tokenizer
        self._check_template(name)

    def apply_chat_template(self, conversation: list[dict[str, Any]], *, tools: Any = None, **named: Any) -> Any:
        """Inputs of the model for one conversation; `HTTPException` 400 where a limit is passed."""
        shown, urls = [], []
        for turn in conversation:
            if turn["role"] not in _ROLES:
                raise HTTPException(400, f"a message's role must be one of {', '.join(_ROLES)}")
            if other := {part["type"] for part in turn["content"]} - {"text", "image"}:
                raise HTTPException(400, f"{other.pop()} is not taken: send texts and images")
            urls += [part.pop("url") for part in turn["content"] if part["type"] == "image"]
            shown.append({**turn, "role": _ROLES[turn["role"]]})
        self.check_length(json.dumps([shown, tools], ensure_ascii=False))
        if len(urls) > self._limits.max_images:
            raise HTTPException(400, f"a request may hold {self._limits.max_images} images: send fewer")
        left = self._limits.max_pixels
        for part in (part for turn in shown for part in turn["content"] if part["type"] == "image"):
            part["image"] = open_picture(urls.pop(0), max_pixels=left)
            left -= part["image"].width * part["image"].height
        try:
            return self._processor.apply_chat_template(shown, tools=tools, sanitize_control_tokens=True, **named)
        except (ValueError, TemplateError, NotImplementedError) as error:  # of templates and image processors
            reason = " ".join(str(error).split())[:300]
            raise HTTPException(400, f"the model's processor refuses this conversation: {reason}") from None

    def check_length(self, text: str) -> None:
        """Refuses more text than is templated and tokenised in one go."""
        if len(text) > self._limits.max_characters:
            raise HTTPException(400, f"the texts hold more than {self._limits.max_characters:,} characters: send less")

    def examples(self) -> list[Any]:
        """Short conversations of unlike lengths with no, one and two pictures, for trying a batch; none where this
        processor does not take them."""
        asked: dict[str, tuple[str, ...]] = {
            "Name three colours of the rainbow, please.": (),
            "What is this?": ("red",),
            "And which are these two?": ("blue", "red"),
        }
        found = []
        for text, colours in asked.items():
            shown = [{"type": "image", "image": Image.new("RGB", (96, 64), colour)} for colour in colours]
            turn = {"role": "user", "content": [*shown, {"type": "text", "text": text}]}
            named = {"add_generation_prompt": True, "tokenize": True, "return_dict": True, "return_tensors": "pt"}
            try:
                found.append(self._processor.apply_chat_template([turn], **named))
            except Exception:  # families' processors raise whatever they like, as at two images where they take one
                return []
        return found

    def decode(self, tokens: Any, **named: Any) -> str:
        return str(self.tokenizer.decode(tokens, **named))

    def _check_template(self, name: str) -> None:
        """Whether the folder's tokenizer knows words, and its chat template writes a message given as parts."""
        message = {"role": "user", "content": [{"type": "text", "text": _PROBE}]}
        try:
            text = self._processor.apply_chat_template([message], add_generation_prompt=True, tokenize=False)
        except (ValueError, TypeError, TemplateError) as error:
            text = f"it says: {error}"
        if not self.tokenizer(_PROBE, add_special_tokens=False)["input_ids"]:  # Transformers makes empty ones
            text = "the tokenizer knows no words"
        if _PROBE not in text or "'type'" in text:
            raise ConfigError(
                f"{name} cannot write a message whose content is a list of parts ({' '.join(text.split())[:200]}): put "
                "its tokenizer.json and a chat_template.jinja that can beside the model"
            )


def open_picture(url: str, *, max_pixels: int) -> Image.Image:
    """RGB pixels of the first frame, turned as EXIF says: what Transformers' own `load_image` makes of the image.

    Refuses everything that would have to be fetched, and images too large or too thin.
    """
    start = _DATA_URL.match(url)
    if start is None:
        raise HTTPException(
            400,
            "an image must come as a data URL (data:image/png;base64,...): nothing is fetched from the network and no "
            "file is opened",
        )
    try:
        content = base64.b64decode(url[start.end() :], validate=True)
        width, height = image_size(content, max_pixels=max(max_pixels, 1))
        if max(width, height) > _MAX_RATIO * min(width, height):
            raise ValueError(f"{width} x {height} pixels are more than {_MAX_RATIO} times as long as wide")
        with warnings.catch_warnings(), Image.open(io.BytesIO(content), formats=_FORMATS) as image:
            warnings.simplefilter("ignore")  # of palettes with transparency, once for every stranger's image
            if image.size != (width, height):
                raise ValueError(f"{image.width} x {image.height} pixels behind a header of another size")
            return ImageOps.exif_transpose(image).convert("RGB")
    except Exception as error:  # format readers raise whatever struct, zlib or indexing raises
        reason = f"an image cannot be used ({error}): send another, as {', '.join(_FORMATS)}"
        raise HTTPException(400, reason) from None
