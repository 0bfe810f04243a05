"""Seconds and bytes of one layer by formula: products at the device's flop/s, everything else at its bytes/s."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from trimtab.costs.formula.activations import (
    adapter_item_bytes,
    adapter_traffic,
    casts_inputs,
    count_kernels,
    expert_launches,
    kept_when,
    layer_traffic,
    selective_bytes,
    uses_dense_pairs,
)
from trimtab.costs.formula.adapters import Adapted, adapt_layer, quantised_params
from trimtab.costs.formula.curves import Line, product_rates
from trimtab.costs.formula.flops import Matmul, layer_matmuls, local_heads, pair_flops
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.formula.state import (
    adapter_settings,
    added_bytes,
    scattered_bytes,
    shares_of,
    state_bytes,
    step_seconds,
)
from trimtab.lora import NF4_BYTES, Lora
from trimtab.specs import (
    NUM_WORK_TERMS,
    WORK_TERMS,
    DeviceSpec,
    LayerCost,
    LayerSpec,
    ParallelDims,
    RecomputeTier,
)

KERNEL_S = 2e-6
"""Assumed: start and drain of a kernel that only moves memory. A host that cannot launch fast enough costs more."""

COLLECTIVE_S = 10e-6
"""Assumed: latency of one collective among the devices of a node."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """What a layer's backward must compute."""

    inputs: bool  # something trainable lies before it
    weights: bool  # it is trainable itself, or has an adapter that is

    @property
    def any(self) -> bool:
        return self.inputs or self.weights


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkColumns:
    """Which of WORK_TERMS a layer's rows and attended pairs are counted in."""

    rows: int
    pairs: int
    rows_per_unit: float
    pair_share: float  # pairs computed for each squared row: 1/2 when causal

    def terms(self, *, rows: float = 0.0, pairs: float = 0.0, once: float = 0.0) -> tuple[float, ...]:
        """Return the figures for each row, each pair and each micro-batch in their WORK_TERMS."""
        values = [0.0] * NUM_WORK_TERMS
        values[0] = float(once)
        values[self.rows] = float(rows * self.rows_per_unit)
        values[self.pairs] = float(pairs * self.pair_share)
        return tuple(values)


def find_gradients(layers: Iterable[LayerSpec], frozen: frozenset[str], lora: Lora | None = None) -> list[Gradients]:
    """Return what each layer's backward computes, given the towers that do not train; with LoRA adapters alone do.

    Pixels and token ids have no gradient, and a frozen layer passes none on to nothing: a frozen tower with nothing
    trainable before it has no backward at all, one after trainable layers has the half for its inputs.
    """
    result, reached = [], False
    for layer in layers:
        weights = layer.tower not in frozen if lora is None else bool(adapt_layer(layer, lora, 1))
        starts = layer.kind == "embed" and layer.tower != "projector"  # pixels and ids; not a newline among features
        result.append(Gradients(inputs=reached and not starts, weights=weights))
        reached = reached or weights
    return result


