"""What one traced step kept, storage by storage: the bytes of every subset of recomputed layers follow from it."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

from trimtab.errors import TrimtabError


@dataclass(slots=True, kw_only=True)
class SavedStorage:
    """Memory that autograd kept when the forward was over, and who wanted it; layers by their place in `Trace.layers`.

    Parameters and buffers are none of these; what the batch itself holds (pixels, ids) is, where something saved it.
    """

    num_bytes: int
    savers: set[int] = field(default_factory=set)  # layers that saved it
    saved_outside: bool = False  # code outside all layers saved it
    entered: set[int] = field(default_factory=set)  # layers it was handed to, by position: held while they recompute
    named: set[int] = field(default_factory=set)  # layers it was handed to by keyword (rotary tables, masks): as well
    follows_gradient: bool = False  # it is part of the graph, as rows are and masks are not
    behind: int | None = None  # the layer last entered when code outside first saved it; None: before all of them


@dataclass(slots=True, kw_only=True)
class TracedLayer:
    """One layer in the traced step; sums over its calls where it ran more than once, except for the transients."""

    name: str
    num_calls: int = 0
    keeps: bool = False  # autograd kept something for it: recompute has something to free
    output_bytes: int = 0
    forward_flops: int = 0
    backward_flops: int = 0  # with what is computed again, where the layer was recomputed
    recompute_flops: int = 0  # what recompute adds: it stops at the last tensor backward needs
    forward_transient_bytes: int = 0  # most that lived from its start to the next layer's, above what was there before
    backward_transient_bytes: int = 0  # the same inside its backward: computed again where recomputed, and gradients


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """One step, forward and backward, on weights that take no memory."""

    layers: tuple[TracedLayer, ...]
    storages: tuple[SavedStorage, ...]
    recomputed: frozenset[str]  # while it was traced
    peak_bytes: int  # largest live at any time of the step: gradients of parameters pile up in it

    def saved_bytes(self, recomputed: Collection[str] = ()) -> int:
        """Bytes held from forward to backward if exactly these layers are recomputed.

        Sum of the storages that a layer not recomputed or code outside of layers saved, and of those that a recomputed
        layer was handed, by position (non-reentrant checkpointing saves them) or by keyword (its closure holds them).
        Exact, from a step in which nothing was recomputed. Not counted: the random-number state of each recomputed
        layer (5,056 bytes of the CPU's, 16 of CUDA's).
        """
        if self.recomputed:
            raise TrimtabError(
                f"bytes of other layers were asked of a step in which {len(self.recomputed)} were recomputed: "
                "trace a step in which none is"
            )
        chosen = self._find(recomputed)
        return sum(x.num_bytes for x in self.storages if _is_held(x, chosen))

    def _find(self, names: Collection[str]) -> frozenset[int]:
        places = {layer.name: place for place, layer in enumerate(self.layers)}
        unknown = sorted(set(names) - places.keys())
        if unknown:
            raise TrimtabError(
                f"{', '.join(unknown)} cannot be recomputed: not among the {len(places)} layers traced; "
                f"name them as in {next(iter(places), 'none')}"
            )
        return frozenset(place for name in names if self.layers[place := places[name]].keeps)


def _is_held(storage: SavedStorage, recomputed: frozenset[int]) -> bool:
    if storage.saved_outside or storage.savers - recomputed:
        return True
    return bool((storage.entered | storage.named) & recomputed)
