"""LoRA: the linear layers of a model, the adapters next to them, and what those and a 4-bit base take.

Symbols: K and M widths of a linear layer, r rank, w bytes of an activation, N rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType

from trimtab.costs.formula.flops import Matmul, layer_matmuls
from trimtab.errors import PlanError, join_problems
from trimtab.lora import ALL_LINEAR, Lora
from trimtab.specs import LayerSpec, Linear, ModelSpec

_NAMES = MappingProxyType(
    {
        **{name: f"self_attn.{name}_proj" for name in "qkvo"},
        **{name: f"mlp.{name}_proj" for name in ("gate", "up", "down")},
        **{f"shared {name}": f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")},
        **{name: name for name in ("linear", "linear_1", "linear_2")},
    }
)
"""Most families' names of the products of `layer_matmuls`; experts and their routers are no linear layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adapted:
    """A linear layer on one tensor-parallel device, with its adapter."""

    name: str
    products: tuple[str, ...]  # of `layer_matmuls`, that it computes; none: of another make
    in_width: float
    out_width: float
    rank: int

    @property
    def num_params(self) -> float:
        return self.rank * (self.in_width + self.out_width)

    @property
    def factors(self) -> tuple[Matmul, Matmul]:
        """Return A and B as matrix products."""
        return (
            Matmul(name="A", in_width=self.in_width, out_width=self.rank),
            Matmul(name="B", in_width=self.rank, out_width=self.out_width),
        )


def layer_linears(layer: LayerSpec) -> tuple[Linear, ...]:
    """The linear layers that PEFT would find in `layer`: as Transformers was asked, else those its shapes make.

    The output embedding has none: it is never adapted by "all-linear", nor quantised.
    """
    if layer.kind == "head" or layer.tower == "audio":
        return ()
    # as the library built them
    if layer.linears is not None:
        return layer.linears
    if layer.kind not in ("block", "projector") or layer.measured is not None:
        return ()
    # else one for each product, where q, k and v may share a matrix
    products = {p.name: p for p in layer_matmuls(layer, 1) if p.name in _NAMES}
    fused: tuple[Linear, ...] = ()
    if layer.attention is not None and layer.attention.fused_qkv:
        joined = sum(products.pop(name).out_width for name in "qkv")
        o = products.pop("o")
        fused = (
            Linear(name="attn.qkv", in_width=layer.hidden_size, out_width=round(joined)),
            Linear(name="attn.proj", in_width=round(o.in_width), out_width=round(o.out_width)),
        )
    # names as Transformers spells them, of gated MLPs and of plain ones
    names = _NAMES if layer.mlp is None or layer.mlp.gated else {**_NAMES, "up": "mlp.fc1", "down": "mlp.fc2"}
    return fused + tuple(
        Linear(name=names[p.name], in_width=round(p.in_width), out_width=round(p.out_width)) for p in products.values()
    )


def adapt_layer(layer: LayerSpec, lora: Lora | None, tp: int) -> tuple[Adapted, ...]:
    """Return the adapters of `layer` on one of `tp` devices: A is divided with its layer's input, B with its output."""
    if lora is None or layer.tower not in lora.towers:
        return ()
    return tuple(x for x in _on_device(layer, lora.r, tp) if _is_target(x.name, layer, lora))


def quantised_params(layer: LayerSpec, lora: Lora | None, tp: int) -> float:
    """Count the weights of `layer` on a device that lie in 4 bits: of all linear layers of a tower with adapters.

    Embeddings, norms, biases, the head and towers without adapters keep their format, as ms-swift leaves them
    (`get_modules_to_not_convert` in its quant_args.py).
    """
    if lora is None or lora.bits == 16 or layer.tower not in lora.towers:
        return 0.0
    return sum(x.in_width * x.out_width for x in _on_device(layer, lora.r, tp))


def refuse_unknown_targets(model: ModelSpec, lora: Lora) -> None:
    """Raise `PlanError` with a sentence for each target that names no linear layer of the towers; it lists those."""
    layers = [x for x in model.layers if x.tower in lora.towers]
    # names that could have been meant, by their last part
    names = [linear.name for x in layers for linear in layer_linears(x)]
    there = list(dict.fromkeys(name.rpartition(".")[2] for name in names if name))
    towers = " and ".join(lora.towers)
    problems = [
        f"lora was asked for on {target!r}, and no linear layer of {model.name}'s {towers} tower is called so: name "
        f"some of {', '.join(there) or 'another tower'}, or {ALL_LINEAR}"
        for target in lora.targets
        if not any(_names(target, x, linear.name) for x in layers for linear in layer_linears(x))
    ]
    if problems:
        raise PlanError(join_problems(problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class AdapterCount:
    """What LoRA trains of a whole model."""

    num_matrices: int
    num_params: int


def count_adapters(model: ModelSpec, lora: Lora) -> AdapterCount:
    """Return the linear layers with adapters, and the adapters' parameters: those that PEFT prints as trainable.

    >>> from trimtab import describe
    >>> count_adapters(describe("Qwen2.5-VL-7B"), Lora(r=16))
    AdapterCount(num_matrices=196, num_params=40370176)
    """
    found = [adapter for layer in model.layers for adapter in adapt_layer(layer, lora, 1)]
    return AdapterCount(num_matrices=len(found), num_params=round(sum(x.num_params for x in found)))


def _is_target(name: str, layer: LayerSpec, lora: Lora) -> bool:
    return any(_names(target, layer, name) for target in lora.targets)


def _names(target: str, layer: LayerSpec, name: str) -> bool:
    """Match as PEFT's `target_modules` do: the whole path, or its end after a dot."""
    path = f"{layer.name}.{name}" if name else layer.name
    return target == ALL_LINEAR or path == target or path.endswith(f".{target}")


def _on_device(layer: LayerSpec, rank: int, tp: int) -> list[Adapted]:
    """Return linear layers at their widths on one device, each with the products that its widths say it computes."""
    linears = layer_linears(layer)
    left, local = list(layer_matmuls(layer, 1)), {p.name: p for p in layer_matmuls(layer, tp)}
    # match each linear layer with the products that it stands for
    runs: dict[str, Sequence[Matmul]] = {}
    for linear in sorted(linears, key=lambda x: -x.out_width):  # joined ones first; q before o, as modules have them
        runs[linear.name] = _matching(linear, left)
        left = [p for p in left if p not in runs[linear.name]]
    # its widths on one device are those of its products there
    found = []
    for linear in linears:
        run = [local[p.name] for p in runs[linear.name]]
        found.append(
            Adapted(
                name=linear.name,
                products=tuple(p.name for p in run),
                in_width=run[0].in_width if run else linear.in_width,
                out_width=sum(p.out_width for p in run) if run else linear.out_width / tp,
                rank=rank,
            )
        )
    return found


def _matching(linear: Linear, products: Sequence[Matmul]) -> Sequence[Matmul]:
    """The product of its name and widths, or else the first of these widths, or neighbours with one input, joined."""
    runs = [products[start : start + length] for start in range(len(products)) for length in (1, 2, 3)]
    for run in sorted(runs, key=lambda run: [_NAMES.get(p.name) for p in run] != [linear.name]):
        widths = {round(p.in_width) for p in run}, round(sum(p.out_width for p in run))
        if widths == ({linear.in_width}, linear.out_width) and not (len(run) > 1 and any(p.reduced for p in run)):
            return run
    return ()
