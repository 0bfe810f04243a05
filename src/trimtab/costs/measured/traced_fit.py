"""Traced steps of several sizes -> a Profile: bytes as they were counted, seconds as the formulas give them.

What one step kept is known storage by storage: the bytes of every subset of recomputed layers follow from it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np

from trimtab.costs.bands import COUNTED_ERROR
from trimtab.costs.formula.layers import find_columns
from trimtab.costs.formula.settings import CostSettings
from trimtab.errors import TrimtabError
from trimtab.specs import NUM_WORK_TERMS, WORK_TERMS, FloatArray, LayerCost, LayerSpec, ModelSpec, Profile, Terms


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
class StepTrace:
    """One step, forward and backward, on weights that take no memory."""

    layers: tuple[TracedLayer, ...]
    storages: tuple[SavedStorage, ...]
    recomputed: frozenset[str]  # while it was traced
    peak_bytes: int  # largest live at any time of the step: gradients of parameters pile up in it

    def saved_bytes(self, recomputed: Collection[str] = ()) -> int:
        """Count the bytes held from forward to backward if exactly these layers are recomputed.

        Sum of the storages that a layer not recomputed or code outside of layers saved, and of those that a recomputed
        layer was handed, by position (non-reentrant checkpointing saves them) or by keyword (its closure holds them).
        Exact, from a step in which nothing was recomputed. Not counted: the random-number state of each recomputed
        layer (5,056 bytes of the CPU's, 16 of CUDA's).
        """
        if self.recomputed:
            raise TrimtabError(f"bytes of other layers need a step without recompute, not {len(self.recomputed)}")
        chosen = self._find(recomputed)
        return sum(x.num_bytes for x in self.storages if _is_held(x, chosen))

    def _find(self, names: Collection[str]) -> frozenset[int]:
        places = {layer.name: place for place, layer in enumerate(self.layers)}
        unknown = sorted(set(names) - places.keys())
        if unknown:
            known = next(iter(places), "none")
            raise TrimtabError(f"{', '.join(unknown)} are none of {len(places)} layers traced: name them as {known}")
        return frozenset(place for name in names if self.layers[place := places[name]].keeps)


def _is_held(storage: SavedStorage, recomputed: frozenset[int]) -> bool:
    if storage.saved_outside or storage.savers - recomputed:
        return True
    return bool((storage.entered | storage.named) & recomputed)


# -- steps of several sizes -------------------------------------------------------------------------------------------


PATCHES, TOKENS = WORK_TERMS.index("patches"), WORK_TERMS.index("tokens")
PATCHES_SQ, PATCHES_WINDOWED = WORK_TERMS.index("patches_sq"), WORK_TERMS.index("patches_windowed")
TOKENS_SQ = WORK_TERMS.index("tokens_sq")

MISFIT, MAX_MISFIT = 1e-3, 0.3
"""Shares that a fit may leave without a word, and with one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """One traced step, and the work it was for each layer (number in the model), per WORK_TERMS."""

    trace: StepTrace
    numbers: tuple[int, ...]  # of `trace.layers`, in the model
    work: Mapping[int, Terms]


@dataclass(frozen=True, slots=True, kw_only=True)
class KindCounts:
    """What one layer, which stands for all of its group, was counted to keep and compute; per WORK_TERMS."""

    layer: int  # number in the model
    group: int
    kept_bytes: Terms  # nothing recomputed; with what the code after the layer keeps
    recomputed_bytes: Terms  # the layer recomputed
    context_bytes: Terms  # tables and masks it is handed, shared by the layers of its tower; of code between blocks
    output_bytes: Terms
    transient_bytes: Terms  # above what is kept and, if the layer is recomputed, what is computed again
    forward_flops: Terms
    recompute_flops: Terms
    misfit: float = 0.0  # share of the largest count that these terms leave: products of tokens and patches have none


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedProfile:
    """A profile whose bytes were counted, and the counts behind it."""

    profile: Profile
    kinds: tuple[KindCounts, ...]
    warnings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerBytes:
    """One layer's share of a trace, so that shares add up to what the step keeps."""

    kept: int
    recomputed: int
    context: int