def cost_layer(
    layer: LayerSpec, gradients: Gradients, device: DeviceSpec, settings: CostSettings, *, group: int
) -> LayerCost:
    """Return the coefficients of seconds and bytes of `layer` on one device, per WORK_TERMS.

    forward = products (`product_line`) + attention + elementwise traffic / (bandwidth x efficiency) + start of each
        kernel + tensor-parallel collectives, one after the other (none overlaps another but by `tp_overlap`).
    backward = products once for the inputs and once for the weights (`weight_line`), whose gradient is added to what
        earlier micro-batches left + attention x 2.5 (fused: scores computed again; unfused 2) + twice the traffic
        + collectives; its part for the weights alone is their products.
    With LoRA (`CostSettings.lora`) the weights are those of the adapters, two narrow products next to each matrix.
    4-bit weights are unpacked before each product, forward and backward: bytes read and written, assumed to take the
    memory's bandwidth.
    A layer of measured work has no tiers between "none" and "full". An audio tower takes only its state: no sample
    holds sound.
    A layer that nothing reads has no backward and keeps nothing, yet takes the state of a trainable one (DeepSpeed
    and Megatron-Core allocate it for every parameter that may train; a plain AdamW makes none: an upper bound).
    Gradient exchange and optimizer come once a step: `step_seconds`. A pass lasts as long as the host's, if that is
    longer (`LayerCost`); where launches block, as long as both together.
    """
    assert layer.attention is None or not layer.attention.cross, "it has no price: profile_model refuses it"
    runs_backward = gradients.any and not layer.unread and layer.tower != "audio"
    # seconds: forward, the same once more for recompute, backward
    columns = find_columns(layer, settings)
    seconds = _LayerSeconds.of(layer, device, settings)
    host_s = 0.0 if layer.tower == "audio" else host_seconds(layer, settings)
    pair_factor = 2.0 if settings.attention == "eager" else 2.5
    rows = seconds.forward.row + seconds.traffic + seconds.collectives + seconds.ring + seconds.experts
    pairs = seconds.attention + seconds.pair_traffic
    silent = layer.tower == "audio"
    forward = columns.terms() if silent else columns.terms(rows=rows, pairs=pairs, once=seconds.once + seconds.gather)
    again = columns.terms(rows=rows, pairs=pairs, once=seconds.once)
    # backward: gradients of inputs and of weights, whichever are needed
    backward = weight = columns.terms()
    if runs_backward and gradients.weights:
        weight = columns.terms(rows=seconds.weights.row, once=seconds.weights.once + seconds.scatter)
    if runs_backward:
        products = _backward_products(seconds, layer, gradients)
        backward = columns.terms(
            rows=products.row
            + 2 * (seconds.traffic + seconds.ring)
            + seconds.experts
            + (seconds.collectives + (seconds.regather if gradients.weights else 0.0) if gradients.inputs else 0.0),
            pairs=pair_factor * seconds.attention + 2 * seconds.pair_traffic,
            once=products.once
            + 2 * (seconds.kernels + seconds.waits)
            + seconds.unpack
            + seconds.gather
            + (seconds.scatter if gradients.weights else 0.0),
        )
    # bytes: what is kept, what recompute keeps, what lives while backward runs
    none_bytes = columns.terms()
    if runs_backward:
        kept = kept_when(layer, settings, weights=gradients.weights and settings.lora is None)
        none_bytes = columns.terms(rows=sum(k.row_bytes for k in kept), pairs=sum(k.pair_bytes for k in kept))
    tiers = [RecomputeTier(name="none", extra_backward_s=columns.terms(), saved_bytes=none_bytes)]
    if runs_backward and layer.kind == "block":
        tiers += _recompute_tiers(layer, settings, seconds, columns, again)
    transients = _transients(layer, settings, columns, none_bytes) if runs_backward else (columns.terms(),)
    # state, and weights that ZeRO-3 gathers for this layer and the next
    shares = shares_of(layer, device, settings, trainable=gradients.weights)
    gathered = 2.0 * sum(share.stored_bytes for share in shares if settings.zero_stage == 3)  # with the next layer's
    transients = tuple(_add(moment, columns.terms(once=gathered)) for moment in transients)
    return LayerCost(
        name=layer.name,
        tower=layer.tower,
        kind=layer.kind,
        forward_s=forward,
        backward_s=backward,
        output_bytes=_output_bytes(layer, columns, settings),
        state_bytes=sum(state_bytes(share, settings) for share in shares),
        num_params=sum(share.params for share in shares),
        tiers=tuple(tiers),
        transient_bytes=transients[0],
        other_transient_bytes=transients[1] if len(transients) > 1 else (),
        group=group,
        step_s=sum(step_seconds(share, device, adapter_settings(settings)) for share in shares),
        weight_s=weight,
        host_forward_s=host_s,
        host_backward_s=2 * host_s if runs_backward else 0.0,
    )


