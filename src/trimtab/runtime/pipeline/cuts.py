"""What crosses each cut of a model, for the micro-batch at hand: `Cuts`."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_unflatten

from trimtab.errors import UnsupportedPlanError, join_problems
from trimtab.models.asking.units import Unit
from trimtab.runtime.pipeline.trace import (
    ENCODED,
    Batch,
    Call,
    Encoded,
    Output,
    Sealed,
    Trace,
    Tracer,
    Wire,
    arguments_of,
    as_features,
    feature_name,
    feature_rows,
    find_layer,
    has_images,
    hollow_copy,
    is_pixels,
    parameters_of,
    tensors_of,
    try_trace,
    watch_encoders,
)
from trimtab.runtime.vision.hooks import PatchedFunction

Shape = tuple[int, ...]
Rule = tuple[str | None, Fraction]
"""A quantity of the micro-batch and a factor; None: the factor is the size itself."""


class SizeRules:
    """Every rule for each dimension that all micro-batches seen so far have obeyed.

    A size is predicted where the rules that are left agree. Where they do not, `None` asks for one more observation,
    which leaves fewer of them: after two or three micro-batches no more is asked.
    """

    def __init__(self) -> None:
        self._rules: dict[str, list[list[Rule]]] = {}

    def observe(self, shapes: Mapping[str, Shape], quantities: Mapping[str, int]) -> None:
        for name, shape in shapes.items():
            # every rule that fitted so far; one that misses once is gone
            known = self._rules.get(name)
            if known is None or len(known) != len(shape):
                self._rules[name] = [_all_rules(size, quantities) for size in shape]
                continue
            self._rules[name] = [
                [rule for rule in rules if _apply(rule, quantities) == size]
                for rules, size in zip(known, shape, strict=True)
            ]

    def foretell(self, name: str, quantities: Mapping[str, int]) -> Shape | None:
        """Predict the shape; None where what was seen does not settle it."""
        shape = []
        for rules in self._rules.get(name, [[]]):
            sizes = {_apply(rule, quantities) for rule in rules}
            if len(sizes) != 1 or None in sizes:
                return None
            shape += [size for size in sizes if size is not None]
        return tuple(shape)


def _all_rules(size: int, quantities: Mapping[str, int]) -> list[Rule]:
    """List rules: that size always, or in proportion to a quantity, by a whole number or one part of one."""
    # sizes follow from others by whole factors: rows from patches, patches from pixels
    found: list[Rule] = [(None, Fraction(size))]
    for key, value in quantities.items():
        if value and size:
            factor = Fraction(size, value)
            if 1 in (factor.numerator, factor.denominator):
                found.append((key, factor))
    return found


def _apply(rule: Rule, quantities: Mapping[str, int]) -> int | None:
    key, factor = rule
    size = factor if key is None else factor * quantities.get(key, 0)
    return int(size) if size.denominator == 1 else None


Kind = tuple[str, ...]
"""Keys of images that a micro-batch has: another kind runs other layers, or some of them again."""


@dataclass(kw_only=True, eq=False)
class Way:
    """The forward of one kind of micro-batch, as the layers of a plan."""

    layers: tuple[str, ...]
    trace: Trace
    graded: frozenset[str]  # outputs that a trained parameter lies in front of
    sizes: SizeRules = field(default_factory=SizeRules)

    @cached_property
    def place(self) -> dict[str, int]:
        """Return the place of each layer in the plan's order; image features are made where their last layer is."""
        # a call that is no layer of the plan runs where the last of what it reads is made
        found = {name: i for i, name in enumerate(self.layers)}
        written = dict(found)
        for call in self.trace.calls:
            if call.layer not in found:
                found[call.layer] = max((written[x] for x in call.reads), default=0)
            written |= {x.name: found[call.layer] for x in call.outputs}
        return found

    @cached_property
    def writer(self) -> dict[str, int]:
        """Return output -> place of the layer that returns it."""
        written = {x.name: self.place[call.layer] for call in self.trace.calls for x in call.outputs}
        return {**self.place, **written}  # bare parameters by their own names

    @cached_property
    def calls(self) -> dict[str, list[Call]]:
        found: dict[str, list[Call]] = {}
        for call in self.trace.calls:
            found.setdefault(call.layer, []).append(call)
        return found

    @cached_property
    def outputs(self) -> dict[str, Output]:
        return {x.name: x for call in self.trace.calls for x in call.outputs}

    @property
    def read(self) -> frozenset[str]:
        """Return the layers that the logits depend on."""
        return self._needed & set(self.layers)

    @cached_property
    def _needed(self) -> frozenset[str]:
        # backwards from the logits
        needed, layers = set(self.trace.result), set()
        for call in reversed(self.trace.calls):
            if needed & {x.name for x in call.outputs}:
                needed |= call.reads
                layers.add(call.layer)
        return frozenset(layers | needed)

    @cached_property
    def last_reader(self) -> dict[str, int]:
        """Return output -> place of the last layer that reads it; after all layers where the logits do."""
        found = {name: len(self.layers) for name in self.trace.result}
        for call in self.trace.calls:
            if call.layer in self._needed:
                for name in call.reads:
                    found[name] = max(found.get(name, 0), self.place[call.layer])
        return found

    def alive(self, cut: int) -> tuple[str, ...]:
        """Return the outputs of layers before the cut that are read after it; none at either end.

        They come in the order in which they are written: a set's order differs from process to process.
        """
        if not 0 < cut < len(self.layers):
            return ()
        return tuple(x for x, place in self.writer.items() if place < cut <= self.last_reader.get(x, -1))

    def is_fed(self, start: int, stop: int) -> bool:
        """Return whether all that these layers send on with a gradient was made of something received with one."""
        # an output without a gradient path into the stage would leave the sender waiting
        received = set(self.alive(start)) & self.graded
        fed = set(received)
        for call in self.trace.calls:
            if start <= self.place[call.layer] < stop and call.reads & fed:
                fed |= {x.name for x in call.outputs}
        return not (set(self.alive(stop)) & self.graded) - fed


