"""Device maps that Accelerate and Transformers choose themselves, from the real libraries.

Tested with accelerate 1.15 and Transformers 5.23. Transformers keeps its own copy of Accelerate's rule behind
`device_map="auto"`; the copy is private (`integrations.accelerate._get_device_map`), and there is no public way to it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Literal

import accelerate
import torch
import transformers
from transformers.integrations.accelerate import _get_device_map

from trimtab.errors import UnsupportedPlanError
from trimtab.models.asking.internvl_chat import chat_config, published_name
from trimtab.models.families import REMOTE
from trimtab.placement.bytes import DeviceKey
from trimtab.placement.machine import Machine

Library = Literal["accelerate", "transformers"]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def max_memory(machine: Machine) -> dict[int | str, int]:
    """The limits that both libraries take: what is free on each GPU, then host memory."""
    return {**{gpu.index: gpu.free_bytes for gpu in machine.gpus}, "cpu": machine.cpu_bytes}


def build_on_meta(config: Mapping[str, Any], *, tied: bool, dtype: str = "bf16") -> torch.nn.Module:
    """The real model of a configuration on the meta device: modules and sizes, no weights.

    `tied`: whether the head shares the embedding's weight, as `ModelSpec.tied` has settled it.
    """
    model_type = config.get("model_type")
    if model_type == REMOTE:
        with torch.device("meta"):
            chat: torch.nn.Module = transformers.InternVLForConditionalGeneration(chat_config(config))
        return chat.to(DTYPES[dtype])
    if not isinstance(model_type, str) or model_type not in transformers.CONFIG_MAPPING:
        raise UnsupportedPlanError(
            f"model_type {model_type!r} has remote code only, which is never executed here: compare the same model in "
            "Transformers' own format"
        )
    outer = {key: value for key, value in config.items() if key != "model_type"}
    settings = transformers.AutoConfig.for_model(model_type, **{**outer, "tie_word_embeddings": tied})
    with torch.device("meta"):
        model: torch.nn.Module = transformers.AutoModelForImageTextToText.from_config(settings, dtype=DTYPES[dtype])
    return model


def auto_map(model: Any, machine: Machine, *, library: Library) -> dict[str, DeviceKey]:
    """What `device_map="auto"` gives for a model without weights, under the machine's memory.

    accelerate: `get_balanced_memory` and `infer_auto_device_map`, as Transformers called them up to 4; transformers:
    the copy of version 5. Both know only weights.
    """
    model.tie_weights()
    limits = max_memory(machine)
    with _quiet("accelerate.utils.modeling"):  # it warns that the GPUs asked about are not in this machine
        if library == "transformers":
            found = _get_device_map(model, "auto", limits, None)
        else:
            classes = list(model._no_split_modules or ())
            balanced = accelerate.utils.get_balanced_memory(model, max_memory=limits, no_split_module_classes=classes)
            found = accelerate.infer_auto_device_map(model, max_memory=balanced, no_split_module_classes=classes)
    return {published_name(module, model.config): device for module, device in found.items()}


@contextmanager
def _quiet(name: str) -> Iterator[None]:
    logger = logging.getLogger(name)
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)
