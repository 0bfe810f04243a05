"""Layer counts of pipeline stages for vLLM and SGLang, from a placement.

Both read one environment variable: decoder layers of each pipeline rank, separated by commas, their number and sum
checked against `--pipeline-parallel-size` and the model (vllm/distributed/utils.py and
sglang/srt/distributed/utils.py, `get_pp_indices`). Vision tower and embedding run on the first rank, the head on the
last. What an engine needs beyond that (paged cache, graphs) is its own; the counts balance what a placement knows of.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from trimtab.errors import UnsupportedPlanError
from trimtab.placement.chain import device_changes

Engine = Literal["vllm", "sglang"]

VARIABLES: Mapping[Engine, str] = {"vllm": "VLLM_PP_LAYER_PARTITION", "sglang": "SGLANG_PP_LAYER_PARTITION"}
SIZE_FLAGS: Mapping[Engine, str] = {"vllm": "--pipeline-parallel-size", "sglang": "--pp-size"}


@dataclass(frozen=True, slots=True, kw_only=True)
class StageCounts:
    """Decoder layers of every pipeline rank, and the GPU of each."""

    layers: tuple[int, ...]
    gpus: tuple[int, ...]

    def environment(self, engine: Engine) -> dict[str, str]:
        """Variables to start the engine with; ranks take visible devices in order."""
        found = {VARIABLES[engine]: ",".join(map(str, self.layers))}
        if self.gpus != tuple(range(len(self.gpus))):
            found["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, self.gpus))
        return found

    def shell(self, engine: Engine, command: str = " # with") -> str:
        """The variables, the engine's command, and the flag that goes with them."""
        words = [f"{name}={value}" for name, value in self.environment(engine).items()]
        return " ".join([*words, command, SIZE_FLAGS[engine], str(len(self.layers))])


def engine_commands(model: str, device_map: Mapping[str, int | str] | None) -> tuple[str, ...]:
    """Command lines by which vLLM and SGLang serve `model` in the same placement; None is the whole model on one GPU.

    `UnsupportedPlanError` if an engine cannot run it as pipeline stages.
    """
    commands: dict[Engine, str] = {
        "vllm": f"vllm serve {model}",
        "sglang": f"python -m sglang.launch_server --model-path {model}",
    }
    devices = [0] if device_map is None else sorted(set(device_map.values()), key=str)
    if len(devices) == 1 and isinstance(devices[0], int):
        return tuple(commands.values())
    assert device_map is not None, "None is one device"
    stages = count_placed_layers(device_map)
    return tuple(stages.shell(engine, command) for engine, command in commands.items())


def count_placed_layers(device_map: Mapping[str, int | str]) -> StageCounts:
    """Stages of a placement; `UnsupportedPlanError` if an engine cannot run it as stages."""
    modules = list(device_map)
    off = sorted({str(x) for x in device_map.values() if not isinstance(x, int)})
    if off:
        raise UnsupportedPlanError(
            f"the placement keeps modules on {' and '.join(off)}, and pipeline stages hold their weights on GPUs: "
            "give more or larger GPUs to `trimtab map --for pipeline`"
        )
    blocks = [name for name in modules if _is_block(name)]
    if not blocks:
        raise UnsupportedPlanError("the placement names no decoder layers: give one that `trimtab map` wrote")
    start = modules.index(blocks[0])
    where = [device_map[name] for name in blocks]
    changes = [0, *device_changes(where), len(blocks)]
    gpus = [int(where[i]) for i in changes[:-1]]
    front = {device_map[name] for name in modules[:start]}
    behind = {device_map[name] for name in modules[start:] if not _is_block(name)}
    if len(set(gpus)) != len(gpus) or front - {gpus[0]} or behind - {gpus[-1]}:
        raise UnsupportedPlanError(
            "the placement is no chain of pipeline stages, which hold vision tower and embedding on the first rank and "
            "the head on the last: make it by `trimtab map --for pipeline`"
        )
    counts = tuple(stop - first for first, stop in itertools.pairwise(changes))
    return StageCounts(layers=counts, gpus=tuple(gpus))


def _is_block(module: str) -> bool:
    """Decoder layers of every family's language model; towers are `visual`, `vision_tower`, `vision_model`, `vpm`."""
    stem, _, number = module.rpartition(".")
    return number.isdigit() and stem.endswith(
        ("language_model.layers", "language_model.model.layers", "llm.model.layers")
    )
