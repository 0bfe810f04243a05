"""InternVL's published rule for spreading a model over GPUs, and what any given map does with a model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from trimtab.errors import PartitionError
from trimtab.placement.bytes import DeviceKey, inference_table, modules_of, upwards
from trimtab.placement.machine import Machine, Workload
from trimtab.placement.placed import Placement, summarize
from trimtab.specs import ModelSpec


def split_model(num_layers: int, vit_alpha: float = 0.5, *, world_size: int) -> dict[str, int]:
    """The published device map, key for key; use it to compare, or where code expects it. `trimtab map` plans better.

    As `split_model` in OpenGVLab/InternVL, internvl_chat/internvl/model/__init__.py: every GPU takes
    ceil(L / (n - alpha)) decoder blocks, the first one ceil((1 - alpha) times that); ViT, projector, embedding, last
    norm, head, rotary table and the last block lie on GPU 0. With a `vit_alpha` of 1 or more
    GPU 0 gets no other block. Rounding up twice can name blocks that do not exist and
    can leave the last GPUs without any: `assess_map` reports both. Keys are those of the remote code.

    There `world_size` is the number of visible GPUs, as in `trimtab.placement.split_model`.

    >>> sorted({gpu for key, gpu in split_model(48, world_size=4).items() if ".layers." in key})
    [0, 1, 2, 3]
    """
    if num_layers < 1 or world_size < 1 or not 0 <= vit_alpha < world_size:
        raise PartitionError(
            f"{num_layers} layers, {world_size} GPUs, vit_alpha {vit_alpha}: give 1, 1, 0 <= vit_alpha < world_size"
        )
    share = math.ceil(num_layers / (world_size - vit_alpha))
    shares = [math.ceil(share * (1 - vit_alpha)), *([share] * (world_size - 1))]
    owners = [gpu for gpu, count in enumerate(shares) for _ in range(count)]
    placed = {f"language_model.model.layers.{i}": gpu for i, gpu in enumerate(owners)}
    ends = ("model.tok_embeddings", "model.embed_tokens", "output", "model.norm", "model.rotary_emb", "lm_head")
    placed |= dict.fromkeys(("vision_model", "mlp1", *(f"language_model.{module}" for module in ends)), 0)
    placed[f"language_model.model.layers.{num_layers - 1}"] = 0
    return placed


def split_model_map(model: ModelSpec, world_size: int) -> dict[str, int]:
    """`split_model` for any family: InternVL's own keys, or the modules of `model` that play their part."""
    blocks = [x.name for x in model.layers if x.tower == "language" and x.kind == "block"]
    published = split_model(len(blocks), world_size=world_size)
    prefix = "language_model.model.layers."
    if blocks[0].startswith(prefix):  # the remote code's own names
        return published
    counted = {int(key.removeprefix(prefix)): gpu for key, gpu in published.items() if key.startswith(prefix)}
    stem = blocks[0].removesuffix("0")
    placed = {f"{stem}{i}": gpu for i, gpu in counted.items()}
    for i, layer in enumerate(model.layers):
        if layer.name not in placed:
            placed.update(dict.fromkeys(modules_of(model, i), 0))
    return placed


@dataclass(frozen=True, slots=True, kw_only=True)
class Assessed:
    """What someone else's map does, in our bytes."""

    rule: str
    placement: Placement | None  # None: no map, for the reason given
    problems: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        return self.placement is not None and self.placement.fits


def assess_map(
    model: ModelSpec, machine: Machine, workload: Workload, device_map: Mapping[str, DeviceKey], *, rule: str
) -> Assessed:
    """The bytes of `device_map` on each device under `workload`, and what is wrong with it.

    A layer lies where the longest key that is its name or a module around it says; one that is itself divided, where
    its first part lies. Offloaded layers are copied to the map's first GPU to run, as Accelerate does.
    """
    table = inference_table(model, workload)
    gpus = sorted({x for x in device_map.values() if isinstance(x, int)})
    main: DeviceKey = gpus[0] if gpus else machine.gpus[0].index
    runs_on: dict[int, DeviceKey] = {}
    spilled: dict[int, str] = {}
    lost: list[str] = []
    for i, layer in enumerate(model.layers):
        key = _owner(layer.name, device_map)
        if key is None:
            lost.append(layer.name)
            runs_on[i] = main
            continue
        device = device_map[key]
        runs_on[i] = device if isinstance(device, int) else main
        if isinstance(device, str):
            spilled[i] = device
    known = {name for i in range(len(model.layers)) for name in modules_of(model, i)}
    problems = _problems(model, device_map, known, lost)
    empty = [gpu.index for gpu in machine.gpus if gpu.index not in runs_on.values()]
    if empty:
        problems.append(f"{_count(empty, 'GPU')} left without any layer: {_listed(empty)}")
    unknown = sorted({x for x in gpus if x not in {gpu.index for gpu in machine.gpus}})
    if unknown:
        raise PartitionError(f"the map of {rule} names GPU {_listed(unknown)}: give one for {len(machine.gpus)} GPUs")
    placement = summarize(model, machine, table, runs_on, spilled, arrangement=rule)
    return Assessed(rule=rule, placement=placement, problems=tuple(problems))


def _owner(module: str, device_map: Mapping[str, DeviceKey]) -> str | None:
    around = [name for name in upwards(module) if name in device_map]
    within = (key for key in device_map if key.startswith(f"{module}."))
    return around[0] if around else next(within, None)


def _problems(model: ModelSpec, device_map: Mapping[str, DeviceKey], known: set[str], lost: list[str]) -> list[str]:
    problems = []
    layers = [x.name for x in model.layers]
    blocks = [
        key
        for key in device_map
        if ".layers." in key
        and key not in known
        and not any(name.startswith(f"{key}.") or key.startswith(f"{name}.") for name in layers)
    ]
    if blocks:
        problems.append(f"{_count(blocks, 'key')} for decoder blocks that do not exist: {_listed(blocks)}")
    if lost:
        problems.append(f"{_count(lost, 'module')} without a device: {_listed(lost)}")
    for owner, borrower in model.tied:
        homes = [device_map.get(_owner(x, device_map) or "") for x in (owner, borrower)]
        if homes[0] != homes[1] and None not in homes:
            problems.append(f"{owner} and {borrower} share a weight but lie on {homes[0]} and {homes[1]}")
    return problems


def _count(items: list[str] | list[int], noun: str) -> str:
    return f"{len(items)} {noun}{'s' if len(items) != 1 else ''}"


def _listed(items: list[str] | list[int]) -> str:
    shown = ", ".join(map(str, items[:6]))
    return shown if len(items) <= 6 else f"{shown} and {len(items) - 6} more"
