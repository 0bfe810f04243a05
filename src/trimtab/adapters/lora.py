"""LoRA in the words of hosts: lines for PEFT, and the names of Megatron-Core's linear layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from trimtab.errors import UnsupportedPlanError
from trimtab.lora import ALL_LINEAR, Lora
from trimtab.specs import ModelSpec

MEGATRON_LAYERS = ("linear_qkv", "linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Of an attention and a dense feed-forward; experts lie one module deeper (`mlp.experts.linear_fc1`)."""


def peft_config(model: ModelSpec, lora: Lora) -> dict[str, Any]:
    """Arguments of `peft.LoraConfig`: adapters where `lora` has them, and in no other tower."""
    targets = ALL_LINEAR if ALL_LINEAR in lora.targets else list(lora.targets)
    found = {"r": lora.r, "lora_alpha": lora.alpha, "lora_dropout": lora.dropout, "target_modules": targets}
    elsewhere = _modules_of_other_towers(model, lora)
    if elsewhere:
        found["exclude_modules"] = rf"({'|'.join(map(re.escape, elsewhere))})(\..*)?"
    return found


def quantisation_config(model: ModelSpec, lora: Lora, *, sharded: bool) -> dict[str, Any]:
    """Arguments of `transformers.BitsAndBytesConfig` that store what the plan prices in 4 bits; none for 16.

    `sharded`: FSDP shards weights of one dtype alone, so packed ones are stored as bfloat16.
    """
    if lora.bits == 16:
        return {}
    head = [x.name for x in model.layers if x.kind == "head"]
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_use_double_quant": True,
        "bnb_4bit_compute_dtype": "bfloat16",
        **({"bnb_4bit_quant_storage": "bfloat16"} if sharded else {}),
        "llm_int8_skip_modules": [*head, *_modules_of_other_towers(model, lora)],
    }


def peft_lines(model: ModelSpec, lora: Lora, *, sharded: bool) -> str:
    """Python lines: how the base is loaded, and the adapters, to run behind the lines of recompute."""
    quantised = quantisation_config(model, lora, sharded=sharded)
    loaded = f"# load the model with quantization_config=BitsAndBytesConfig({_call(quantised)})\n" if quantised else ""
    cast = "" if lora.weights == "fp32" else ", autocast_adapter_dtype=False"
    return (
        f"{loaded}from peft import LoraConfig, get_peft_model\n\n"
        f"model = get_peft_model(model, LoraConfig({_call(peft_config(model, lora))}){cast})"
    )


def megatron_layers(model: ModelSpec, lora: Lora, host: str) -> tuple[str, ...]:
    """Megatron-Core's linear layers in which PEFT's would get adapters; those of experts get none.

    Megatron-Core joins q, k, v and gate, up: one adapter stands beside each, with fewer weights than the plan counts.
    """
    if ALL_LINEAR not in lora.targets:
        raise UnsupportedPlanError(
            f"LoRA on {' and '.join(lora.targets)} was planned, and {host} has layers of other names, with q, k, v and "
            f"gate, up joined: plan with targets={ALL_LINEAR}"
        )
    mlps = [x.mlp for x in model.layers if x.tower == "language" and x.mlp is not None]
    shared = any(mlp.num_experts and mlp.shared_intermediate_size for mlp in mlps)
    return MEGATRON_LAYERS + (("shared_experts.linear_fc1", "shared_experts.linear_fc2") if shared else ())


def _modules_of_other_towers(model: ModelSpec, lora: Lora) -> list[str]:
    """The lists of blocks and the projectors of towers without adapters."""
    names = [x.name for x in model.layers if x.tower not in lora.towers and x.kind in ("block", "projector", "embed")]
    return list(dict.fromkeys(re.sub(r"\.\d+$", "", name) for name in names if not name.endswith("embed_tokens")))


def _call(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
