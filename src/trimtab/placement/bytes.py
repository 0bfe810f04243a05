"""Bytes that serving a model takes, layer by layer: weights, KV cache, and what is live while a layer runs."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.errors import PartitionError
from trimtab.placement.live import Serving, decode_bytes, held_bytes, prefill_bytes, stacked_bytes
from trimtab.placement.machine import QUANTS, RequestBatch, Workload, count_batch, stored_workload
from trimtab.specs import IntArray, LayerSpec, ModelSpec

_NUMBERED = re.compile(r"\.\d+$")


@dataclass(frozen=True, slots=True)
class PlacedUnit:
    """Layers that stay together, as positions in `ModelSpec.layers`."""

    layers: tuple[int, ...]

    def __add__(self, other: PlacedUnit) -> PlacedUnit:
        return PlacedUnit(self.layers + other.layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The four parts of a vision-language model that arrangements move around."""

    vision: tuple[PlacedUnit, ...]  # ViT and projector; one unit where the family allows no cut
    embed: PlacedUnit
    blocks: tuple[PlacedUnit, ...]
    head: PlacedUnit  # with the last norm
    tied: bool  # the head owns no weight: it reads the embedding's


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """An order of all units; a placement cuts it into runs, one a device."""

    name: str
    units: tuple[PlacedUnit, ...]


def parts_of(model: ModelSpec) -> Parts:
    """Return the units between which a device may change: blocks, each with what follows it up to the next one.

    What runs in front of a tower's first block belongs to that, as the projector does to the last one of the ViT.
    Blocks whose results are joined outside of any layer stay together (`joined_cuts`), and so do layers that share a
    weight: the one that borrows it lies with its owner, out of the order of the others.
    """
    joined = model.forbidden_cuts if model.joined_cuts is None else model.joined_cuts
    front = [i for i, x in enumerate(model.layers) if x.tower != "language"]
    language = [i for i, x in enumerate(model.layers) if x.tower == "language"]
    at = [n for n, i in enumerate(language) if _is_block(model.layers[i])] or [len(language)]
    embed, head = language[: at[0]], language[at[-1] + 1 :]
    vision, blocks = _runs(model, front, joined), _runs(model, language[at[0] : at[-1] + 1], joined)
    tied = _reunite(model, [*vision, embed, *blocks, head], embed, head)
    return Parts(
        vision=tuple(PlacedUnit(tuple(x)) for x in vision if x),
        embed=PlacedUnit(tuple(embed)),
        blocks=tuple(PlacedUnit(tuple(x)) for x in blocks if x),
        head=PlacedUnit(tuple(head)),
        tied=tied,
    )


def _is_block(layer: LayerSpec) -> bool:
    return layer.kind == "block" and _NUMBERED.search(layer.name) is not None


def _runs(model: ModelSpec, at: Sequence[int], joined: frozenset[int]) -> list[list[int]]:
    """Cut layers `at` in front of every block but the first, where a state that is joined does not stay behind."""
    found: list[list[int]] = []
    has_block = False
    for i in at:
        is_block = _is_block(model.layers[i])
        if not found or (is_block and has_block and not {i, i + 1} & joined):
            found.append([])
        found[-1].append(i)
        has_block = has_block or is_block
    return found


def _reunite(model: ModelSpec, units: Sequence[list[int]], embed: list[int], head: list[int]) -> bool:
    """Moves borrowers of weights to their owners; whether embedding and head, which arrangements join, share one."""
    number = {x.name: i for i, x in enumerate(model.layers)}
    tied = False
    for owner, borrower in model.tied:
        home, away = (next(unit for unit in units if number[name] in unit) for name in (owner, borrower))
        if {id(home), id(away)} == {id(embed), id(head)}:
            tied = True
        elif home is not away:
            away.remove(number[borrower])
            home.append(number[borrower])
    return tied


