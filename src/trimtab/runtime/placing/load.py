"""Loads a model folder onto the devices that a placement names, ready to generate."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import accelerate
import torch
from accelerate.hooks import remove_hook_from_submodules
from torch import nn
from transformers.integrations.accelerate import _get_device_map

from trimtab.errors import ConfigError, PartitionError, join_problems, refuse_type
from trimtab.models.asking.inputs import quietly
from trimtab.models.asking.internvl_chat import chat_config, forget_published_names, published_name
from trimtab.models.asking.model import build, complete, configured, library_reads
from trimtab.models.families import REMOTE
from trimtab.placement import placed as rule
from trimtab.placement.bytes import DeviceKey
from trimtab.placement.machine import Machine
from trimtab.placement.placed import Placement
from trimtab.runtime.placing.device_units import CPU, PIXELS, DeviceUnits, hook_units, resolve_units
from trimtab.runtime.placing.folder import (
    StoredNames,
    StoredTensor,
    model_class,
    open_file,
    open_weights,
    read_config,
    read_generation,
)

_CURE = "download it again, or install what its weights ask for"


def load_placed(
    path: str | Path,
    placement: Placement | Mapping[str, DeviceKey] | None = None,
    *,
    runs_on: Mapping[str, DeviceKey] | None = None,
    dtype: torch.dtype | None = None,
    attention: str | None = None,
    offload_folder: str | Path | None = None,
) -> Any:
    """The Transformers model in the folder `path` on the devices of `placement`, in eval mode.

    Use this in place of `from_pretrained(device_map=...)`. docs/howto-serve.md shows it.

    A GPU's number, "cpu" or "disk" for each module; None puts all on the first accelerator, or on the CPU. Modules on
    "cpu" or "disk" run on the GPU that the placement says, or `runs_on` next to a bare map, their weights copied there
    each time; embeddings run in host memory and only rows move. What is on disk stays in the folder's own files, or is
    written to `offload_folder` where one is named. `dtype`: that of the config if None.
    `attention`: Transformers' `attn_implementation`. Inputs may lie anywhere and results come back to there;
    `move_inputs` spares them detours.

    Reads only safetensors, tensor by tensor: next to what is to stay in it, host memory holds those on their way to a
    device. Runs no code of the folder.
    """
    refuse_type("path", path, Path | str, "the folder of a model")
    folder = Path(path)
    if placement is None:
        placement = {"": 0 if torch.accelerator.is_available() else "cpu"}
    stored = open_weights(folder)
    config = read_config(folder, attention)
    if isinstance(placement, Placement):
        runs_on = {**placement.runs_on, **dict.fromkeys(placement.run_on_cpu, "cpu")}
        placement = placement.device_map
    if (quantised := getattr(config, "quantization_config", None)) is not None and len(set(placement.values())) > 1:
        method = quantised.get("quant_method") if isinstance(quantised, dict) else None
        raise ConfigError(f"{folder} is quantised ({method}): put it on one device, or use the folder it was made from")
    kind = model_class(folder, config)
    with library_reads(f"builds no model of config.json in {folder}", _CURE), torch.device("meta"):
        skeleton = kind(config)
    _check_size(skeleton, stored, folder, is_quantised=quantised is not None)
    names = StoredNames(skeleton)
    placed = resolve_units(skeleton, names.of_map(placement), names.of_map(runs_on or {}))
    dtype = dtype or _dtype_of(config, stored)
    as_stored = names.of_tensors(stored)
    if offload_folder is None:
        _check_on_disk(skeleton, placed, as_stored, dtype)
    del skeleton, names
    target = None if offload_folder is None else Path(offload_folder)
    model = _load(kind, config, folder, stored, _load_map(placed, target), dtype, target)
    on_disk = _settle(model, placed, as_stored, target)
    remove_hook_from_submodules(model)
    hook_units(model, placed, on_disk)
    forget_published_names(model)
    model.hf_device_map = {unit.name: unit.home for unit in placed.units}
    return model


def move_inputs(model: Any, inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Move inputs of a loaded model where they cross few links: tokens and masks to the device of its head, so that
    logits stay there; pixels as they are, as they go to the vision tower.

    Use it before `generate` on a model that `load_placed` spread over GPUs. docs/howto-serve.md shows it.
    """
    hook = getattr(model, "_hf_hook", None)
    device = model.device if hook is None else hook.execution_device
    return {
        key: value if key.startswith(PIXELS) or not isinstance(value, torch.Tensor) else value.to(device)
        for key, value in inputs.items()
    }


