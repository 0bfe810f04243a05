"""Ranks without images run the tower where another rank has some, so that sharded parameters meet on every rank.

FSDP, ZeRO and DDP wait in the tower for every rank: a batch without images on one rank stops all others. Before each
forward the ranks tell one another what they hold (a few integers over gloo). Where some have images and some none, the
latter encode the smallest image of the former and add no row of it to their embeddings. Where none has any, nothing
runs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from trimtab.runtime.vision.agree import compare_kinds
from trimtab.runtime.vision.control import Control
from trimtab.runtime.vision.families import PIXELS, Kind
from trimtab.runtime.vision.seams import Hook, given_by_name

KINDS: tuple[Kind, ...] = ("image", "video")
"""In the order in which models encode them: every rank runs them in this order."""


@dataclass(slots=True, kw_only=True, eq=False)
class Heartbeat:
    """What the ranks of one forward hold; hooks on the module whose forward takes the pixels."""

    control: Control
    module: nn.Module
    kinds: tuple[Kind, ...]
    prepare: Callable[[Kind, dict[str, Any] | None, int], None]  # before the forward, on all ranks, where one lacks it
    run: Callable[[Kind], Tensor]  # the tower on next to nothing: a zero that depends on it
    _present: tuple[Kind, ...] = ()
    _missing: list[Kind] = field(default_factory=list)
    _hooks: list[Any] = field(default_factory=list)

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
        self._present = tuple(kind for kind in self.kinds if given.get(PIXELS[kind]) is not None)
        self._missing = []
        for kind, holding, _ in list(compare_kinds(self.control, self._present, self.kinds)):
            self.prepare(kind, given if kind in self._present else None, holding[0])
            if kind not in self._present:
                self._missing.append(kind)
        embeddings = given.get("inputs_embeds")
        return None if embeddings is None else ((), {**given, "inputs_embeds": self._touched(embeddings)})

    def _after_embedding(self, _module: nn.Module, _args: Any, embeddings: Tensor) -> Tensor:
        return self._touched(embeddings)

    def _touched(self, embeddings: Tensor) -> Tensor:
        zero = self.run_missing(None)
        return embeddings if zero is None else embeddings + zero.to(embeddings)

    def run_missing(self, after: Kind | None) -> Tensor | None:
        """Kinds this rank lacks, up to the next one it holds; `after` is the kind that was just encoded."""
        zero: Tensor | None = None
        start = 0 if after is None or after not in self.kinds else self.kinds.index(after) + 1
        for kind in self.kinds[start:]:
            if kind in self._present:
                break
            if kind in self._missing:
                self._missing.remove(kind)
                own = self.run(kind)
                zero = own if zero is None else zero + own
        return zero
