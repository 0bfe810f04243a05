"""A model folder's weights by a device map, and its processor: nothing is fetched, no code of the folder runs."""

from __future__ import annotations

import inspect
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import torch
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
)
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING
from transformers.utils import GENERATION_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

from trimtab.errors import ConfigError, join_problems

DeviceMap = Mapping[str, int | str]


def load_model(
    path: Path,
    device_map: DeviceMap | Literal["auto"] | None = None,
    *,
    offload_folder: Path | None = None,
    max_memory: Mapping[int | str, str] | None = None,
) -> Any:
    """The model in the folder `path`, in the type its config names, ready to generate.

    Without a map it lies whole on the first accelerator, or on the CPU where there is none; "auto" leaves the choice
    to Transformers, under `max_memory`. Weights are read from safetensors alone.
    """
    if device_map is None:
        device_map = {"": 0 if torch.accelerator.is_available() else "cpu"}
    if device_map != "auto" and "disk" in device_map.values() and offload_folder is None:
        raise ConfigError("the device map places modules on disk: name a folder for them with --offload-folder")
    folder = _folder(path)
    with _readable(path, "weights"):
        _check_files(path)
        model, report = AutoModelForImageTextToText.from_pretrained(
            folder,
            device_map=device_map if device_map == "auto" else dict(device_map),
            max_memory=None if max_memory is None else dict(max_memory),
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            ignore_mismatched_sizes=True,  # they are refused below, in a sentence
            output_loading_info=True,
            **({} if offload_folder is None else {"offload_folder": str(offload_folder)}),
        )
    # Transformers would draw both at random
    wrong = [f"no weight for {name}" for name in sorted(report["missing_keys"])]
    wrong += [f"{name} in another shape than config.json says" for name, *_ in sorted(report["mismatched_keys"])]
    if wrong:
        raise ConfigError(join_problems([f"{path} holds {what}: download it again" for what in wrong]))
    return model.eval()


def load_processor(path: Path) -> Any:
    """The folder's processor without its video part: tokenizer, chat template, and Pillow's image backend.

    Made of its parts, because Transformers' `AutoProcessor` asks for torchvision as soon as a processor could take
    videos (5.23).
    """
    folder = _folder(path)
    local = {"trust_remote_code": False, "local_files_only": True}
    with _readable(path, "processor"):
        kind = PROCESSOR_MAPPING.get(type(AutoConfig.from_pretrained(folder, **local)), None)
        if kind is None or "image_processor" not in kind.get_attributes():
            raise ConfigError(
                f"Transformers has no processor of images and text for the model in {path}: serve another"
            )
        tokenizer = AutoTokenizer.from_pretrained(folder, **local)
        image_processor = AutoImageProcessor.from_pretrained(folder, backend="pil", **local)
        settings, _ = kind.get_processor_dict(folder, **local)
    parts = {"tokenizer": tokenizer, "image_processor": image_processor}
    attributes, accepted = kind.get_attributes(), inspect.signature(kind.__init__).parameters
    processor = _without_video(kind)(
        **{name: parts.get(name) for name in attributes},
        **{name: value for name, value in settings.items() if name in accepted and name not in attributes},
    )
    if processor.chat_template is None:  # some folders keep it with the tokenizer
        processor.chat_template = tokenizer.chat_template
    return processor


def _without_video(kind: type[Any]) -> type[Any]:
    """A processor class that may be made with None for its video processor (public method; Transformers 5.23)."""

    def check(self: Any, name: str, argument: object) -> Any:
        return None if argument is None else kind.check_argument_for_proper_class(self, name, argument)

    return type(kind.__name__, (kind,), {"check_argument_for_proper_class": check})


@contextmanager
def _readable(path: Path, what: str) -> Iterator[None]:
    """What Transformers raises at missing, damaged or foreign files, as one sentence."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, KeyError, ImportError, SafetensorError, StrictDataclassError) as error:
        told = f"no {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(
            f"the {what} in {path} cannot be read ({' '.join(told.split())[:300]}): name a folder in Transformers' own "
            f"format, with {_NEEDED[what]}"
        ) from None


_NEEDED = MappingProxyType(
    {
        "weights": "its weights as safetensors, and install what a quantised model asks for",
        "processor": "tokenizer.json, tokenizer_config.json and preprocessor_config.json",
    }
)


def _check_files(path: Path) -> None:
    """What Transformers would pass over in silence: a generation config that is none, weights of another folder."""
    if (path / GENERATION_CONFIG_NAME).is_file():
        GenerationConfig.from_pretrained(str(path), local_files_only=True)
    index = path / SAFE_WEIGHTS_INDEX_NAME
    if index.is_file():
        content = json.loads(index.read_bytes())
        files = content.get("weight_map") if isinstance(content, dict) else None
        names = [str(x) for x in files.values()] if isinstance(files, dict) else [""]
        if outside := [name for name in names if not name or Path(name).name != name]:
            raise ConfigError(f"{index} names {outside[0]!r}, no file of its own folder: do not use it")


def _folder(path: Path) -> str:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no config.json: name the folder of a saved model")
    return str(path)
