"""Two gloo ranks under DDP and FSDP2, with and without recompute; spawned processes call `one_rank`. Needs torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from gloo_ranks import on_ranks
from recompute_checks import count_forwards, gradients, make_model
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from traced_families import find_layers

from trimtab.runtime.recompute.apply import apply

RANKS = 2


class Gathers(TorchDispatchMode):
    """Counts FSDP2's gathers of weights."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += "all_gather" in str(operator)
        return operator(*args, **(kwargs or {}))


def run_ranks(folder: Path) -> list[dict[str, Any]]:
    on_ranks(one_rank, str(folder), num_ranks=RANKS)
    return [row for rank in range(RANKS) for row in json.loads((folder / f"rows{rank}.json").read_text())]


def run_offloaded(folder: Path) -> list[dict[str, Any]]:
    on_ranks(one_offloaded_rank, str(folder), num_ranks=RANKS)
    return [row for rank in range(RANKS) for row in json.loads((folder / f"rows{rank}.json").read_text())]


def one_offloaded_rank(rank: int, folder: str) -> None:
    rows = []
    for wrapper in ("ddp", "fsdp2"):
        found = []
        for offloaded in (False, True):
            family, model = make_model("qwen2_5_vl", "sdpa")
            handle = apply(model, find_layers(model) if offloaded else [], granularity="offload")
            wrapped: nn.Module = model
            if wrapper == "ddp":
                wrapped = DistributedDataParallel(model)
            else:
                for name in find_layers(model):
                    fully_shard(model.get_submodule(name).mlp)  # its weights are gathered within the layer
                    fully_shard(model.get_submodule(name))
                fully_shard(model)
            found.append({k: as_whole(x) for k, x in gradients(wrapped, family.inputs).items()})
        plain, moved = found
        equal = plain.keys() == moved.keys() and all(torch.equal(moved[k], plain[k]) for k in plain)
        rows.append({"wrapper": wrapper, "rank": rank, "equal": equal, "moved": handle.host.most_bytes})
    Path(folder, f"rows{rank}.json").write_text(json.dumps(rows))


def one_rank(rank: int, folder: str) -> None:
    rows = []
    for wrapper in ("ddp", "fsdp2"):
        expected, gathers = step(wrapper, None)[:2]
        for when in ("before", "after"):
            found, again, forwards, wanted = step(wrapper, when)
            equal = found.keys() == expected.keys() and all(torch.equal(found[k], expected[k]) for k in expected)
            rows.append(
                {
                    "wrapper": wrapper,
                    "when": when,
                    "rank": rank,
                    "equal": equal and len(expected) > 20,
                    "forwards": forwards,
                    "wanted": wanted,
                    "gathers": (gathers, again),
                }
            )
    Path(folder, f"rows{rank}.json").write_text(json.dumps(rows))


def step(wrapper: str, when: str | None) -> tuple[dict[str, torch.Tensor], int, dict[str, int], dict[str, int]]:
    family, model = make_model("qwen2_5_vl", "sdpa")
    layers = find_layers(model)
    chosen = layers[::2]
    if when == "before":
        apply(model, chosen)
    wrapped: nn.Module = model
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for name in layers:
            fully_shard(model.get_submodule(name))
        fully_shard(model)
    if when == "after":
        apply(wrapped, chosen)
    counts = count_forwards(model, layers)
    with Gathers() as gathers:
        found = gradients(wrapped, family.inputs)
    whole = {name.removeprefix("module."): as_whole(gradient) for name, gradient in found.items()}
    wanted = {name: 2 if when is not None and name in chosen else 1 for name in layers}
    return whole, gathers.count, dict(counts), wanted


def as_whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
