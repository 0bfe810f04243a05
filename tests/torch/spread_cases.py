"""Tiny models of 13 families to spread over devices: folders with several shards, inputs, and maps. Needs torch."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tiny_models import CLIP, IMAGE_TOKEN, SIGLIP, TEXT, describe_here, make_tiny_model

from trimtab.errors import PartitionError
from trimtab.placement.chain import modules_of, parts_of
from trimtab.placement.device_bytes import DeviceKey
from trimtab.placement.machine import Gpu, Machine
from trimtab.placement.place import place
from trimtab.placement.placed import Placement
from trimtab.placement.workload import Workload
from trimtab.specs import ModelSpec

DESCRIBED = (
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl",
    "qwen3_vl_moe",
    "internvl qwen2",
    "llava llama",
    "llava_next",
    "llava_onevision",
    "gemma3",
    "glm4v_moe",
)
OTHERS = ("mllama", "mistral3", "paligemma")
NEW_TOKENS = 3
GENERATE: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}


@dataclass(frozen=True)
class Case:
    """A model on the CPU, its folder, and what it answers there."""

    model: Any
    folder: Path
    inputs: dict[str, torch.Tensor]
    chain: tuple[tuple[str, ...], ...]  # modules of each unit, in forward order
    spec: ModelSpec | None
    logits: torch.Tensor
    tokens: torch.Tensor


def make_case(name: str, folder: Path) -> Case:
    torch.manual_seed(0)
    spec = None
    if name in OTHERS:
        model, inputs, chain = _other(name)
        if name == "mllama":  # described, but drawn maps hold its tower by one key
            spec = describe_here(model.config)
    else:
        tiny = make_tiny_model(name)
        model, inputs, spec = tiny.model, tiny.inputs, tiny.spec
        units = _units(spec)
        chain = tuple(tuple(m for i in unit for m in modules_of(spec, i)) for unit in units)
    model = model.eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.12)  # so that tokens differ and no gate is zero
            elif not parameter.any():
                parameter.normal_(std=0.5)
        logits = model(**inputs).logits
        tokens = model.generate(**inputs, **GENERATE)
    model.save_pretrained(folder, max_shard_size="150KB")
    return Case(model, folder, inputs, chain, spec, logits, tokens)


def _units(spec: ModelSpec) -> list[tuple[int, ...]]:
    """Where a device may change; tied weights at one end together."""
    parts = parts_of(spec)
    head = parts.embed + parts.head if parts.tied else parts.embed
    tail = () if parts.tied else (parts.head,)
    return [unit.layers for unit in (*parts.vision, head, *parts.blocks, *tail)]


# -- maps -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Map:
    """A placement to load: from the solver, or drawn."""

    kind: str
    placement: Placement | Mapping[str, DeviceKey]


def maps_of(case: Case, number: int, seed: int = 0) -> Iterator[Map]:
    """Half of them the solver's, a third of these with too little memory; the others drawn cuts, some with spills."""
    draw = random.Random(seed)
    for i in range(number):
        if case.spec is not None and i % 2 == 0:
            yield _solved(case.spec, draw, short=i % 6 == 0)
        else:
            yield _drawn(case, draw, spill=i % 4 == 1)


def coarse_maps(case: Case) -> list[dict[str, DeviceKey]]:
    """As people write them: all on one device, and a model around others on one key, with a layer elsewhere."""
    layers = [name for names in case.chain for name in names if ".layers." in name and "vision" not in name]
    return [{"": 2}, {"": "cpu", layers[-1]: 1}, {"": 0, layers[0]: "cpu"}]


