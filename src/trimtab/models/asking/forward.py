"""A forward pass of a model without weights: which units run in which order, on what rows, with which products.

Units of one list that are built alike run once: the others hand on what the first one made.
Tested with Transformers 5.23.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import flop_registry

from trimtab.models.asking.units import Unit
from trimtab.specs import AttentionSpec

# -- parameters that take no memory -----------------------------------------------------------------------------------
#
# Only parameters are fake tensors. What touches them becomes fake; ids, pixels, positions, masks and grids stay real:
# code that reads them (`tolist`, boolean indices, loops over chosen experts) runs as ever. Not the `meta` device: its
# attention falls apart into products and keeps what no kernel keeps. Tested with 5.23.


aten = torch.ops.aten

_INDEXING = (aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index)


def make_weightless(module: Any, *, without: Collection[str] = ()) -> None:
    """Gives `module` (built on the meta device) fake parameters on the CPU and real buffers, filled by Transformers.

    The modules `without` stay on the meta device.
    """
    fake = FakeTensorMode(allow_non_fake_inputs=True)
    _fill(module, lambda parameter: _fake_parameter(parameter, fake), torch.device("cpu"), without)
    for part in module.modules():
        choose_kernels(getattr(part, "config", None), experts="grouped_mm")  # as the library does for real weights
    module.initialize_weights()


def choose_kernels(config: Any, *, experts: Literal["grouped_mm", "batched_mm"]) -> None:
    """Choose for attention and experts operations that fake tensors know; `run_operation` knows `grouped_mm` too."""
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = experts
    if "flash" in str(getattr(config, "_attn_implementation", None)):
        config._attn_implementation = "sdpa"


def make_real(module: Any, device: torch.device, *, without: Collection[str] = ()) -> None:
    """Gives `module` (built on the meta device) weights on `device`, drawn as for training from scratch."""

    def real(parameter: nn.Parameter) -> nn.Parameter:
        values = torch.zeros_like(parameter, device=device)  # 0 where Transformers draws nothing
        return nn.Parameter(values, requires_grad=parameter.requires_grad)

    _fill(module, real, device, without)
    module.initialize_weights()


def _fill(
    module: Any, make: Callable[[nn.Parameter], nn.Parameter], device: torch.device, without: Collection[str]
) -> None:
    """Set parameters that `make` gives, one for all modules that share it, and zeros for buffers."""
    made: dict[int, nn.Parameter] = {}
    left = tuple(f"{name}." for name in without)
    for path, part in module.named_modules():
        if f"{path}.".startswith(left):
            part._is_hf_initialized = True
            continue
        for name, parameter in part._parameters.items():
            if parameter is not None:
                if id(parameter) not in made:
                    made[id(parameter)] = make(parameter)
                part._parameters[name] = made[id(parameter)]
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.device.type == "meta":
                part._buffers[name] = torch.zeros_like(buffer, device=device)


def _fake_parameter(parameter: nn.Parameter, mode: FakeTensorMode) -> nn.Parameter:
    with mode:
        values = torch.empty_strided(parameter.shape, parameter.stride(), dtype=parameter.dtype, device="cpu")
    made = nn.Parameter(values, requires_grad=parameter.requires_grad and parameter.is_floating_point())
    made._is_hf_initialized = True  # type: ignore[attr-defined]
    return made


def run_operation(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Return one operation below autograd, as it would run on real tensors.

    Real boolean indices of fake values become places, so that their number is known. Products of experts have a fake
    kernel only for bf16. What a router chose is real: places in turn, so that all experts get as many rows.
    """
    packet = func.overloadpacket
    if packet in _INDEXING:
        args = _with_integer_indices(args)
    if packet is aten._grouped_mm:
        return _multiply_groups(func, args, kwargs)
    result = func(*args, **kwargs)
    if packet is aten.topk and isinstance(result[1], FakeTensor):
        return (result[0], _choose_in_turn(result[1], args[0].shape[args[2] if len(args) > 2 else -1]))
    return result