def arrangements(parts: Parts) -> tuple[Arrangement, ...]:
    """List orders to cut: forward; head with the embedding (the only way where they share a weight); head in front
    of the ViT; ViT behind the head, next to either. All but the first two bring activations back once."""
    V, E, L, H = parts.vision, parts.embed, parts.blocks, parts.head
    found = [Arrangement(name="head with embedding", units=(*V, E + H, *L))]
    if not parts.tied:
        found.insert(0, Arrangement(name="forward", units=(*V, E, *L, H)))
        found.append(Arrangement(name="head first", units=(H, *V, E, *L)))
    if V:
        found.append(Arrangement(name="vision last, head with embedding", units=(E + H, *L, *V)))
        if not parts.tied:
            found.append(Arrangement(name="vision last", units=(E, *L, H, *V)))
    return tuple(Arrangement(name=x.name, units=tuple(unit for unit in x.units if unit.layers)) for x in found)


def pipeline_arrangement(parts: Parts) -> Arrangement:
    """The forward order as serving engines cut it into stages: by a number of decoder blocks each, at least one.

    The first stage holds ViT, projector and embedding too, the last one the norm and the head.
    """
    first, *between = parts.blocks or (PlacedUnit(()),)
    front = sum(parts.vision, PlacedUnit(())) + parts.embed + first
    if not between:
        return Arrangement(name="pipeline", units=(front + parts.head,))
    return Arrangement(name="pipeline", units=(front, *between[:-1], between[-1] + parts.head))


def modules_of(model: ModelSpec, layer: int) -> tuple[str, ...]:
    """List keys of a device map for one layer: what holds only buffers comes with the layer after it."""
    return (*model.layers[layer].companions, model.layers[layer].name)


def upwards(name: str) -> Iterator[str]:
    """Yield a module's path and those of the modules around it: "a.b", "a", ""."""
    while name:
        yield name
        name = name.rpartition(".")[0]
    yield ""


def device_changes(devices: Sequence[int | str]) -> list[int]:
    """Return the positions whose device is another than that of the position before."""
    return [i for i in range(1, len(devices)) if devices[i] != devices[i - 1]]


# -- bytes of each layer ----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class InferenceTable:
    """Bytes of every layer, one array each, in the order of `ModelSpec.layers`.

    A device that holds a set of layers needs, on top of context and allocator slack, weights + max(
    held + largest prefill peak in front of the decoder, prompt KV + held + largest prefill peak of the decoder,
    full KV + largest decode peak).
    """

    weights: IntArray
    kv_prompt: IntArray  # cache of the prompts
    kv_full: IntArray  # cache at the last new token
    held: IntArray  # live on the layer's device all through the prefill: pixels, embedded inputs, image features
    prefill: IntArray  # most that is live while the layer runs over the prompts, its input included
    decode: IntArray  # the same for one new token of each sequence
    cached: IntArray  # 1 where the KV cache exists while the layer runs: in the decoder; 0 in tower and projector
    runs: IntArray  # times the layer runs in one batch of requests
    rows_out: IntArray  # bytes that leave it over all its runs: what a cut after it would carry
    touched: IntArray  # weight bytes that its runs read; of an embedding the rows looked up


def inference_table(model: ModelSpec, workload: Workload, batch: RequestBatch | None = None) -> InferenceTable:
    """Return what each layer of `model` takes under `workload`.

    Exact for weights and KV cache. The live bytes follow the modules of Transformers 5 and hold within 10 % of what
    is counted on them together with the weights; not counted: workspace inside kernels, the allocator's rounding.
    `batch`: the workload's rows, where images are counted elsewhere.
    """
    workload = stored_workload(model, workload)
    serving = Serving.of(model, workload, count_batch(model, workload) if batch is None else batch)
    costs = [_layer_bytes(layer, serving) for layer in model.layers]
    columns = np.array(costs, dtype=np.float64).reshape(len(costs), -1)
    columns[:, _PREFILL] += stacked_bytes(model, serving)
    if not columns.max() < _MAX_BYTES:
        raise PartitionError("one layer takes more than 8 PiB: give a smaller batch, fewer tokens or images")
    exact = np.ceil(columns - 1e-6).astype(np.int64)
    return InferenceTable(**{name: exact[:, i] for i, name in enumerate(_COLUMNS)})


_MAX_BYTES = 2**53  # of one layer: float64 counts so far, and sums of a thousand layers stay in int64
_COLUMNS = ("weights", "kv_prompt", "kv_full", "held", "prefill", "decode", "cached", "runs", "rows_out", "touched")
_PREFILL = _COLUMNS.index("prefill")


