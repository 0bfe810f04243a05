"""A Trainer's checkpoint comes back whole: weights by the mapping of `from_pretrained`, all states compared.

Transformers saves some models under other names than their modules have (Qwen2.5-VL, InternVL), and its Trainer loads a
checkpoint by the names in the file: every key is then missing, and training goes on from fresh weights. Here the class
of the model reads the checkpoint itself. The Trainer also goes on with a fresh optimizer where a checkpoint lacks its
states. Whoever reads them, each weight and each state is compared before the first step.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import PreTrainedModel

from trimtab.errors import PlanError, shorten

Weighed = dict[str, list[int]]
"""By name the sum of a tensor's bits, as whole numbers, and how many of these are not 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptState:
    """What a checkpoint was taken of."""

    weights: Weighed
    optimizer: Weighed | None = None  # None: an older checkpoint
    scheduler: list[float] | None = None  # steps done, then the rate of each group


def restore_weights(model: nn.Module, folder: Path) -> None:
    """Read the weights of a whole model out of `folder`; `PlanError` where one is left that cannot be."""
    if not isinstance(model, PreTrainedModel):
        raise PlanError(f"{type(model).__name__} does not say its stored names: use PlanDataLoader.load_state_dict")
    stored = _read_as_pretrained(model, folder)
    with torch.no_grad():
        for name, tensor in model.state_dict().items():
            if name in stored:
                tensor.copy_(stored[name])


def weigh(model: nn.Module, device: torch.device) -> Weighed:
    """Weigh every weight, over all ranks; collective.

    Weights in pieces (FSDP, ZeRO-3) and whole ones on every rank count alike: both numbers of a weight grow by one
    factor, the ranks that hold it.
    """
    return _weigh(dict(model.named_parameters()), device)


def weigh_optimizer(optimizer: Any, device: torch.device) -> Weighed:
    """Weigh every state of an optimizer, over all ranks; collective.

    Of ZeRO's these are the parts that each rank saves, its weights in float32 among them.
    """
    own = getattr(optimizer, "optimizer", optimizer)  # of Accelerate's wrapper
    if isinstance(own, torch.optim.Optimizer):
        return _weigh(dict(_states(own)), device)
    return _weigh(dict(_tensors(own.state_dict(), "state")), device)


def _states(optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, parameter in enumerate(parameters):
        for key, value in sorted(optimizer.state.get(parameter, {}).items()):
            if isinstance(value, Tensor):
                yield f"{key} of parameter {number}", value


def _tensors(held: Any, name: str) -> Iterator[tuple[str, Tensor]]:
    """The tensors in nested lists and dictionaries, and steps done, which some optimizers count in whole numbers."""
    if isinstance(held, Tensor):
        yield name, held
    elif name.endswith(".step") and isinstance(held, int):
        yield name, torch.tensor(held)
    elif isinstance(held, (dict, list, tuple)):
        for key, part in held.items() if isinstance(held, dict) else enumerate(held):
            yield from _tensors(part, f"{name}.{key}")


def stand_of(scheduler: Any) -> list[float] | None:
    """Return a scheduler's steps and rates; None where it does not tell them."""
    own = getattr(scheduler, "scheduler", scheduler)
    if not hasattr(own, "last_epoch") or not hasattr(own, "_last_lr"):
        return None
    return [float(own.last_epoch), *map(float, own._last_lr)]


def _weigh(tensors: dict[str, Tensor], device: torch.device) -> Weighed:
    parts = [_own_part(tensor) for tensor in tensors.values()]
    rows = [[int(part.sum(dtype=torch.int64)), int(part.count_nonzero())] for part in parts]
    table = torch.tensor(rows, dtype=torch.int64, device=device).reshape(-1, 2)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(table)
    return dict(zip(tensors, table.tolist(), strict=True))


def _own_part(parameter: Any) -> Tensor:
    """Return this rank's part of a weight, as whole numbers."""
    part = parameter.to_local() if hasattr(parameter, "to_local") else parameter
    if hasattr(parameter, "ds_tensor"):  # ZeRO-3, whose last parts are filled up
        part, rank = parameter.ds_tensor.flatten(), dist.get_rank(parameter.ds_process_group)
        part = part[: max(0, parameter.ds_numel - rank * part.numel())]
    sizes = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int32}
    return part.detach().reshape(-1).view(sizes[part.element_size()])  # type: ignore[no-any-return]


def check_weights(model: nn.Module, kept: Weighed, where: object, device: torch.device) -> None:
    """Raise `PlanError` where a weight is not the one that the checkpoint `where` was taken of; collective."""
    _refuse_others("weights", weigh(model, device), kept, where, "resume with the model, host and versions of the run")


def check_states(optimizer: Any, scheduler: Any, kept: KeptState, where: object, device: torch.device) -> None:
    """Raise `PlanError` where optimizer or scheduler do not go on from where the checkpoint stands; collective."""
    if kept.optimizer is not None:
        found = weigh_optimizer(optimizer, device)
        advice = "resume with the optimizer of the run, from a checkpoint that has its states (save_only_model=False)"
        _refuse_others("states of the optimizer", found, kept.optimizer, where, advice)
    stand = stand_of(scheduler)
    if stand is not None and kept.scheduler is not None and stand != kept.scheduler:
        raise PlanError(
            f"{where} has its scheduler at step {kept.scheduler[0]:.0f} and rate {kept.scheduler[-1]:g}, not at "
            f"{stand[0]:.0f} and {stand[-1]:g}: resume with the scheduler of the run"
        )


def _refuse_others(what: str, found: Weighed, kept: Weighed, where: object, advice: str) -> None:
    lacking = found.keys() ^ kept.keys()
    other = [name for name in found.keys() & kept.keys() if not _agree(found[name], kept[name])]
    if lacking or other:
        raise PlanError(
            f"{where} was not restored: {len(lacking)} {what} are in one of checkpoint and run alone, and {len(other)} "
            f"differ, {min([*lacking, *other])} the first; {advice}"
        )


def _agree(own: list[int], kept: list[int]) -> bool:
    (bits, count), (kept_bits, kept_count) = own, kept
    return bits * kept_count == kept_bits * count and (count == 0) == (kept_count == 0)


def _read_as_pretrained(model: PreTrainedModel, folder: Path) -> dict[str, Tensor]:
    """The tensors of the checkpoint by the names of the model's modules."""
    dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
    try:
        read, found = type(model).from_pretrained(
            folder,
            config=copy.deepcopy(model.config),
            dtype=torch.float32 if torch.float32 in dtypes else model.dtype,  # the widest: each is cast to its own
            local_files_only=True,
            output_loading_info=True,
        )
    except (OSError, ValueError, KeyError, RuntimeError, EOFError, SafetensorError) as error:
        raise unreadable(folder, error) from None
    wrong = {what: sorted(map(str, found[what])) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if problems := [f"{len(keys)} {what.replace('_', ' ')} ({keys[0]})" for what, keys in wrong.items() if keys]:
        raise PlanError(
            f"{folder} does not hold this {type(model).__name__}: {', '.join(problems)}; resume with the run's model"
        )
    tensors: dict[str, Tensor] = read.state_dict()
    return tensors


def unreadable(path: Path, error: Exception) -> PlanError:
    return PlanError(f"{path} is not readable ({type(error).__name__}: {shorten(str(error), 200)}): remove it")
