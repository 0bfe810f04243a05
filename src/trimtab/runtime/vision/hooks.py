"""The functions that are replaced on a model's instance: where image features come out."""

from __future__ import annotations

import copy
import inspect
import types
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import transformers
from torch import nn

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.families import Kind


class StandIn:
    """Stands for a function of a module, on the instance. A copy of the module has the function itself again."""

    def __init__(self, function: PatchedFunction, handle: Any, encode: Callable[..., Any]) -> None:
        self.function, self.handle = function, handle
        # a compiler stops here: what ranks agree on and exchange differs from call to call
        self._encode = torch.compiler.disable(encode)  # type: ignore[no-untyped-call]
        self.__wrapped__ = function.original  # for its signature
        self.__name__, self.__doc__ = function.name, function.original.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._encode(self.function, args, kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        function = self.function
        if function.replaced is not None:
            return copy.deepcopy(function.replaced, memo)
        return types.MethodType(function.original.__func__, copy.deepcopy(function.module, memo))  # type: ignore[attr-defined]

    def __reduce__(self) -> Any:
        raise TrimtabError(
            "a model whose images are shared among ranks was to be pickled, and its connections to other processes "
            "cannot be: save its state_dict(), or call remove() of the handle first"
        )


class Hook:
    """A hook of a handle. A copy of the module has one that does nothing."""

    def __init__(self, run: Callable[..., Any]) -> None:
        self._run = torch.compiler.disable(run)  # type: ignore[no-untyped-call]

    def __call__(self, *args: Any) -> Any:
        return self._run(*args)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return Hook(_do_nothing)

    def __reduce__(self) -> Any:
        return Hook, (_do_nothing,)


def _do_nothing(*_: Any) -> None:
    """For copies."""


RETURNS_OBJECTS = not str(transformers.__version__).startswith("4.")
"""Functions that encode images return one object with all features; before, tensors in tuples and lists."""

Place = Literal["features", "tower"]
FUNCTIONS: dict[str, Kind] = {"get_image_features": "image", "get_video_features": "video"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PatchedFunction:
    """One function of one module."""

    module: nn.Module
    name: str
    kind: Kind
    original: Callable[..., Any]
    replaced: Any  # what the instance itself had under that name before, or None
    signature: inspect.Signature

    def bind(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """All arguments by name."""
        bound = dict(self.signature.bind(*args, **kwargs).arguments)
        for name, parameter in self.signature.parameters.items():
            if parameter.kind is inspect.Parameter.VAR_KEYWORD:
                bound.update(bound.pop(name, {}))
        return bound

    def call(self, arguments: dict[str, Any]) -> Any:
        """The module's own function, returning an object where it can."""
        as_object = {"return_dict": True} if RETURNS_OBJECTS and self.kind != "tower" else {}
        return self.original(**arguments, **as_object)

    def put(self, stand_in: Callable[..., Any]) -> None:
        self.module.__dict__[self.name] = stand_in

    def put_back(self) -> None:
        self.module.__dict__.pop(self.name, None)
        if self.replaced is not None:
            self.module.__dict__[self.name] = self.replaced


def given_by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a module's forward was called with."""
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    return {**given.pop("kwargs", {}), **given}


def holder_of(module: nn.Module) -> Any:
    """The handle whose stand-in one of this module's functions is, or None."""
    stand_ins = (module.__dict__.get(name) for name in (*FUNCTIONS, "forward"))
    return next((stand_in.handle for stand_in in stand_ins if isinstance(stand_in, StandIn)), None)


def find_functions(model: nn.Module, at: Place | None = None) -> tuple[PatchedFunction, ...]:
    """`get_image_features` and `get_video_features` of the innermost module that has them, or the tower's `forward`.

    None: the former where the model has them, else the latter.
    """
    owners = _innermost([m for m in model.modules() if hasattr(m, "get_image_features")])
    if at is None:
        at = "features" if owners else "tower"
    if at == "features":
        if len(owners) != 1:
            raise TrimtabError(
                f"{type(model).__name__} has {len(owners)} modules with get_image_features, and exactly one can be "
                f"shared: pass that part of the model"
            )
        return tuple(_function(owners[0], name, kind) for name, kind in FUNCTIONS.items() if hasattr(owners[0], name))
    towers = _innermost([m for m in model.modules() if hasattr(m, "config") and _takes_grid(m)])
    if len(towers) != 1:
        raise TrimtabError(
            f"{type(model).__name__} has {len(towers)} vision towers whose forward takes grid_thw, and exactly one can "
            f"be shared: pass the tower itself, or the model with at='features'"
        )
    return (_function(towers[0], "forward", "tower"),)


def _takes_grid(module: nn.Module) -> bool:
    return "grid_thw" in inspect.signature(type(module).forward).parameters


def _innermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Those that hold no other of them."""
    return [m for m in modules if not any(o is not m and any(o is x for x in m.modules()) for o in modules)]


def _function(module: nn.Module, name: str, kind: Kind) -> PatchedFunction:
    original = getattr(module, name)
    return PatchedFunction(
        module=module,
        name=name,
        kind=kind,
        original=original,
        replaced=module.__dict__.get(name),
        signature=inspect.signature(original),
    )
