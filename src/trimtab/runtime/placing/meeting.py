"""Tensors of several devices that meet outside of any unit: all go to one of the devices before the operation runs.

Between units a model's own code joins what they made: image features into embedded text, hidden states of several
blocks, a table of positions with the patches. Units move their inputs by themselves, so the watch pauses inside them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode, _get_current_function_mode  # no public way to see the mode on top
from torch.utils._pytree import tree_leaves, tree_map  # nested arguments; torch has no public way to walk them
from torch.utils.weak import WeakTensorKeyDictionary

from trimtab.runtime.placing.stored_weights import StoredTensor

_MIXED = frozenset({"to", "copy_", "type_as", "set_", "__get__", "__set__"})  # take tensors of two devices
_IN_PLACE = frozenset({"__setitem__", "__getitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__ior__"})


class Absent(nn.Parameter):
    """A weight that is on its device only while its unit runs; says where that is when it is asked."""

    source: torch.Tensor | StoredTensor
    runs_on: torch.device

    @staticmethod
    def of(weight: torch.Tensor, source: torch.Tensor | StoredTensor, runs_on: torch.device) -> Absent:
        made = Absent(torch.empty_like(weight, device="meta"), requires_grad=False)
        made.source, made.runs_on = source, runs_on
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return self.runs_on

    def bring(self) -> torch.Tensor:
        """The values, on the device."""
        return (self.source.map() if isinstance(self.source, StoredTensor) else self.source).to(self.runs_on)


class Copies:
    """Copies on other devices of tensors that are still alive and have not changed since, for one forward."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._of: WeakTensorKeyDictionary = WeakTensorKeyDictionary()

    def move(self, tree: Any, device: torch.device) -> Any:
        """Every tensor in nested lists, tuples and dicts on `device`; states that layers share move themselves."""

        def one(leaf: Any) -> Any:
            if isinstance(leaf, torch.Tensor):
                return self._one(leaf, device)
            # `KVSharingDict` of Transformers
            return leaf.to(device) if hasattr(leaf, "to") and hasattr(leaf, "keys") else leaf

        return tree_map(one, tree)

    def move_inputs(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, stays: Collection[str]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments of a module on `device`, but for those that stay."""
        moved = {key: value if key in stays else self.move(value, device) for key, value in kwargs.items()}
        return self.move(args, device), moved

    def _one(self, tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        if tensor.is_inference() or tensor.requires_grad:  # no count of changes; a gradient has to find its way back
            return tensor.to(device)
        version, copies = self._of.get(tensor, (None, {}))  # type: ignore[no-untyped-call]
        if version != tensor._version:
            version, copies = tensor._version, {}
        if device not in copies:
            copies[device] = tensor.to(device)
            self._of[tensor] = (version, copies)
        copy: torch.Tensor = copies[device]
        return copy


class Meeting(TorchFunctionMode):
    """The watch: open during a model's forward and `generate`, paused while a unit runs."""

    def __init__(self, copies: Copies) -> None:
        super().__init__()
        self._copies, self._open = copies, False

    def around(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """`call` with the watch open."""

        @functools.wraps(call)
        def watched(*args: Any, **kwargs: Any) -> Any:
            with self._opened():
                return call(*args, **kwargs)

        return watched

    @contextmanager
    def _opened(self) -> Iterator[None]:
        if self._open:
            yield
            return
        self._open = True
        self.resume()
        try:
            yield
        finally:
            self.pause()
            self._open = False

    def pause(self) -> bool:
        """Whether it was watching: another mode may lie above it, and then it stays."""
        if _get_current_function_mode() is not self:  # type: ignore[no-untyped-call]
            return False
        self.__exit__(None, None, None)
        return True

    def resume(self) -> None:
        if self._open:
            self.__enter__()  # type: ignore[no-untyped-call]

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = getattr(func, "__name__", "")
        leaves = [] if name in _MIXED else tree_leaves((args, kwargs))
        operands = [x for x in leaves if isinstance(x, torch.Tensor)]
        if len(operands) < 2 and not any(isinstance(x, Absent) for x in operands):
            return func(*args, **kwargs)
        away = {x.device for x in operands if x.dim() or x.device.type != "cpu"}  # scalars of the host go with any
        if len(away) > 1 or any(isinstance(x, Absent) for x in operands):
            where = _place_of(name, operands)
            args, kwargs = self._gather(args, where), self._gather(kwargs, where)
        return func(*args, **kwargs)

    def _gather(self, tree: Any, where: torch.device) -> Any:
        def one(leaf: Any) -> Any:
            if isinstance(leaf, Absent):
                return leaf.bring().to(where)
            is_operand = isinstance(leaf, torch.Tensor) and (leaf.dim() or leaf.device.type != "cpu")
            return self._copies.move(leaf, where) if is_operand else leaf

        return tree_map(one, tree)


def _place_of(name: str, operands: list[torch.Tensor]) -> torch.device:
    """That of the operand that is changed or read from, else of the largest: the least has to move."""
    if name in _IN_PLACE or (name.endswith("_") and not name.endswith("__")):
        return operands[0].device
    present = [x for x in operands if not isinstance(x, Absent)] or operands
    return max(present, key=lambda x: x.numel() * x.element_size()).device