# -- weights ----------------------------------------------------------------------------------------------------------


def _load_map(placed: DeviceUnits, offload_folder: Path | None) -> dict[str, torch.device | str]:
    """Return where each tensor goes first. Only real devices, as Accelerate would otherwise offload in its own way."""
    found: dict[str, torch.device | str] = {}
    for unit in placed.units:
        rewritten = unit.home == "disk" and unit.streamed and offload_folder is not None
        found[unit.name] = "disk" if rewritten else CPU if isinstance(unit.home, str) else unit.runs_on
    return found | dict(placed.loose)


def _load(
    kind: Any,
    config: Any,
    folder: Path,
    stored: Mapping[str, StoredTensor],
    load_map: Mapping[str, torch.device | str],
    dtype: torch.dtype,
    offload_folder: Path | None,
) -> Any:
    """Load by Transformers, which renames, converts and places what the files hold; it does not open them."""
    generation: dict[str, Any] = {}
    if (folder / "generation_config.json").is_file():
        generation["generation_config"] = read_generation(folder)
    with warnings.catch_warnings():
        # a tensor whose own module is cut up has no module to name; Accelerate expects only modules
        warnings.filterwarnings("ignore", message="The following device_map keys do not match any submodules")
        with library_reads(f"does not load {folder}", _CURE):
            model, report = kind.from_pretrained(
                None,
                config=config,
                state_dict=dict(stored),
                device_map=dict(load_map),
                dtype=dtype,
                offload_folder=None if offload_folder is None else str(offload_folder),
                ignore_mismatched_sizes=True,  # they are refused below, in a sentence
                output_loading_info=True,
                **generation,
            )
    problems = [f"{folder} holds no weight for {name}: download it again" for name in sorted(report["missing_keys"])]
    problems += [
        f"{folder} holds {name} in another shape than config.json says: use its own config.json"
        for name, *_ in sorted(report["mismatched_keys"])
    ]
    if problems:
        raise ConfigError(join_problems(problems))
    model.config.name_or_path = str(folder)
    return model


def _check_size(model: nn.Module, stored: Mapping[str, StoredTensor], folder: Path, *, is_quantised: bool) -> None:
    """Refuse a config.json of a larger model, which would be drawn at random and fill the memory."""
    made = sum(parameter.numel() for parameter in model.parameters())
    held = sum(math.prod(tensor.shape) for tensor in stored.values())
    if made > 2 * held and not is_quantised:
        raise ConfigError(f"config.json in {folder} makes {made:,} parameters, not its weights' {held:,}: use theirs")


def _settle(
    model: nn.Module, placed: DeviceUnits, as_stored: Mapping[str, StoredTensor], offload_folder: Path | None
) -> dict[str, StoredTensor]:
    """Copies into host memory what belongs there; where what belongs on disk lies, by its name in the model."""
    on_disk: dict[str, StoredTensor] = {}
    copied: set[nn.Parameter] = set()  # tied ones are in two units
    for unit in placed.units:
        if not isinstance(unit.home, str):
            continue
        for name, parameter in model.get_submodule(unit.name).named_parameters(prefix=unit.name):
            stored = as_stored.get(name)
            if parameter.device.type == "meta":
                assert offload_folder is not None
                on_disk.update(open_file(offload_folder / f"{name}.safetensors"))
            elif unit.home == "disk" and stored is not None:
                on_disk[name] = stored
            elif unit.home == "cpu" and parameter not in copied and _is_mapped(parameter, stored):
                parameter.data = parameter.data.clone()
                copied.add(parameter)
    return on_disk


