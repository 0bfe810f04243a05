"""One stage as a module: the whole model's tree and its own forward, with weights for the stage's own layers only."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from trimtab.errors import UnsupportedPlanError
from trimtab.runtime.pipeline.cuts import Cuts, Way
from trimtab.runtime.pipeline.flow import ENCODED, Batch, Encoded, Sealed, Wire, arguments_of, feature_name, has_images
from trimtab.runtime.pipeline.hollow import find_layer, hollow_copy
from trimtab.runtime.pipeline.trace import Output, as_features, feature_rows, watch_encoders
from trimtab.runtime.vision.hooks import PatchedFunction


class _Done(Exception):  # noqa: N818 - no error
    """The rest of the forward is other stages'."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Run:
    """One micro-batch in one stage."""

    batch: Batch
    way: Way
    received: dict[str, Tensor]
    kept: frozenset[str]  # outputs of own layers that are sent on
    encoded: Encoded | None  # images that other ranks encoded
    made: dict[str, Tensor] = field(default_factory=dict)
    counts: Counter[str] = field(default_factory=Counter)


class StageModule(nn.Module):
    """Runs the layers `start <= i < stop` of the model's own forward: wires of the first cut in, of the last cut out.

    Layers of other stages are hollow. One in front of the stage hands on what was received of it, or zeros where
    nothing after the cut reads it; the first one of the text after the stage ends the forward.
    """

    def __init__(
        self, model: nn.Module, cuts: Cuts, start: int, stop: int, *, dtype: torch.dtype, device: torch.device
    ) -> None:
        super().__init__()
        self.cuts, self.start, self.stop, self.dtype, self.device = cuts, start, stop, dtype, device
        self.is_last = stop == len(cuts.layers)
        own = cuts.layers[start:stop]
        others = {x: functools.partial(self._elsewhere, x) for x in cuts.layers if x not in own}
        layers = {name: find_layer(model, name) for name in own}
        kept = {id(x): x for x in layers.values() if isinstance(x, nn.Module)}
        self.model = hollow_copy(model, others, own=kept, device=device)
        self._hooks = [
            layer.register_forward_hook(functools.partial(self._keep, name))
            for name, layer in layers.items()
            if isinstance(layer, nn.Module)
        ]
        watch_encoders(self.model, self._encode)
        self._run: _Run | None = None

    def release(self) -> None:
        """Leaves the model's own layers as they were."""
        for hook in self._hooks:
            hook.remove()

    def named_own(self, pairs: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """Of (name, tensor) pairs of `model` those that are no other stage's."""
        others = tuple(f"{name}." for i, name in enumerate(self.cuts.layers) if not self.start <= i < self.stop)
        return ((name, x) for name, x in pairs if not f"{name}.".startswith(others))

    def forward(self, *received: Tensor, sealed: Sealed) -> Tensor | tuple[Tensor, ...]:
        """Logits on the last stage, elsewhere the tensors of `Cuts.wires`, in their order, sizes and `dtype`.

        None is a view, or the very tensor that came in: schedules with split backwards detach them in place.
        """
        batch = sealed.batch
        wires = self.cuts.wires(self.start, batch)
        given = {wire.name: tensor for wire, tensor in zip(wires, received, strict=True)}
        sent = self.cuts.wires(self.stop, batch)
        run = _Run(
            batch=batch,
            way=self.cuts.way(batch),
            received=given,
            kept=frozenset(x.name for x in sent) - given.keys(),
            encoded=batch.get(ENCODED),
        )
        logits = self._run_model(run)
        if self.is_last:
            assert logits is not None
            return logits
        return tuple(self._as_sent(wire, run) for wire in sent)

    def _run_model(self, run: _Run) -> Tensor | None:
        """The model's own forward; None where another stage ends it."""
        images = {name for name in self.cuts.images if name in run.way.read}
        own = self.cuts.layers[self.start : self.stop]
        writers = {self.cuts.layers[run.way.writer[name]] for name in run.received}
        sees = has_images(run.batch) and bool(images & {*own, *writers})
        self._run = run
        try:
            result = self.model(**arguments_of(run.batch, with_images=sees))
        except _Done:
            return None
        finally:
            self._run = None
        logits: Tensor = result.logits if hasattr(result, "logits") else result[0]
        return logits

    def _as_sent(self, wire: Wire, run: _Run) -> Tensor:
        is_given = wire.name in run.received
        tensor = (run.received if is_given else run.made)[wire.name].to(self.dtype)
        if tensor._is_view() or is_given or not tensor.is_contiguous():
            tensor = tensor.clone(memory_format=torch.contiguous_format)
        if tensor.shape != wire.shape:
            raise UnsupportedPlanError(
                f"{wire.name} is {tuple(tensor.shape)} and {wire.shape} was expected after it: its size follows from "
                "nothing that all stages know; cut elsewhere"
            )
        graded = wire.requires_grad and torch.is_grad_enabled()
        assert tensor.requires_grad == graded, f"{wire.name} has requires_grad {tensor.requires_grad}"
        return tensor

    # -- layers -------------------------------------------------------------------------------------------------------

    def _elsewhere(self, path: str, *_: Any, **__: Any) -> Any:
        run = self._run
        assert run is not None, "a layer of another stage is called in a forward of only this one"
        calls, number = run.way.calls.get(path, []), run.counts[path]
        run.counts[path] += 1
        if number >= len(calls):
            raise UnsupportedPlanError(
                f"{path} lies on another stage, but the model calls it more often for this micro-batch than for the "
                "first of its kind: put the stages' cut after the vision tower"
            )
        call = calls[number]
        is_text = self.cuts.units[path].tower == "language"
        if is_text and call.reads and run.way.place[path] >= self.stop:
            raise _Done
        shapes = self.cuts.shapes(run.batch, [x.name for x in call.outputs if x.name not in run.received])
        return tree_unflatten([self._stand_in(leaf, run, shapes) for leaf in call.returned], call.spec)

    def _stand_in(self, leaf: Any, run: _Run, shapes: Mapping[str, tuple[int, ...]]) -> Any:
        if not isinstance(leaf, Output):
            return leaf
        if leaf.name in run.received:
            received = run.received[leaf.name]
            return received.clone() if run.way.trace.writes else received
        return torch.zeros(shapes[leaf.name], dtype=leaf.dtype, device=self.device)

    def _encode(self, function: PatchedFunction, *args: Any, **kwargs: Any) -> Any:
        """What a function that encodes images returns: of this stage's layers, of what was received, or of neither."""
        run, name = self._run, feature_name(function.kind, 0)
        calls = [] if run is None else run.way.calls.get(name, [])
        if run is None or not calls:
            return function.original(*args, **kwargs)
        names = [x.name for x in calls[0].outputs]
        if run.encoded is not None and function.kind in run.encoded.outputs:
            run.made |= {x: run.encoded.rows[x] for x in names}
            return run.encoded.outputs[function.kind]
        if run.way.place[name] < self.start:
            shapes = self.cuts.shapes(run.batch, [x for x in names if x not in run.received])
            rows = [self._stand_in(x, run, shapes) for x in calls[0].outputs]
            return as_features(run.way.trace.samples[name], rows)
        result = function.original(*args, **kwargs)
        if not run.kept.isdisjoint(names):
            run.made |= dict(zip(names, feature_rows(result) or [], strict=True))
        return result

    def _keep(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        """Of an own layer what is sent on."""
        run = self._run
        if run is None or not run.kept:
            return
        calls, number = run.way.calls.get(path, []), run.counts[path]
        run.counts[path] += 1
        if number < len(calls):
            for leaf, seen in zip(tree_leaves(output), calls[number].returned, strict=True):
                if isinstance(seen, Output) and seen.name in run.kept:
                    run.made[seen.name] = leaf
