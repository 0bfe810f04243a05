"""The processor of an InternVL folder as first published, which holds a tokenizer and nothing else of Transformers'.

Its images are cut by fields of `config.json` and its conversations written by code of its own, which is never run. Here
Transformers' classes are given those fields, and the conversation template that the makers of the `-hf` folders wrote
(transformers/models/internvl/convert_internvl_weights_to_hf.py at 015d3b2): no default system message.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD

from trimtab.errors import ConfigError, quote
from trimtab.models.asking.internvl_chat import IMAGE_ROW, InternVLChatConfig, tile_size

# after <|im_end|>, by the name that config.json gives its conversations (OpenGVLab/InternVL, conversation.py)
_BEHIND_TURN = {"internvl2_5": "\\n", "Hermes-2": "", "internlm2-chat": ""}
_TEMPLATE = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}"
    "{{ '<IMG_CONTEXT>\\n' if part['type'] == 'image' else part['text'] }}"
    "{% endfor %}{% endif %}{{ '<|im_end|>BEHIND' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def processor_parts(folder: Path, config: InternVLChatConfig) -> dict[str, Any]:
    """Arguments of Transformers' `InternVLProcessor`, without its video part.

    `ConfigError` where the folder cuts images or writes turns in ways that Transformers' classes do not.
    """
    fields = config.published
    template, dynamic = fields.get("template"), bool(fields.get("dynamic_image_size"))
    if template not in _BEHIND_TURN:
        raise ConfigError(
            f"{folder} writes conversations by the template {quote(template)} of its own code, which is never run: "
            f"serve the -hf folder of the same model (known are {', '.join(_BEHIND_TURN)})"
        )
    if dynamic and not fields.get("use_thumbnail"):
        raise ConfigError(
            f"{folder} cuts images into tiles without the thumbnail that Transformers' processor adds: load it in "
            "Python, with pixels of your own"
        )
    size = tile_size(fields)
    tokens = {"start_image_token": "<img>", "end_image_token": "</img>", "context_image_token": IMAGE_ROW}
    tokenizer = transformers.AutoTokenizer.from_pretrained(
        folder, config=config, trust_remote_code=False, local_files_only=True, extra_special_tokens=tokens
    )
    tokenizer.video_token = "<video>"  # noqa: S105 - the processor asks for a name; videos are not taken
    image_processor = transformers.GotOcr2ImageProcessorPil(
        size={"height": size, "width": size},
        min_patches=fields.get("min_dynamic_patch", 1),
        max_patches=fields.get("max_dynamic_patch", 6) if dynamic else 1,
        image_mean=IMAGENET_DEFAULT_MEAN,
        image_std=IMAGENET_DEFAULT_STD,
    )
    return {
        "tokenizer": tokenizer,
        "image_processor": image_processor,
        "image_seq_length": config.image_seq_length,
        "chat_template": _TEMPLATE.replace("BEHIND", _BEHIND_TURN[template]),
    }