def share_bytes(trace: StepTrace, *, blocks: Collection[str] = ()) -> tuple[LayerBytes, ...]:
    """Give each storage of `trace` to the first layer that saved it; that of code outside to the layer before it.

    A layer other than `blocks` counts all that it saves, another's or not: the two may come to lie on two stages.
    Where one layer is recomputed the shares are exact; where several are that hold the same storage, it counts for
    each. Context is what layers are handed by keyword and without gradient, and what code between `blocks` keeps (one
    block stands for many, and such code need not run after each): it is held once, whatever is recomputed.
    """
    kept, recomputed, context = ([0] * len(trace.layers) for _ in range(3))
    for storage in trace.storages:
        # tables and masks: held once, by the first that has them
        if _is_context(storage):
            context[min(storage.savers | storage.named)] += storage.num_bytes
            continue
        # what layers save counts for the first of them
        owner = min(storage.savers) if storage.savers else storage.behind or 0
        if storage.saved_outside and not storage.savers and trace.layers[owner].name in blocks:
            context[owner] += storage.num_bytes
            continue
        if storage.savers or storage.saved_outside:
            kept[owner] += storage.num_bytes
        # a layer that is no block counts it as well: a cut may part the two
        for place in storage.savers - {owner}:
            if trace.layers[place].name not in blocks:
                kept[place] += storage.num_bytes
        # under recompute only what enters stays
        held = set(storage.entered)
        if storage.follows_gradient:
            held |= storage.named
        if storage.saved_outside:
            held.add(owner)
        for place in held:
            recomputed[place] += storage.num_bytes
    return tuple(
        LayerBytes(kept=k, recomputed=r if layer.keeps else k, context=c)
        for k, r, c, layer in zip(kept, recomputed, context, trace.layers, strict=True)
    )


def _is_context(storage: SavedStorage) -> bool:
    return bool(storage.named) and not storage.follows_gradient and not storage.entered


def fit_counts(
    model: ModelSpec,
    settings: CostSettings,
    groups: Mapping[int, int],
    kept: Sequence[Probe],
    recomputed: Sequence[Probe],
) -> tuple[KindCounts, ...]:
    """Return the counts of each traced layer as coefficients of WORK_TERMS.

    `groups`: number of each traced layer -> the group of like layers that it stands for.
    `kept`: steps in which nothing was recomputed. Their bytes and FLOPs are sums of terms, so a fit leaves no rest; a
    rest is reported as a warning, and from 30 % on as a `TrimtabError`.
    `recomputed`: steps of larger sizes with every block recomputed. Transients are maxima of such sums, and only at
    large sizes does one of the sums decide, so they are lines through these.
    """
    blocks = {x.name for x in model.layers if x.kind == "block"}
    shares = [share_bytes(probe.trace, blocks=blocks) for probe in kept]
    counts = []
    for number in sorted(set(groups) & set(kept[0].numbers)):
        place, layer = kept[0].numbers.index(number), model.layers[number]
        work = np.array([probe.work[number] for probe in kept])
        columns = _columns(layer, settings)
        traced = [probe.trace.layers[place] for probe in kept]
        if not any(x.num_calls for x in traced):  # a tower that no input reaches keeps its formulas
            continue

        # kept bytes are sums over rows and pairs; what they leave is noted
        misfits: list[float] = []
        fit = partial(_fit, layer.name, work, columns, misfits)
        kept_bytes = fit([s[place].kept for s in shares], "kept bytes")
        recomputed_bytes = fit([s[place].recomputed for s in shares], "bytes kept under recompute")
        # what recompute makes again is no part of the transient
        again = _difference(kept_bytes, recomputed_bytes if layer.name in blocks else kept_bytes)
        counts.append(
            KindCounts(
                layer=number,
                group=groups[number],
                kept_bytes=kept_bytes,
                recomputed_bytes=recomputed_bytes,
                context_bytes=fit([s[place].context for s in shares], "tables and masks"),
                output_bytes=fit([x.output_bytes for x in traced], "output bytes"),
                transient_bytes=_fit_transient(layer, settings, number, recomputed, kept_bytes, again),
                forward_flops=fit([x.forward_flops for x in traced], "forward FLOPs"),
                recompute_flops=fit([x.recompute_flops for x in traced], "recompute FLOPs"),
                misfit=max(misfits, default=0.0),
            )
        )
    return tuple(counts)


