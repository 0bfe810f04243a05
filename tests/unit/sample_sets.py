"""Small data sets for the sizing tests: images, conversations, a tokenizer trained on the spot."""

import io
import json
import struct
import zlib
from dataclasses import dataclass
from functools import cache

from trimtab.specs import ImageCounts

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% elif c['type'] == 'text' %}{{ c['text'] }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
VICUNA = (
    "{{ bos_token }}{% for m in messages %}{% if m['role'] == 'user' %}{{ 'USER: ' + m['content'] + ' ' }}"
    "{% elif m['role'] == 'assistant' %}{{ 'ASSISTANT: ' + m['content'] + eos_token }}"
    "{% else %}{{ raise_exception('only user and assistant speak') }}{% endif %}{% endfor %}"
)
GEMMA = (
    "{{ bos_token }}{% for m in messages %}{{ '<start_of_turn>' + ('model' if m['role'] == 'assistant' else m['role']) "
    "+ '\n' }}{% if m['content'] is string %}{{ m['content'] | trim }}{% else %}{% for c in m['content'] %}"
    "{% if c['type'] == 'image' %}{{ '<start_of_image>' }}{% else %}{{ c['text'] | trim }}{% endif %}{% endfor %}"
    "{% endif %}{{ '<end_of_turn>\n' }}{% endfor %}"
)
INTERNVL = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% if m['content'] is string %}{{ m['content'] }}{% else %}"
    "{% for c in m['content'] %}{% if c['type'] == 'image' %}{{ '<IMG_CONTEXT>\n' }}{% else %}{{ c['text'] }}"
    "{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
)
SPECIAL = (
    *("<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>"),
    *("<image>", "<img>", "</img>", "<IMG_CONTEXT>", "<start_of_image>", "<end_of_image>", "<image_soft_token>"),
    *("<|video_pad|>", "<video>"),
)


@dataclass(frozen=True)
class PixelRule:
    """One token for every started 10 x 10 pixels, four patches a token; refuses images over 100 times as long."""

    name: str = "tens"
    cell: int = 10

    def count(self, width, height):
        from trimtab.errors import ImageError

        if max(width, height) > 100 * min(width, height):
            raise ImageError(f"{width} x {height} is longer than 100 times its width: crop it")
        tokens = -(-width // self.cell) * -(-height // self.cell)
        return ImageCounts(
            patches=4 * tokens, tokens=tokens, tiles=1, patches_sq=(4 * tokens) ** 2, patches_windowed=16 * tokens
        )


def png(width, height):
    """A real one-bit PNG of zeros."""

    rows = zlib.compress((b"\0" + bytes(-(-width // 8))) * height)
    return png_of(width, height, 1, 0, content=_chunk(b"IDAT", rows))


def png_of(width, height, depth=8, colour=2, *, content=b""):
    """A PNG that claims this size; of `content`, which may be none, nothing is checked."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + _chunk(b"IHDR", header) + content + _chunk(b"IEND", b"")


def _chunk(name, body):
    return struct.pack(">I", len(body)) + name + body + struct.pack(">I", zlib.crc32(name + body))


def talk(*texts):
    """ShareGPT turns, user first."""
    return [{"from": ("human", "gpt")[i % 2], "value": text} for i, text in enumerate(texts)]


def write_jsonl(path, rows):
    lines = [row if isinstance(row, bytes) else json.dumps(row).encode() for row in rows]
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


def write_tokenizer(folder, template=CHATML, special=SPECIAL, config=None, post=False):
    """A byte-level BPE tokenizer of a few hundred tokens in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(_tokenizer_json(tuple(special), post))
    config = {"bos_token": "<s>", "eos_token": {"__type": "AddedToken", "content": "</s>"}, **(config or {})}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (folder / "chat_template.jinja").write_text(template)
    return folder


@cache
def _tokenizer_json(special, post):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420 + len(special),
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    text = "what is in the picture? a small cat sits on the red mat, and the sun shines on user assistant system\n\n"
    tokenizer.train_from_iterator([text] * 20, trainer)
    if post:
        tokenizer.post_processor = processors.TemplateProcessing(
            single="<s> $A", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))]
        )
    return tokenizer.to_str()


def tar_bytes(members):
    """An uncompressed tar of (name, content) pairs."""
    import tarfile

    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return buffer.getvalue()