def _layer_bytes(layer: LayerSpec, serving: Serving) -> list[float]:
    w, rows = serving.item_bytes, serving.rows
    weights = weight_bytes(layer, serving.workload)
    per_token = kv_bytes_per_token(layer, w)
    state = 0.0 if layer.cache is None else rows.sequences * layer.cache.bytes_per_sequence
    crosses = layer.attention is not None and layer.attention.cross
    window = layer.attention.window if layer.attention is not None else None
    # a sliding cache keeps what the next query still sees, but as a view of the whole prompt until the first new token
    kept = rows.context if window is None else min(rows.context, window)
    language = layer.tower == "language"
    runs = rows.new_tokens if language else (1 if rows.patches else 0)
    if (crosses and not rows.patches) or layer.tower == "audio":  # skipped where there is nothing to read
        runs = 0
    num_out = rows.tokens + rows.sequences * (rows.new_tokens - 1) if language else rows.patches
    out = num_out * layer.rows_out_per_input * layer.output_size * w
    if layer.kind == "head":
        out = rows.sequences * rows.new_tokens * layer.output_size * w
    touched = runs * weights
    if layer.kind == "embed" and language:
        touched = num_out * layer.output_size * w
    return [
        weights + layer.extra_bytes,
        (serving.crossed_rows if crosses else rows.tokens) * per_token + state,
        (serving.crossed_rows if crosses else rows.sequences * kept) * per_token + state,
        held_bytes(layer, serving),
        prefill_bytes(layer, serving),
        decode_bytes(layer, serving) if language else 0.0,
        language,
        runs,
        out,
        touched,
    ]


def weight_bytes(layer: LayerSpec, workload: Workload) -> float:
    """Return the bytes of parameters in the dtype, and of matrices that the quantised format covers in its own."""
    w = workload.item_bytes
    quant = QUANTS[workload.quant] if workload.quant is not None else None
    if quant is None or layer.tower not in quant.towers or layer.kind not in ("block", "projector"):
        return float(layer.num_params * w)
    m = layer.mlp
    experts = active = router = 0
    if m is not None and m.num_experts:
        expert = (3 if m.gated else 2) * layer.hidden_size * m.intermediate_size
        experts, active = m.num_experts * expert, (m.experts_per_token or 1) * expert
        router = layer.hidden_size * m.num_experts
    # of an expert layer `num_matmul_params` holds the active experts only; the router stays in the dtype
    covered = layer.num_matmul_params - active - router + (experts if quant.experts else 0)
    return covered * quant.weight_bytes + (layer.num_params - covered) * w


def kv_bytes_per_token(layer: LayerSpec, item_bytes: int) -> float:
    """Return keys and values of one token (of cross-attention: of one image row), as Transformers caches them.

    Grouped heads as they are; what a family caches in another way (latent attention, states) as `LayerSpec.cache` says.
    """
    a = layer.attention
    if layer.cache is not None:
        return item_bytes * layer.cache.values_per_token
    if layer.tower != "language" or a is None:
        return 0
    return item_bytes * a.num_kv_heads * (a.head_dim + a.value_head_dim)


# -- a device -----------------------------------------------------------------------------------------------------
# The same sums for our maps and for anyone's.


ALLOCATOR_DIVISOR = 20  # 5 % of what comes and goes: blocks that the caching allocator keeps and cannot hand out again

DeviceKey = int | str  # a GPU's number, "cpu" or "disk"


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceUse:
    """What one device holds, and how much of it is taken at the peak."""

    device: DeviceKey
    capacity_bytes: int | None = None  # None: a disk is not counted
    weight_bytes: int = 0
    kv_bytes: int = 0  # cache when the peak comes: none yet, of the prompts, or of everything at the last new token
    activation_bytes: int = 0  # live next to it at that moment
    streamed_bytes: int = 0  # weights of the layer that runs at that moment, where they are copied here to run
    reserve_bytes: int = 0  # CUDA context and the allocator's slack; 0 where nothing runs
    modules: tuple[str, ...] = ()  # whose weights it holds

    @property
    def total_bytes(self) -> int:
        return self.weight_bytes + self.kv_bytes + self.activation_bytes + self.streamed_bytes + self.reserve_bytes

    @property
    def fraction(self) -> float:
        """Share of the capacity in use: above 1 it does not fit; 0 for an empty device and for a disk."""
        if self.capacity_bytes is None or self.total_bytes == 0:
            return 0.0
        return self.total_bytes / self.capacity_bytes if self.capacity_bytes else float("inf")


