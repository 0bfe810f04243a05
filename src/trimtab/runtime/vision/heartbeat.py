"""Ranks without images run the tower where another rank has some, so that sharded parameters meet on every rank.

FSDP, ZeRO and DDP wait in the tower for every rank: a batch without images on one rank stops all others. Before each
forward the ranks tell one another what they hold (a few integers over gloo). Where some have images and some none, the
latter encode the smallest image of the former and add no row of it to their embeddings. Where none has any, nothing
runs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from trimtab.runtime.vision.agreement import Control, compare_kinds
from trimtab.runtime.vision.families import PIXELS, Family, Kind
from trimtab.runtime.vision.hooks import Hook, PatchedFunction, given_by_name
from trimtab.runtime.vision.inputs import VisionInputs

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
        self._hooks = [
            self.module.register_forward_pre_hook(Hook(self._before_forward), with_kwargs=True),
            embedding.register_forward_hook(Hook(self._after_embedding)),
        ]

    def remove(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = given_by_name(module, args, kwargs)
        self._present = tuple(kind for kind in self.functions if given.get(PIXELS[kind]) is not None)
        self._missing = []
        for kind, holding, _ in list(compare_kinds(self.control, self._present, tuple(self.functions))):
            self._learn_template(kind, given, holding[0])
            if kind not in self._present:
                self._missing.append(kind)
        embeddings = given.get("inputs_embeds")
        return None if embeddings is None else ((), {**given, "inputs_embeds": self._touched(embeddings)})

    def _learn_template(self, kind: Kind, given: dict[str, Any], source: int) -> None:
        """Every rank learns what the smallest image of rank `source` is."""
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
        """Kinds this rank lacks, up to the next one it holds; `after` is the kind that was just encoded."""
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
