"""A model as a chain of units that a device holds whole, in the orders that a placement may cut."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from trimtab.specs import ModelSpec

_NUMBERED = re.compile(r"\.\d+$")

VISION_CUT_FAMILIES = frozenset(
    {
        "internvl",
        "qwen2_vl",
        "qwen2_5_vl",
        "qwen3_vl",
        "qwen3_vl_moe",
        "llava",
        "llava_next",
        "llava_onevision",
        "gemma3",
        "glm4v_moe",
    }
)
"""Families of Transformers whose ViT runs with its blocks on several devices.

Each was run cut between all of its blocks and gave the uncut model's values. Elsewhere the tower stays whole: families
with remote code only have not been run, and Mllama's stacks hidden states of many blocks, which must share a device.
"""

_CARRIED = frozenset({"qwen3_vl", "qwen3_vl_moe"})
"""Families whose forbidden cuts bind a training pipeline alone: at inference the features move to the reading layer."""

_BUFFER_MODULES = MappingProxyType(
    {
        "model.visual.patch_embed": ("model.visual.rotary_pos_emb",),
        "model.language_model.layers.0": ("model.language_model.rotary_emb",),
        "language_model.model.layers.0": ("language_model.model.rotary_emb",),
        "llm.model.layers.0": ("llm.model.rotary_emb",),
    }
)
"""Modules without parameters that hold buffers (rotary tables), by the layer in front of which they run."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Layers that stay together, as positions in `ModelSpec.layers`."""

    layers: tuple[int, ...]

    def __add__(self, other: Unit) -> Unit:
        return Unit(self.layers + other.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The four parts of a vision-language model that arrangements move around."""

    vision: tuple[Unit, ...]  # ViT and projector; one unit where the family allows no cut
    embed: Unit
    blocks: tuple[Unit, ...]
    head: Unit  # with the last norm
    tied: bool  # the head owns no weight: it reads the embedding's


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """An order of all units; a placement cuts it into runs, one a device."""

    name: str
    units: tuple[Unit, ...]


def parts_of(model: ModelSpec) -> Parts:
    """Units between which a device may change.

    A ViT's first unit holds everything up to its first block, each further one a block and what follows it, the last
    one also the projector. Where the projector joins several hidden states, the blocks behind the first of them and
    the one that makes it stay together (`forbidden_cuts`).
    """
    forbidden = frozenset() if model.family in _CARRIED else model.forbidden_cuts
    layers = model.layers
    language = [i for i, x in enumerate(layers) if x.tower == "language"]
    front = [i for i, x in enumerate(layers) if x.tower != "language"]
    vision: list[list[int]] = []
    has_block = False
    for i in front:
        is_block = layers[i].kind == "block" and _NUMBERED.search(layers[i].name) is not None
        free = not {i, i + 1} & forbidden  # a state that a block hands on and a projector joins stays where it was made
        cut = is_block and has_block and free and model.family in VISION_CUT_FAMILIES
        if not vision or cut:
            vision.append([])
        vision[-1].append(i)
        has_block = has_block or is_block
    embed = [i for i in language if layers[i].kind == "embed"]
    blocks = [i for i in language if layers[i].kind == "block"]
    tail = [i for i in language if layers[i].kind in ("norm", "head")]
    return Parts(
        vision=tuple(Unit(tuple(x)) for x in vision),
        embed=Unit(tuple(embed)),
        blocks=tuple(Unit((i,)) for i in blocks),
        head=Unit(tuple(tail)),
        tied=bool(model.tied),
    )


def arrangements(parts: Parts) -> tuple[Arrangement, ...]:
    """Orders worth cutting: forward; head with the embedding (the only way where they share a weight); head in front
    of the ViT; ViT behind the head, beside either. All but the first two bring activations back once."""
    V, E, L, H = parts.vision, parts.embed, parts.blocks, parts.head
    found = [Arrangement(name="head with embedding", units=(*V, E + H, *L))]
    if not parts.tied:
        found.insert(0, Arrangement(name="forward", units=(*V, E, *L, H)))
        found.append(Arrangement(name="head first", units=(H, *V, E, *L)))
    if V:
        found.append(Arrangement(name="vision last, head with embedding", units=(E + H, *L, *V)))
        if not parts.tied:
            found.append(Arrangement(name="vision last", units=(E, *L, H, *V)))
    return tuple(found)


def pipeline_arrangement(parts: Parts) -> Arrangement:
    """The forward order as serving engines cut it into stages: by a number of decoder blocks each, at least one.

    The first stage holds ViT, projector and embedding too, the last one the norm and the head.
    """
    first, *between = parts.blocks
    front = sum(parts.vision, Unit(())) + parts.embed + first
    if not between:
        return Arrangement(name="pipeline", units=(front + parts.head,))
    return Arrangement(name="pipeline", units=(front, *between[:-1], between[-1] + parts.head))


def modules_of(model: ModelSpec, layer: int) -> tuple[str, ...]:
    """Keys of a device map for one layer: modules with buffers alone come with the layer they run in front of."""
    name = model.layers[layer].name
    if model.family == "kimi_vl" or any(x.name.endswith(".tok_embeddings") for x in model.layers):
        return (name,)  # DeepSeek-V3 and InternLM2 keep rotary tables inside their blocks
    return (*_BUFFER_MODULES.get(name, ()), name)


def device_changes(devices: Sequence[int | str]) -> list[int]:
    """Positions whose device is another than that of the position before."""
    return [i for i in range(1, len(devices)) if devices[i] != devices[i - 1]]
