"""The functions that are replaced on a model's instance: where image features come out."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
import transformers
from torch import Tensor, nn

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.agreement import Control, compare_kinds
from trimtab.runtime.vision.inputs import PIXELS, Family, Kind, VisionInputs


class StandIn:
    """Stands for a function of a module, on the instance."""

    def __init__(self, function: PatchedFunction, handle: Any, encode: Callable[..., Any]) -> None:
        self.function, self.handle = function, handle
        # a compiler stops here: what ranks agree on and exchange differs from call to call
        self._encode = torch.compiler.disable(encode)  # type: ignore[no-untyped-call]
        self.__wrapped__ = function.original  # for its signature
        self.__name__, self.__doc__ = function.name, function.original.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._encode(self.function, args, kwargs)


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
        """Return all arguments by name."""
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
    """Return what a module's forward was called with."""
    given = inspect.signature(module.forward).bind_partial(*args, **kwargs).arguments
    return {**given.pop("kwargs", {}), **given}


def holder_of(module: nn.Module) -> Any:
    """The handle whose stand-in one of this module's functions is, or None."""
    stand_ins = (module.__dict__.get(name) for name in (*FUNCTIONS, "forward"))
    return next((stand_in.handle for stand_in in stand_ins if isinstance(stand_in, StandIn)), None)


def is_shared(model: nn.Module) -> bool:
    """Return whether a function of the model is replaced already."""
    return any(holder_of(module) is not None for module in model.modules())


def find_functions(model: nn.Module, at: Place | None = None) -> tuple[PatchedFunction, ...]:
    """Find `get_image_features` and `get_video_features` of the innermost module with them, or the tower's `forward`.

    None: the former where the model has them, else the latter.
    """
    owners = _innermost([m for m in model.modules() if hasattr(m, "get_image_features")])
    if at is None:
        at = "features" if owners else "tower"
    if at == "features":
        if len(owners) != 1:
            raise TrimtabError(f"{type(model).__name__} has {len(owners)} get_image_features: pass the part with one")
        return tuple(_function(owners[0], name, kind) for name, kind in FUNCTIONS.items() if hasattr(owners[0], name))
    towers = _innermost([m for m in model.modules() if hasattr(m, "config") and _takes_grid(m)])
    if len(towers) != 1:
        raise TrimtabError(f"{type(model).__name__} has {len(towers)} towers of grid_thw: pass one, or at='features'")
    return (_function(towers[0], "forward", "tower"),)


def _takes_grid(module: nn.Module) -> bool:
    return "grid_thw" in inspect.signature(type(module).forward).parameters


def _innermost(modules: list[nn.Module]) -> list[nn.Module]:
    """Return those that hold no other of them."""
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


# Ranks without images run the tower where another rank has some, so that sharded parameters meet on every rank.
#
# FSDP, ZeRO and DDP wait in the tower for every rank: a batch without images on one rank stops all others. Before each
# forward the ranks tell one another what they hold (a few integers over gloo). Where some have images and some none,
# the latter encode the smallest image of the former and add no row of it to their embeddings. Where none has any,
# nothing runs.


KINDS: tuple[Kind, ...] = ("image", "video")
"""In the order in which models encode them: every rank runs them in this order."""


@dataclass(slots=True, kw_only=True, eq=False)
class Heartbeat:
    """What the ranks of one forward hold; hooks on the module whose forward takes the pixels."""

    control: Control
    functions: Mapping[Kind, PatchedFunction]
    family: Family
    config: Any
    is_dispatch: bool  # ranks with images too need a template: those of others may be the only ones they encode
    run: Callable[[PatchedFunction, VisionInputs], Tensor]  # the tower on next to nothing: a zero that depends on it
    templates: dict[Kind, VisionInputs] = field(default_factory=dict)  # the smallest image of each kind one lacks
    _present: tuple[Kind, ...] = ()
    _missing: list[Kind] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)

    @property
    def module(self) -> nn.Module:
        return next(iter(self.functions.values())).module

    def install(self) -> None:
        # after the embedding and not before it: sharded parameters are gathered in one order on all ranks
        embedding: nn.Module = self.module.get_input_embeddings()  # type: ignore[operator]
        before, after = map(torch.compiler.disable, (self._before_forward, self._after_embedding))
        self._hooks = [
            self.module.register_forward_pre_hook(before, with_kwargs=True),
            embedding.register_forward_hook(after),
        ]

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = given_by_name(module, args, kwargs)
        self._present = tuple(kind for kind in self.functions if given.get(PIXELS[kind]) is not None)
        self._missing = []
        for kind, source in compare_kinds(self.control, self._present, tuple(self.functions)):
            self._learn_template(kind, given, source)
            if kind not in self._present:
                self._missing.append(kind)
        embeddings = given.get("inputs_embeds")
        return None if embeddings is None else ((), {**given, "inputs_embeds": self._touched(embeddings)})

    def _learn_template(self, kind: Kind, given: dict[str, Any], source: int) -> None:
        """Learn on every rank what the smallest image of rank `source` is."""
        function, smallest = self.functions[kind], None
        if self.control.rank == source:
            known = {name: value for name, value in given.items() if name in function.signature.parameters}
            read = self.family.read(kind, known, self.config)
            smallest = self.family.smallest(read, self.config).to(torch.device("cpu"))
        template = self.control.send(smallest, source, "the smallest image")
        if kind not in self._present or self.is_dispatch:
            self.templates[kind] = template.to(next(function.module.parameters()).device)

    def _after_embedding(self, _module: nn.Module, _args: Any, embeddings: Tensor) -> Tensor:
        return self._touched(embeddings)

    def _touched(self, embeddings: Tensor) -> Tensor:
        zero = self.run_missing(None)
        return embeddings if zero is None else embeddings + zero.to(embeddings)

    def run_missing(self, after: Kind | None) -> Tensor | None:
        """Run kinds this rank lacks, up to the next one it holds; `after` is the kind that was just encoded."""
        zero: Tensor | None = None
        kinds = list(self.functions)
        start = 0 if after is None or after not in kinds else kinds.index(after) + 1
        for kind in kinds[start:]:
            if kind in self._present:
                break
            if kind in self._missing:
                self._missing.remove(kind)
                own = self.run(self.functions[kind], self.templates.pop(kind))
                zero = own if zero is None else zero + own
        return zero
