"""A model folder's processor without torchvision: nothing is fetched, no code of the folder runs."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from transformers import AutoImageProcessor, AutoTokenizer, InternVLProcessor
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from trimtab.errors import ConfigError
from trimtab.models.asking.internvl_chat import InternVLChatConfig
from trimtab.runtime.placing.folder import read_config
from trimtab.serve.published_internvl import processor_parts


def load_processor(path: Path) -> Any:
    """The folder's processor without its video part: tokenizer, chat template, and Pillow's image backend.

    Made of its parts, because Transformers' `AutoProcessor` asks for torchvision as soon as a processor could take
    videos (5.23).
    """
    config = read_config(path)
    try:
        if isinstance(config, InternVLChatConfig):
            kind, parts = InternVLProcessor, processor_parts(path, config)
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