def _solved(spec: ModelSpec, draw: random.Random, *, short: bool) -> Map:
    workload = Workload(seq_len=16, max_new_tokens=NEW_TOKENS, images=((56, 56),), dtype="fp32")
    total = 4 * spec.num_params
    while True:
        shares = [draw.uniform(0.3, 1.0) for _ in range(draw.randint(1 if short else 2, 4))]
        scale = (draw.uniform(0.6, 1.0) if short else draw.uniform(1.6, 3.0)) * total / sum(shares)
        machine = Machine(
            gpus=tuple(Gpu(index=i, free_bytes=int(scale * share)) for i, share in enumerate(shares)),
            cpu_bytes=draw.choice([total // 4, 2 * total]) if short else 0,
            disk=short,
            context_bytes=0,
        )
        try:
            placement = place(spec, machine, workload, objective=draw.choice(["memory", "latency"]))
        except PartitionError:  # a GPU smaller than what one layer needs to run
            continue
        return Map(f"solved, {len(placement.spilled)} spilled", placement)


def _drawn(case: Case, draw: random.Random, *, spill: bool) -> Map:
    num_devices = draw.randint(1, 4)
    devices = draw.sample(range(8), num_devices)
    cuts = sorted(draw.sample(range(1, len(case.chain)), min(num_devices - 1, len(case.chain) - 1)))
    homes: list[DeviceKey] = [devices[sum(i >= cut for cut in cuts)] for i in range(len(case.chain))]
    if spill:
        for i in draw.sample(range(len(homes)), draw.randint(1, len(homes) // 2)):
            homes[i] = draw.choice(["cpu", "disk"])
    return Map(
        "drawn, spilled" if spill else "drawn",
        {name: home for names, home in zip(case.chain, homes, strict=True) for name in names},
    )


# -- families that have no description of their own -------------------------------------------------------------------


def _other(name: str) -> tuple[Any, dict[str, torch.Tensor], tuple[tuple[str, ...], ...]]:
    make = {"mllama": _mllama, "mistral3": _mistral3, "paligemma": _paligemma}[name]
    config, inputs, vision, tied = make()
    model = transformers.AutoModelForImageTextToText.from_config(config)
    layers = tuple((f"model.language_model.layers.{i}",) for i in range(config.text_config.num_hidden_layers))
    embed = ("model.language_model.rotary_emb", "model.language_model.embed_tokens")
    tail = ("model.language_model.norm", "lm_head")
    chain = (vision, (*embed, *tail), *layers) if tied else (vision, embed, *layers, tail)
    return model, inputs, chain


def _text_ids(num_images_tokens: int) -> torch.Tensor:
    return torch.tensor([[3] * 5 + [IMAGE_TOKEN] * num_images_tokens + [4] * 3])


def _mllama() -> tuple[Any, dict[str, torch.Tensor], tuple[str, ...], bool]:
    vision = {
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "num_global_layers": 1,
        "attention_heads": 4,
        "intermediate_size": 48,
        "vision_output_dim": 96,
        "image_size": 56,
        "patch_size": 14,
        "max_num_tiles": 2,
        "intermediate_layers_indices": [0, 1],
        "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]],
    }
    text = {**TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1], "pad_token_id": 0}
    text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4}
    config = transformers.MllamaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN)
    ids = _text_ids(1)
    inputs = {
        "input_ids": ids,
        "pixel_values": torch.randn(1, 1, 2, 3, 56, 56),
        "aspect_ratio_ids": torch.tensor([[2]]),
        "aspect_ratio_mask": torch.ones(1, 1, 2, dtype=torch.long),
        "cross_attention_mask": torch.ones(1, ids.shape[1], 1, 2, dtype=torch.long),
    }
    return config, inputs, ("model.vision_model", "model.multi_modal_projector"), False


def _mistral3() -> tuple[Any, dict[str, torch.Tensor], tuple[str, ...], bool]:
    vision = {**CLIP, "model_type": "pixtral", "num_channels": 3, "head_dim": 8}
    config = transformers.AutoConfig.for_model(
        "mistral3",
        vision_config=vision,
        text_config={**TEXT, "model_type": "mistral", "sliding_window": None, "head_dim": 16},
        image_token_index=IMAGE_TOKEN,
        spatial_merge_size=2,
        tie_word_embeddings=False,
    )
    inputs = {
        "input_ids": _text_ids(4),
        "pixel_values": torch.randn(1, 3, 56, 56),
        "image_sizes": torch.tensor([[56, 56]]),
    }
    return config, inputs, ("model.vision_tower", "model.multi_modal_projector"), False


def _paligemma() -> tuple[Any, dict[str, torch.Tensor], tuple[str, ...], bool]:
    config = transformers.AutoConfig.for_model(
        "paligemma",
        vision_config={**SIGLIP, "projection_dim": 64},
        text_config={**TEXT, "model_type": "gemma", "head_dim": 16},
        image_token_index=IMAGE_TOKEN,
        projection_dim=64,
        tie_word_embeddings=True,
    )
    inputs = {"input_ids": _text_ids(16), "pixel_values": torch.randn(1, 3, 56, 56)}
    return config, inputs, ("model.vision_tower", "model.multi_modal_projector"), True
