"""Matrix products and attention of one layer on one tensor-parallel device, and their FLOPs.

Symbols: h hidden size, f intermediate size, H and K query and key/value heads, d their width, tp devices.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, gcd

from trimtab.costs.formula.curves import Efficiency, Line, product_line, weight_line
from trimtab.specs import WORK_TERMS, AttentionSpec, LayerSpec, ParallelDims


@dataclass(frozen=True, slots=True, kw_only=True)
class Matmul:
    """One weight of `in_width` x `out_width` on this device, that each row is multiplied with `visits` times."""

    name: str
    in_width: float
    out_width: float
    visits: float = 1  # experts per token, for a routed expert
    reduced: bool = False  # row-parallel: the result is summed over the tp devices

    @property
    def flops(self) -> float:
        """Return the forward FLOPs for each row: 2 per multiply-add. Bias not counted."""
        return 2.0 * self.in_width * self.out_width * self.visits

    def forward_line(self, e: Efficiency, peak_flops: float) -> Line:
        """Return the seconds of the product over N rows; all experts of a device as one of their rows together."""
        return self._visited(product_line(self.in_width, self.out_width, e, peak_flops))

    def backward_line(self, e: Efficiency, peak_flops: float) -> Line:
        """Return seconds for the gradient of its rows: the weights turned round."""
        return self._visited(product_line(self.out_width, self.in_width, e, peak_flops))

    def weight_line(self, e: Efficiency, peak_flops: float) -> Line:
        """Return seconds for the gradient of its weights."""
        return self._visited(weight_line(self.in_width, self.out_width, e, peak_flops))

    def _visited(self, line: Line) -> Line:
        return Line(row=line.row * self.visits, once=line.once)


@dataclass(frozen=True, slots=True, kw_only=True)
class Heads:
    """Heads one device computes: padded to a multiple of tp, key/value heads copied where tp exceeds their number."""

    query: int
    kv: int


def local_heads(attention: AttentionSpec, tp: int) -> Heads:
    """Count heads on each of `tp` devices: ceil(H / tp); K is divided alike, or copied when tp is a multiple of K."""
    query = ceil(attention.num_heads / tp)
    if attention.num_kv_heads == attention.num_heads:
        return Heads(query=query, kv=query)
    return Heads(query=query, kv=max(1, attention.num_kv_heads // tp))


def find_tp_problems(layer: LayerSpec, tp: int) -> list[str]:
    """Say why `tp` devices cannot share this layer; heads that do not divide are padded, no problem."""
    problems = []
    a, m = layer.attention, layer.mlp
    if layer.measured is not None and layer.kind == "block":
        # every inner width is cut into equal parts; a gate of one column stays whole
        inner = {x.in_width if x.out_width == layer.hidden_size else x.out_width for x in layer.linears or ()} - {1}
        if (common := gcd(*inner)) % tp:
            problems.append(f"tp {tp} cannot share the columns of {layer.name}: use a tp that divides {common}")
        return problems
    # key/value heads are divided or copied; query heads are padded, which is no problem
    if a is not None and a.num_kv_heads != a.num_heads and a.num_kv_heads % tp and tp % a.num_kv_heads:
        problems.append(
            f"tp {tp} cannot share {a.num_kv_heads} key/value heads of {layer.name}: use a divisor or a multiple of it"
        )
    # columns of the MLP are cut into equal parts
    if m is not None and layer.kind == "block":
        for width in {m.intermediate_size, m.shared_intermediate_size}:
            if width % tp:
                problems.append(
                    f"tp {tp} cannot share the intermediate size {width} of {layer.name}: use a tp that divides {width}"
                )
    return problems


def num_expert_params(layer: LayerSpec) -> int:
    """Count the weights of all routed experts of a layer, 0 where it has none; the rest of a layer is dense."""
    m = layer.mlp
    if m is None or m.num_experts is None:
        return 0
    return (3 if m.gated else 2) * layer.hidden_size * m.intermediate_size * m.num_experts


def num_visited_params(layer: LayerSpec) -> int:
    """Count the weights of the routed experts that one row visits, 0 where it has none."""
    m = layer.mlp
    if m is None or m.num_experts is None:
        return 0
    return num_expert_params(layer) // m.num_experts * (m.experts_per_token or 1)


def has_expert_biases(layer: LayerSpec) -> bool:
    """Return whether experts have biases (GPT-OSS): no other parameters of a block, its matrices aside, are as many."""
    m = layer.mlp
    if m is None or m.num_experts is None:
        return False
    rest = layer.num_params - num_expert_params(layer) - (layer.num_matmul_params - num_visited_params(layer))
    return rest >= m.num_experts * (layer.hidden_size + m.intermediate_size)


def find_ep_problems(layer: LayerSpec, dims: ParallelDims) -> list[str]:
    """Return why the experts of this layer cannot be divided so, in sentences."""
    m = layer.mlp
    if m is None or m.num_experts is None:
        return []
    problems = []
    # whole experts on each device
    if m.num_experts % dims.ep:
        problems.append(
            f"ep {dims.ep} cannot share the {m.num_experts} experts of {layer.name}: use an ep that divides them"
        )
    # columns of one expert among etp devices
    if m.intermediate_size % dims.expert_tp:
        problems.append(
            f"etp {dims.expert_tp} cannot share the {m.intermediate_size} columns of an expert of {layer.name}"
        )
    return problems


def layer_matmuls(layer: LayerSpec, tp: int | ParallelDims) -> tuple[Matmul, ...]:
    """The matrix products of `layer` on one of `tp` devices, or of those of `ParallelDims`.

    Blocks: q, k, v column-parallel over padded heads; output row-parallel; MLP column- then row-parallel; routers
    whole on each device. Weights of `num_matmul_params` that this does not explain come as one evenly shared product.
    Projector: one or two products, column- then row-parallel, whole on each device where tp does not divide the width
    between. Patch embedding: whole on each device. Head: the vocabulary, padded to a multiple of tp, divided.
    A block whose work was measured: one product of as many FLOPs a row; over tp two, whose results are summed. Other
    measured layers are whole on each device.
    """
    dims = ParallelDims(tp=tp) if isinstance(tp, int) else tp
    if layer.measured is not None:
        return _measured_matmuls(layer, dims)
    if layer.num_matmul_params == 0:
        return ()
    tp = dims.tp
    if layer.kind == "block":
        return _block_matmuls(layer, dims)
    if layer.kind == "projector":
        return _projector_matmuls(layer, tp)
    if layer.kind == "head":
        vocab = layer.num_matmul_params / layer.hidden_size
        return (Matmul(name="vocabulary", in_width=layer.hidden_size, out_width=ceil(vocab / tp)),)
    return (
        Matmul(
            name=layer.kind,
            in_width=layer.num_matmul_params / layer.output_size,
            out_width=layer.output_size,
        ),
    )


def attention_flops_per_pair(attention: AttentionSpec, tp: int) -> float:
    """Return the forward FLOPs of QK^T and AV for each (query row, key row) pair: 2 H (d_qk + d_v), nothing masked.

    Not counted: softmax, rotary, masks (< 1 % for d >= 64).
    """
    return 2.0 * local_heads(attention, tp).query * (attention.head_dim + attention.value_head_dim)


def _measured_matmuls(layer: LayerSpec, dims: ParallelDims) -> tuple[Matmul, ...]:
    row_flops, h = measured_terms(layer, dims.tp).row_flops, layer.hidden_size
    if not row_flops:
        return ()
    if dims.tp == 1 or layer.kind != "block":
        return (Matmul(name="measured", in_width=h, out_width=row_flops / 2 / h),)
    half = Matmul(
        name="measured", in_width=h, out_width=row_flops / 4 / h, reduced=True
    )  # one mixes rows, one does not
    return half, replace(half, name="measured MLP", reduced=num_expert_params(layer) == 0 or not dims.is_folded)


@dataclass(frozen=True, slots=True, kw_only=True)
class MeasuredTerms:
    """Measured work of a layer for each of its rows, and for each row squared (or pair in a window)."""

    row_flops: float
    pair_flops: float
    row_bytes: float
    pair_bytes: float


WHOLE_BYTES = 16
"""Kept of a measured block, for each value of its width, that tp does not divide: two norms, in PyTorch operations an
fp32 copy and a 16-bit one each, and the inputs of the products after them."""


def measured_terms(layer: LayerSpec, tp: int = 1, row_share: int = 1, *, flash: bool = False) -> MeasuredTerms:
    """Return `LayerSpec.measured` in the two columns that the layer's tower has, on one of `tp` devices.

    `flash`: attention's scores and mask, which were counted where no kernel spares them, are not kept.

    A block's work is divided evenly, but for `WHOLE_BYTES`, which only sequence parallelism divides (`row_share`). What
    hosts keep whole on each device, as the narrow products of latent attention, is divided too: a few per cent less.
    """
    assert layer.measured is not None, "only a layer that was measured has these"
    tower = "tokens" if layer.tower == "language" else "patches"
    pairs = [WORK_TERMS.index(f"{tower}_{x}") for x in ("sq", "windowed")]
    flops, kept = layer.measured.forward_flops, layer.measured.kept_bytes
    assert flops, f"{layer.name} has no price; profile_model refuses it"
    rows, r = WORK_TERMS.index(tower), layer.rows_per_input or 1.0
    tp, row_share = (tp, row_share) if layer.kind == "block" else (1, 1)
    whole = min(kept[rows] / r, float(WHOLE_BYTES * layer.hidden_size))
    return MeasuredTerms(
        row_flops=flops[rows] / r / tp,
        pair_flops=sum(flops[i] for i in pairs) / tp,
        row_bytes=whole / row_share + (kept[rows] / r - whole) / tp,
        pair_bytes=0.0 if flash and layer.attention is not None else sum(kept[i] for i in pairs) / tp,
    )


def pair_flops(layer: LayerSpec, tp: int) -> float:
    """Return forward FLOPs per computed pair of `layer`; 0 without attention. Measured ones leave out masked pairs."""
    if layer.measured is not None:
        return measured_terms(layer, tp).pair_flops
    return attention_flops_per_pair(layer.attention, tp) if layer.attention else 0.0


def _block_matmuls(layer: LayerSpec, dims: ParallelDims) -> tuple[Matmul, ...]:
    products, tp = _explained_matmuls(layer, dims), dims.tp
    explained = sum(p.in_width * p.out_width * p.visits for p in _explained_matmuls(layer, ParallelDims()))
    rest = layer.num_matmul_params - explained
    assert rest >= -0.001 * explained, f"{layer.name}: num_matmul_params is less than its attention and MLP need"
    if rest > 0:
        products.append(Matmul(name="other", in_width=layer.hidden_size, out_width=rest / layer.hidden_size / tp))
    return tuple(products)


def _explained_matmuls(layer: LayerSpec, dims: ParallelDims) -> list[Matmul]:
    """List the products that shapes explain; of E experts a device has E / ep, each cut into etp parts.

    It gets the rows of etp devices of tp, so that the work of a device is the same whatever ep and etp are.
    """
    h, tp, products = layer.hidden_size, dims.tp, list[Matmul]()
    # attention: three products in, one out whose result is summed over tp
    if (a := layer.attention) is not None:
        heads = local_heads(a, tp)
        products += [
            Matmul(name="q", in_width=h, out_width=heads.query * a.head_dim),
            Matmul(name="k", in_width=h, out_width=heads.kv * a.head_dim),
            Matmul(name="v", in_width=h, out_width=heads.kv * a.value_head_dim),
            Matmul(name="o", in_width=heads.query * a.value_head_dim, out_width=h, reduced=True),
        ]
    # the MLP: dense, or routed experts, each row visiting k of them
    if (m := layer.mlp) is not None:
        names = ("gate", "up") if m.gated else ("up",)
        if m.num_experts is None:
            products += [Matmul(name=name, in_width=h, out_width=m.intermediate_size / tp) for name in names]
            products.append(Matmul(name="down", in_width=m.intermediate_size / tp, out_width=h, reduced=True))
        else:
            k = (m.experts_per_token or 1) * dims.expert_tp / tp
            f = m.intermediate_size / dims.expert_tp
            products.append(Matmul(name="router", in_width=h, out_width=m.num_experts))
            products += [Matmul(name=f"expert {name}", in_width=h, out_width=f, visits=k) for name in names]
            products.append(Matmul(name="expert down", in_width=f, out_width=h, visits=k, reduced=not dims.is_folded))
            # shared experts are visited by all rows, and divided as a dense MLP
            if s := m.shared_intermediate_size / tp:
                products += [Matmul(name=f"shared {name}", in_width=h, out_width=s) for name in names]
                products.append(Matmul(name="shared down", in_width=s, out_width=h, reduced=True))
    return products


def _projector_matmuls(layer: LayerSpec, tp: int) -> tuple[Matmul, ...]:
    enter, leave, weights = layer.hidden_size, layer.output_size, layer.num_matmul_params
    if weights == enter * leave:
        return (Matmul(name="linear", in_width=enter, out_width=leave),)
    # two layers of one width between: enter * m + m * leave = weights, whatever a projector repeats of that
    middle = weights / (enter + leave)
    share = tp if middle % tp == 0 else 1
    return (
        Matmul(name="linear_1", in_width=enter, out_width=middle / share),
        Matmul(name="linear_2", in_width=middle / share, out_width=leave, reduced=share > 1),
    )
