"""The table every solver reads: made from shapes, saved and loaded, asked for seconds."""

from __future__ import annotations

import json
import math
import os
from collections import Counter
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from trimtab.costs.bands import FORMULAS_ERROR, TIME_BANDS, TIME_ERROR, Regime, find_regime
from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.activations import casts_inputs, uses_dense_pairs
from trimtab.costs.formula.adapters import adapt_layer, count_adapters, refuse_unknown_targets
from trimtab.costs.formula.curves import efficiency_of
from trimtab.costs.formula.flops import find_ep_problems, find_tp_problems
from trimtab.costs.formula.host import OTHER_LAYERS
from trimtab.costs.formula.layers import cost_layer, document_multiple, find_cp_problems, find_gradients
from trimtab.costs.formula.settings import CostSettings, settings_of
from trimtab.errors import PartitionError, TrimtabError, join_problems, refuse_type
from trimtab.files import blake2b, read_small, write_atomically
from trimtab.lora import NF4_BYTES, Lora
from trimtab.options import Tower
from trimtab.specs import (
    NUM_WORK_TERMS,
    WORK_TERMS,
    DeviceSpec,
    FloatArray,
    LayerCost,
    LayerSpec,
    ModelSpec,
    ParallelDims,
    Profile,
    RecomputeTier,
    Stage,
    evaluate,
    tiers_of,
)
from trimtab.typed_json import parse_json, read_typed

FORMAT = "trimtab-profile 1.2"

_MOST_S, _LEAST_S = 1e3, 1e-15  # of a layer for one token, patch or pair of them; real ones: 1e-4 to 1e-11


def profile_model(model: ModelSpec, device: DeviceSpec, **choices: Any) -> Profile:
    """Price every layer of `model` on one `device` in seconds and bytes: what plans are made of without a GPU.

    Use it to see where a model's time and memory go, or as the input of `split_stages`.

    `choices` are fields of `CostSettings`: dims, dtype, zero_stage, attention, frozen_towers, host, ...; what is left
    out is what the host does by itself (`HOSTS`).

    >>> import trimtab
    >>> model, device = trimtab.describe("Qwen2.5-VL-7B"), trimtab.find_device("A100-80GB")
    >>> profile = trimtab.profile_model(model, device, dims=trimtab.ParallelDims(tp=2), zero_stage=2)
    >>> profile.layers[0].name
    'model.visual.patch_embed'
    """
    refuse_type("model", model, ModelSpec, "describe(name or folder)")
    refuse_type("device", device, DeviceSpec, "find_device(name)")
    return price_model(model, device, settings_of(**choices))


def price_model(model: ModelSpec, device: DeviceSpec, settings: CostSettings) -> Profile:
    """Price a model under given settings, as `profile_model` does."""
    # what cannot be priced is refused, all of it at once
    problems = _precision_problems(device, settings)  # alone: they are those of every model and degree
    if not problems:
        problems = _cross_attention_problems(model) + _unpriced_problems(model) + _unlike_problems(model, settings.dims)
    if problems:
        raise PartitionError(join_problems(problems))
    frozen, lora = settings.frozen_towers, settings.lora
    if lora is not None:
        refuse_unknown_targets(model, lora)
    # layers alike are priced once
    groups, gradients = group_layers(model, frozen, lora), find_gradients(model.layers, frozen, lora)
    first = {group: i for i, group in reversed(list(enumerate(groups)))}  # layers of one group cost the same
    costs = {g: cost_layer(model.layers[i], gradients[i], device, settings, group=g) for g, i in first.items()}
    return Profile(
        layers=tuple(replace(costs[g], name=layer.name) for layer, g in zip(model.layers, groups, strict=True)),
        method="analytic",
        device=device,
        dims=settings.dims,
        dtype=settings.dtype,
        time_error=TIME_ERROR,
        memory_error=FORMULAS_ERROR,
        assumptions=tuple(_list_assumptions(model, device, settings)),
        attention=settings.attention,
        fused_kernels=settings.fused_kernels,
        frozen_towers=tuple(sorted(frozen)),
        lora=lora,
        layers_blake2b=layers_fingerprint(model),
        send_wait_bytes_per_s=settings.of_host.send_bytes_per_s,
    )