def _is_mapped(parameter: nn.Parameter, stored: StoredTensor | None) -> bool:
    """Return whether it is still the mapping of a file: all of it, or a part that was split off."""
    if stored is not None:
        return stored.dtype == parameter.dtype
    return parameter.untyped_storage().nbytes() > parameter.nbytes


def _check_on_disk(
    skeleton: nn.Module, placed: DeviceUnits, as_stored: Mapping[str, StoredTensor], dtype: torch.dtype
) -> None:
    """Refuses, before anything is read, what cannot stay in the files: tensors that loading casts or puts together."""
    lost = []
    for unit in placed.units:
        if unit.home != "disk":
            continue
        for name, parameter in skeleton.get_submodule(unit.name).named_parameters(prefix=unit.name):
            wanted = dtype if parameter.is_floating_point() else parameter.dtype
            if name not in as_stored or as_stored[name].dtype != wanted:
                lost.append(name)
    if lost:
        raise PartitionError(
            join_problems([f"{name} is stored in another dtype or in parts: name an offload folder" for name in lost])
        )


def _dtype_of(config: Any, stored: Mapping[str, StoredTensor]) -> torch.dtype:
    if isinstance(config.dtype, torch.dtype):
        return config.dtype
    return next((x.dtype for x in stored.values() if x.dtype.is_floating_point), torch.float32)


# `split_model` under its published signature.


def split_model(
    num_layers: int,
    vit_alpha: float = 0.5,
    *,
    world_size: int | None = None,
    variant: Literal["repository", "model card"] = "repository",
) -> dict[str, int]:
    """Return InternVL's published device map, key for key, for code that expects it; `trimtab map` plans better ones.

    Use it where code expects InternVL's own function of that name.

    `world_size` None: the GPUs that torch sees. `variant`: model cards leave `rotary_emb` out, the repository has it.
    Raises `PartitionError` where the rule is not defined, as without a GPU.

    >>> len(split_model(48, world_size=4, variant="model card"))
    56
    """
    if variant not in (choices := ("repository", "model card")):
        raise PartitionError(f"split_model has no variant {variant!r}: choose {' or '.join(choices)}")
    if world_size is None:
        import torch

        world_size = torch.cuda.device_count()
    found = rule.split_model(num_layers, vit_alpha, world_size=world_size)
    return {module: gpu for module, gpu in found.items() if variant == "repository" or "rotary_emb" not in module}


# -- device maps that Accelerate and Transformers choose --------------------------------------------------------------


Library = Literal["accelerate", "transformers"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def max_memory(machine: Machine) -> dict[int | str, int]:
    """The limits that both libraries take: what is free on each GPU, then host memory."""
    return {**{gpu.index: gpu.free_bytes for gpu in machine.gpus}, "cpu": machine.cpu_bytes}


def build_on_meta(config: Mapping[str, Any], *, tied: bool, dtype: str = "bf16") -> Any:
    """The real model of a configuration on the meta device: modules and sizes, no weights.

    `tied`: whether the head shares the embedding's weight, as `ModelSpec.tied` has settled it.
    """
    fields = {**config, "tie_word_embeddings": tied}
    is_remote = config.get("model_type") == REMOTE
    settings = configured(fields, lambda: chat_config(config)) if is_remote else complete(fields)
    return build(settings, dtype=DTYPES[dtype])


def auto_map(model: Any, machine: Machine, *, library: Library) -> dict[str, DeviceKey]:
    """Return what `device_map="auto"` gives for a model without weights, under the machine's memory.

    accelerate: `get_balanced_memory` and `infer_auto_device_map`, as Transformers called them up to 4; transformers:
    the copy of version 5. Both know only weights.
    """
    model.tie_weights()
    limits = max_memory(machine)
    with quietly():  # it warns that the GPUs asked about are not in this machine
        if library == "transformers":
            found = _get_device_map(model, "auto", limits, None)
        else:
            classes = list(model._no_split_modules or ())
            balanced = accelerate.utils.get_balanced_memory(model, max_memory=limits, no_split_module_classes=classes)
            found = accelerate.infer_auto_device_map(model, max_memory=balanced, no_split_module_classes=classes)
    return {published_name(module, model.config): device for module, device in found.items()}