class Cuts:
    """Made from the whole model, on every rank alike; `layers` in the order of the plan. Cut c lies before layer c."""

    def __init__(self, model: nn.Module, layers: Sequence[str], *, tracer: Tracer | None = None) -> None:
        self.layers = tuple(layers)
        self.tracer = tracer or Tracer(model)
        self.units: dict[str, Unit] = {unit.path: unit for unit in self.tracer.units}
        self.config: Any = model.config
        self._trained = {x: any(p.requires_grad for p in parameters_of(find_layer(model, x))) for x in self.layers}
        self._ways: dict[Kind, Way] = {}
        self._ends: tuple[int, ...] = ()

    @property
    def images(self) -> tuple[str, ...]:
        """Return the layers that only images pass: all but the language model's."""
        return tuple(x for x in self.layers if self.units[x].tower != "language")

    def forbid(self, cuts: Sequence[int]) -> None:
        """Refuse micro-batches from now on in which something that cannot travel crosses one of these."""
        self._ends = tuple(cuts)

    def way(self, batch: Batch) -> Way:
        kind = tuple(sorted(key for key, x in batch.items() if is_pixels(key) and x is not None and len(x)))
        if kind not in self._ways:
            trace = try_trace(self.tracer, batch)
            way = Way(layers=self.layers, trace=trace, graded=_follow(trace, self._trained))
            problems = self._problems(way)
            if problems:
                raise UnsupportedPlanError(join_problems(problems))
            self._observe(way, trace, batch)
            self._ways[kind] = way
        return self._ways[kind]

    def wires(self, cut: int, batch: Batch) -> tuple[Wire, ...]:
        """Return tensors that cross the cut for this micro-batch; none before the first layer and after the last."""
        if not 0 < cut < len(self.layers):
            return ()
        way = self.way(batch)
        names = way.alive(cut)
        shapes = self.shapes(batch, names)
        return tuple(Wire(name=name, shape=shapes[name], requires_grad=name in way.graded) for name in names)

    def shapes(self, batch: Batch, names: Sequence[str]) -> dict[str, tuple[int, ...]]:
        """Return the sizes of outputs, by the rules that earlier micro-batches have left or by following this one."""
        way = self.way(batch)
        quantities = self._measure(batch)
        # following the forward again takes up to a second: only where no rule is sure
        found = {name: way.sizes.foretell(name, quantities) for name in names}
        if any(shape is None for shape in found.values()):
            trace = try_trace(self.tracer, batch)
            self._observe(way, trace, batch)
            seen = {x.name: x.shape for call in trace.calls for x in call.outputs}
            missing = [name for name in names if name not in seen]
            if missing:
                raise UnsupportedPlanError(
                    f"{missing[0]} is called more often for some micro-batches: cut after the tower"
                )
            found = {name: seen[name] for name in names}
        return {name: shape for name, shape in found.items() if shape is not None}

    def _observe(self, way: Way, trace: Trace, batch: Batch) -> None:
        way.sizes.observe({x.name: x.shape for call in trace.calls for x in call.outputs}, self._measure(batch))

    def _measure(self, batch: Batch) -> dict[str, int]:
        """Return what sizes may be in proportion to: dimensions of the arguments, and tokens of each special kind."""
        # sizes depend on shapes and on how many tokens are images or videos
        found = {f"{key}.{i}": n for key, x in tensors_of(batch).items() for i, n in enumerate(x.shape)}
        ids = batch["input_ids"]
        for name in ("image_token_id", "image_token_index", "video_token_id", "video_token_index"):
            token = getattr(self.config, name, None)
            if isinstance(token, int):
                found[name] = int((ids == token).sum())
        return found

    def _problems(self, way: Way) -> list[str]:
        """List what would have to cross a cut of the layout and cannot: backwards, or no layer's output."""
        found = []
        # modules that read what a later stage makes
        for call in way.trace.calls:
            reader = way.place[call.layer]
            late = [x for x in call.reads if any(reader < cut <= way.writer[x] for cut in self._ends)]
            if late:
                found.append(f"{call.layer} reads {sorted(late)[0]} of a later stage: list modules as they run")
        # what would have to cross a cut, and is no output that a stage can send
        for cut in self._ends:
            for name in way.alive(cut):
                if name not in way.outputs:
                    found.append(
                        f"{name} in front of {self.layers[cut]} is a bare parameter, read after it: put both on one "
                        "stage"
                    )
                elif not way.outputs[name].dtype.is_floating_point:
                    found.append(f"{name} hands whole numbers across the cut at {self.layers[cut]}: cut elsewhere")
            apart = [(x, y) for x, y in way.trace.hidden if way.place[y] < cut <= way.place[x]]
            if apart:
                found.append(
                    f"{apart[0][0]} reads what {apart[0][1]} keeps in front of {self.layers[cut]} (shared keys and "
                    "values): put both on one stage"
                )
        return found


