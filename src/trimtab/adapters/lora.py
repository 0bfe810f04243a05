"""LoRA in the words of hosts: lines for PEFT, and the names of Megatron-Core's linear layers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from trimtab.costs.formula.adapters import adapt_layer
from trimtab.costs.formula.flops import layer_matmuls
from trimtab.errors import UnsupportedPlanError
from trimtab.lora import ALL_LINEAR, Lora
from trimtab.specs import ModelSpec

_MLP = {"gate": "linear_fc1_gate", "up": "linear_fc1_up", "down": "linear_fc2"}
CANONICAL: Mapping[str, str] = MappingProxyType(
    {
        **{name: f"linear_{name}" for name in "qkv"},
        "o": "linear_proj",
        **{name: f"mlp.{matrix}" for name, matrix in _MLP.items()},
        **{f"shared {name}": f"shared_experts.{matrix}" for name, matrix in _MLP.items()},
    }
)
"""Products of a block by Megatron-Core's names; experts lie one module deeper (`mlp.experts.linear_fc1`)."""


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

    `sharded`: FSDP shards only weights of one dtype, so packed ones are stored as bfloat16.
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
    """Python lines: how the base is loaded, and the adapters, to run after the lines of recompute."""
    quantised = quantisation_config(model, lora, sharded=sharded)
    loaded = f"# load the model with quantization_config=BitsAndBytesConfig({_call(quantised)})\n" if quantised else ""
    cast = "" if lora.weights != "same" else ", autocast_adapter_dtype=False"
    return (
        f"{loaded}from peft import LoraConfig, get_peft_model\n\n"
        f"model = get_peft_model(model, LoraConfig({_call(peft_config(model, lora))}){cast})"
    )


def canonical_layers(model: ModelSpec, lora: Lora, host: str) -> tuple[str, ...]:
    """Ends of names in Megatron-Core, q, k, v and gate, up apart, as Megatron-Bridge's `CanonicalLoRA` has them."""
    return tuple(CANONICAL[product] for product in _adapted_products(model, lora, host))


def joined_layers(model: ModelSpec, lora: Lora, host: str) -> tuple[str, ...]:
    """Ends of names in Megatron-Core itself, which joins q, k, v and gate, up.

    One adapter stands beside each of these, with fewer weights than the plan counts.
    """
    products = _adapted_products(model, lora, host)
    for parts in (("q", "k", "v"), ("gate", "up"), ("shared gate", "shared up")):
        if 0 < len({*parts} & {*products}) < len(parts):
            raise UnsupportedPlanError(
                f"LoRA on {' and '.join(lora.targets)} was planned, and {host} has {', '.join(parts)} in one matrix: "
                f"plan with all of these or none, as in targets={ALL_LINEAR}"
            )
    apart = re.compile("_(gate|up)$")
    names = ("linear_qkv" if x in "qkv" else apart.sub("", CANONICAL[x]) for x in products)
    return tuple(dict.fromkeys(names))


def _adapted_products(model: ModelSpec, lora: Lora, host: str) -> tuple[str, ...]:
    """Products of the decoder's blocks beside which there are adapters: in all blocks alike, for names are patterns."""
    found: dict[str, int] = {}
    there: dict[str, int] = {}
    for layer in (x for x in model.layers if x.tower == "language" and x.kind == "block"):
        for name in (p.name for p in layer_matmuls(layer, 1)):
            there[name] = there.get(name, 0) + 1
        for adapter in adapt_layer(layer, lora, 1):
            for name in adapter.products or (adapter.name,):
                found[name] = found.get(name, 0) + 1
    unlike = [name for name, number in found.items() if name not in CANONICAL or number < there.get(name, 0)]
    if unlike:
        raise UnsupportedPlanError(
            f"LoRA ({lora}) was planned on {unlike[0]}, of which {host} is told no pattern: plan with targets that are "
            "attention's or the MLP's in every block, or for transformers"
        )
    return tuple(found)


def _modules_of_other_towers(model: ModelSpec, lora: Lora) -> list[str]:
    """The lists of blocks and the projectors of towers without adapters."""
    names = [x.name for x in model.layers if x.tower not in lora.towers and x.kind in ("block", "projector", "embed")]
    return list(dict.fromkeys(re.sub(r"\.\d+$", "", name) for name in names if not name.endswith("embed_tokens")))


def _call(arguments: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value!r}" for name, value in arguments.items())
