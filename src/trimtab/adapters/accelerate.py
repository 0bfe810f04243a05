"""Device maps that Accelerate and Transformers choose themselves, from the real libraries.

Tested with accelerate 1.15 and Transformers 5.23. Transformers keeps its own copy of Accelerate's rule behind
`device_map="auto"`; the copy is private (`integrations.accelerate._get_device_map`), and there is no public way to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import accelerate
import torch
from transformers.integrations.accelerate import _get_device_map

from trimtab.models.asking.inputs import quietly
from trimtab.models.asking.internvl_chat import chat_config, published_name
from trimtab.models.asking.model import build, complete, configured
from trimtab.models.families import REMOTE
from trimtab.placement.bytes import DeviceKey
from trimtab.placement.machine import Machine

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
