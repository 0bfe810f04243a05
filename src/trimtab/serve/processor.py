"""A model folder's processor without torchvision: nothing is fetched, no code of the folder runs.

A folder of InternVL as first published holds a tokenizer and nothing else of Transformers'. Fields of `config.json` say
how its images are cut; code of its own, which never runs, writes its conversations. Transformers' classes get those
fields here, and the conversation template that the makers of the `-hf` folders wrote
(transformers/models/internvl/convert_internvl_weights_to_hf.py at 015d3b2): no default system message.
"""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoImageProcessor, AutoTokenizer, GotOcr2ImageProcessorPil, InternVLProcessor
from transformers.image_utils import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from trimtab.errors import ConfigError, quote
from trimtab.models.asking.internvl_chat import IMAGE_ROW, InternVLChatConfig, tile_size
from trimtab.runtime.placing.folder import read_config

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


def load_processor(path: Path) -> Any:
    """The folder's processor without its video part: tokenizer, chat template, and Pillow's image backend.

    Made of its parts, because Transformers' `AutoProcessor` asks for torchvision as soon as a processor could take
    videos (5.23).
    """
    config = read_config(path)
    try:
        if isinstance(config, InternVLChatConfig):
            kind, parts = InternVLProcessor, _published_parts(path, config)
        else:
            kind = PROCESSOR_MAPPING.get(type(config), None)
            if kind is None or "image_processor" not in kind.get_attributes():
                raise ValueError("Transformers has no processor of images and text for it")
            parts = _read_parts(path, kind)
    except (OSError, ValueError, KeyError, ImportError, StrictDataclassError) as error:
        raise ConfigError(
            f"the processor in {path} cannot be read ({' '.join(str(error).split())[:300]}): name a folder in "
            "Transformers' own format, with tokenizer.json, tokenizer_config.json and preprocessor_config.json"
        ) from None
    processor = _without_video(kind)(**parts)
    if processor.chat_template is None:  # some folders keep it with the tokenizer
        processor.chat_template = parts["tokenizer"].chat_template
    return processor


def _read_parts(path: Path, kind: type[Any]) -> dict[str, Any]:
    local = {"trust_remote_code": False, "local_files_only": True}
    settings, _ = kind.get_processor_dict(path, **local)
    attributes, accepted = kind.get_attributes(), inspect.signature(kind.__init__).parameters
    read = {
        "tokenizer": AutoTokenizer.from_pretrained(path, **local),
        "image_processor": AutoImageProcessor.from_pretrained(path, backend="pil", **local),
    }
    return {
        **{name: read.get(name) for name in attributes},
        **{name: value for name, value in settings.items() if name in accepted and name not in attributes},
    }


def _without_video(kind: type[Any]) -> type[Any]:
    """A processor class that may be made with None for its video processor (public method; Transformers 5.23)."""

    def check(self: Any, name: str, argument: object) -> Any:
        return None if argument is None else kind.check_argument_for_proper_class(self, name, argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


def _published_parts(folder: Path, config: InternVLChatConfig) -> dict[str, Any]:
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
    tokenizer = AutoTokenizer.from_pretrained(
        folder, config=config, trust_remote_code=False, local_files_only=True, extra_special_tokens=tokens
    )
    tokenizer.video_token = "<video>"  # noqa: S105 - the processor asks for a name; videos are not taken
    image_processor = GotOcr2ImageProcessorPil(
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
