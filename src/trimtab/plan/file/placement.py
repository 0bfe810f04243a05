"""placement.yaml: a device map that people review and machines read; same rules as the plan file."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from trimtab import __version__
from trimtab.files import write_atomically, written_together
from trimtab.options import same_fields
from trimtab.placement.bytes import ALLOCATOR_DIVISOR, DeviceKey
from trimtab.placement.machine import Machine, Workload
from trimtab.placement.placed import Assessed, Placement
from trimtab.plan.file.yaml import read_file, record_from_yaml, record_to_yaml
from trimtab.specs import ModelSpec
from trimtab.units import GIB, fold_modules, format_bytes, unfold_modules

PLACEMENT_VERSION = "1.0"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacedModel:
    name: str
    family: str
    num_layers: int
    config_blake2b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuInput:
    gpu: int
    free_gib: float
    name: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkloadInput:
    batch: int
    seq_len: int
    max_new_tokens: int
    images: tuple[str, ...]
    dtype: str
    quant: str | None
    attention: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementInputs:
    model: PlacedModel
    gpus: tuple[GpuInput, ...]
    cpu_gib: float
    disk: bool
    workload: WorkloadInput


@dataclass(frozen=True, slots=True, kw_only=True)
class MapRow:
    """Modules of one device, in forward order."""

    device: int | str
    runs_on: int | None = None  # the GPU that modules on "cpu" or "disk" are copied to; None: where they lie
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementDecisions:
    """All that loaders and adapters read."""

    objective: str
    arrangement: str
    device_map: tuple[MapRow, ...]
    run_on_cpu: tuple[str, ...]  # computed in host memory


@dataclass(frozen=True, slots=True, kw_only=True)
class UseRow:
    device: int | str
    weights_gib: float
    kv_gib: float
    activations_gib: float
    streamed_gib: float
    reserve_gib: float
    total_gib: float
    used_percent: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleRow:
    rule: str
    fullest_percent: float | None  # None: no map
    fits: bool
    problems: str


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementEstimates:
    fullest_percent: float
    moved_gib: float
    devices: tuple[UseRow, ...]
    compared: tuple[RuleRow, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementFile:
    placement_version: str
    created_by: str
    command: str
    summary: str
    inputs: PlacementInputs
    decisions: PlacementDecisions
    estimates: PlacementEstimates
    assumptions: tuple[str, ...]

    @property
    def device_map(self) -> dict[str, DeviceKey]:
        """Return module path -> device, every module by itself."""
        return {name: row.device for row in self.decisions.device_map for name in unfold_modules(row.modules)}

    @property
    def runs_on(self) -> dict[str, DeviceKey]:
        """Return module path -> the GPU it is copied to, of modules on "cpu" or "disk"."""
        rows = ((row.runs_on, row.modules) for row in self.decisions.device_map)
        return {name: gpu for gpu, modules in rows if gpu is not None for name in unfold_modules(modules)}


def write_placement(folder: Path, record: PlacementFile, placement: Placement) -> None:
    """Write placement.yaml, and map.json with the bare map, into `folder`."""
    with written_together():
        write_atomically(folder / "map.json", json.dumps(map_json(placement), indent=1) + "\n")
        write_atomically(folder / "placement.yaml", record_to_yaml(record))


def map_json(placement: Placement) -> dict[str, object]:
    """The map as loaders take it; of what lies off the GPUs, the GPU it is copied to or that it is computed there."""
    return {
        "device_map": dict(placement.device_map),
        "runs_on": placement.runs_on,
        "run_on_cpu": list(placement.run_on_cpu),
    }


def load_placement(path: Path | str) -> PlacementFile:
    """The placement in a file, or in the `placement.yaml` of a folder; all problems of the file at once.

    Use it for what `trimtab map --out` wrote. docs/howto-serve.md shows it.
    """
    origin, text = read_file(path, "placement", wrote="trimtab map --out")
    return record_from_yaml(
        text, PlacementFile, origin=origin, version=("placement_version", PLACEMENT_VERSION), verb="map"
    )


def placement_file(
    model: ModelSpec,
    machine: Machine,
    workload: Workload,
    placement: Placement,
    compared: Sequence[Assessed] = (),
    command: str = "",
) -> PlacementFile:
    """The placement as a record: rounded where it estimates, exact where it decides."""
    return PlacementFile(
        placement_version=PLACEMENT_VERSION,
        created_by=f"trimtab {__version__}",
        command=command,
        summary=summary(placement, compared),
        inputs=PlacementInputs(
            model=PlacedModel(**same_fields(model, PlacedModel) | {"num_layers": len(model.layers)}),
            gpus=tuple(GpuInput(gpu=x.index, free_gib=_gib(x.free_bytes), name=x.name) for x in machine.gpus),
            cpu_gib=_gib(machine.cpu_bytes),
            disk=machine.disk,
            workload=WorkloadInput(**same_fields(workload, WorkloadInput) | {"images": image_texts(workload)}),
        ),
        decisions=PlacementDecisions(
            objective=placement.objective,
            arrangement=placement.arrangement,
            device_map=_rows(placement),
            run_on_cpu=placement.run_on_cpu,
        ),
        estimates=PlacementEstimates(
            fullest_percent=round(100 * placement.fullest, 1),
            moved_gib=_gib(placement.moved_bytes),
            devices=tuple(
                UseRow(
                    device=use.device,
                    weights_gib=_gib(use.weight_bytes),
                    kv_gib=_gib(use.kv_bytes),
                    activations_gib=_gib(use.activation_bytes),
                    streamed_gib=_gib(use.streamed_bytes),
                    reserve_gib=_gib(use.reserve_bytes),
                    total_gib=_gib(use.total_bytes),
                    used_percent=None if use.capacity_bytes is None else round(100 * use.fraction, 1),
                )
                for use in placement.uses
            ),
            compared=tuple(
                RuleRow(
                    rule=x.rule,
                    fullest_percent=None if x.placement is None else round(100 * x.placement.fullest, 1),
                    fits=x.fits,
                    problems="; ".join(x.problems),
                )
                for x in compared
            ),
        ),
        assumptions=assumptions(machine, placement),
    )


def summary(placement: Placement, compared: Sequence[Assessed] = ()) -> str:
    """Return two or three sentences."""
    used = [use for use in placement.uses if isinstance(use.device, int) and use.total_bytes]
    num = sum(isinstance(use.device, int) for use in placement.uses)
    text = f"{placement.model} on {len(used)} of {num} GPUs; the fullest is {100 * placement.fullest:.1f} % full."
    if placement.spilled:
        size = sum(x.weight_bytes for x in placement.spilled)
        text += (
            f" {format_bytes(size)} of weights lie elsewhere, and {format_bytes(placement.moved_bytes)} move for each "
            "batch of requests."
        )
    for other in compared:
        if other.placement is not None:
            verdict = f"{100 * other.placement.fullest:.1f} %" + ("" if other.fits else " (does not fit)")
            text += f" {other.rule}: {verdict}."
    return text


def assumptions(machine: Machine, placement: Placement) -> tuple[str, ...]:
    """Return what the figures rest on, in sentences."""
    return (
        "Live tensors are those of Transformers' own modules without gradients; workspace inside kernels is not "
        "counted.",
        f"Each GPU in use keeps {format_bytes(machine.context_bytes)} for its context and "
        f"{100 // ALLOCATOR_DIVISOR} % of KV cache and activations for the allocator.",
        "The prefill runs all prompts of a batch at once; the head sees only their last tokens.",
        *placement.notes,
    )


def image_texts(workload: Workload) -> tuple[str, ...]:
    """Return the sizes as `--images` takes them, repeated ones once: "1024x768,4"."""
    counts: dict[tuple[int, int], int] = {}
    for size in workload.images:
        counts[size] = counts.get(size, 0) + 1
    return tuple(f"{width}x{height}" + (f",{n}" if n > 1 else "") for (width, height), n in counts.items())


def _rows(placement: Placement) -> tuple[MapRow, ...]:
    groups: dict[tuple[DeviceKey, DeviceKey | None], list[str]] = {}
    for name, device in placement.device_map.items():
        groups.setdefault((device, placement.runs_on.get(name)), []).append(name)
    return tuple(
        MapRow(device=device, runs_on=gpu if isinstance(gpu, int) else None, modules=fold_modules(names))
        for (device, gpu), names in groups.items()
    )


def _gib(num_bytes: int) -> float:
    return round(num_bytes / GIB, 3)
