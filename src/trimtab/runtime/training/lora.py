"""Adapters in `trimtab train`: PEFT puts them beside the layers that a plan names, an export merges them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import Tensor

from trimtab.costs.formula.adapters import adapt_layer
from trimtab.errors import UnsupportedPlanError
from trimtab.lora import Lora
from trimtab.models.asking.layers import read_linears
from trimtab.models.describe import describe
from trimtab.runtime.training.target import refuse_quantised

_BASE, _A, _B = ".base_layer", ".lora_A.default.weight", ".lora_B.default.weight"  # PEFT's names


def add_adapters(model: Any, folder: Path, lora: Lora) -> None:
    """Put an adapter beside each linear layer that `lora` names, and freeze everything else.

    `folder` holds the model's config.json. A is drawn by torch's generator, B is 0, as PEFT does it: the first step's
    loss is only that of the model.
    """
    refuse_quantised(lora)
    try:
        import peft
    except ImportError:
        raise UnsupportedPlanError(
            f"the plan trains LoRA adapters ({lora}), which PEFT makes, and it is not installed: pip install "
            "'trimtab[lora]', or plan without --lora"
        ) from None
    built = dict(model.named_modules())
    layers = [replace(x, linears=read_linears(built.get(x.name))) for x in describe(folder).layers]
    names = [f"{x.name}.{adapter.name}".rstrip(".") for x in layers for adapter in adapt_layer(x, lora, 1)]
    config = peft.LoraConfig(r=lora.r, lora_alpha=lora.alpha, lora_dropout=lora.dropout, target_modules=names)
    peft.inject_adapter_in_model(config, model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(".lora_" in name)


def merged(tensors: Mapping[str, Tensor], lora: Lora) -> dict[str, Tensor]:
    """Tensors of a model with adapters as those of the model itself: W + alpha / r B A, under W's own name.

    `tensors` may be a part of the model, as a pipeline's rank holds it: an adapter lies where its layer does.
    """
    scale, found = lora.alpha / lora.r, dict[str, Tensor]()
    for name, value in tensors.items():
        if name.endswith((_A, _B)):
            continue
        stem, mark, rest = name.rpartition(_BASE)
        if not mark:
            found[name] = value
            continue
        if rest == ".weight":
            value = value.detach() + scale * (tensors[stem + _B].detach() @ tensors[stem + _A].detach())
        found[stem + rest] = value
    return found