def _columns(layer: LayerSpec, settings: CostSettings) -> list[int]:
    """Return the terms that what is counted for `layer` may depend on: rows of both towers, pairs of its own."""
    return [0, PATCHES, TOKENS, find_columns(layer, settings).pairs]


def _fit(
    name: str, work: FloatArray, columns: Sequence[int], misfits: list[float], values: Sequence[int], what: str
) -> Terms:
    """Return the coefficients of layer `name` that give `values`; the share that they leave is added to `misfits`."""
    # nothing counted, nothing to fit
    y = np.array(values, dtype=np.float64)
    terms = [0.0] * NUM_WORK_TERMS
    if not y.any():
        return tuple(terms)
    # first only rows: where all images are equal tiles, pairs are a multiple of rows, and a sum of both says nothing
    for chosen in (columns[:-1], columns):
        X = work[:, chosen]
        scale = np.maximum(X.max(axis=0), 1.0)
        found = np.round(np.linalg.lstsq(X / scale, y, rcond=1e-9)[0] / scale, 7)
        left = np.abs(X @ found - y).max() / y.max()
        if left < 1e-6:
            break
    # a layer that does not keep the same for each row has no coefficients
    if left > MAX_MISFIT:
        raise TrimtabError(f"{what} of {name} is no sum of rows and pairs ({left:.2%} left): profile without --traced")
    for column, value in zip(chosen, found, strict=True):
        terms[column] = float(value)
    if left > MISFIT:
        misfits.append(float(left))
    return tuple(terms)


def _fit_transient(
    layer: LayerSpec, settings: CostSettings, number: int, probes: Sequence[Probe], kept: Terms, again: Terms
) -> Terms:
    """Fit transient bytes as a line through the sizes: the larger of backward's, and of forward's above what is kept.

    `again`, what the layer computed again in `probes`, is subtracted: the sum of a stage counts it for each layer that
    is recomputed. Two sizes settle only two coefficients, so a pair of rows then costs what is kept for it (SDPA's
    masks) and not computed again. Three sizes settle the pair's as well.
    """
    values = []
    for probe in probes:
        place = probe.numbers.index(number)
        traced, share = probe.trace.layers[place], share_bytes(probe.trace)[place]
        values.append(max(traced.backward_transient_bytes, traced.forward_transient_bytes - share.recomputed))
    columns = find_columns(layer, settings)
    work = np.array([probe.work[number] for probe in probes])
    y = np.array(values, dtype=np.float64) - work @ np.array(again)
    terms = [0.0] * NUM_WORK_TERMS
    chosen = [0, columns.rows, columns.pairs]
    # two sizes settle rows alone
    if len(probes) == 2:
        terms[columns.pairs] = kept[columns.pairs] - again[columns.pairs]
        y -= work[:, columns.pairs] * terms[columns.pairs]
        chosen = chosen[:2]
    X = work[:, chosen]
    scale = np.maximum(X.max(axis=0), 1.0)
    for column, value in zip(chosen, np.linalg.lstsq(X / scale, y, rcond=1e-9)[0] / scale, strict=True):
        terms[column] = float(value)
    return tuple(terms)


def _difference(more: Terms, less: Terms) -> Terms:
    return tuple(a - b for a, b in zip(more, less, strict=True))


