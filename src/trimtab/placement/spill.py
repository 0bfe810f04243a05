"""Whose weights leave the GPUs first when not all fit: by bytes moved per request for each byte freed."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.models.families.known import family_of
from trimtab.placement.bytes import InferenceTable
from trimtab.placement.chain import Parts
from trimtab.specs import IntArray, LayerSpec, ModelSpec


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Victims:
    """Layers in the order in which they spill, and what each moves."""

    layers: tuple[int, ...]
    moved_bytes: IntArray  # per layer of the model, if it spills
    by_rows: frozenset[int]  # computed in host memory: looked-up rows move instead of the table


def order_victims(model: ModelSpec, parts: Parts, table: InferenceTable, *, cpu_bytes: int) -> Victims:
    """Every layer with weights, cheapest first; parameters without a module never, as nothing would bring them back.

    An embedding that shares no weight runs in host memory, where there is room, and moves the rows it looks up; else
    it is copied like a block. The ViT's layers are copied
    once a batch; decoder blocks for every new token, spread over the depth so that each GPU gives up alike; the head,
    and an embedding that is one with it, last. The ratio of moved to freed bytes orders these groups whatever the
    layers' sizes, because a layer that runs k times moves k times what it frees.
    """
    shared = {name for pair in model.tied for name in pair}
    tables = [i for i in parts.embed.layers if _is_table(model.layers[i]) and model.layers[i].name not in shared]
    size = sum(int(table.weights[i]) for i in tables)
    by_rows = frozenset(tables if size <= cpu_bytes else ())
    stays = family_of(model.family).stacks_states  # Mllama asks where its patch embedding lies before it calls it
    vision = [i for unit in parts.vision for i in unit.layers if not (stays and model.layers[i].kind == "embed")]
    blocks = _spread([i for unit in parts.blocks for i in unit.layers])
    ends = [*parts.head.layers, *(i for i in parts.embed.layers if i not in by_rows)]
    moved = (table.runs * table.weights).astype(table.weights.dtype)
    for layer in by_rows:
        moved[layer] = table.rows_out[layer]
    groups = ([*by_rows], sorted(vision, key=lambda i: (-int(table.weights[i]), i)), blocks, ends)
    order = tuple(i for group in groups for i in group if table.weights[i] > 0 and not model.layers[i].bare)
    return Victims(layers=order, moved_bytes=moved, by_rows=by_rows)


def with_borrowers(model: ModelSpec, layer: int) -> tuple[int, ...]:
    """`layer` and those that share a weight with it, directly or by way of others: they lie in one place."""
    number = {x.name: i for i, x in enumerate(model.layers)}
    pairs = [{number[owner], number[borrower]} for owner, borrower in model.tied]
    found: dict[int, None] = {layer: None}
    for _ in pairs:  # chains of pairs
        found.update({i: None for pair in pairs if pair & found.keys() for i in pair})
    return tuple(found)


def _is_table(layer: LayerSpec) -> bool:
    return layer.kind == "embed" and not layer.bare and not layer.num_matmul_params


def _spread(layers: list[int]) -> list[int]:
    """Every prefix lies about evenly over the list: bit-reversed order."""
    bits = max(len(layers) - 1, 1).bit_length()
    turned = (int(f"{i:0{bits}b}"[::-1], 2) for i in range(2**bits))
    return [layers[i] for i in turned if i < len(layers)]
