"""Parameters that take no memory, and operations on them that fake tensors cannot do alone. Tested with 5.23.

Only parameters are fake tensors. What touches them becomes fake; ids, pixels, positions, masks and grids stay real, so
code that reads them (`tolist`, boolean indices, loops over chosen experts) runs as ever. Not the `meta` device: its
attention falls apart into products and keeps what no kernel keeps.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

_INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)


def make_weightless(module: Any, *, without: Collection[str] = ()) -> None:
    """Gives `module` (built on the meta device) fake parameters on the CPU and real buffers, filled by Transformers.

    The modules `without` stay on the meta device.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    _fill(module, lambda parameter: _fake_parameter(parameter, fake), torch.device("cpu"), without)
    for part in module.modules():
        choose_kernels(getattr(part, "config", None), experts="grouped_mm")  # as the library does for real weights
    module.initialize_weights()


def choose_kernels(config: Any, *, experts: Literal["grouped_mm", "batched_mm"]) -> None:
    """Attention and experts by operations that fake tensors know; `run_operation` knows `grouped_mm` too."""
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = experts
    if "flash" in str(getattr(config, "_attn_implementation", None)):
        config._attn_implementation = "sdpa"


def make_real(module: Any, device: torch.device, *, without: Collection[str] = ()) -> None:
    """Gives `module` (built on the meta device) weights on `device`, drawn as for training from scratch."""

    def real(parameter: nn.Parameter) -> nn.Parameter:
        values = torch.zeros_like(parameter, device=device)  # 0 where Transformers draws nothing
        return nn.Parameter(values, requires_grad=parameter.requires_grad)

    _fill(module, real, device, without)
    module.initialize_weights()


def _fill(
    module: Any, make: Callable[[nn.Parameter], nn.Parameter], device: torch.device, without: Collection[str]
) -> None:
    """Parameters that `make` gives, one for all modules that share it, and zeros for buffers."""
    made: dict[int, nn.Parameter] = {}
    left = tuple(f"{name}." for name in without)
    for path, part in module.named_modules():
        if f"{path}.".startswith(left):
            part._is_hf_initialized = True
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = make(parameter)
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = torch.zeros_like(buffer, device=device)


def _fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
    made = nn.Parameter(values, requires_grad=parameter.requires_grad and parameter.is_floating_point())
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    return made


def run_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """One operation below autograd, as it would run on real tensors.

    Real boolean indices of fake values become places, so that their number is known. Products of experts have a fake
    kernel only for bf16. What a router chose is real: places in turn, so that all experts get as many rows.
    """
    packet = func.overloadpacket
    if packet in _INDEXING:
        args = _with_integer_indices(args)
    if packet is aten._grouped_mm:
        return _multiply_groups(func, args, kwargs)
    result = func(*args, **kwargs)
    if packet is aten.topk and isinstance(result[1], FakeTensor):
        return (result[0], _choose_in_turn(result[1], args[0].shape[args[2] if len(args) > 2 else -1]))
    return result


class Weightless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a weightless model runs as a real one: for passes of which nothing is counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operation(func, args, kwargs or {})


def _with_integer_indices(args: Sequence[Any]) -> tuple[Any, ...]:
    values, indices, *others = args
    if not isinstance(values, FakeTensor):
        return tuple(args)
    places: list[Tensor | None] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            places += index.nonzero(as_tuple=True)
        else:
            places.append(index)
    return (values, places, *others)


def _multiply_groups(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    a, b, *others = args
    if isinstance(a, FakeTensor) and a.dtype != torch.bfloat16:
        half = func(a.to(torch.bfloat16), b.to(torch.bfloat16), *others, **{**kwargs, "out_dtype": None})
        return half.to(a.dtype)
    return func(*args, **kwargs)


def _choose_in_turn(chosen: Tensor, num: int) -> Tensor:
    """Real places below `num` in the shape of `chosen`: 0 1 | 2 3 | 0 1 for pairs of 4."""
    with unset_fake_temporarily():
        return torch.arange(chosen.numel()).remainder(num).view(chosen.shape)
