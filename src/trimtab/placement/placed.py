"""A device map and what it costs, ours, InternVL's published one or any: bytes by kind, and what moves."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimtab.errors import ConfigError, PartitionError
from trimtab.files import read_small
from trimtab.placement.bytes import (
    DeviceKey,
    DeviceUse,
    InferenceTable,
    device_bytes,
    inference_table,
    modules_of,
    upwards,
)
from trimtab.placement.machine import Machine, Workload
from trimtab.specs import ModelSpec
from trimtab.typed_json import parse_json
from trimtab.units import three_lines

Objective = Literal["memory", "latency", "pipeline"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Spilled:
    """Modules of one layer that no GPU holds, and what that costs each batch of requests."""

    modules: tuple[str, ...]
    device: str  # "cpu" or "disk"
    weight_bytes: int
    runs_on: DeviceKey  # the GPU its weights are copied to, or "cpu": computed in host memory, only its rows move
    moved_bytes: int  # over the link to a GPU


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """A device map and what it costs.

    Use `device_map` for Transformers or `load_placed`, `uses` for the bytes of each GPU; `place` has an example.
    """

    model: str
    device_map: Mapping[str, DeviceKey]  # module path -> device, forward order; each parameter and buffer once
    uses: tuple[DeviceUse, ...]  # GPUs in order, then "cpu" and "disk" where the machine has them
    arrangement: str  # which of `chain.arrangements` was cut
    spilled: tuple[Spilled, ...] = ()
    objective: Objective = "memory"
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        used = [f"{device} {100 * share:.1f} %" for device, share in self._shares()]
        return three_lines(
            f"Placement of {self.model}, by {self.objective}",
            f"of what is free, {', '.join(used[:8])}{', ...' if len(used) > 8 else ''}",
            f"{len(self.device_map)} modules, {len(self.spilled)} layers that no GPU holds",
        )

    def _shares(self) -> list[tuple[str, float]]:
        return [(f"GPU {use.device}", use.fraction) for use in self.uses if isinstance(use.device, int)]

    @property
    def fullest(self) -> float:
        """The fullest GPU's share of its capacity."""
        return max(share for _, share in self._shares())

    @property
    def fits(self) -> bool:
        return all(use.fraction <= 1 for use in self.uses)

    @property
    def moved_bytes(self) -> int:
        """Count the bytes of weights and rows that cross a link because they did not fit, per batch of requests."""
        return sum(x.moved_bytes for x in self.spilled)

    @property
    def runs_on(self) -> dict[str, DeviceKey]:
        """The GPU to which each module's weights are copied to run, of those that no GPU holds."""
        return {name: x.runs_on for x in self.spilled if x.runs_on != "cpu" for name in x.modules}

    @property
    def run_on_cpu(self) -> tuple[str, ...]:
        """List modules that run in host memory instead of copying weights: dispatch by `torch.device("cpu")`."""
        return tuple(name for x in self.spilled if x.runs_on == "cpu" for name in x.modules)


def summarize(
    model: ModelSpec,
    machine: Machine,
    table: InferenceTable,
    runs_on: Mapping[int, DeviceKey],
    spilled: Mapping[int, str],
    *,
    arrangement: str,
    objective: Objective = "memory",
) -> Placement:
    """The placement in which layer i runs on `runs_on[i]`, its weights in `spilled[i]` where they are not there."""
    where = [runs_on[i] for i in range(len(model.layers))]
    home = [spilled.get(i, where[i]) for i in range(len(model.layers))]
    names = [modules_of(model, i) for i in range(len(model.layers))]
    uses = []
    for gpu in machine.gpus:
        at = [i for i, device in enumerate(where) if device == gpu.index]
        uses.append(
            device_bytes(
                table,
                at,
                spilled,
                machine.context_bytes,
                device=gpu.index,
                capacity_bytes=gpu.free_bytes,
                modules=_named(names, [i for i in at if i not in spilled]),
            )
        )
    for device, capacity in (("cpu", machine.cpu_bytes), ("disk", None)):
        at = [i for i, x in enumerate(home) if x == device]
        if at or (machine.cpu_bytes if device == "cpu" else machine.disk):
            size = sum(int(table.weights[i]) for i in at)
            use = DeviceUse(device=device, capacity_bytes=capacity, weight_bytes=size, modules=_named(names, at))
            uses.append(use)
    gone = tuple(
        Spilled(
            modules=names[i],
            device=spilled[i],
            weight_bytes=int(table.weights[i]),
            runs_on=where[i],
            moved_bytes=int(table.rows_out[i] if where[i] == "cpu" else table.runs[i] * table.weights[i]),
        )
        for i in sorted(spilled)
    )
    return Placement(
        model=model.name,
        device_map={name: home[i] for i in range(len(model.layers)) for name in names[i]},
        uses=tuple(uses),
        arrangement=arrangement,
        spilled=gone,
        objective=objective,
    )


def _named(names: Sequence[tuple[str, ...]], layers: Sequence[int]) -> tuple[str, ...]:
    return tuple(name for i in layers for name in names[i])


# -- a map in a file ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WrittenMap:
    """A device map as a file has it; whether it fits a model is seen when that is loaded."""

    device_map: dict[str, int | str] | None  # module path -> a GPU's number, "cpu" or "disk"; None: all on one device
    runs_on: dict[str, int | str]  # of modules on "cpu" or "disk": the GPU they are copied to, or "cpu"


def read_device_map(path: Path) -> WrittenMap:
    """Read a JSON file's map: the bare mapping, or what `trimtab map` wrote with where the rest runs."""
    try:
        content = parse_json(read_small(path))
        placed = content.get("device_map", content)
        runs_on = {**content.get("runs_on", {}), **dict.fromkeys(content.get("run_on_cpu", []), "cpu")}
        if not placed or not all(type(x) in (int, str) for x in [*placed.values(), *runs_on.values()]):
            raise ValueError("its devices are neither numbers, cpu nor disk")
        if not all(isinstance(name, str) for name in runs_on):
            raise ValueError("run_on_cpu names something else than modules")
    except (ValueError, TypeError, AttributeError) as error:
        raise ConfigError(f"{path} holds no device map ({error}): write it with trimtab map --json") from None
    return WrittenMap(placed, runs_on)


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
    """Run `split_model` for any family: InternVL's own keys, or the modules of `model` that play their part."""
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
