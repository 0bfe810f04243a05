"""A model folder's weights by a device map, and its processor: nothing is fetched, no code of the folder runs."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

from trimtab.errors import ConfigError

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
    with _readable(path, "weights"):
        model = AutoModelForImageTextToText.from_pretrained(
            _folder(path),
            device_map=device_map if device_map == "auto" else dict(device_map),
            max_memory=None if max_memory is None else dict(max_memory),
            dtype="auto",
            use_safetensors=True,
            trust_remote_code=False,
            local_files_only=True,
            **({} if offload_folder is None else {"offload_folder": str(offload_folder)}),
        )
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
    except (OSError, ValueError, KeyError) as error:
        reason = " ".join(str(error).split())[:300]
        raise ConfigError(
            f"the {what} in {path} cannot be read ({reason}): name a folder in Transformers' own format, with its "
            "weights as safetensors"
        ) from None


def _folder(path: Path) -> str:
    if not (path / "config.json").is_file():
        raise ConfigError(f"{path} holds no config.json: name the folder of a saved model")
    return str(path)
