"""The handle of a model whose images are shared: its life, from the first replaced function to the last put back.

What ranks agree on is `agreement.py`, what they encode and exchange is `encode.py`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from torch import nn

from trimtab.errors import TrimtabError
from trimtab.runtime.vision.encode import Load, Settings, Sharing, encode_nothing, encode_shared, run_on_nothing
from trimtab.runtime.vision.exchange import sum_in_place
from trimtab.runtime.vision.hooks import Heartbeat, PatchedFunction, StandIn
from trimtab.runtime.vision.inputs import Family, VisionInputs
from trimtab.runtime.vision.outputs import touch

_TEXT = ("language_model", "lm_head", "text_model", "embed_tokens")


@dataclass(slots=True, kw_only=True, eq=False)
class VisionDataParallel:
    """Holds the replaced functions of one model; `remove()` or leaving the `with` block puts them back."""

    model: nn.Module
    group: Any  # None: a heartbeat and no exchange
    settings: Settings
    family: Family
    config: Any
    functions: tuple[PatchedFunction, ...]
    over: Any = None  # group of the heartbeat
    sharing: Sharing | None = None  # None: a group of one, or none
    heartbeat: Heartbeat | None = None
    _inside: bool = False  # a call of our own: replaced functions are the module's own
    _paused: bool = False
    _installed: bool = False

    @property
    def num_ranks(self) -> int:
        return 1 if self.sharing is None else self.sharing.control.num_ranks

    @property
    def load(self) -> Load:
        """What this rank has encoded."""
        return Load() if self.sharing is None else self.sharing.load

    def __enter__(self) -> VisionDataParallel:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def install(self) -> None:
        """Replace the functions, once; a group of one without a heartbeat replaces nothing."""
        if self.sharing is None and self.heartbeat is None:
            return
        for function in self.functions:
            function.put(StandIn(function, self, self._encode))
        if self.heartbeat is not None:
            self.heartbeat.install()
        self._installed = True

    def remove(self) -> None:
        """Put the module's own functions back, end the connections; harmless when that was done already."""
        if not self._installed:
            return
        for function in self.functions:
            function.put_back()
        if self.heartbeat is not None:
            self.heartbeat.remove()
            self.heartbeat.control.close()
        if self.sharing is not None:
            self.sharing.control.close()
        self._installed = False

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Every rank encodes all images it holds, as without the handle; a heartbeat goes on."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def vision_parameters(self) -> list[nn.Parameter]:
        """All of the module that are not its language model's: the tower and what follows it up to the features."""
        module = self.functions[0].module
        children = [child for name in _TEXT if isinstance(child := getattr(module, name, None), nn.Module)]
        text = {id(p) for child in children for p in child.parameters()}
        return [p for p in module.parameters() if id(p) not in text]

    def reduce_gradients(self) -> None:
        """Average the vision parameters' gradients over the group, for a host that leaves replicas alone."""
        if self.sharing is None:
            return
        trained = [p for p in self.vision_parameters() if p.requires_grad]
        if self.load.calls and trained and all(p.grad is None for p in trained):
            raise TrimtabError(
                "no vision parameter has a gradient: call this after the backward, or average main_grad yourself "
                "(Megatron)"
            )
        gradients = [p.grad for p in trained if p.grad is not None]
        sum_in_place(gradients, self.group)  # N times those of one process: every rank has the whole loss (kappa = N)
        for gradient in gradients:
            gradient /= self.num_ranks

    # -- what the replaced functions and the hooks call ------------------------------------------------------------

    def _encode(self, function: PatchedFunction, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Called in place of the model's own function."""
        if self._inside:  # videos encoded as images call a second replaced function
            return function.original(*args, **kwargs)
        with self._within():
            if self.sharing is None or self._paused:
                output = function.original(*args, **kwargs)
            else:
                template = None if self.heartbeat is None else self.heartbeat.templates.pop(function.kind, None)
                output = encode_shared(self.sharing, function, args, kwargs, template)
        # what other ranks encode next and this one lacks runs now: the order of calls is the same on every rank
        zero = None if self.heartbeat is None else self.heartbeat.run_missing(function.kind)
        return output if zero is None else touch(output, zero)

    def run_without(self, function: PatchedFunction, template: VisionInputs) -> Any:
        """Take part in a call of the tower without an image of one's own: a zero that depends on it."""
        with self._within():
            if self.sharing is not None and self.settings.exchange == "dispatch" and not self._paused:
                return encode_nothing(self.sharing, function, template)
            return run_on_nothing(self.family, self.config, function, template).rows.sum()

    @contextlib.contextmanager
    def _within(self) -> Iterator[None]:
        """Calls of the replaced functions from here on are our own."""
        before, self._inside = self._inside, True
        try:
            yield
        finally:
            self._inside = before