def host_seconds(layer: LayerSpec, settings: CostSettings) -> float:
    """Return the host's seconds for a forward of the layer; experts' kernels count where the device does not wait."""
    host, own = settings.of_host, settings.host_s(layer.kind)
    if host.takes_turns or not (launches := expert_launches(layer, settings)):
        return own
    return (1.0 + host.routing) * own + launches * host.expert_s


def _launch_seconds(layer: LayerSpec, settings: CostSettings) -> float:
    """Return the seconds of a forward in which the device waits for launches: of experts' kernels, or of all."""
    experts_s = expert_launches(layer, settings) * settings.of_host.expert_s if settings.of_host.takes_turns else 0.0
    return experts_s + (host_seconds(layer, settings) if settings.blocking_launches else 0.0)


def find_columns(layer: LayerSpec, settings: CostSettings) -> WorkColumns:
    """Find the columns of rows, "patches" or "tokens", and of pairs: squares, or windowed ones where a window cuts.

    Masked pairs are skipped by fused kernels, computed by `uses_dense_pairs`: there a pack's pairs are the square of
    all its tokens (`join_samples`). Rows and pairs of the language model are those of one of cp devices.
    """
    tower = "tokens" if layer.tower == "language" else "patches"
    a = layer.attention
    dense, shared = uses_dense_pairs(layer, settings), settings.token_share(layer.tower)
    windowed = a is not None and a.window is not None and not dense
    return WorkColumns(
        rows=WORK_TERMS.index(tower),
        pairs=WORK_TERMS.index(f"{tower}_windowed" if windowed else f"{tower}_sq"),
        rows_per_unit=layer.rows_per_input / shared,
        pair_share=(0.5 if a is not None and a.causal and not dense and layer.measured is None else 1.0) / shared,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Workspace:
    """Bytes above all that a block keeps, at one moment of its backward."""

    rows: float  # for each row
    once: float


def _workspaces(layer: LayerSpec, settings: CostSettings) -> tuple[_Workspace, _Workspace]:
    """Return the bytes at the MLP's last product and at its gate, for N rows.

    At the last product, where nothing kept is freed yet: gradient of the block's output (it goes on along the residual)
    w N h, gradient of the product's input w N f, gradient of its weight w f h. At the gate (or a GELU in separate
    operations): gradients of the block's output, and of the gate's result and two operands, less the product's input:
    w N (h + 2 f). The weight's gradient is in the weight's dtype: kernels make it before it is added to the fp32
    accumulator, and Megatron-Core 0.16 allocates it even where its kernel adds to the accumulator itself ("dummy
    grad_weight" in tensor_parallel/layers.py). Exact for dense blocks of Transformers with SDPA (0.1 %); up to 24 % too
    much where a norm stands after the MLP (Gemma 3), whose input is freed before. Not counted: the first products
    where fused kernels make one matrix of two, w (2 N h - N f + 2 h f), larger than both only with fewer rows than
    about half the width, and by less than w h f. Unfused attention: see `_transients`.

    LoRA: no gradient of a frozen weight, but of 4 bits the matrix is unpacked, w f h, while the gradient of its rows is
    made. An adapter next to the last product makes a second gradient of the product's input before both are added, in
    fp32 first where its input is cast.
    The product's input is freed only where an adapter (or a gradient of the weight) kept it.

    Experts (measured on one family, 3 % too much): rows visit several; their results, weighed, and the copies of their
    inputs have gradients too, and one kernel makes the gradient of all experts' weights.
    """
    m, w, h = layer.mlp, settings.item_bytes, layer.hidden_size
    if m is None:
        return _Workspace(rows=0.0, once=0.0), _Workspace(rows=0.0, once=0.0)
    f, leaving = m.intermediate_size / settings.dims.tp, h / settings.row_share(layer.tower)
    # the gradient of a matrix; of a frozen one in 4 bits its unpacked copy
    lora = settings.lora
    matrix = w * f * h if lora is None or quantised_params(layer, lora, 1) else 0.0
    adapted = lora is not None and any("down" in x.products for x in adapt_layer(layer, lora, 1))
    # experts: every visited row, and one gradient for all experts' weights
    if m.num_experts is not None:
        v, f = settings.visits(m), m.intermediate_size / settings.dims.expert_tp
        own = m.num_experts / settings.dims.ep if lora is None else 0.0  # experts stay frozen, in 16 bits
        last = _Workspace(rows=w * (leaving + 2 * v * h + v * f), once=w * f * h * own)
        return last, _Workspace(rows=w * (leaving + 3 * v * h), once=0.0)
    # a dense MLP: at its last product, and at its gate
    separate = m.gated or (m.quick_gelu and not settings.fused_kernels)
    cast = 4.0 * f if adapted and casts_inputs(settings) else 0.0
    last = _Workspace(rows=w * (leaving + (2 * f if adapted else f)) + cast, once=matrix)
    unkept = f if lora is not None and not adapted else 0.0
    return last, _Workspace(rows=w * (leaving + (2 * f if separate else f) + unkept), once=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class _LayerSeconds:
    """Forward seconds of one layer: for each row, for each computed pair, and once for each micro-batch."""

    forward: Line  # matrix products
    last: Line  # the last of them
    inputs: Line  # backward: gradients of the products' inputs, of those that enter the layer aside
    entering: Line  # the same of the products that the layer's input enters
    weights: Line  # backward: gradients of the weights, added to what earlier micro-batches left
    traffic: float
    collectives: float  # sums over tp, or their halves under sequence parallel
    ring: float  # keys and values to the other ranks of cp
    experts: float  # dispatch and combine of ep and etp
    regather: float  # sequence parallel gathers the inputs of column-parallel products once more in backward
    attention: float
    pair_traffic: float
    kernels: float  # starts of those that are no product, launches of experts' kernels, all launches where they block
    waits: float  # latency of collectives
    unpack: float  # of 4-bit weights, into the model's dtype
    gather: float  # ZeRO-3: weights from the other dp ranks, not overlapped
    scatter: float  # gradients to them

    @property
    def once(self) -> float:
        """Return the seconds of the forward for each micro-batch."""
        return self.forward.once + self.kernels + self.waits + self.unpack

    @classmethod
    def of(cls, layer: LayerSpec, device: DeviceSpec, settings: CostSettings) -> _LayerSeconds:
        e, w, dims, tp = settings.efficiency_on(device), settings.item_bytes, settings.dims, settings.dims.tp
        stays = settings.in_8_bits and layer.kind != "block"  # head, projector and patch embedding: bf16
        products, peak = product_rates(e, device.peak_flops, "bf16" if stays else settings.dtype)
        plain_peak = min(peak, device.peak_flops)  # of adapters and attention, which 8-bit recipes leave alone
        bandwidth, link = device.memory_bytes_per_s * e.memory, device.link_bytes_per_s * e.link
        # products and small kernels of one device
        matmuls = busiest_matmuls(layer, settings)
        traffic = (*layer_traffic(layer, settings), *adapter_traffic(layer, settings))
        num_collectives = sum(p.reduced for p in matmuls) if tp > 1 else 0
        if tp > 1 and layer.kind in ("embed", "head") and layer.tower == "language":
            num_collectives = 1  # embedding: sum in forward; head: sum of the input's gradient in backward
        # messages: over tp, from ZeRO-3's shares, round the ring of cp, among experts
        # ring all-reduce of b bytes moves 2 b (tp - 1) / tp through each link; reduce-scatter + all-gather the same
        row = w * (layer.output_size if layer.kind != "head" else layer.hidden_size)
        ring = 2.0 * row * (tp - 1) / tp / link / (tp if settings.tp_overlap else 1)
        shares = shares_of(layer, device, settings, trainable=True) if layer.num_params else ()
        adapters = adapt_layer(layer, settings.lora, tp)
        factors = [factor for x in adapters for factor in x.factors]
        narrow = (e, plain_peak) if adapter_item_bytes(settings) < 4 else product_rates(e, plain_peak, "fp32")
        gather = sum(x.stored_bytes * x.away_s(e) for x in shares if settings.zero_stage == 3)
        scatter = sum(x.trained * scattered_bytes(adapter_settings(settings)) * x.away_s(e) for x in shares)
        between = (settings.cp_bytes_per_s or device.link_bytes_per_s) * e.link
        all_to_all, gathered = all_to_all_s(layer, device, settings), expert_tp_bytes(layer, settings)
        num_messages = num_collectives + 2 * (all_to_all > 0) + 2 * (gathered > 0)
        ring_sent = ring_bytes(layer, settings)
        num_messages += dims.cp - 1 if ring_sent else 0
        # backward: two gradients a product, of adapters alone where they alone are trained
        entering = {"q", "k", "v"} if layer.kind == "block" else {p.name for p in matmuls[:1]}
        backward = [(p.name in entering, p.backward_line(products, peak)) for p in matmuls]
        for adapter, (a, b) in ((x, x.factors) for x in adapters):  # the gradient of A asks for that of B's rows
            enters = _enters(adapter, entering)
            backward += [(False, b.backward_line(*narrow)), (enters, a.backward_line(*narrow))]
        weights = [p.weight_line(products, peak) for p in matmuls]
        if settings.lora is not None:
            weights = [p.weight_line(*narrow) for p in factors]
        added = sum(x.trained for x in shares) * added_bytes(adapter_settings(settings)) / bandwidth
        unpacked = quantised_params(layer, settings.lora, tp)
        own = [p.forward_line(products, peak) for p in matmuls]
        forward = own + [p.forward_line(*narrow) for p in factors]
        of_experts = all_to_all + gathered / link
        # what hides behind products is not waited for
        if settings.ep_overlap:  # both directions hide behind products and traffic, three forwards of them in all
            hidden = 1.5 * (sum(forward, Line()).row + sum(t.row_bytes for t in traffic) / bandwidth)
            of_experts = max(0.0, of_experts - hidden)
        return cls(
            forward=sum(forward, Line()),
            last=own[-1] if own else Line(),
            inputs=sum((line for enters, line in backward if not enters), Line()),
            entering=sum((line for enters, line in backward if enters), Line()),
            weights=sum(weights, Line(once=added)),
            traffic=sum(t.row_bytes for t in traffic) / bandwidth,
            collectives=num_collectives * ring,
            ring=ring_sent / between,
            experts=of_experts,
            regather=num_collectives * ring / 2 if settings.row_share(layer.tower) > 1 else 0.0,
            attention=pair_flops(layer, tp) / (plain_peak * e.attention),
            pair_traffic=sum(t.pair_bytes for t in traffic) / bandwidth,
            kernels=count_kernels(traffic, layer) * KERNEL_S + _launch_seconds(layer, settings),
            waits=num_messages * COLLECTIVE_S,
            unpack=unpacked * (NF4_BYTES + w) / bandwidth,
            gather=gather,
            scatter=scatter,
        )


def busiest_matmuls(layer: LayerSpec, settings: CostSettings) -> tuple[Matmul, ...]:
    """Return `layer_matmuls` of the device whose experts have most rows."""
    more = settings.busiest_experts
    return tuple(
        replace(p, visits=p.visits * more) if more > 1 and p.name.startswith("expert ") else p
        for p in layer_matmuls(layer, settings.dims)
    )


def _enters(adapter: Adapted, entering: set[str]) -> bool:
    return bool(adapter.products) and entering.issuperset(adapter.products)


def _backward_products(seconds: _LayerSeconds, layer: LayerSpec, gradients: Gradients) -> Line:
    """Price products of the backward: where nothing before the layer trains, nobody needs the gradient of its input."""
    found = seconds.inputs if layer.kind != "embed" else Line()
    if gradients.inputs and layer.kind != "embed":
        found += seconds.entering
    return found + seconds.weights if gradients.weights else found


def _output_bytes(layer: LayerSpec, columns: WorkColumns, settings: CostSettings) -> tuple[float, ...]:
    """Return bytes of the rows that leave a device: split over cp, over tp only under sequence parallel."""
    values = [0.0] * NUM_WORK_TERMS
    share = settings.row_share(layer.tower) * settings.token_share(layer.tower)
    values[columns.rows] = float(layer.rows_out_per_input * layer.output_size * settings.item_bytes / share)
    return tuple(values)


def _recompute_tiers(
    layer: LayerSpec, settings: CostSettings, seconds: _LayerSeconds, columns: WorkColumns, again: tuple[float, ...]
) -> list[RecomputeTier]:
    """Return the tiers "selective" (`selective_bytes`) and "full"; measured work has only the last.

    full keeps the layer's input and runs the whole forward again, collectives included. Implementations that stop
    once the last needed tensor is there (`early_stop`) skip the last product, but where the layer scales or norms its
    result: 0.71-0.86 of a forward.
    """
    row = settings.item_bytes * layer.hidden_size / settings.row_share(layer.tower)
    # checkpoints of PyTorch stop before the last product, unless its result is needed
    if settings.early_stop and not layer.layer_scale and layer.num_norms <= 2:
        left = columns.terms(rows=seconds.last.row, once=seconds.last.once)
        again = tuple(max(0.0, a - b) for a, b in zip(again, left, strict=True))
    full = RecomputeTier(name="full", extra_backward_s=again, saved_bytes=columns.terms(rows=row))
    if layer.measured is not None:
        return [full]
    # "selective": small kernels again, and unfused attention whole
    eager = settings.attention == "eager"
    extra = columns.terms(
        rows=seconds.traffic,
        pairs=seconds.attention + seconds.pair_traffic if eager else 0.0,
        once=seconds.kernels,
    )
    kept = columns.terms(rows=selective_bytes(layer, settings))
    return [RecomputeTier(name="selective", extra_backward_s=extra, saved_bytes=kept), full]


def _transients(
    layer: LayerSpec, settings: CostSettings, columns: WorkColumns, none_bytes: tuple[float, ...]
) -> tuple[tuple[float, ...], ...]:
    """Return what is live only while the layer runs backward, at one or two moments; the larger counts.

    Blocks: `_workspaces`; with unfused attention also its scores once more, for their gradients (twice where
    softmax keeps one copy): an upper bound, up to three times the truth. A layer that recomputes holds what it computed
    again as well: `SplitProblem.assess` adds that. Head: next to logits and log-softmax (kept), the fp32 gradients
    before and after the softmax, 8 bytes for each vocabulary entry and token. Fused, the softmax becomes its own
    gradient: next to it (kept) that gradient as the head's product takes it, then, the softmax gone, the gradients of
    weight and input. Not counted: projectors, norms, random states (16 bytes a layer on a GPU), the vision tower's
    gather under vision data parallel.
    """
    # blocks: their workspaces, with the scores' gradients where attention is unfused
    if layer.kind == "block":
        scores = [0.0] * NUM_WORK_TERMS
        if settings.attention == "eager" and layer.attention is not None:
            heads = local_heads(layer.attention, settings.dims.tp).query
            twice = columns.terms(pairs=2.0 * settings.item_bytes * heads)
            pairs = columns.pairs
            scores[pairs] = max(none_bytes[pairs], twice[pairs])
        return tuple(
            _add(columns.terms(rows=moment.rows, once=moment.once), tuple(scores))
            for moment in _workspaces(layer, settings)
        )
    # head: gradients of the logits
    if layer.kind == "head":
        (product,) = layer_matmuls(layer, settings.dims.tp)
        V, h, w = product.out_width, layer.hidden_size, settings.item_bytes
        if not settings.fused_kernels:
            return (columns.terms(rows=8.0 * V),)
        return columns.terms(rows=w * V), columns.terms(rows=(w - 4.0) * V + w * h, once=w * h * V)
    return (columns.terms(),)


def _add(a: tuple[float, ...], b: tuple[float, ...]) -> tuple[float, ...]:
    return tuple(x + y for x, y in zip(a, b, strict=True))


# -- what devices that share experts, or the tokens of a pack, send one another: bytes of one device ------------------
#
# Context parallelism is the ring of Megatron-Core and Transformer Engine: each document is padded to a multiple of 2 cp
# tokens and cut into as many chunks, rank r holds the r-th from the front and the r-th from the back, so that all ranks
# have equal shares of rows and of causal pairs. Keys and values go round. Expert parallelism is a dispatch of the rows
# to their experts and a combine of the results.


def document_multiple(dims: ParallelDims) -> int:
    """Return the multiple to which each document's tokens are padded, so that ranks of cp share them evenly."""
    return 2 * dims.cp if dims.cp > 1 else 1


def find_cp_problems(layer: LayerSpec, cp: int) -> list[str]:
    """Return why `cp` devices cannot share this layer's tokens, in sentences."""
    if cp == 1 or layer.tower != "language" or layer.measured is None:
        return []
    return [f"cp {cp} cannot share {layer.name}: its work was measured whole, no formula divides it: use cp 1"]


def ring_bytes(layer: LayerSpec, settings: CostSettings) -> float:
    """Return bytes sent for each row of this device in forward: keys and values of its rows, cp - 1 times.

    Backward sends them once more, and their gradients: twice that. An all-gather of keys and values moves as much.
    """
    if layer.attention is None or layer.tower != "language":
        return 0.0
    a, dims = layer.attention, settings.dims
    kv_bytes = settings.item_bytes * local_heads(a, dims.tp).kv * (a.head_dim + a.value_head_dim)
    return (dims.cp - 1) * kv_bytes


def all_to_all_s(layer: LayerSpec, device: DeviceSpec, settings: CostSettings) -> float:
    """Return the seconds of dispatch and combine for each row in forward, and as many in backward.

    A row is sent to each of its k experts from the one tensor-parallel device that holds it (sequence parallel); what
    stays in the node takes the device's link, what leaves it the device's own share of the node's ports, both at once,
    and the slower decides. DeepEP and HybridEP send a row once to each node that has some of its experts, to the device
    of the sender's place there, and from it once to each device that has some (deepseek-ai/DeepEP, README).
    """
    m, dims = layer.mlp, settings.dims
    if m is None or m.num_experts is None or dims.ep == 1:
        return 0.0
    # how many copies of a row stay in the node, and how many leave it
    here = min(dims.ep, settings.ep_in_node or dims.ep)  # devices of a node, among those that share experts
    k, nodes = m.experts_per_token or 1, dims.ep / here
    inside, outside = k * (here - 1) / dims.ep, k * (dims.ep - here) / dims.ep
    if settings.dispatcher == "deepep":
        inside = settings.reached(m, dims.ep) * (here - 1) / here
        outside = settings.reached(m, nodes) * (nodes - 1) / nodes
    # both ways at once: the slower decides
    ports = settings.ep_bytes_per_s or device.link_bytes_per_s
    row = 2.0 * layer.hidden_size * settings.item_bytes / dims.tp * settings.busiest_experts
    return row * max(inside / device.link_bytes_per_s, outside / ports) / settings.efficiency_on(device).link


def expert_tp_bytes(layer: LayerSpec, settings: CostSettings) -> float:
    """Return bytes sent a row among an expert's etp devices, forward: dispatched rows gathered, results scattered.

    0 where experts are divided as the dense layers are: their results are summed with `Matmul.reduced`.
    """
    m, dims = layer.mlp, settings.dims
    if m is None or m.num_experts is None or not dims.is_folded:
        return 0.0
    row = (m.experts_per_token or 1) * layer.hidden_size * settings.item_bytes / dims.tp
    return 2.0 * row * (dims.expert_tp - 1)
