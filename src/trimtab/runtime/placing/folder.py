"""What a model folder says of itself: its configuration, its class in Transformers, the names of its tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
import transformers
from safetensors import SafetensorError, safe_open
from safetensors.torch import _TYPES  # its names of types; there is no public table (0.8)
from torch import nn
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from trimtab.errors import ConfigError, join_problems, quote
from trimtab.files import read_small, refuse_special
from trimtab.models.asking.internvl_chat import read_chat_config
from trimtab.models.asking.model import library_reads
from trimtab.models.families import REMOTE
from trimtab.placement.bytes import DeviceKey
from trimtab.typed_json import parse_json

# The tensors of a model folder's safetensors files, each mapped into memory on its own and only when asked for.
#
# A tensor that was copied to a GPU is unmapped at once, so host memory holds what is on its way and no shard twice; one
# that stays mapped costs no memory before it is read, and none that the system could not take back. Nothing is
# unpickled.


_INDEX, _SINGLE = "model.safetensors.index.json", "model.safetensors"


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Where one tensor lies, and how to have it.

    Transformers 5 reads it as a slice of safetensors, when its turn comes: `stored[...]`, before that dtype and shape.
    """

    file: Path
    name: str
    dtype_name: str  # as safetensors has it: "BF16"
    shape: tuple[int, ...]

    @property
    def dtype(self) -> torch.dtype:
        return _TYPES.get(self.dtype_name) or torch.uint8  # bytes, where torch has no such type

    def map(self) -> torch.Tensor:
        """The tensor, in a private mapping of its pages that lasts as long as the tensor."""
        with safe_open(self.file, framework="pt") as opened:
            tensor: torch.Tensor = opened.get_tensor(self.name)
            return tensor

    def __getitem__(self, everything: EllipsisType) -> torch.Tensor:
        return self.map()

    def get_dtype(self) -> str:
        return self.dtype_name

    def get_shape(self) -> list[int]:
        return list(self.shape)


def open_weights(folder: Path) -> dict[str, StoredTensor]:
    """Return every tensor of a model folder by its name in the files, none of them read yet.

    `ConfigError` where there are no safetensors files, a shard is missing, is cut short or lacks what the index says.
    """
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder: give one that holds config.json and safetensors files")
    index = folder / _INDEX
    if not index.is_file():
        single = folder / _SINGLE
        if not single.is_file():
            raise ConfigError(f"{folder} holds neither {_SINGLE} nor {_INDEX}: save the model as safetensors")
        return open_file(single)
    files = _read_index(index)
    missing = sorted({name for name in files.values() if not (folder / name).is_file()})
    if missing:
        raise ConfigError(
            join_problems([f"{index} names {name}, which is missing: download the folder again" for name in missing])
        )
    found: dict[str, StoredTensor] = {}
    for name in sorted(set(files.values())):
        found.update(open_file(folder / name))
    lost = sorted(set(files) - set(found))
    if lost:
        lines = [f"{index} puts {name} into {files[name]}, which lacks it: download the folder again" for name in lost]
        raise ConfigError(join_problems(lines))
    return {name: found[name] for name in files}


def _read_index(index: Path) -> dict[str, str]:
    try:
        written: Any = parse_json(read_small(index))
    except ValueError as error:
        raise ConfigError(f"{index} is not JSON ({error}): download it again") from None
    files = written.get("weight_map") if isinstance(written, dict) else None
    if not isinstance(files, dict) or not files or not all(isinstance(x, str) for x in files.values()):
        raise ConfigError(f"{index} has no weight_map from tensor to file: download it again")
    outside = sorted({name for name in files.values() if Path(name).name != name or not name.endswith(".safetensors")})
    if outside:
        lines = [f"{index} names {quote(name)}, no safetensors file of its folder: do not use it" for name in outside]
        raise ConfigError(join_problems(lines))
    return files


def open_file(path: Path) -> dict[str, StoredTensor]:
    """Return every tensor of one safetensors file by its name."""
    try:
        with safe_open(path, framework="pt") as opened:
            slices = {name: opened.get_slice(name) for name in opened.keys()}  # noqa: SIM118 - it is no mapping
            return {name: StoredTensor(path, name, x.get_dtype(), tuple(x.get_shape())) for name, x in slices.items()}
    except SafetensorError as error:
        raise ConfigError(f"{path} is no whole safetensors file ({error}): download it again") from None


_DTYPE = re.compile(r"auto|(torch\.)?b?float\d+\w*")
_READ_BY_LOADERS = re.compile(
    r"((generation_|processor_|(video_)?preprocessor_|tokenizer_|adapter_)?config|tokenizer|vocab|added_tokens"
    r"|special_tokens_map|chat_template)\.json"
)
_MAX_TOKENIZER_BYTES = 256 << 20
_LARGEST = 10**7  # ten times the largest vocabulary; positions, which may be more, are no "size"


def read_config(folder: Path, attention: str | None = None) -> Any:
    """Read Transformers' configuration of a folder, whose code never runs; `attention`: its `attn_implementation`.

    `ConfigError` where Transformers has no class for it.
    """
    check_folder(folder)
    what_not = f"knows no config.json in {folder} without running the folder's own code"
    with library_reads(what_not, "use a folder in Transformers' own format"):
        fields, _ = transformers.PreTrainedConfig.get_config_dict(folder, local_files_only=True)
        if fields.get("model_type") == REMOTE:
            config = read_chat_config(folder, fields)
        else:
            config = transformers.AutoConfig.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    if attention is not None:
        config._attn_implementation = attention
    return config


