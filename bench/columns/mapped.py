"""Column "mapped": the family's full-size default is placed, and the map checked against its real modules.

Two machines: four unlike GPUs that hold it, and two that hold half of it beside host memory and disk. On the model that
Transformers builds without weights, every parameter and buffer lies under exactly one key of the map, no module of a
class in `_no_split_modules` is cut, what shares a weight shares a device, and the bytes of each device are those of the
tensors that the map puts there. Text alone: images need no device of their own.
Run: python bench/columns/mapped.py [FAMILY ...]
"""

import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cell import Cell, sweep
from torch import nn

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "torch"))

from shrunk_models import GIVEN

from trimtab.errors import PartitionError
from trimtab.models.asking.model import build, complete, describe_model
from trimtab.placement.bytes import DeviceKey
from trimtab.placement.machine import Workload, machine_of
from trimtab.placement.place import place
from trimtab.placement.placed import Placement
from trimtab.specs import ModelSpec
from trimtab.units import GIB

NOT_WHOLE = ("chameleon", "cohere_compass", "emu3")
"""Families whose default configuration lacks a field (a vocabulary of images, a kind of rotary table) to be built."""

CONSISTENT = {
    "gemma3": {"vision_config": {"image_size": 896, "patch_size": 14}},
    "glm4v_moe": {"text_config": {"head_dim": 128}},
    "qwen2_5_vl": {"vision_config": {"out_hidden_size": 8192}},
    "qwen2_vl": {"vision_config": {"hidden_size": 8192}},
    "qwen3_vl": {"vision_config": {"out_hidden_size": 4096}},
    "qwen3_vl_moe": {"vision_config": {"out_hidden_size": 2048}},
}
"""Fields whose class defaults contradict each other, or that images of the usual size need."""

WORKLOAD = Workload(batch=2, seq_len=512, max_new_tokens=64)
ROOMY, TIGHT = (0.7, 0.5, 0.4, 0.6), (0.3, 0.2)  # of the weights, on each GPU


def check(family: str) -> Cell:
    fields = {"model_type": family, **CONSISTENT.get(family, {}), **(GIVEN[family] if family in NOT_WHOLE else {})}
    real = build(complete(fields))
    model = describe_model(build(complete(fields)))
    if model.num_params != sum(x.numel() for x in real.parameters()):
        return Cell(yes=False, note="described with other parameters than the model's")
    for placement in (_on_gpus(model), _with_spill(model)):
        problems = find_problems(real, placement)
        if problems:
            return Cell(yes=False, note=problems[0])
    return Cell(yes=True)


def _on_gpus(model: ModelSpec) -> Placement:
    """Over GPUs of unlike sizes, each with room for context and activations beside its share."""
    size = 2 * model.num_params
    placement = place(model, machine_of([int(x * size) + 2 * GIB for x in ROOMY], cpu_bytes=size), WORKLOAD)
    assert not placement.spilled, "it spilled where it fits"
    assert len({x.device for x in placement.uses if x.modules}) > 1, "it lies on one GPU"
    return placement


def _with_spill(model: ModelSpec) -> Placement:
    """The smallest room, from half of the weights on, that the largest layers let it run in."""
    size = 2 * model.num_params
    for extra in (0.6, 0.8, 1.0, 1.4, 2.0, 4.0, 8.0, 16.0):
        gpus = [int(x * size + extra * GIB) for x in TIGHT]
        try:
            placement = place(model, machine_of(gpus, cpu_bytes=size // 2, disk=True), WORKLOAD)
        except PartitionError:
            continue
        if placement.spilled:
            return placement
    raise PartitionError("no small machine was found on which it spills and runs")


def find_problems(real: nn.Module, placement: Placement) -> list[str]:
    """What is wrong with the map of `placement` on the modules of `real`, in sentences."""
    homes: dict[str, DeviceKey] = {}
    runs: dict[str, DeviceKey] = {}
    ran = {**placement.device_map, **placement.runs_on, **dict.fromkeys(placement.run_on_cpu, "cpu")}
    problems = []
    for name, _ in _tensors(real):
        keys = [key for key in placement.device_map if name == key or name.startswith(f"{key}.")]
        if len(keys) != 1:
            problems.append(f"{name} lies under {len(keys)} keys of the map: {', '.join(keys[:2])}")
        else:
            homes[name], runs[name] = placement.device_map[keys[0]], ran[keys[0]]
    modules = dict(real.named_modules())
    problems += [f"{key} is no module" for key in placement.device_map if key not in modules and key not in homes]
    if not problems:
        problems += [*_cut_blocks(modules, runs), *_torn_weights(real, homes), *_wrong_bytes(real, homes, placement)]
    return problems


def _tensors(real: nn.Module) -> Iterator[tuple[str, Any]]:
    yield from real.named_parameters(remove_duplicate=False)
    yield from real.named_buffers(remove_duplicate=False)


def _cut_blocks(modules: Mapping[str, Any], runs: Mapping[str, DeviceKey]) -> Iterator[str]:
    """By where modules run: a layer that is copied in from host memory cuts nothing."""
    whole = set(getattr(modules[""], "_no_split_modules", None) or ())
    for name, module in modules.items():
        if type(module).__name__ in whole:
            found = {runs[f"{name}.{inner}"] for inner, _ in _tensors(module)}
            if len(found) > 1:
                yield f"{name} is a {type(module).__name__}, which is not to be split, on {sorted(map(str, found))}"


def _torn_weights(real: nn.Module, homes: Mapping[str, DeviceKey]) -> Iterator[str]:
    first: dict[int, str] = {}
    for name, tensor in real.named_parameters(remove_duplicate=False):
        other = first.setdefault(id(tensor), name)
        if homes[name] != homes[other]:
            yield f"{name} and {other} are one weight on {homes[name]} and {homes[other]}"


def _wrong_bytes(real: nn.Module, homes: Mapping[str, DeviceKey], placement: Placement) -> Iterator[str]:
    counted: Counter[DeviceKey] = Counter()
    for name, tensor in (*real.named_parameters(), *real.named_buffers()):  # a shared weight once
        counted[homes[name]] += tensor.numel() * tensor.element_size()
    for use in placement.uses:
        if use.weight_bytes != counted[use.device]:
            yield f"{use.weight_bytes} bytes are said to lie on {use.device}, and {counted[use.device]} do"


def main() -> None:
    sweep(check, "mapped")


if __name__ == "__main__":
    main()
