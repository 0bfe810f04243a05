"""Shrunk models of 13 families to spread over devices: folders with several shards, inputs, and maps. Needs torch."""

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from shrunk_models import make_shrunk
from tiny_models import describe_here, preprocessor_of

from trimtab import ModelSpec, place
from trimtab.errors import PartitionError
from trimtab.models.asking.batches import Batches
from trimtab.models.asking.units import split_units
from trimtab.models.images.rules import UnsettledRule
from trimtab.placement.bytes import DeviceKey, modules_of, parts_of
from trimtab.placement.machine import Gpu, Machine, Workload
from trimtab.placement.placed import Placement

FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "internvl", "llava", "llava_next", "llava_onevision"),
    *("gemma3", "glm4v_moe", "mllama", "mistral3", "paligemma"),
)
NEW_TOKENS = 3
GENERATE: dict[str, Any] = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False}


@dataclass(frozen=True)
class Case:
    """A model on the CPU, its folder, and what it answers there."""

    model: Any
    folder: Path
    inputs: dict[str, torch.Tensor]
    chain: tuple[tuple[str, ...], ...]  # modules of each unit, in forward order
    spec: ModelSpec
    logits: torch.Tensor
    tokens: torch.Tensor


def make_case(family: str, folder: Path, **changes: Any) -> Case:
    model = make_shrunk(family, changes=changes)
    inputs = Batches(model, split_units(model), packed=False).make(1, 8).inputs
    inputs = {name: x for name, x in inputs.items() if name not in ("labels", "use_cache")}
    spec = describe_here(model.config, preprocessor=preprocessor_of(family, model.config.vision_config.to_dict()))
    chain = tuple(tuple(m for i in unit for m in modules_of(spec, i)) for unit in _units(spec))
    with torch.no_grad():
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
        if i % 2 == 0:
            yield _solved(case.spec, draw, short=i % 6 == 0)
        else:
            yield _drawn(case, draw, spill=i % 4 == 1)


def coarse_maps(case: Case) -> list[dict[str, DeviceKey]]:
    """As people write them: all on one device, and a model around others on one key, with a layer elsewhere."""
    layers = [name for names in case.chain for name in names if ".layers." in name and "vision" not in name]
    return [{"": 2}, {"": "cpu", layers[-1]: 1}, {"": 0, layers[0]: "cpu"}]


def _solved(spec: ModelSpec, draw: random.Random, *, short: bool) -> Map:
    images = () if isinstance(spec.image_rule, UnsettledRule) else ((56, 56),)
    workload = Workload(seq_len=16, max_new_tokens=NEW_TOKENS, images=images, dtype="fp32")
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
            if not any(name.endswith("patch_embedding") for name in case.chain[i]):  # Mllama's: docs/howto-serve.md
                homes[i] = draw.choice(["cpu", "disk"])
    return Map(
        "drawn, spilled" if spill else "drawn",
        {name: home for names, home in zip(case.chain, homes, strict=True) for name in names},
    )
