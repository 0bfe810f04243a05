"""One step of a model, forward and backward, traced: who saved what, how much lived, how many FLOPs.

The model may be real or weightless: bytes and FLOPs are the same. Needs torch, loaded when this module is.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from trimtab.costs.measured.traced_fit import SavedStorage, StepTrace, TracedLayer
from trimtab.errors import TrimtabError
from trimtab.models.asking.forward import run_operation

aten = torch.ops.aten


class StepMode(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operation below autograd, in forward and backward.

    `live_bytes`: storages that operations made and that something still holds; storages in `known` (parameters,
    buffers, inputs) are left out. Not seen: workspaces inside kernels. `flops` counts what torch's flop counter
    counts, products and attention, masked pairs included.
    """

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.live_bytes = 0
        self.step_peak_bytes = 0
        self.peak_bytes = 0  # since `mark` was last called
        self.flops = 0
        self._live: dict[int, _Storage] = {}
        self._known = {tensor.untyped_storage()._cdata for tensor in known}
        self._num_storages = 0

    def mark(self) -> None:
        """Let `peak_bytes` count from here."""
        self.peak_bytes = self.live_bytes

    def identify(self, tensor: Tensor) -> int:
        """Number the storage of `tensor`, never twice alike: negative for known ones. It counts from now on."""
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return -int(storage._cdata)
        self._see(tensor)
        return self._live[storage._cdata].number

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        packet = func.overloadpacket
        result = run_operation(func, args, kwargs)
        if packet in _FLOPS:
            self.flops += _FLOPS[packet](*args, **kwargs, out_val=result)
        self._see(result)
        return result

    def _see(self, result: Any) -> None:
        if isinstance(result, Tensor):
            self._see_storage(result.untyped_storage())
        elif isinstance(result, (tuple, list)):
            for part in result:
                self._see(part)

    def _see_storage(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key in self._live or key in self._known:
            return
        self._num_storages += 1
        self._live[key] = _Storage(number=self._num_storages, num_bytes=storage.nbytes())
        self.live_bytes += storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        self.step_peak_bytes = max(self.step_peak_bytes, self.live_bytes)
        weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self.live_bytes -= self._live.pop(key).num_bytes


@dataclass(frozen=True, slots=True)
class _Storage:
    number: int
    num_bytes: int


# -- FLOPs ----------------------------------------------------------------------------------------------------------


def _attention(query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    return int(sdpa_flop_count(query.shape, key.shape, value.shape))  # type: ignore[no-untyped-call]


def _attention_backward(grad: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> int:
    shapes = (x.shape for x in (grad, query, key, value))
    return int(sdpa_backward_flop_count(*shapes))  # type: ignore[no-untyped-call]


def _grouped(a: Any, b: Any, *_: Any, out_val: Any, **__: Any) -> int:
    """Count FLOPs: rows by width of the result by width of the inner side; groups share the rows, or the inner."""
    return (
        2 * int(a.shape[-1]) * (prod(out_val.shape) if a.dim() == 2 and b.dim() == 3 else int(prod(out_val.shape[-2:])))
    )


def _formulas() -> dict[Any, Callable[..., int]]:
    found: dict[Any, Callable[..., int]] = {
        packet: (lambda formula: lambda *args, out_val, **kwargs: int(formula(*args, **kwargs, out_val=out_val)))(f)
        for packet, f in flop_registry.items()
    }
    found[aten._scaled_dot_product_flash_attention_for_cpu] = _attention
    found[aten._scaled_dot_product_flash_attention_for_cpu_backward] = _attention_backward
    found[aten._grouped_mm] = _grouped
    return found


_FLOPS = _formulas()


# -- the step ---------------------------------------------------------------------------------------------------------


def trace_step(
    module: nn.Module,
    layers: Sequence[str],
    inputs: Mapping[str, Any],
    *,
    recomputed: Collection[str] = (),
    rng_state_bytes: int | None = None,
    accumulate: bool = False,
) -> StepTrace:
    """Trace what `module(**inputs).loss` and its backward keep, hold and compute, for each of `layers` (paths).

    `recomputed` are checkpointed while the step runs (non-reentrant), each with `rng_state_bytes` of random state, by
    default that of the CPU's generator: so `peak_bytes` is the peak of that choice. `accumulate`: gradients of an
    earlier micro-batch are there (and not counted), so those of this one live only until they are added. The gradients
    of `module` are cleared. Layers must not lie in one another.
    """
    _refuse_unusable(module, layers, recomputed)
    fixed = [*module.parameters(), *module.buffers()]
    gradients: list[Tensor] = []
    module.zero_grad(set_to_none=True)
    # gradients of an earlier micro-batch
    if accumulate:
        for parameter in module.parameters():
            if parameter.requires_grad and parameter.device.type != "meta":
                parameter.grad = torch.zeros_like(parameter)
                gradients.append(parameter.grad)
    # what is there before the step is not counted
    mode = StepMode([*fixed, *gradients, *_tensors(dict(inputs))])
    recorder = _Recorder(mode, layers, fixed)
    state_bytes = torch.get_rng_state().numel() if rng_state_bytes is None else rng_state_bytes
    with ExitStack() as stack:
        for place, name in enumerate(layers):
            part = module.get_submodule(name)
            stack.enter_context(recorder.watch(place, part))
            if name in recomputed:
                stack.enter_context(checkpointed(part, lambda: torch.empty(state_bytes, dtype=torch.uint8)))
        # no collection but where it is asked for: peaks would be a matter of chance
        stack.enter_context(young_garbage())
        stack.enter_context(mode)
        with torch.autograd.graph.saved_tensors_hooks(recorder.pack, _Kept.unpack):
            # forward: who saves what
            loss = module(**inputs).loss
        gc.collect(0)
        recorder.end_forward()
        storages = recorder.list_storages()
        # backward: what lives while each layer runs
        recorder.begin_backward()
        loss.backward()
        recorder.end_backward()
    del loss
    module.zero_grad(set_to_none=True)
    return StepTrace(
        layers=tuple(recorder.records),
        storages=storages,
        recomputed=frozenset(recomputed),
        peak_bytes=mode.step_peak_bytes,
    )


@contextmanager
def young_garbage(generation: int = 0) -> Iterator[None]:
    """Collect no cycles but those asked for, after one of `generation`: what is made stays in the youngest.

    Models leave tensors in cycles of Python objects; whether those still hold memory would be a matter of chance.
    """
    was_enabled = gc.isenabled()
    gc.collect(generation)
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def _refuse_unusable(module: nn.Module, layers: Sequence[str], recomputed: Collection[str]) -> None:
    known = dict(module.named_modules())
    missing = [name for name in layers if name not in known]
    if missing:
        raise TrimtabError(f"{type(module).__name__} has no {', '.join(missing)}: give names of named_modules()")
    # recompute only of what is traced
    unknown = sorted(set(recomputed) - set(layers))
    if unknown:
        raise TrimtabError(f"{', '.join(unknown)} are none of the {len(layers)} layers to trace: name them there too")
    chosen = set(layers)
    # layers side by side, none inside another
    for name in layers:
        parts = name.split(".")
        outer = next((p for n in range(1, len(parts)) if (p := ".".join(parts[:n])) in chosen), None)
        if outer is not None:
            raise TrimtabError(f"{name} cannot be traced next to {outer}, which it is a part of: give one of the two")


# -- who saves ------------------------------------------------------------------------------------------------------


class _Kept:
    """What autograd holds in place of a saved tensor; it lives as long as the graph needs it."""

    __slots__ = ("__weakref__", "behind", "call", "tensor")

    def __init__(self, tensor: Tensor, call: _Call | None, behind: int | None) -> None:
        self.tensor = tensor.detach()  # without its graph: an operation that saves its own result would never be freed
        self.call, self.behind = call, behind

    def unpack(self) -> Tensor:
        return self.tensor


@dataclass(eq=False)
class _Call:
    """One run of a layer, and the storages it was handed, by number."""

    place: int
    entered: frozenset[int]
    named: frozenset[int]
    start_flops: int
    start_bytes: int
    last_saved_flops: int | None = None


class _Recorder:
    """Hooks around layers, and what they saw."""

    def __init__(self, mode: StepMode, layers: Sequence[str], fixed: Iterable[Tensor]) -> None:
        self.mode = mode
        self.records = [TracedLayer(name=name) for name in layers]
        self.storages: dict[int, SavedStorage] = {}  # by number
        self.open_calls: list[_Call] = []
        self.calls: list[_Call] = []
        self.kept: weakref.WeakSet[_Kept] = weakref.WeakSet()
        self.fixed = {mode.identify(tensor) for tensor in fixed}
        self.in_backward: int | None = None
        self.backward_start = (0, 0)  # FLOPs, bytes

    def pack(self, tensor: Tensor) -> _Kept:
        call = self.open_calls[-1] if self.open_calls else None
        if call is not None:
            call.last_saved_flops = self.mode.flops
        self._number(tensor)
        kept = _Kept(tensor, call, self.calls[-1].place if self.calls else None)
        self.kept.add(kept)
        return kept

    @contextmanager
    def watch(self, place: int, module: nn.Module) -> Iterator[None]:
        """Hook on to `module` while the context lasts: its calls, and the gradients that enter and leave it."""
        handles = [
            module.register_forward_pre_hook(
                lambda _, args, kwargs: self._enter(place, args, kwargs), with_kwargs=True
            ),
            module.register_forward_hook(lambda _, __, result: self._leave(place, result)),
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def end_forward(self) -> None:
        """The code after the last layer entered, up to now, was part of that layer's forward."""
        if self.calls:
            record, call = self.records[self.calls[-1].place], self.calls[-1]
            record.forward_transient_bytes = max(
                record.forward_transient_bytes, self.mode.peak_bytes - call.start_bytes
            )

    def _enter(self, place: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.end_forward()
        # what enters by position may be recomputed from; what is named is context
        call = _Call(
            place=place,
            entered=frozenset(self._number(x) for x in _tensors(args)),
            named=frozenset(self._number(x) for x in _tensors(kwargs)),
            start_flops=self.mode.flops,
            start_bytes=self.mode.live_bytes,
        )
        self.mode.mark()
        self.open_calls.append(call)
        self.calls.append(call)
        # its backward ends where the gradient of an input is there
        for tensor in _tensors((args, kwargs)):
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._leave_backward(place))  # type: ignore[no-untyped-call]

    def _leave(self, place: int, result: Any) -> None:
        call, mode, record = self.open_calls.pop(), self.mode, self.records[place]
        outputs = _tensors(result)
        # forward FLOPs, and those up to the last tensor that was saved
        record.num_calls += 1
        record.output_bytes += sum(x.numel() * x.element_size() for x in outputs)
        record.forward_flops += mode.flops - call.start_flops
        if call.last_saved_flops is not None:
            record.recompute_flops += call.last_saved_flops - call.start_flops
        # its backward begins with the gradient of a result
        for tensor in outputs:
            if tensor.requires_grad:
                tensor.register_hook(lambda _: self._enter_backward(place))  # type: ignore[no-untyped-call]

    # a layer's backward runs from the gradient of its result to that of what entered it

    def begin_backward(self) -> None:
        """Begin with the loss: what comes before the first gradient enters a layer belongs to the last one."""
        if self.calls:
            self._enter_backward(self.calls[-1].place)

    def _enter_backward(self, place: int) -> None:
        if self.in_backward != place:
            self.end_backward()
            self.mode.mark()
            self.in_backward, self.backward_start = place, (self.mode.flops, self.mode.live_bytes)

    def _leave_backward(self, place: int) -> None:
        if self.in_backward == place:
            self.end_backward()

    def end_backward(self) -> None:
        if self.in_backward is not None:
            record, (flops, live) = self.records[self.in_backward], self.backward_start
            record.backward_flops += self.mode.flops - flops
            record.backward_transient_bytes = max(record.backward_transient_bytes, self.mode.peak_bytes - live)
            self.in_backward = None

    # what the graph holds now

    def _number(self, tensor: Tensor) -> int:
        number = self.mode.identify(tensor)
        storage = self.storages.setdefault(number, SavedStorage(num_bytes=tensor.untyped_storage().nbytes()))
        storage.follows_gradient |= tensor.requires_grad
        return number

    def list_storages(self) -> tuple[SavedStorage, ...]:
        """List storages in the order they were first met; those of parameters and buffers are left out."""
        # who saved each storage, in a layer or outside
        keeping: set[_Call] = set()
        for kept in self.kept:
            storage = self.storages[self.mode.identify(kept.tensor)]
            if kept.call is None:
                storage.behind = _earlier(storage, kept.behind)
                storage.saved_outside = True
            else:
                storage.savers.add(kept.call.place)
                keeping.add(kept.call)
                self.records[kept.call.place].keeps = True
        # and into which of those layers it entered
        for call in keeping:
            for number in call.entered:
                self.storages[number].entered.add(call.place)
            for number in call.named:
                self.storages[number].named.add(call.place)
        for record in self.records:
            if not record.keeps:  # then recompute has nothing to do
                record.recompute_flops = 0
        return tuple(
            x
            for number, x in self.storages.items()
            if number not in self.fixed and (x.savers or x.saved_outside or x.entered or x.named)
        )


def _earlier(storage: SavedStorage, behind: int | None) -> int | None:
    """Return where code outside first saved it: handles come in no order."""
    if not storage.saved_outside:
        return behind
    return None if storage.behind is None or behind is None else min(storage.behind, behind)


def _tensors(values: Any) -> list[Tensor]:
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


# -- recompute ------------------------------------------------------------------------------------------------------


@contextmanager
def checkpointed(module: nn.Module, random_state: Callable[[], Tensor]) -> Iterator[None]:
    """Put `module` under non-reentrant checkpointing while the context lasts; its hooks stay outside.

    `random_state` makes a tensor of a random-number state's size: one lives with each call, one more while it is
    computed again, as those do that torch makes where no dispatch mode sees it.
    """
    forward = module.forward

    def contexts() -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
        return nullcontext(), _RandomStates(random_state)

    def again(*args: Any, **kwargs: Any) -> Any:
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, context_fn=contexts)

    module.forward = again
    try:
        yield
    finally:
        del module.forward


class _RandomStates:
    """Lives as long as one checkpointed call does."""

    def __init__(self, make: Callable[[], Tensor]) -> None:
        self.make, self.of_forward = make, make()
        self.of_backward: Tensor | None = None

    def __enter__(self) -> None:
        self.of_backward = self.make()

    def __exit__(self, *_: object) -> None:
        self.of_backward = None