def group_layers(model: ModelSpec, frozen_towers: frozenset[Tower], lora: Lora | None = None) -> list[int]:
    """Number the kind of each layer: equal where layers cost the same."""
    kinds = [
        (*layer.alike, layer.output_size, layer.rows_out_per_input, gradients, adapt_layer(layer, lora, 1))
        for layer, gradients in zip(model.layers, find_gradients(model.layers, frozen_towers, lora), strict=True)
    ]
    numbers = {kind: number for number, kind in enumerate(dict.fromkeys(kinds))}
    return [numbers[kind] for kind in kinds]


def with_tiers(profile: Profile, model: ModelSpec, tiers: Callable[[LayerSpec], Collection[str]] | None) -> Profile:
    """The profile whose layers recompute by these tiers (None: any) or not at all."""
    if tiers is None:
        return profile
    layers = (
        replace(cost, tiers=(cost.tiers[0], *(tier for tier in cost.tiers[1:] if tier.name in tiers(layer))))
        for layer, cost in zip(model.layers, profile.layers, strict=True)
    )
    return replace(profile, layers=tuple(layers))


def has_experts(model: ModelSpec) -> bool:
    """Return whether any of its layers has routed experts."""
    return any(layer.mlp is not None and layer.mlp.num_experts is not None for layer in model.layers)


def is_unpriced(layer: LayerSpec) -> bool:
    """Return whether no formula knows the layer and nothing has measured it."""
    if layer.measured is not None:
        return not layer.measured.forward_flops
    return layer.attention is not None and layer.attention.cross


def layers_fingerprint(model: ModelSpec) -> str:
    """Changes when the name, the widths or the parameters of a layer do."""
    return blake2b(repr(model.layers).encode())


def profile_bytes(profile: Profile) -> bytes:
    """Return `profile` as JSON: same profile, same bytes."""
    content = {"format": FORMAT, **asdict(profile)}
    for axis in _LATER_DEGREES:
        if content["dims"][axis] == getattr(ParallelDims(), axis):
            del content["dims"][axis]
    if profile.lora is None:
        del content["lora"]  # it came after the first profiles
    text = json.dumps(content, indent=1, allow_nan=False)
    return f"{text}\n".encode()


