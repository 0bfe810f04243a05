"""What each layer reads of the others, found by one run of the model's own forward on zeros.

Layers are hollow: each is run alone, on fake weights, for the shapes of what it returns, and hands on zeros. All code
between layers is run as it is, and autograd records what it makes of those zeros: from what enters a layer its graph
leads back to the layers that made it. So it is not written down for any family which tensors cross a cut: hidden
states, DeepStack features, rows that cross-attention reads, per-layer embeddings, a position bias. What the functions
that encode images return counts as made by one more layer, so that nothing of the tower is run after it.

All of it is on the host, and zeros take no memory as long as no code writes into them.
"""

from __future__ import annotations

import copy
import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from accelerate.utils.operations import send_to_device
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves

from trimtab.errors import TrimtabError, UnsupportedPlanError
from trimtab.models.asking.forward import choose_kernels, kind_of
from trimtab.models.asking.units import Unit, forward_order, split_units
from trimtab.runtime.recompute import tensors_in
from trimtab.runtime.vision.hooks import PatchedFunction, find_functions
from trimtab.runtime.vision.inputs import columns_of, fill_features, rows_of

# What a micro-batch is to a pipeline: the tensors that cross a cut, and the arguments of a stage's forward.


ENCODED = "encoded_images"
"""Key of a batch whose images were encoded already: an `Encoded`."""
NOT_GIVEN = ("labels", "loss_weights", "denominator", ENCODED)
"""Keys of a batch that are no arguments of a model here."""
Batch = Mapping[str, Any]


@dataclass(frozen=True, slots=True, eq=False)
class Sealed:
    """A batch that torch's schedules do not look into: they would search its tensors for gradients."""

    batch: Batch


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Encoded:
    """What other ranks have encoded of a micro-batch."""

    outputs: Mapping[str, Any]  # "image" and "video" -> what the function that encodes them returns
    rows: Mapping[str, Tensor]  # the same as rows, by `feature_name`