class Weightless(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Inside, a weightless model runs as a real one: for passes of which nothing is counted."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run_operation(func, args, kwargs or {})


def _with_integer_indices(args: Sequence[Any]) -> tuple[Any, ...]:
    values, indices, *others = args
    if not isinstance(values, FakeTensor):
        return tuple(args)
    places: list[Tensor | None] = []
    for index in indices:
        if isinstance(index, Tensor) and index.dtype == torch.bool and not isinstance(index, FakeTensor):
            places += index.nonzero(as_tuple=True)
        else:
            places.append(index)
    return (values, places, *others)


def _multiply_groups(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    a, b, *others = args
    if isinstance(a, FakeTensor) and a.dtype != torch.bfloat16:
        half = func(a.to(torch.bfloat16), b.to(torch.bfloat16), *others, **{**kwargs, "out_dtype": None})
        return half.to(a.dtype)
    return func(*args, **kwargs)


def _choose_in_turn(chosen: Tensor, num: int) -> Tensor:
    """Return real places below `num` in the shape of `chosen`: 0 1 | 2 3 | 0 1 for pairs of 4."""
    with unset_fake_temporarily():
        return torch.arange(chosen.numel()).remainder(num).view(chosen.shape)


@dataclass(slots=True)
class RanUnit:
    """What one unit did in one pass."""

    rows_in: int = 0
    width_in: int = 0
    rows_out: int = 0
    width_out: int = 0
    weight_flops: float = 0.0  # of products with parameters
    pair_flops: float = 0.0  # of fused attention, nothing masked
    other_flops: float = 0.0  # of products of rows with rows outside of it
    kept_bytes: float = 0.0  # between forward and backward, parameters aside
    num_together: int = 1  # images that one call of attention holds next to each other
    # fused attention as it was called; keys that were copied to every query head count as so many
    attention: AttentionSpec | None = None
    cache_bytes: float = 0.0  # that the cache grew by


@dataclass(slots=True)
class Pass:
    """All units of one pass, in the order they were entered."""

    ran: dict[str, RanUnit] = field(default_factory=dict)
    unread: set[str] = field(default_factory=set)  # entered, but no gradient of the result reaches them


class ForwardWatch:
    """Wraps the forward of every unit's module; `run` makes one pass and says what ran."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self.units = units
        self.now = Pass()
        self.stack: list[str] = []
        self.in_attention = False
        self._owner = {id(x): unit.path for unit in units if unit.module is not None for x in unit.module.parameters()}
        self._first: dict[tuple[object, ...], tuple[str, Any]] = {}
        for unit in units:
            if unit.module is not None:
                unit.module.forward = self._wrapped(unit, unit.module.forward)

    def run(self, call: Callable[[], Any]) -> Pass:
        """Return one pass; the exception of a call that fails is the caller's."""
        self.now, self.stack, self._first = Pass(), [], {}
        self.in_attention = False
        with _Meter(self), _AttentionMeter(self):
            result = call()
        self._find_unread(result)
        return self.now

    def _find_unread(self, result: Any) -> None:
        """Find units that no gradient of the features would reach; of a list, all before a reached one are reached."""
        named = [getattr(result, x, None) for x in ("pooler_output", "deepstack_features")]
        given = tree_leaves([x for x in named if x is not None] or getattr(result, "to_tuple", lambda: result)())
        todo: list[Any] = [x.grad_fn for x in given if isinstance(x, Tensor) and x.grad_fn is not None]
        reached: set[str] = set()
        visited: set[Any] = set()
        while todo:
            node = todo.pop()
            if node is None or node in visited:
                continue
            visited.add(node)
            variable = getattr(node, "variable", None)
            reached.update(filter(None, (self._owner.get(id(variable)), node.metadata.get("unit"))))
            todo += [x for x, _ in node.next_functions]
        if not reached:
            return
        last = {}
        for place, unit in enumerate(self.units):
            if unit.path in reached and unit.list_path is not None:
                last[unit.list_path] = place
        self.now.unread = {
            unit.path
            for place, unit in enumerate(self.units)
            if unit.path in self.now.ran and unit.path not in reached and place > last.get(unit.list_path or "", -1)
        }

    def _wrapped(self, unit: Unit, forward: Callable[..., Any]) -> Callable[..., Any]:
        kind = None if unit.list_path is None else (unit.list_path, *kind_of(unit.module))

        @functools.wraps(forward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            entering = _largest([args, kwargs])
            sizes = tuple(tuple(x.shape) for x in tree_leaves([args, kwargs]) if isinstance(x, Tensor))
            key = None if kind is None or entering is None else (*kind, sizes)
            if key in self._first:
                name, result = self._first[key]
                self.now.ran.setdefault(unit.path, self.now.ran[name])
                return tree_map(functools.partial(_as_made_by, unit.path), result)
            ran = self.now.ran.setdefault(unit.path, RanUnit())
            kept: dict[object, Any] = {}  # storages: held, so that no other takes its address

            def keep(tensor: Tensor) -> Tensor:
                if not isinstance(tensor, nn.Parameter) and not isinstance(tensor._base, nn.Parameter):
                    storage = tensor.untyped_storage()
                    kept[storage._cdata] = storage
                return tensor

            self.stack.append(unit.path)
            cached = _cache_bytes([args, kwargs])
            try:
                with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
                    result = forward(*args, **kwargs)
            finally:
                self.stack.pop()
            ran.kept_bytes += float(sum(x.nbytes() for x in kept.values()))
            ran.cache_bytes += _cache_bytes([args, kwargs]) - cached
            if entering is not None:
                ran.rows_in, ran.width_in = ran.rows_in + _rows(entering), int(entering.shape[-1])
            leaving = _first_rows(result)
            if leaving is not None:
                width = _width_out(unit.module, leaving)
                ran.rows_out, ran.width_out = ran.rows_out + leaving.numel() // width, width
            if key is not None:
                self._first[key] = (unit.path, result)
            return result

        return watched


class _AttentionMeter(TorchFunctionMode):
    """Books fused attention by its shapes; which products a CPU makes of it does not matter."""

    def __init__(self, watch: ForwardWatch) -> None:
        super().__init__()
        self.watch = watch

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is not nn.functional.scaled_dot_product_attention or not self.watch.stack:
            return func(*args, **(kwargs or {}))
        named: dict[str, Any] = kwargs or {}
        given = [*args, *(named[x] for x in ("query", "key", "value")[len(args) :])]
        query, key, value = given[:3]
        ran = self.watch.now.ran[self.watch.stack[-1]]
        batch = query.shape[0] if query.dim() == 4 else 1
        heads, rows, width = query.shape[-3:]
        ran.pair_flops += 2.0 * batch * heads * rows * key.shape[-2] * (width + value.shape[-1])
        ran.num_together = max(ran.num_together, batch)
        ran.attention = AttentionSpec(
            num_heads=heads,
            num_kv_heads=key.shape[-3],
            head_dim=width,
            value_head_dim=value.shape[-1],
            causal=False,
        )
        self.watch.in_attention = True
        try:
            return func(*args, **(kwargs or {}))
        finally:
            self.watch.in_attention = False


class _Meter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Books the FLOPs of every product to the unit that runs it."""

    def __init__(self, watch: ForwardWatch) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.watch = watch

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = run_operation(func, args, kwargs or {})
        name = func._overloadpacket.__name__
        if name == "_to_copy" and _is_weight(args[0]):
            result.is_cast_weight = True  # a router that multiplies in fp32
        if not self.watch.stack or self.watch.in_attention:
            return result
        ran = self.watch.now.ran[self.watch.stack[-1]]
        if name == "_grouped_mm":
            ran.weight_flops += 2.0 * args[0].shape[-2] * args[0].shape[-1] * args[1].shape[-1]
        elif func._overloadpacket in flop_registry and not name.endswith("backward"):
            flops = float(flop_registry[func._overloadpacket](*args, **(kwargs or {}), out_val=result))
            if any(_is_weight(x) for x in args if isinstance(x, Tensor)):
                ran.weight_flops += flops
            else:
                ran.other_flops += flops
        return result


def _as_made_by(path: str, value: Any) -> Any:
    if not isinstance(value, Tensor):
        return value
    copied = value.clone()
    if copied.grad_fn is not None:
        notes: Any = copied.grad_fn.metadata  # a dict, typed as a method
        notes["unit"] = path
    return copied


def _cache_bytes(given: Any) -> int:
    """Count the bytes of all tensors in the caches among a layer's arguments; each layer's part is an object."""
    total, todo = 0, [x for x in tree_leaves(given) if hasattr(x, "get_seq_length")]
    while todo:
        part = todo.pop()
        if isinstance(part, Tensor):
            total += part.numel() * part.element_size()
        elif isinstance(part, (list, tuple, dict)):
            todo += part.values() if isinstance(part, dict) else part
        elif type(part).__module__.endswith("cache_utils"):
            todo += vars(part).values()
    return total


def _is_weight(tensor: Tensor) -> bool:
    """Return whether it is a parameter, or a view of one: a dispatch mode sees views by their base."""
    base = tensor if tensor._base is None else tensor._base
    return isinstance(base, nn.Parameter) or hasattr(base, "is_cast_weight")


def kind_of(module: Any) -> tuple[object, ...]:
    """Return what is equal for modules built alike: they return tensors of the same sizes."""
    parts = tuple((name, type(x).__name__) for name, x in module.named_modules())
    return (type(module), parts, tuple(tuple(x.shape) for x in module.parameters()))


def _largest(tree: Any) -> Tensor | None:
    """The rows that enter: the first tensor of numbers, or else of ids."""
    tensors = [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.dim() > 0]
    return next((x for x in tensors if x.is_floating_point() and x.dim() > 1), tensors[0] if tensors else None)


def _first_rows(tree: Any) -> Tensor | None:
    leaves = tree_leaves(getattr(tree, "to_tuple", lambda: tree)())
    return next((x for x in leaves if isinstance(x, Tensor) and x.is_floating_point() and x.dim() > 1), None)


def _width_out(module: Any, leaving: Tensor) -> int:
    """Return the last dimension of rows, or the channels of a picture that a convolution made."""
    channels = [x.out_channels for x in module.modules() if isinstance(x, nn.Conv2d)]
    if leaving.dim() == 4 and channels and leaving.shape[1] == channels[-1]:
        return int(leaving.shape[1])
    return int(leaving.shape[-1])


def _rows(tensor: Tensor) -> int:
    return int(tensor.shape[:-1].numel()) if tensor.is_floating_point() else int(tensor.numel())