def traced_profile(
    analytic: Profile,
    model: ModelSpec,
    settings: CostSettings,
    kinds: Sequence[KindCounts],
    *,
    how: str,
    warnings: Sequence[str] = (),
) -> TracedProfile:
    """Return `analytic` with the bytes that were counted; `how` names dtype, attention and kernels in a sentence.

    The tier "full" keeps what was counted and costs the formula's forward less the products that recompute stops
    short of. The formulas' stay: the tier "selective", and of a block's transients the one that grows
    fastest. Context of a tower is held by its first layer, and by a stage that begins after it. A group without a
    module of its own (a bare parameter) keeps its formula.
    """
    counted = {kind.group: kind for kind in kinds}
    context: dict[int, FloatArray] = {}
    for kind in kinds:
        tower = model.layers[kind.layer].tower
        first = (model.indices("vision" if tower == "projector" else tower) or model.indices(tower))[0]
        # full and windowed masks are two; a fit's own error may fall below 0
        context[first] = context.get(first, 0.0) + np.maximum(kind.context_bytes, 0.0)
    # a stage that begins inside a tower holds its context too
    entries = {
        number: tuple(float(x) for x in shared)
        for first, shared in context.items()
        for number in range(first + 1, max(model.indices(model.layers[first].tower, "block"), default=first) + 1)
    }
    rate = (
        analytic.device.peak_flops
        * settings.efficiency_on(analytic.device).matmul
        * (0.5 if settings.dtype == "fp32" else 1.0)
    )
    # counted bytes in place of the formulas'
    layers = []
    for number, (cost, layer) in enumerate(zip(analytic.layers, model.layers, strict=True)):
        found = counted.get(cost.group)
        made = cost if found is None else _with_bytes(cost, layer, found, settings, rate, context.get(number))
        layers.append(replace(made, entry_bytes=entries.get(number, ())))
    # say what was counted, and what was not
    uncounted = sorted({x.name for x in analytic.layers if x.group not in counted})
    said = [
        f"Bytes kept and transient were counted on the real layers, without weights: {how}.",
        "Tables and masks that a tower's layers share, and what code between its blocks keeps, are its first layer's, "
        "and again of every stage that begins after it.",
        *warnings,
    ]
    if uncounted:
        said.append(f"No module of its own, so bytes by formula: {', '.join(uncounted)}.")
    return TracedProfile(
        profile=replace(
            analytic,
            layers=_ungroup(layers),
            method="traced",
            memory_error=COUNTED_ERROR,
            assumptions=(analytic.assumptions[0], *said, *analytic.assumptions[1:]),
        ),
        kinds=tuple(kinds),
        warnings=tuple(warnings),
    )


def _ungroup(layers: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Return new groups: the first layer of a tower may hold more than those that were like it."""
    groups: dict[tuple[object, ...], int] = {}
    # of like layers only the tiers may differ now
    return tuple(replace(x, group=groups.setdefault((x.group, x.tiers), len(groups))) for x in layers)


def _with_bytes(
    cost: LayerCost,
    layer: LayerSpec,
    found: KindCounts,
    settings: CostSettings,
    rate: float,
    shared: FloatArray | None,
) -> LayerCost:
    more = np.zeros(NUM_WORK_TERMS) if shared is None else shared
    rows = find_columns(layer, settings).rows
    # recompute may stop before a block's last product
    skipped = max(0.0, found.forward_flops[rows] - found.recompute_flops[rows]) / rate
    tiers = []
    for tier in cost.tiers:
        if tier.name == "none":
            tiers.append(replace(tier, saved_bytes=_sum(found.kept_bytes, more)))
        elif tier.name == "full":
            extra = list(tier.extra_backward_s)
            extra[rows] = max(0.0, extra[rows] - skipped)
            tiers.append(replace(tier, saved_bytes=_sum(found.recomputed_bytes, more), extra_backward_s=tuple(extra)))
        else:
            tiers.append(replace(tier, saved_bytes=_sum(tier.saved_bytes, more)))
    # of wide layers the sizes that were traced lie below those at which the gate's gradients outweigh the weight's
    moments = (cost.transient_bytes, cost.other_transient_bytes or cost.transient_bytes)
    return replace(
        cost,
        tiers=tuple(tiers),
        output_bytes=found.output_bytes,
        transient_bytes=found.transient_bytes,
        other_transient_bytes=max(moments, key=lambda terms: terms[rows]) if layer.kind == "block" else (),
    )


def _sum(terms: Terms, more: FloatArray) -> Terms:
    return tuple(float(x) for x in np.maximum(np.array(terms) + more, 0.0))
