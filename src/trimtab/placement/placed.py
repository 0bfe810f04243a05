"""A device map and what it costs: the bytes of every device by kind, and what moves because it did not fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from trimtab.errors import ConfigError
from trimtab.files import read_small
from trimtab.placement.bytes import DeviceKey, DeviceUse, InferenceTable, device_bytes, modules_of
from trimtab.placement.machine import Machine
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
        """Weights and rows that cross a link because they did not fit, per batch of requests."""
        return sum(x.moved_bytes for x in self.spilled)

    @property
    def runs_on(self) -> dict[str, DeviceKey]:
        """The GPU to which each module's weights are copied to run, of those that no GPU holds."""
        return {name: x.runs_on for x in self.spilled if x.runs_on != "cpu" for name in x.modules}

    @property
    def run_on_cpu(self) -> tuple[str, ...]:
        """Modules to compute in host memory instead of copying their weights: dispatch by `torch.device("cpu")`."""
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