def _follow(trace: Trace, trained: Mapping[str, bool]) -> frozenset[str]:
    # as autograd has it: what a trained layer makes, or what is made of such
    graded = {name for name, is_trained in trained.items() if is_trained}  # bare parameters
    for call in trace.calls:
        if trained.get(call.layer, False) or graded & call.reads:
            graded |= {x.name for x in call.outputs if x.dtype.is_floating_point}
        else:
            graded -= {x.name for x in call.outputs}
    return frozenset(graded)


# One stage as a module: the whole model's tree and its own forward, with weights for the stage's own layers only.


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
        # layers of other stages answer with stand-ins, own ones are hooked for what must be sent
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
        """Yield those (name, tensor) pairs of `model` that are no other stage's."""
        others = tuple(f"{name}." for i, name in enumerate(self.cuts.layers) if not self.start <= i < self.stop)
        return ((name, x) for name, x in pairs if not f"{name}.".startswith(others))

    def forward(self, *received: Tensor, sealed: Sealed) -> Tensor | tuple[Tensor, ...]:
        """Return logits on the last stage, elsewhere the tensors of `Cuts.wires`, in their order, sizes and `dtype`.

        None is a view, or the very tensor that came in: schedules with split backwards detach them in place.
        """
        batch = sealed.batch
        # tensors that come in and go out, by name
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
        # the model's own forward, of which other stages' layers are left out
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
        # layers of other stages are replaced while it runs, and the last of ours ends it
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
                f"{wire.name} is {tuple(tensor.shape)}, not {wire.shape}: its size follows from nothing that all "
                "stages know; cut elsewhere"
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
                f"{path} of another stage is called more often than in the first micro-batch of its kind: cut after "
                "the vision tower"
            )
        call = calls[number]
        # a language layer behind this stage: nothing more is needed
        is_text = self.cuts.units[path].tower == "language"
        if is_text and call.reads and run.way.place[path] >= self.stop:
            raise _Done
        # else what was received, or zeros of the shape
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
        """Return image features: of this stage's layers, of what was received, or of neither."""
        run, name = self._run, feature_name(function.kind, 0)
        calls = [] if run is None else run.way.calls.get(name, [])
        if run is None or not calls:
            return function.original(*args, **kwargs)
        # encoded by the ranks together
        names = [x.name for x in calls[0].outputs]
        if run.encoded is not None and function.kind in run.encoded.outputs:
            run.made |= {x: run.encoded.rows[x] for x in names}
            return run.encoded.outputs[function.kind]
        # encoded on an earlier stage
        if run.way.place[name] < self.start:
            shapes = self.cuts.shapes(run.batch, [x for x in names if x not in run.received])
            rows = [self._stand_in(x, run, shapes) for x in calls[0].outputs]
            return as_features(run.way.trace.samples[name], rows)
        # encoded here
        result = function.original(*args, **kwargs)
        if not run.kept.isdisjoint(names):
            run.made |= dict(zip(names, feature_rows(result) or [], strict=True))
        return result

    def _keep(self, path: str, _: nn.Module, __: Any, output: Any) -> None:
        """Keep what an own layer sends on."""
        run = self._run
        if run is None or not run.kept:
            return
        calls, number = run.way.calls.get(path, []), run.counts[path]
        run.counts[path] += 1
        if number < len(calls):
            for leaf, seen in zip(tree_leaves(output), calls[number].returned, strict=True):
                if isinstance(seen, Output) and seen.name in run.kept:
                    run.made[seen.name] = leaf