def device_bytes(
    table: InferenceTable,
    layers: Sequence[int],
    spilled: Collection[int],
    context_bytes: int,
    *,
    device: DeviceKey = 0,
    capacity_bytes: int | None = None,
    modules: tuple[str, ...] = (),
) -> DeviceUse:
    """Return the bytes of a device that runs `layers`, of which the `spilled` ones are copied in each time.

    Weights + max(held + encode peak, prompt KV + held + prefill peak, full KV + decode peak) + reserve. A peak is the
    most of any one layer, its weights included where they are copied in; the encode peak is that of tower and
    projector, which are through before the cache begins. The reserve is the context and 5 % of all but the weights that
    stay. Nothing for a device that runs nothing.
    """
    if not layers:
        return DeviceUse(device=device, capacity_bytes=capacity_bytes)
    at = list(layers)
    held, prompt, full = (int(column[at].sum()) for column in (table.held, table.kv_prompt, table.kv_full))
    moments: list[tuple[int, int, int]] = []  # KV cache, activations, weights copied in
    for i in at:
        streamed = int(table.weights[i]) if i in spilled else 0
        moments.append((prompt if table.cached[i] else 0, held + int(table.prefill[i]), streamed))
        if table.cached[i]:
            moments.append((full, int(table.decode[i]), streamed))
    peak = max([*moments, (prompt, held, 0), (full, 0, 0)], key=sum)
    return DeviceUse(
        device=device,
        capacity_bytes=capacity_bytes,
        weight_bytes=sum(int(table.weights[i]) for i in at if i not in spilled),
        kv_bytes=peak[0],
        activation_bytes=peak[1],
        streamed_bytes=peak[2],
        reserve_bytes=context_bytes + sum(peak) // ALLOCATOR_DIVISOR,
        modules=modules,
    )


def run_bytes(
    table: InferenceTable,
    units: Sequence[PlacedUnit],
    context_bytes: int,
    *,
    spilled: Collection[int] = (),
    on_cpu: Collection[int] = (),
) -> IntArray:
    """Count (n + 1, n + 1) bytes of a device that runs units s <= i < e at [s, e], as `device_bytes`; 0 if s >= e.

    `spilled` layers have their weights copied in to run; those `on_cpu` run in host memory and take nothing.
    """
    n = len(units)
    order = [i for unit in units for i in unit.layers]
    first = np.cumsum([0, *(len(unit.layers) for unit in units[:-1])])  # of each unit, in that order
    off = np.isin(np.arange(len(table.weights)), list(on_cpu))
    gone = np.isin(np.arange(len(table.weights)), list(spilled))
    streamed = np.where(gone, table.weights, 0)

    def sums(column: IntArray) -> IntArray:
        of_unit = np.add.reduceat(np.where(off, 0, column)[order], first)
        before = np.concatenate([[0], np.cumsum(of_unit)])
        return np.asarray(before[None, :] - before[:, None], dtype=np.int64)

    def peaks(column: IntArray, runs: IntArray) -> IntArray:
        """Return the largest peak of every run of units: one is live at a time, and those that do not run have none."""
        of_unit = np.maximum.reduceat(np.where(off | (runs == 0), 0, column + streamed)[order], first)
        found = np.zeros((n + 1, n + 1), dtype=np.int64)
        for start in range(n):
            found[start, start + 1 :] = np.maximum.accumulate(of_unit[start:])
        return found

    live = np.maximum(
        sums(table.held)
        + np.maximum(
            peaks(table.prefill, 1 - table.cached), sums(table.kv_prompt) + peaks(table.prefill, table.cached)
        ),
        sums(table.kv_full) + peaks(table.decode, table.cached),
    )
    total = sums(np.where(gone, 0, table.weights)) + live + live // ALLOCATOR_DIVISOR + context_bytes
    return np.where(np.triu(np.ones((n + 1, n + 1), dtype=bool), k=1), total, 0)