def check_folder(folder: Path) -> None:
    """Refuse files of a model folder that no loader may read: JSON of another kind, and what `_check_config` names.

    What else is wrong the loaders say.
    """
    if not folder.is_dir():  # which a loader would take for a name on the Hub
        raise ConfigError(f"{folder} is no folder: give one that holds config.json and safetensors files")
    for file in folder.iterdir():
        refuse_special(file)  # a loader would wait for ever
        if not _READ_BY_LOADERS.fullmatch(file.name):
            continue
        try:
            content = parse_json(read_small(file, most_bytes=_MAX_TOKENIZER_BYTES))
        except OSError as error:
            raise ConfigError(f"{file} cannot be read ({error.strerror}): download it again") from None
        except ValueError as error:  # what a loader reads otherwise than we do is not checked
            raise ConfigError(f"{file} is not strict JSON ({error}): do not use this folder") from None
        if not isinstance(content, dict):
            raise ConfigError(f"{file} holds {quote(content)}, where an object belongs: download it again")
        if file.name == "config.json":
            _check_config(file, content)


def _check_config(file: Path, content: dict[str, Any]) -> None:
    """Refuse names to fetch or resolve, and sizes of no model."""
    if not isinstance(content.get("model_type", ""), str):
        raise ConfigError(f"{file} has model_type {quote(content['model_type'])}: write the name of one")
    for name, value in _set_fields(content):
        if name.endswith("_implementation") and isinstance(value, str) and "/" in value:
            reason = "a kernel to fetch from the Hub"
        elif name in ("dtype", "torch_dtype") and not (isinstance(value, str) and _DTYPE.fullmatch(value)):
            reason = "no type of weights"
        elif name.endswith(("_size", "_layers")) and isinstance(value, int) and abs(value) > _LARGEST:
            reason = "larger than that of any model"
        else:
            continue
        raise ConfigError(f"{file} has {name} {str(value)[:100]!r}, {reason}: do not use this folder")


def _set_fields(value: Any) -> Iterator[tuple[str, Any]]:
    """Yield every field that is set, of nested objects too."""
    if isinstance(value, dict):
        for name, field in value.items():
            if field is not None:
                yield name, field
            yield from _set_fields(field)
    elif isinstance(value, list):
        for item in value:
            yield from _set_fields(item)


def read_generation(folder: Path) -> Any:
    """The folder's generation_config.json."""
    with library_reads(f"reads no generation_config.json in {folder}", "correct it, or take it away"):
        return transformers.GenerationConfig.from_pretrained(folder, local_files_only=True)


def model_class(folder: Path, config: Any) -> Any:
    """The class of Transformers that generates text by this configuration."""
    for mapping in (transformers.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, transformers.MODEL_FOR_CAUSAL_LM_MAPPING):
        for kind in type(config).__mro__[:2]:  # a published format is a kind of Transformers' own
            if kind in mapping:
                return mapping[kind]
    raise ConfigError(f"{folder} is a {config.model_type}, which generates no text: use a model that does")


class StoredNames:
    """What Transformers calls the modules and tensors that older folders name otherwise."""

    def __init__(self, model: nn.Module) -> None:
        transforms = get_model_conversion_mapping(model)
        self._renamings = [x for x in transforms if isinstance(x, WeightRenaming)]
        self._converters = [x for x in transforms if isinstance(x, WeightConverter)]
        self._prefix, self._tensors = getattr(model, "base_model_prefix", None), model.state_dict()
        self._tied = getattr(model, "all_tied_weights_keys", {})
        self._modules = {name for name, _ in model.named_modules(remove_duplicate=False)}

    def of_map(self, device_map: Mapping[str, DeviceKey]) -> dict[str, DeviceKey]:
        """The map in the model's own names; names that it does not have in either way stay as they are."""
        found: dict[str, DeviceKey] = {}
        for key, device in device_map.items():
            own, _ = rename_source_key(key, self._renamings, [])
            known = own in self._modules and key not in self._modules
            if known and found.get(own, device_map.get(own, device)) == device:
                key = own
            found[key] = device
        return found

    def of_tensors(self, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
        """List tensors that the model takes as they are stored, by its names; not those that it joins or splits."""
        found = {}
        for name, tensor in stored.items():
            own, converter = rename_source_key(name, self._renamings, self._converters, self._prefix, self._tensors)
            if own not in self._tensors and name in self._tensors:
                own, converter = name, None  # as Transformers does
            if converter is None or self._keeps(converter, own, tensor):
                found[own] = tensor
        for pair in self._tied.items():
            present = [found[name] for name in pair if name in found]
            found.update(dict.fromkeys(pair, present[0]) if present else {})
        return found

    def _keeps(self, pattern: str, own: str, tensor: StoredTensor) -> bool:
        """Return whether a converter leaves a tensor as it is: one that only transposes what has another shape."""
        if own not in self._tensors or tensor.shape != tuple(self._tensors[own].shape):
            return False
        operations = [op for x in self._converters if pattern in x.source_patterns for op in x.operations]
        return all(getattr(operation, "check_dims", False) for operation in operations)
