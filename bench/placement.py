"""Device maps beside the public rules: equal GPUs, unlike and busy GPUs, and spill.

Sizes are modelled bytes of published models on no GPU at all: every map is counted by the same formulas. The public
maps come from the installed libraries over models without weights; InternVL models are built as Transformers' port.
Needs torch and Transformers.
Run: python bench/placement.py
"""

import logging
import warnings
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
import transformers

from trimtab.errors import PartitionError
from trimtab.models.asking.model import complete
from trimtab.models.describe import describe, read_config
from trimtab.placement.bytes import (
    ALLOCATOR_DIVISOR,
    Arrangement,
    InferenceTable,
    arrangements,
    device_bytes,
    inference_table,
    parts_of,
)
from trimtab.placement.machine import CONTEXT_BYTES, Machine, Workload, machine_of
from trimtab.placement.place import place
from trimtab.placement.placed import assess_map, split_model_map
from trimtab.runtime.placing.load import auto_map
from trimtab.specs import ModelSpec
from trimtab.units import GIB

MODELS = (
    *("Qwen2.5-VL-7B", "Qwen2.5-VL-72B", "InternVL3_5-8B-HF", "InternVL3_5-38B-HF", "InternVL3_5-241B-A28B-HF"),
    *("LLaVA-OneVision-72B", "Qwen3-VL-32B", "Qwen3-VL-235B-A22B", "Gemma3-27B"),
)
IMAGE = (1024, 1024)
WORKLOADS = {
    "light": Workload(batch=1, seq_len=256, max_new_tokens=256, images=(IMAGE,)),
    "heavy": Workload(batch=8, seq_len=1024, max_new_tokens=1024, images=(IMAGE,) * 8),
}
RULES = ("Accelerate auto", "Transformers auto", "split_model 0.5")


@dataclass(frozen=True)
class Case:
    name: str
    spec: ModelSpec
    real: torch.nn.Module


def load(name: str) -> Case:
    spec, config = describe(name), complete(read_config(name))
    with torch.device("meta"):
        real = transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)
    assert sum(p.numel() for p in real.parameters()) == spec.num_params, name
    return Case(name, spec, real)


# -- an independent optimum -----------------------------------------------------------------------------------------


def optimum(spec: ModelSpec, table: InferenceTable, num_devices: int) -> int:
    """Bytes of the fullest of equal devices: the textbook recurrence over cuts, one arrangement after the other."""
    return min(_optimum(option, table, num_devices) for option in arrangements(parts_of(spec)))


def _optimum(option: Arrangement, table: InferenceTable, num_devices: int) -> int:
    n = len(option.units)
    size = [[0] * (n + 1) for _ in range(n + 1)]
    for s in range(n):
        layers: list[int] = []
        for e in range(s + 1, n + 1):
            layers += option.units[e - 1].layers
            size[s][e] = device_bytes(table, layers, (), CONTEXT_BYTES).total_bytes
    best = [size[0][e] for e in range(n + 1)]
    for _ in range(num_devices - 1):
        best = [min(max(best[s], size[s][e]) for s in range(e + 1)) for e in range(n + 1)]
    return best[n]


# -- tables ---------------------------------------------------------------------------------------------------------


def public_maps(case: Case, machine: Machine) -> dict[str, Callable[[], dict[str, int | str]]]:
    return {
        "Accelerate auto": lambda: auto_map(case.real, machine, library="accelerate"),
        "Transformers auto": lambda: auto_map(case.real, machine, library="transformers"),
        "split_model 0.5": lambda: split_model_map(case.spec, len(machine.gpus)),
    }


def equal_gpus(cases: list[Case]) -> None:
    print("Fullest of equal GPUs, as a ratio to an independent exact optimum (9 models x 2, 4, 8 GPUs, roomy)")
    print(f"{'map':20s}" + "".join(f"{w:>8s} mean median    p90    max" for w in WORKLOADS))
    ratios: dict[str, dict[str, list[float]]] = {x: {w: [] for w in WORKLOADS} for x in ("this placement", *RULES)}
    for case in cases:
        for name, workload in WORKLOADS.items():
            table = inference_table(case.spec, workload)
            for num in (2, 4, 8):
                machine = machine_of([1024 * GIB] * num)
                exact = optimum(case.spec, table, num)
                ours = place(case.spec, machine, workload)
                ratios["this placement"][name].append(max(u.total_bytes for u in ours.uses) / exact)
                for rule, make in public_maps(case, machine).items():
                    found = assess_map(case.spec, machine, workload, make(), rule=rule).placement
                    assert found is not None
                    ratios[rule][name].append(max(u.total_bytes for u in found.uses) / exact)
    for rule, by_workload in ratios.items():
        cells = [
            f"{'':8s}{np.mean(x):5.3f} {np.median(x):6.3f} {np.quantile(x, 0.9):6.3f} {max(x):6.3f}"
            for x in by_workload.values()
        ]
        print(f"{rule:20s}" + "".join(cells))
    print(flush=True)