def feature_name(kind: str, column: int) -> str:
    """Return the name of a column of features across a cut: 0 is the image's, 1 and more are DeepStack layers'."""
    return f"{kind} features" + (f" {column}" if column else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Wire:
    """One tensor across a cut, for one micro-batch."""

    name: str  # of the layer that made it, or of image features
    shape: tuple[int, ...]
    requires_grad: bool


def is_pixels(key: str) -> bool:
    return "pixel_values" in key or key == "flattened_patches"


def has_images(batch: Batch) -> bool:
    return any(is_pixels(key) and value is not None and len(value) for key, value in batch.items())


def arguments_of(batch: Batch, *, with_images: bool = True) -> dict[str, Any]:
    """Return what the model's forward is called with."""
    return {
        key: value
        for key, value in batch.items()
        if key not in NOT_GIVEN and (with_images or not is_pixels(key)) and value is not None
    } | {"use_cache": False}


def tensors_of(batch: Batch) -> dict[str, Tensor]:
    return {key: value for key, value in batch.items() if isinstance(value, Tensor)}


# Models with some layers hollow: modules of the same class and fields that hold no weights and compute nothing.


Forward = Callable[..., Any]


def hollow_copy(
    model: nn.Module, hollow: Mapping[str, Forward], *, own: Mapping[int, Any] | None = None, device: torch.device
) -> nn.Module:
    """The model's tree with a shell in place of every layer of `hollow`, whose forward is the function given there.

    All other modules are copied; their parameters, buffers and the configurations are the model's own, or what `own`
    has for them by `id`: whole modules may stand there too. A layer that is a bare parameter becomes a plain tensor
    without weights. A shell's parameters hold one zero in their shape, for code that asks for their dtype.
    """
    # parameters, buffers and configurations stay the same objects
    memo: dict[int, Any] = {}
    for module in model.modules():
        memo |= {id(x): x for x in _tensors(module)}
        config = getattr(module, "config", None)
        memo[id(config)] = config
    memo |= own or {}
    # layers become shells
    bare = []
    for path, forward in hollow.items():
        layer = find_layer(model, path)
        if isinstance(layer, nn.Module):
            memo[id(layer)] = _shell(layer, device)
            memo[id(layer)].forward = forward
        else:
            bare.append(path)
    # the rest is copied; bare parameters lose their weights there
    taken: nn.Module = copy.deepcopy(model, memo)
    for path in bare:
        parent, _, name = path.rpartition(".")
        holder = taken.get_submodule(parent)
        holder._parameters[name] = _weightless_parameter(getattr(holder, name), device)
    return taken


def find_layer(model: nn.Module, path: str) -> nn.Module | nn.Parameter:
    """Return a layer is a module, or a parameter that lies next to modules."""
    parent, _, name = path.rpartition(".")
    found = getattr(model.get_submodule(parent), name)
    assert isinstance(found, (nn.Module, nn.Parameter))
    return found


def tensors_between(model: nn.Module, layers: Iterable[str]) -> list[Tensor]:
    """Return the parameters and buffers that belong to none of the layers."""
    inside = {id(x) for name in layers for x in model.get_submodule(name).modules()}
    return [x for module in model.modules() if id(module) not in inside for x in _tensors(module)]


def parameters_of(layer: nn.Module | nn.Parameter) -> list[nn.Parameter]:
    return [layer] if isinstance(layer, nn.Parameter) else list(layer.parameters())


def _shell(module: nn.Module, device: torch.device) -> Any:
    """Return one of the same class and fields, so that code that asks for its type or dtype gets the same answers."""
    shell = module.__class__.__new__(module.__class__)
    nn.Module.__init__(shell)
    fresh = set(vars(shell))
    shell.__dict__.update({name: x for name, x in vars(module).items() if name not in fresh and name != "forward"})
    shell.training = module.training
    # its hooks, parameters, buffers and children, without weights
    for key, hook in module._forward_hooks.items():  # by which Transformers collects hidden states of a tower
        if getattr(hook, "__name__", "") == "output_capturing_hook":
            shell._forward_hooks[key] = hook
    for name, parameter in module._parameters.items():
        shell._parameters[name] = None if parameter is None else _weightless_parameter(parameter, device)
    for name, buffer in module._buffers.items():
        shell._buffers[name] = None if buffer is None else _weightless(buffer, device)
    shell._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
    for name, child in module._modules.items():
        shell._modules[name] = None if child is None else _shell(child, device)
    return shell


def _weightless(tensor: Tensor, device: torch.device) -> Tensor:
    """Return one zero in that shape."""
    return torch.zeros((), dtype=tensor.dtype, device=device).expand(tensor.shape)


def _weightless_parameter(parameter: Tensor, device: torch.device) -> nn.Parameter:
    return nn.Parameter(_weightless(parameter, device), requires_grad=False)


def _tensors(module: nn.Module) -> list[Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


HOST = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Output:
    """One tensor of what a call of a layer returned."""

    name: str  # the layer's path, with the number of the call and of the tensor where there are several
    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Call:
    """One call of a layer."""

    layer: str
    reads: frozenset[str]  # names of outputs and of bare parameters that what it was given was made of
    returned: tuple[Any, ...]  # leaves: an `Output` in place of each tensor
    spec: TreeSpec

    @property
    def outputs(self) -> list[Output]:
        return [leaf for leaf in self.returned if isinstance(leaf, Output)]


@dataclass(slots=True, kw_only=True, eq=False)
class Trace:
    """One run, in the order of its calls."""

    calls: list[Call] = field(default_factory=list)
    result: frozenset[str] = frozenset()  # what the logits were made of
    samples: dict[str, Any] = field(default_factory=dict)  # "image features" -> what the function returned
    writes: bool = False  # some code between layers writes into what a layer returned
    hidden: list[tuple[str, str]] = field(default_factory=list)  # (reader, writer) of what no layer returns


class Tracer:
    """Made of a model before its weights are dropped; holds none itself."""

    def __init__(self, model: nn.Module) -> None:
        self.units: tuple[Unit, ...] = tuple(split_units(model))
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._layers = {x.path: self._weightless(x.module) for x in self.units if x.module is not None}
        self._kinds = {path: kind_of(layer) for path, layer in self._layers.items()}
        forwards = {path: functools.partial(self._call, path) for path in self._layers}
        # parameters without a module: leaves that autograd finds
        bare = {
            id(x.parameters[""]): torch.zeros_like(x.parameters[""], device=HOST)
            for x in self.units
            if x.module is None
        }
        leaves = {key: nn.Parameter(value) for key, value in bare.items()}
        self._bare = {id(leaves[id(x.parameters[""])]): x.path for x in self.units if x.module is None}
        # what lies between layers, on the host; configurations with kernels that run there
        between = {id(x): x.to(HOST) for x in tensors_between(model, forwards) if x.device != HOST}
        configs = {id(c): copy.deepcopy(c) for m in model.modules() if (c := getattr(m, "config", None)) is not None}
        for config in configs.values():
            choose_kernels(config, experts="batched_mm")
        self._model = hollow_copy(model, forwards, own={**between, **leaves, **configs}, device=HOST)
        watch_encoders(self._model, self._encode)
        self._trace = Trace()
        self._leaves: dict[int, tuple[Tensor, str]] = {}
        self._made: dict[Any, Any] = {}
        self._inside: dict[int, tuple[Tensor, str]] = {}

    def run(self, batch: Batch) -> Trace:
        """The calls of one forward; whatever the model's own code raises of the batch is the caller's."""
        try:
            return self._run_once(batch, writes=False)
        except Exception:  # most likely that zeros without memory cannot be written into
            return self._run_once(batch, writes=True)

    def _run_once(self, batch: Batch, *, writes: bool) -> Trace:
        self._trace, self._leaves, self._made, self._inside = Trace(writes=writes), {}, {}, {}
        given = send_to_device(arguments_of(batch), HOST)
        with torch.enable_grad():
            result = self._model(**given)
        logits = result.logits if hasattr(result, "logits") else result[0]
        trace, self._trace = self._trace, Trace()
        trace.result = self._made_of([logits])
        self._leaves, self._made, self._inside = {}, {}, {}
        return trace

    # -- one layer ----------------------------------------------------------------------------------------------------

    def _call(self, path: str, *args: Any, **kwargs: Any) -> Any:
        # what it reads: outputs of other layers, or what one of them keeps inside
        given = list(tensors_in((args, kwargs)))
        for leaf in given:
            if id(leaf) in self._inside:
                self._trace.hidden.append((path, self._inside[id(leaf)][1]))
        reads = self._made_of(given)
        number = sum(call.layer == path for call in self._trace.calls)
        leaves, spec = tree_flatten(self._run(path, args, kwargs))
        self._note_inside(path, args, kwargs)
        # what it returns: each tensor becomes a new leaf with a name
        returned, handed = [], []
        count = itertools.count()
        for leaf in leaves:
            if not isinstance(leaf, Tensor):
                returned.append(leaf)
                handed.append(leaf)
                continue
            which = next(count)
            name = path + (f"@{number}" if number else "") + (f"#{which}" if which else "")
            returned.append(Output(name=name, shape=tuple(leaf.shape), dtype=leaf.dtype))
            handed.append(self._new_leaf(leaf, name))
        self._trace.calls.append(Call(layer=path, reads=reads, returned=tuple(returned), spec=spec))
        return torch.utils._pytree.tree_unflatten(handed, spec)

    def _encode(self, function: PatchedFunction, *args: Any, **kwargs: Any) -> Any:
        """Return what a function that encodes images returned, as leaves."""
        result = function.original(*args, **kwargs)
        columns = feature_rows(result)
        if columns is None:
            return result
        names = [feature_name(function.kind, i) for i in range(len(columns))]
        returned = tuple(
            Output(name=name, shape=tuple(x.shape), dtype=x.dtype) for name, x in zip(names, columns, strict=True)
        )
        spec = tree_flatten(returned)[1]
        self._trace.calls.append(Call(layer=names[0], reads=self._made_of(columns), returned=returned, spec=spec))
        made = [self._new_leaf(x, name) for name, x in zip(names, columns, strict=True)]
        self._trace.samples[names[0]] = result
        return as_features(result, made, pieces=_pieces(result))

    def _new_leaf(self, like: Tensor, name: str) -> Tensor:
        if not like.is_floating_point():
            return torch.zeros(like.shape, dtype=like.dtype)
        made = torch.zeros((), dtype=like.dtype).expand(like.shape).requires_grad_()
        self._leaves[id(made)] = (made, name)
        return made.clone(memory_format=torch.contiguous_format) if self._trace.writes else made

    def _run(self, path: str, args: Any, kwargs: dict[str, Any]) -> Any:
        """Run once those layers that are built and called alike: they return alike."""
        given, spec = tree_flatten([args, kwargs])
        plain = not any(isinstance(x, MutableMapping) for x in (*args, *kwargs.values()))  # it may be written into
        sizes = tuple((tuple(x.shape), x.dtype) if isinstance(x, Tensor) else repr(x)[:80] for x in given)
        key = (self._kinds[path], sizes, str(spec)) if plain else None
        if key is None or key not in self._made:
            with torch.no_grad():
                result = self._layers[path](*_detached(args), **{k: _detached(x) for k, x in kwargs.items()})
            if key is None:
                return result
            self._made[key] = result
        return self._made[key]

    def _note_inside(self, path: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Note tensors that the layer left in what it was given, for others to read."""
        for leaf in tensors_in((args, kwargs)):
            if isinstance(leaf, FakeTensor) and id(leaf) not in self._inside:
                self._inside[id(leaf)] = (leaf, path)

    def _made_of(self, values: Sequence[Tensor]) -> frozenset[str]:
        """Return the names of the leaves that autograd finds behind them."""
        todo: list[Any] = []
        found = set()
        for value in values:
            if value.requires_grad:
                todo.append(value.grad_fn)
                found.add(self._name_of(value))
        # back through autograd's graph, each node once
        visited = set()
        while todo:
            node = todo.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            found.add(self._name_of(getattr(node, "variable", None)))
            todo += [x for x, _ in node.next_functions]
        return frozenset(x for x in found if x is not None)

    def _name_of(self, leaf: Any) -> str | None:
        known = self._leaves.get(id(leaf))
        return known[1] if known is not None else self._bare.get(id(leaf))

    def _weightless(self, layer: nn.Module) -> nn.Module:
        """Return a copy with fake parameters."""
        memo: dict[int, Any] = {}
        for parameter in layer.parameters():
            with self._fake:
                values = torch.empty(parameter.shape, dtype=parameter.dtype, device=HOST)
            memo[id(parameter)] = nn.Parameter(values, requires_grad=False)
        memo |= {id(buffer): buffer.detach().to(HOST, copy=True) for buffer in layer.buffers()}
        made = copy.deepcopy(layer, memo)
        for module in made.modules():
            choose_kernels(getattr(module, "config", None), experts="batched_mm")
            for hooks in (module._forward_pre_hooks, module._forward_hooks):
                hooks.clear()
        return made


def watch_encoders(model: nn.Module, encode: Callable[..., Any]) -> None:
    """Make calls of functions that encode images `encode(function, ...)`, but not those from inside of one.

    Nothing where the model has no such function, or several.
    """
    try:
        functions = find_functions(model, "features")
    except TrimtabError:
        return
    # calls from inside of a call are the function's own business
    inside: list[PatchedFunction] = []

    def call(function: PatchedFunction, *args: Any, **kwargs: Any) -> Any:
        if inside:  # that of videos may call that of images
            return function.original(*args, **kwargs)
        inside.append(function)
        try:
            return encode(function, *args, **kwargs)
        finally:
            inside.clear()

    for function in functions:
        function.put(functools.partial(call, function))


def feature_rows(output: Any) -> list[Tensor] | None:
    """Return image features and those of DeepStack layers, each as one matrix; None: the output is of another make."""
    try:
        pieces = tree_leaves(columns_of(output))
    except TrimtabError:
        return None
    if not all(isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1 for x in pieces):
        return None
    rows = rows_of(output)
    return rows if len({len(x) for x in rows}) == 1 else None


def as_features(sample: Any, columns: Sequence[Tensor], *, pieces: Sequence[int] | None = None) -> Any:
    """Return an output like `sample` that holds these rows; `pieces`: of each image. None: all in one."""
    num_rows = np.array([len(columns[0])] if pieces is None else pieces, np.int64)
    return fill_features(sample, columns, num_rows)


def _pieces(output: Any) -> list[int] | None:
    first = columns_of(output)[0]
    return [x.numel() // x.shape[-1] for x in first] if isinstance(first, (list, tuple)) else None


def layer_order(units: Sequence[Unit], trace: Trace) -> tuple[str, ...]:
    """Return the paths of all layers as plans list them: towers first, embeddings of text in front of its blocks."""
    times: dict[str, float] = {}
    for number, call in enumerate(trace.calls):
        times.setdefault(call.layer, number)
        for name in call.reads:
            times.setdefault(name, number - 0.5)  # a bare parameter, in front of what reads it first
    return tuple(units[i].path for i in forward_order(units, times))


def try_trace(tracer: Tracer, batch: Batch) -> Trace:
    """Return a trace, or one sentence on what of the model cannot be followed."""
    try:
        return tracer.run(batch)
    except Exception as error:  # of any class that the model's own code likes
        said = " ".join(str(error).split())[:200].rstrip(".")
        raise UnsupportedPlanError(
            f"the forward fails without weights ({type(error).__name__}: {said}): train without pp"
        ) from error


def _detached(value: Any) -> Any:
    """The same containers where nothing in them needs a gradient: a layer may write into them."""
    if isinstance(value, Tensor):
        return value.detach() if value.requires_grad else value
    if type(value) in (tuple, list):
        return type(value)(_detached(x) for x in value)
    if type(value) is dict and any(isinstance(x, Tensor) and x.requires_grad for x in value.values()):
        return {key: _detached(x) for key, x in value.items()}
    return value
