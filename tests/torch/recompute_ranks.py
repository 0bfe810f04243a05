"""Two gloo ranks under DDP and FSDP2, with and without recompute; spawned processes call `one_rank`. Needs torch."""

import json
from dataclasses import dataclass
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

from trimtab.runtime.recompute import apply

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


WAYS = ("before", "after")  # recompute is set before or after the wrapper


@dataclass(frozen=True)
class Step:
    gradients: dict[str, torch.Tensor]
    num_gathers: int
    forwards: dict[str, int]


def one_rank(rank: int, folder: str) -> None:
    rows = []
    for wrapper in ("ddp", "fsdp2"):
        plain = step(wrapper, None)
        expected = plain.gradients
        for when in WAYS:
            found = step(wrapper, when)
            own = found.gradients
            equal = own.keys() == expected.keys() and all(torch.equal(own[k], expected[k]) for k in expected)
            rows.append(
                {
                    "wrapper": wrapper,
                    "when": when,
                    "rank": rank,
                    "equal": equal and len(expected) > 20,
                    "forwards": list(found.forwards.values()),
                    "wanted": [2 if i % 2 == 0 else 1 for i in range(len(found.forwards))],
                    "gathers": (plain.num_gathers, found.num_gathers),
                }
            )
    Path(folder, f"rows{rank}.json").write_text(json.dumps(rows))


def step(wrapper: str, when: str | None) -> Step:
    """Every second layer recomputes; `when` None: none does."""
    family, model = make_model("qwen2_5_vl", "sdpa")
    layers = find_layers(model)
    apply(model, layers[::2] if when == "before" else [])
    wrapped: nn.Module = model
    if wrapper == "ddp":
        wrapped = DistributedDataParallel(model)
    else:
        for name in layers:
            fully_shard(model.get_submodule(name).mlp)  # its weights are gathered within the layer
            fully_shard(model.get_submodule(name))
        fully_shard(model)
    if when == "after":
        apply(wrapped, layers[::2])
    forwards = count_forwards(model, layers)
    with Gathers() as gathers:
        found = gradients(wrapped, family.inputs)
    whole = {name.removeprefix("module."): as_whole(gradient) for name, gradient in found.items()}
    return Step(whole, gathers.count, {name: forwards[name] for name in layers})


def as_whole(gradient: torch.Tensor) -> torch.Tensor:
    return gradient.full_tensor() if hasattr(gradient, "full_tensor") else gradient