def plant(case: Case, workload: Workload, kind: str, rng: np.random.Generator) -> list[int]:
    """Free bytes of GPUs on which a map exists: cut the model at random, fill each device to 70-97 %."""
    table = inference_table(case.spec, workload)
    num = int(rng.integers(2, 9))
    if kind == "equal":
        return [int(optimum(case.spec, table, num) / rng.uniform(0.70, 0.97))] * num
    weights = rng.uniform(0.3, 1.0, num) if kind == "unequal" else np.ones(num)
    if kind == "GPU 0 busy":
        weights[0] = rng.uniform(0.3, 0.7)
    options = [x for x in arrangements(parts_of(case.spec)) if x.name in ("forward", "head with embedding")]
    option = options[0]
    layers = [unit.layers for unit in option.units]
    sizes = np.cumsum([device_bytes(table, x, (), 0).total_bytes for x in layers])
    ends = np.searchsorted(sizes, sizes[-1] * np.cumsum(weights) / weights.sum())
    ends[-1] = len(layers)
    starts = [0, *ends[:-1].tolist()]
    held = [
        device_bytes(table, [i for x in layers[s:e] for i in x], (), CONTEXT_BYTES).total_bytes
        for s, e in zip(starts, ends.tolist(), strict=True)
    ]
    used = [max(x, 2 * GIB) / rng.uniform(0.70, 0.97) for x in held]
    if kind == "GPU 0 busy":
        used[1:] = [max(used[1:])] * (num - 1)
    return [int(x) for x in used]


def random_machines(cases: list[Case], count: int = 300, seed: int = 0) -> None:
    print(f"Maps that fit, of {count} random machines on which one exists (seed {seed})")
    rng = np.random.default_rng(seed)
    kinds = ("equal", "unequal", "GPU 0 busy")
    fits = {x: dict.fromkeys(kinds, 0) for x in ("this placement", *RULES)}
    total = dict.fromkeys(kinds, 0)
    for i in range(count):
        kind = kinds[i % 3]
        case, workload = cases[int(rng.integers(len(cases)))], list(WORKLOADS.values())[int(rng.integers(2))]
        machine = machine_of(plant(case, workload, kind, rng))
        total[kind] += 1
        try:
            fits["this placement"][kind] += place(case.spec, machine, workload).fits
        except PartitionError as error:
            print(f"  none found: {error}")
        for rule, make in public_maps(case, machine).items():
            found = assess_map(case.spec, machine, workload, make(), rule=rule)
            assert found.placement is not None
            fits[rule][kind] += found.fits and not found.placement.spilled
    print(f"{'map':20s}{'all':>10s}" + "".join(f"{k:>18s}" for k in kinds))
    for rule, by_kind in fits.items():
        cells = [f"{100 * by_kind[k] / total[k]:11.0f} % of {total[k]:3d}" for k in kinds]
        print(f"{rule:20s}{100 * sum(by_kind.values()) / count:8.1f} %" + "".join(cells))
    print(flush=True)


def informed(machine: Machine, table: InferenceTable) -> Machine:
    """The limits a user who knows would type: context, an equal share of the cache and the largest peak taken off."""
    live = int(table.kv_full.sum()) // len(machine.gpus) + int((table.held + table.prefill).max())
    taken = CONTEXT_BYTES + live + live // ALLOCATOR_DIVISOR
    lowered = [max(gpu.free_bytes - taken, 0) for gpu in machine.gpus]
    return machine_of(lowered, cpu_bytes=machine.cpu_bytes)


def spill(cases: list[Case]) -> None:
    print("GiB moved for each request when weights do not fit (light load; 256 GiB of host memory)")
    print("the libraries get the free memory as it is, and less what context, cache and activations take (informed)")
    print(
        f"{'model':22s}{'GPUs':>10s}{'spilled':>9s}{'moved':>9s}"
        f"{'Accelerate':>14s}{'informed':>14s}{'Transformers':>14s}{'informed':>14s}"
    )
    named = {case.name: case for case in cases}
    for name, gpus in (
        ("Qwen2.5-VL-7B", [16]),
        ("Qwen3-VL-32B", [32] * 2),
        ("Gemma3-27B", [48]),
        ("Qwen2.5-VL-72B", [68] * 2),
        ("InternVL3_5-38B-HF", [24] * 3),
        ("InternVL3_5-8B-HF", [15]),
        ("LLaVA-OneVision-72B", [48] * 3),
    ):
        case, workload = named[name], WORKLOADS["light"]
        machine = machine_of([x * GIB for x in gpus], cpu_bytes=256 * GIB)
        lowered = informed(machine, inference_table(case.spec, workload))
        ours = place(case.spec, machine, workload)
        cells = ""
        for library in ("accelerate", "transformers"):
            for limits in (machine, lowered):
                theirs = auto_map(case.real, limits, library=library)
                found = assess_map(case.spec, machine, workload, theirs, rule=library).placement
                assert found is not None
                cells += f"{found.moved_bytes / GIB:9.1f}{' over' if not found.fits else '     '}"
                assert not found.fits or ours.moved_bytes <= found.moved_bytes, (name, library)
        size = sum(x.weight_bytes for x in ours.spilled) / GIB
        print(f"{name:22s}{f'{len(gpus)} x {gpus[0]}':>10s}{size:9.2f}{ours.moved_bytes / GIB:9.2f}{cells}")
    print("over: needs more than the GPUs have", flush=True)


def main() -> None:
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    cases = [load(name) for name in MODELS]
    spill(cases)
    equal_gpus(cases)
    random_machines(cases)


if __name__ == "__main__":
    main()
