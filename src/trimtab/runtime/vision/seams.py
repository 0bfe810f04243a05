"""The functions that are replaced on a model's instance: where image features come out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.families import Kind

Place = Literal["features", "tower"]
FUNCTIONS: dict[str, Kind] = {"get_image_features": "image", "get_video_features": "video"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Seam:
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
        if self.kind != "tower":
            return self.original(**arguments, return_dict=True)
        rest = dict(arguments)
        first = rest.pop(next(iter(rest)))  # the pixels, under another name in every family
        return self.original(first, **rest)

    @property
    def holder(self) -> Any:
        """The handle whose stand-in is there already, or None."""
        return getattr(self.original, "handle", None)

    def put(self, stand_in: Callable[..., Any]) -> None:
        self.module.__dict__[self.name] = stand_in

    def put_back(self) -> None:
        self.module.__dict__.pop(self.name, None)
        if self.replaced is not None:
            self.module.__dict__[self.name] = self.replaced


def find_seams(model: nn.Module, at: Place | None = None) -> tuple[Seam, ...]:
    """`get_image_features` and `get_video_features` of the innermost module that has them, or the tower's `forward`.

    None: the former from Transformers 5 on, where they return one object with all features; else the latter.
    """
    import transformers

    owners = _innermost([m for m in model.modules() if hasattr(m, "get_image_features")])
    if at is None:
        at = "features" if owners and int(transformers.__version__.split(".")[0]) >= 5 else "tower"
    if at == "features":
        if len(owners) != 1:
            raise TrimtabError(
                f"{type(model).__name__} has {len(owners)} modules with get_image_features, and exactly one can be "
                f"shared: pass that part of the model"
            )
        return tuple(_seam(owners[0], name, kind) for name, kind in FUNCTIONS.items() if hasattr(owners[0], name))
    towers = _innermost([m for m in model.modules() if hasattr(m, "config") and _takes_grid(m)])
    if len(towers) != 1:
        raise TrimtabError(
            f"{type(model).__name__} has {len(towers)} vision towers whose forward takes grid_thw, and exactly one can "
            f"be shared: pass the tower itself, or the model with at='features'"
        )
    return (_seam(towers[0], "forward", "tower"),)


def _takes_grid(module: nn.Module) -> bool:
    return "grid_thw" in inspect.signature(type(module).forward).parameters


def _innermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Those that hold no other of them."""
    return [m for m in modules if not any(o is not m and any(o is x for x in m.modules()) for o in modules)]


def _seam(module: nn.Module, name: str, kind: Kind) -> Seam:
    original = getattr(module, name)
    return Seam(
        module=module,
        name=name,
        kind=kind,
        original=original,
        replaced=module.__dict__.get(name),
        signature=inspect.signature(original),
    )