def save_profile(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Writes `profile_bytes`; the file is complete, or is not there.

    Use it to plan with the same costs again: `trimtab plan --profile FILE`.

    >>> import tempfile
    >>> from trimtab import describe, find_device
    >>> path = Path(tempfile.mkdtemp()) / "profile.json"
    >>> profile = profile_model(describe("Qwen2.5-VL-7B"), find_device("H200"))
    >>> save_profile(profile, path)
    >>> load_profile(path).layers == profile.layers
    True
    """
    refuse_type("profile", profile, Profile, "profile_model(...)")
    write_atomically(Path(path), profile_bytes(profile))


def load_profile(path: str | os.PathLike[str]) -> Profile:
    """The profile `save_profile` wrote; every missing, unknown or wrongly typed field is named in one error.

    Use it for a profile that was timed, traced or fitted elsewhere; `save_profile` has an example.
    """
    return profile_from_bytes(read_small(Path(path)), origin=str(path))


def profile_from_bytes(content: bytes, *, origin: str) -> Profile:
    """The profile that `profile_bytes` made; `origin` names it in errors."""
    try:
        data = parse_json(content)
    except ValueError as error:
        raise TrimtabError(f"{origin} is no profile: {error}; write it again with save_profile") from None
    # a file of another format is not guessed at
    found = data.pop("format", None) if isinstance(data, dict) else None
    if found != FORMAT:
        raise TrimtabError(f"{origin} is of format {found!r}, not {FORMAT!r}: write it again with save_profile")
    problems: list[str] = []
    unknown: list[str] = []
    # every field is named and typed
    profile = read_typed(
        Profile,
        data,
        "",
        problems,
        read_number=_read_number,
        optional=lambda field: field.default is None or field.name in _LATER_DEGREES,
        unknown=unknown,
    )
    problems += [f"{place}: unknown" for place in unknown]
    # and every tuple has a figure for each term
    if not problems:
        assert isinstance(profile, Profile)
        problems = [
            f"layers.{i} ({layer.name}): {len(values)} coefficients, expected {NUM_WORK_TERMS}"
            for i, layer in enumerate(profile.layers)
            for values in (
                *(terms for terms in (layer.weight_s, layer.other_transient_bytes, layer.entry_bytes) if terms),
                *(layer.forward_s, layer.backward_s, layer.output_bytes, layer.transient_bytes),
                *(terms for tier in layer.tiers for terms in (tier.extra_backward_s, tier.saved_bytes)),
            )
            if len(values) != NUM_WORK_TERMS
        ] or _absurd_times(profile)
    if problems:
        raise TrimtabError(f"{origin} is no profile, write it again with save_profile:\n" + join_problems(problems))
    assert isinstance(profile, Profile)
    return profile


def _absurd_times(profile: Profile) -> list[str]:
    """Find times that no device takes: what is planned with them would be believed."""
    largest = [max(map(abs, (*layer.forward_s, *layer.backward_s))) for layer in profile.layers]
    problems = [
        f"layers.{i} ({layer.name}): {value:.3g} s for one token or patch, where no device takes {_MOST_S:g} s"
        for i, (layer, value) in enumerate(zip(profile.layers, largest, strict=True))
        if value > _MOST_S
    ]
    if max(largest, default=0.0) < _LEAST_S:
        problems.append(f"layers: no layer takes {_LEAST_S:g} s for a token or patch, where every device takes more")
    return problems


def _precision_problems(device: DeviceSpec, settings: CostSettings) -> list[str]:
    """Return the products of 8 bits that the device has not, or whose rate nobody has published."""
    if not settings.in_8_bits or getattr(settings.efficiency_on(device), settings.dtype) is not None:
        return []
    have = [name for name, other in DEVICES.items() if getattr(efficiency_of(other), settings.dtype) is not None]
    return [f"no rate of dtype {settings.dtype} on {device.name} is known: use bf16, or one of {', '.join(have)}"]


def _unlike_problems(model: ModelSpec, dims: ParallelDims) -> list[str]:
    """Return sentences on tp, cp and the experts' degrees, once for each kind of layer."""
    problems, seen = list[str](), set()
    if max(dims.ep, dims.etp or 1) > 1 and not has_experts(model):
        problems.append(f"ep {dims.ep}, etp {dims.etp} was asked for, and {model.name} has no experts: leave both out")
    for layer in model.layers:
        if layer.alike not in seen:
            seen.add(layer.alike)
            problems += find_tp_problems(layer, dims.tp)
            problems += find_cp_problems(layer, dims.cp)
            problems += find_ep_problems(layer, dims)
    return problems


def _cross_attention_problems(model: ModelSpec) -> list[str]:
    """List problems of cross-attention: its pairs are tokens times image rows, and no work term holds that."""
    crossing = [x.name for x in model.layers if is_unpriced(x) and x.measured is None]
    if not crossing:
        return []
    return [f"{len(crossing)} layers of {model.name}, {crossing[0]} first, have cross-attention: use `trimtab map`"]


def _unpriced_problems(model: ModelSpec) -> list[str]:
    """Return the layers that no formula knows and no pass could measure."""
    unpriced = [x.name for x in model.layers if is_unpriced(x) and x.measured is not None]
    if not unpriced:
        return []
    return [f"{len(unpriced)} layers of {model.name}, {unpriced[0]} first, have no formula: use `trimtab map`"]


def _list_assumptions(model: ModelSpec, device: DeviceSpec, settings: CostSettings) -> list[str]:
    """List what a reader of the plan must know, in sentences."""
    e, tp = settings.efficiency_on(device), settings.dims.tp
    said = [
        "Seconds come from formulas: "
        f"{e.product_share(4096, 4096, 4096):.0%} of peak flop/s for a product of 4,096 rows and columns, "
        f"{e.product_share(1024, 4096, 4096):.0%} for 1,024 rows, {e.attention:.0%} for attention, {e.memory:.0%} of "
        f"peak memory bandwidth, {e.link:.0%} of the link; nothing overlaps.",
        _about_host(settings),
    ]
    # heads that tp pads or copies
    for tower in ("vision", "language"):
        heads = {x.attention.num_heads for x in model.layers if x.tower == tower and x.attention is not None}
        for count in sorted(heads):
            if count % tp:
                padded = -(-count // tp) * tp
                said.append(f"The {count} heads of the {tower} tower are padded to {padded} for tp {tp}.")
        kv = {x.attention.num_kv_heads for x in model.layers if x.tower == tower and x.attention is not None}
        if any(1 <= count < tp for count in kv):
            said.append(f"Each device of tp {tp} holds a copy of key/value heads of the {tower} tower.")
    if any(uses_dense_pairs(layer, settings) for layer in model.layers) and settings.packed:
        apart = " (an upper bound: `balanced` and `trimtab train` attend sample by sample)"
        said.append(
            f"With {settings.attention} attention a pack computes the pairs between its samples too"
            f"{apart if settings.attention == 'sdpa' else ''}: use flash."
        )
    # layers without a formula
    measured = [x.name for x in model.layers if x.measured is not None and x.tower != "audio"]
    if measured:
        said.append(
            f"Work of {len(measured)} layers, {measured[0]} the first, is what Transformers' own code was seen to do "
            "(matrix products and kept bytes); kernels made for such layers do and keep less."
        )
    # degrees that share experts or tokens
    if settings.dims.is_folded:
        said.append(
            f"The busiest device of {settings.dims.ep} that share experts gets {settings.expert_imbalance:g} times the "
            f"mean's rows; rows are sent by {settings.dispatcher}, "
            + ("next to products: switch overlap on." if settings.ep_overlap else "not overlapped: an upper bound.")
        )
    if settings.dims.cp > 1:
        said.append(
            f"Documents are padded to multiples of {document_multiple(settings.dims)} tokens and cut in zig-zag among "
            f"cp {settings.dims.cp}; keys and values go round, not overlapped with computing: an upper bound. Every "
            "device of cp runs the whole vision tower."
        )
    # what must be switched on in the launcher, or is not overlapped
    if settings.tp_overlap and tp > 1:
        said.append(f"Of tensor-parallel messages one part in {tp} is waited for: switch overlap on in your launcher.")
    if settings.in_8_bits:
        said.append(f"Products of the blocks are {settings.dtype.upper()}: switch it on in your launcher.")
    if settings.zero_stage == 3:
        said.append("Weights gathered by ZeRO-3 are not overlapped with computing: an upper bound.")
        if settings.expert_products == "loop" and has_experts(model):
            said.append(
                "ZeRO-3 gathers every expert for a loop over them: a published run took 9.5 times as long as Megatron."
            )
    # what is trained
    if settings.frozen_towers:
        said.append(f"Frozen: {', '.join(sorted(settings.frozen_towers))}.")
    if settings.lora is not None:
        said += _about_lora(model, settings, settings.lora)
    if settings.dims.pp > 1 and any(x.kind == "head" and x.num_params == 0 for x in model.layers):
        said.append("The tied head holds its own copy of the embedding, as on a stage of its own.")
    return said


def _about_host(settings: CostSettings) -> str:
    """The line that says what is priced of the host: its own defaults, or what was said."""
    parts = ["fused kernels" if settings.fused_kernels else "PyTorch's own kernels", f"{settings.grad_dtype} gradients"]
    if settings.dims.tp > 1:
        both = (("language model", settings.sequence_parallel), ("vision tower", settings.vision_sequence_parallel))
        towers = [tower for tower, on in both if on]
        parts.append(f"sequence parallelism in {' and '.join(towers)}" if towers else "no sequence parallelism")
    if (block_s := settings.host_s("block")) > 0:
        parts.append(
            f"{1e3 * block_s:.3g} ms of the host for a block's forward"
            + (", the device waiting" if settings.blocking_launches else "")
        )
    return f"Priced as host {settings.host!r} runs: {', '.join(parts)}."


def _about_lora(model: ModelSpec, settings: CostSettings, lora: Lora) -> list[str]:
    """Say what is trained, and in which form the rest lies."""
    count = count_adapters(model, lora)
    kept = "each holds a copy of its input in the model's dtype, cast from fp32 under autocast (weights=same: none)"
    said = [
        f"LoRA of rank {lora.r} on {count.num_matrices} linear layers of {' and '.join(lora.towers)} trains "
        f"{count.num_params:,} parameters; all other weights are frozen."
    ]
    if casts_inputs(settings):
        said.append(f"Adapters are fp32, as PEFT makes them: {kept}.")
    if lora.bits == 4:
        said.append(
            f"Frozen linear layers of {' and '.join(lora.towers)} take {NF4_BYTES:.3f} bytes a weight (NF4, scales "
            "quantised again); unpacking them is assumed to take the memory's bandwidth."
        )
    return said


_ABOVE_ZERO = ("peak_flops", "memory_bytes", "memory_bytes_per_s", "link_bytes_per_s")
_LATER_DEGREES = ("ep", "etp")
"""Not in files of earlier profiles: left out where they divide nothing."""


def _read_number(place: str, kind: Any, value: Any, problems: list[str]) -> Any:
    """Read a number: all are finite and not negative; rates are more than 0, whole numbers have 64 bits.

    Only transient bytes may fall below 0 in single terms: a traced one is a line through two sizes, right between them.
    """
    below = "transient_bytes." in place
    # whole numbers of 64 bits, rates above 0, all else finite
    if kind is int and abs(value) >= 2**63:
        problems.append(f"{place}: expected a whole number of 64 bits")
    elif not (-math.inf if below else 0) <= value < math.inf or value == -math.inf:
        problems.append(f"{place}: expected a finite number of 0 or more, found {str(value)[:40]}")
    elif value == 0 and place.rpartition(".")[2] in _ABOVE_ZERO:
        problems.append(f"{place}: expected a number above 0")
    elif kind is float:
        try:
            return float(value)
        except OverflowError:
            problems.append(f"{place}: expected a number that a float holds")
    return value


def chosen_tiers(profile: Profile, stage: Stage) -> list[RecomputeTier]:
    """The tier of each of the stage's layers, in order; layers that no choice names are on their first."""
    # layers that no choice names keep their activations
    names = tiers_of(stage)
    found = []
    for i, layer in enumerate(profile.layers[stage.start : stage.stop], stage.start):
        tier = layer.tier(names.get(i, layer.tiers[0].name))
        if tier is None:
            raise PartitionError(
                f"layer {layer.name} has no tier {names[i]!r}: choose one of "
                f"{', '.join(tier.name for tier in layer.tiers)}"
            )
        found.append(tier)
    return found


# -- seconds of layers at given work ----------------------------------------------------------------------------------


_PAIR_TERMS = np.array([term.endswith(("_sq", "_windowed")) for term in WORK_TERMS])


class Seconds(NamedTuple):
    """Seconds of a layer or a stage for each of n micro-batches: (n,) each."""

    forward: FloatArray
    backward: FloatArray  # whole, with what is computed again
    weight: FloatArray  # the part of it that only weight gradients need
    again: FloatArray  # the part of it that recompute adds


def host_again_s(layer: LayerCost, tier: RecomputeTier) -> float:
    """Return what recompute asks of the host: its forward once more, or a third of it where the products stay."""
    return layer.host_forward_s * {"none": 0.0, "selective": OTHER_LAYERS}.get(tier.name, 1.0)


def pass_seconds(layer: LayerCost, tier: RecomputeTier, work: FloatArray) -> Seconds:
    """Return the seconds of one layer on `tier` for micro-batches `work` (n, len(WORK_TERMS)).

    max(device, host), forward and backward each, with what is computed again (`host_again_s`). The weights' part is
    the device's own: the host's wait comes before it.
    """
    coefficients = (layer.forward_s, layer.backward_s, tier.extra_backward_s)
    forward, backward, extra = (work @ np.array(terms, np.float64) for terms in coefficients)
    again_s = host_again_s(layer, tier)
    if layer.host_forward_s == 0.0:  # what a fit put below 0 stays there, for the solvers to refuse
        return Seconds(forward, backward + extra, work @ weight_coefficients(layer), extra)
    whole = np.maximum(backward + extra, layer.host_backward_s + again_s)
    return Seconds(
        forward=np.maximum(forward, layer.host_forward_s),
        backward=whole,
        weight=work @ weight_coefficients(layer),
        again=whole - np.maximum(backward, layer.host_backward_s),
    )


def stage_seconds(profile: Profile, stage: Stage, work: FloatArray) -> Seconds:
    """Return the sum of `pass_seconds` over the stage's layers, each on its tier."""
    layers = profile.layers[stage.start : stage.stop]
    # layers of one kind share their tuples: compared by identity, which costs less than by value
    kinds, number = dict[tuple[object, ...], tuple[LayerCost, RecomputeTier]](), Counter[tuple[object, ...]]()
    for layer, tier in zip(layers, chosen_tiers(profile, stage), strict=True):
        shared = map(id, (layer.forward_s, layer.backward_s, layer.weight_s, tier))
        kind: tuple[object, ...] = (*shared, layer.host_forward_s, layer.host_backward_s)
        kinds[kind] = layer, tier
        number[kind] += 1
    total = np.zeros((4, len(work)))
    for kind, (layer, tier) in kinds.items():
        total += number[kind] * np.array(pass_seconds(layer, tier, work))
    return Seconds(*total)


def mean_seconds(profile: Profile, work: FloatArray) -> tuple[FloatArray, FloatArray]:
    """Return (num_layers,) forward and backward seconds of one micro-batch `work`, nothing recomputed.

    Of several micro-batches (n, len(WORK_TERMS)) they are (num_layers, n).
    """
    forward, backward = (profile.matrix(term) @ work.T for term in ("forward_s", "backward_s"))
    if not any(layer.host_forward_s for layer in profile.layers):
        return forward, backward
    host = np.array([(layer.host_forward_s, layer.host_backward_s) for layer in profile.layers])
    return np.maximum(forward.T, host[:, 0]).T, np.maximum(backward.T, host[:, 1]).T


def host_share(profile: Profile, work: FloatArray) -> float:
    """Return the part of the forward and backward of the mean micro-batches `work` (n, len(WORK_TERMS)) that waits."""
    mean = np.atleast_2d(work).mean(axis=0)
    device = float(sum(np.sum(profile.matrix(term) @ mean) for term in ("forward_s", "backward_s")))
    passed = float(sum(map(np.sum, mean_seconds(profile, mean))))
    return 1.0 - device / passed if passed > 0 else 0.0


def regime_of(profile: Profile, model: ModelSpec, work: FloatArray, *, nodes: int) -> Regime:
    """Return the regime of a run of mean micro-batches `work` (n, len(WORK_TERMS)) on so many nodes."""
    return find_regime(
        waits=host_share(profile, work),
        adapters=profile.lora is not None,
        experts=has_experts(model),
        stages=profile.dims.pp,
        nodes=nodes,
    )


def time_band(profile: Profile, regime: Regime) -> float:
    """Return the relative half-width of a run's seconds: of formulas by its regime, else as they were measured."""
    return TIME_BANDS[regime] if profile.method in ("analytic", "traced") else profile.time_error


def weight_coefficients(layer: LayerCost) -> FloatArray:
    """Return (len(WORK_TERMS),) seconds of `layer.backward_s` that only weight gradients need.

    As the profile says (`weight_s`); else by FLOPs: of a matrix product, the gradients of inputs and of weights take
    one product each, so half; of attention's pairs, which multiply no weights, none. Elementwise work counts with the
    products then. Recompute runs before either and belongs to the gradients of the inputs.
    """
    backward = np.asarray(layer.backward_s, np.float64)
    if layer.weight_s:
        return np.minimum(np.asarray(layer.weight_s, np.float64), backward)
    return np.where(_PAIR_TERMS, 0.0, 0.5 * backward)


def device_seconds(profile: Profile, work: FloatArray) -> FloatArray:
    """Return (n,) seconds of the device for forward and backward of all layers: linear in `work`, without the host."""
    per_term = profile.matrix("forward_s").sum(axis=0) + profile.matrix("backward_s").sum(axis=0)
    return evaluate(per_term, work)
