"""Restore the weights of a Trainer's checkpoint, by the mapping that `from_pretrained` uses, and prove it.

Transformers saves some models under other names than their modules have (Qwen2.5-VL, InternVL), and its Trainer loads a
checkpoint by the names in the file: every key is then missing, and training goes on from fresh weights. Here the class
of the model reads the checkpoint itself, and each tensor is compared before the first step.
"""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from trimtab.errors import PlanError
from trimtab.samples.problems import shorten

_ADAPTER = "adapter_model.safetensors"


def restore_weights(model: nn.Module, folder: Path) -> None:
    """Read the weights of a whole model out of `folder`; `PlanError` where one is left that cannot be."""
    if not isinstance(model, PreTrainedModel):
        raise PlanError(
            """Read the weights of a whole model out of `folder`; `PlanError` for what cannot be restored."""
            "names its weights are stored: load them yourself, and resume by PlanDataLoader.load_state_dict"
        )
    stored = _read_as_pretrained(model, folder)
    own = model.state_dict()
    with torch.no_grad():
        for name, tensor in own.items():
            if name in stored:
                tensor.copy_(stored[name])
    _refuse_other(own, stored, folder)


def check_adapters(model: Any, folder: Path) -> None:
    """`PlanError` where the adapters of a PEFT model are not those in `folder`."""
    from peft import get_peft_model_state_dict

    try:
        stored = load_file(folder / _ADAPTER)
    except (OSError, SafetensorError) as error:
        raise _unreadable(folder / _ADAPTER, error) from None
    _refuse_other(get_peft_model_state_dict(model), stored, folder)


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
        raise _unreadable(folder, error) from None
    wrong = {what: sorted(map(str, found[what])) for what in ("missing_keys", "unexpected_keys", "mismatched_keys")}
    if problems := [f"{len(keys)} {what.replace('_', ' ')} ({keys[0]})" for what, keys in wrong.items() if keys]:
        raise PlanError(
            f"{folder} does not hold this {type(model).__name__}: {', '.join(problems)}; resume with the model of the "
            "run, or start again"
        )
    tensors: dict[str, Tensor] = read.state_dict()
    return tensors


def _refuse_other(own: dict[str, Tensor], stored: dict[str, Tensor], folder: Path) -> None:
    """Compare tensor by tensor."""
    lacking = sorted(own.keys() - stored.keys())
    other = [name for name in own.keys() & stored.keys() if not _equal(own[name], stored[name])]
    if lacking or other:
        raise PlanError(
            f"{folder} was not restored: {len(lacking)} tensors are not in it and {len(other)} differ, "
            f"{(lacking + sorted(other))[0]} the first; resume with the model and the versions of the run"
        )


def _equal(own: Tensor, stored: Tensor) -> bool:
    return own.shape == stored.shape and bool(torch.equal(own.cpu(), stored.to(own.dtype).cpu()))


def _unreadable(path: Path, error: Exception) -> PlanError:
    return PlanError(
        f"{path} cannot be read ({type(error).__name__}: {shorten(str(error), 200)}): remove this checkpoint, and "
        "resume from the one before it"
    )
