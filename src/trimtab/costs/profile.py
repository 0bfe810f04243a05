"""The table every solver reads: made from a model's shapes, saved to and loaded from JSON."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Collection
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from trimtab.costs.activations import casts_inputs, uses_dense_pairs
from trimtab.costs.adapters import adapt_layer, count_adapters, refuse_unknown_targets
from trimtab.costs.analytic import cost_layer, find_gradients
from trimtab.costs.curves import efficiency_of
from trimtab.costs.devices import DEVICES
from trimtab.costs.exchange import document_multiple, find_cp_problems
from trimtab.costs.flops import find_ep_problems, find_tp_problems
from trimtab.costs.memory_band import FORMULAS_ERROR
from trimtab.costs.settings import CostSettings
from trimtab.errors import PartitionError, TrimtabError, join_problems, refuse_type
from trimtab.files import blake2b, read_small, write_atomically
from trimtab.lora import NF4_BYTES, Lora
from trimtab.options import Tower
from trimtab.specs import (
    NUM_WORK_TERMS,
    DeviceSpec,
    LayerSpec,
    ModelSpec,
    ParallelDims,
    Profile,
    RecomputeTier,
    Stage,
    tiers_of,
)
from trimtab.typed_json import parse_json, read_typed

FORMAT = "trimtab-profile 1.2"

_MOST_S, _LEAST_S = 1e3, 1e-15  # of a layer for one token, patch or pair of them; real ones: 1e-4 to 1e-11

TIME_ERROR = 0.30
"""Stated, not measured on a device: formulas with one efficiency for each kind of kernel. Calibrate to narrow it."""


def profile_model(model: ModelSpec, device: DeviceSpec, **choices: Any) -> Profile:
    """Analytic seconds and bytes of every layer of `model` on one `device`: what plans are made of without a GPU.

    Use it to see where a model's time and memory go, or as the input of `split_stages`.

    `choices` are fields of `CostSettings`: dims, dtype, zero_stage, attention, fused_kernels, frozen_towers, ...

    >>> import trimtab
    >>> model, device = trimtab.describe("Qwen2.5-VL-7B"), trimtab.find_device("A100-80GB")
    >>> profile = trimtab.profile_model(model, device, dims=trimtab.ParallelDims(tp=2), zero_stage=2)
    >>> profile.layers[0].name
    'model.visual.patch_embed'
    """
    refuse_type("model", model, ModelSpec, "describe(name or folder)")
    refuse_type("device", device, DeviceSpec, "find_device(name)")
    return price_model(model, device, CostSettings(**choices))


def price_model(model: ModelSpec, device: DeviceSpec, settings: CostSettings) -> Profile:
    """`profile_model` under given settings."""
    problems = _precision_problems(device, settings)  # alone: they are those of every model and degree
    if not problems:
        problems = _cross_attention_problems(model) + _unpriced_problems(model) + _unlike_problems(model, settings.dims)
    if problems:
        raise PartitionError(join_problems(problems))
    frozen, lora = settings.frozen_towers, settings.lora
    if lora is not None:
        refuse_unknown_targets(model, lora)
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
    )


def group_layers(model: ModelSpec, frozen_towers: frozenset[Tower], lora: Lora | None = None) -> list[int]:
    """For each layer the number of its kind: equal where layers cost the same."""
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
    """Whether any of its layers has routed experts."""
    return any(layer.mlp is not None and layer.mlp.num_experts is not None for layer in model.layers)


def is_unpriced(layer: LayerSpec) -> bool:
    """Whether no formula knows the layer and nothing has measured it."""
    if layer.measured is not None:
        return not layer.measured.forward_flops
    return layer.attention is not None and layer.attention.cross


def layers_fingerprint(model: ModelSpec) -> str:
    """Changes when the name, the widths or the parameters of a layer do."""
    return blake2b(repr(model.layers).encode())


def profile_bytes(profile: Profile) -> bytes:
    """`profile` as JSON: same profile, same bytes."""
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
    found = data.pop("format", None) if isinstance(data, dict) else None
    if found != FORMAT:
        raise TrimtabError(
            f"{origin} is of format {found!r}, and this version reads {FORMAT!r}: write it again with save_profile"
        )
    problems: list[str] = []
    unknown: list[str] = []
    profile = read_typed(
        Profile,
        data,
        "",
        problems,
        read_number=_read_number,
        optional=lambda field: field.default is None or field.name in _LATER_DEGREES,
        unknown=unknown,
    )
    problems += [f"{place}: unknown" for place in unknown if place not in _NO_MORE_READ]
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
    """A problem for times that no device takes: what is planned with them would be believed."""
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
    """Products of 8 bits that the device has not, or whose rate nobody has published."""
    if not settings.in_8_bits or getattr(settings.efficiency_on(device), settings.dtype) is not None:
        return []
    have = [name for name, other in DEVICES.items() if getattr(efficiency_of(other), settings.dtype) is not None]
    return [
        f"dtype {settings.dtype} was asked for, and no rate of such products on {device.name} is known: use bf16, or "
        f"one of {', '.join(have)}"
    ]


def _unlike_problems(model: ModelSpec, dims: ParallelDims) -> list[str]:
    """Sentences on tp, cp and the experts' degrees, once for each kind of layer."""
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
    """Their pairs are tokens times image rows of each sample, and no work term holds that product."""
    crossing = [x.name for x in model.layers if is_unpriced(x) and x.measured is None]
    if not crossing:
        return []
    return [
        f"training {model.name} cannot be planned: {len(crossing)} layers, {crossing[0]} the first, attend to image "
        "rows by cross-attention, which no cost formula prices: plan another family, or `trimtab map` this one for "
        "inference"
    ]


def _unpriced_problems(model: ModelSpec) -> list[str]:
    """Layers that no formula knows and no pass could measure."""
    unpriced = [x.name for x in model.layers if is_unpriced(x) and x.measured is not None]
    if not unpriced:
        return []
    return [
        f"the time of {model.name} was asked for, and that of {len(unpriced)} layers, {unpriced[0]} the first, is not "
        "known: no formula fits them, and describing could not run them alone: `trimtab map` places the model by its "
        "weights"
    ]


def _list_assumptions(model: ModelSpec, device: DeviceSpec, settings: CostSettings) -> list[str]:
    """What a reader of the plan must know, in sentences."""
    e, tp = settings.efficiency_on(device), settings.dims.tp
    said = [
        "Seconds come from formulas: "
        f"{e.product_share(4096, 4096, 4096):.0%} of peak flop/s for a product of 4,096 rows and columns, "
        f"{e.product_share(1024, 4096, 4096):.0%} for 1,024 rows, {e.attention:.0%} for attention, {e.memory:.0%} of "
        f"peak memory bandwidth, {e.link:.0%} of the link; nothing overlaps."
    ]
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
        said.append(
            f"With {settings.attention} attention a pack computes the pairs between its samples too; "
            "these are not counted: use flash attention for packed samples."
        )
    measured = [x.name for x in model.layers if x.measured is not None and x.tower != "audio"]
    if measured:
        said.append(
            f"Work of {len(measured)} layers, {measured[0]} the first, is what Transformers' own code was seen to do "
            "(matrix products and kept bytes); kernels made for such layers do and keep less."
        )
    if settings.dims.is_folded:
        said.append(
            f"The busiest device of {settings.dims.ep} that share experts gets {settings.expert_imbalance:g} times the "
            f"mean's rows; rows are sent by {settings.dispatcher}, "
            + ("beside products: switch overlap on." if settings.ep_overlap else "not overlapped: an upper bound.")
        )
    if settings.dims.cp > 1:
        said.append(
            f"Documents are padded to multiples of {document_multiple(settings.dims)} tokens and cut in zig-zag among "
            f"cp {settings.dims.cp}; keys and values go round, not overlapped with computing: an upper bound. Every "
            "device of cp runs the whole vision tower."
        )
    if settings.tp_overlap and tp > 1:
        said.append(f"Of tensor-parallel messages one part in {tp} is waited for: switch overlap on in your launcher.")
    if settings.in_8_bits:
        said.append(f"Products of the blocks are {settings.dtype.upper()}: switch it on in your launcher.")
    if settings.zero_stage == 3:
        said.append("Weights gathered by ZeRO-3 are not overlapped with computing: an upper bound.")
    if settings.frozen_towers:
        said.append(f"Frozen: {', '.join(sorted(settings.frozen_towers))}.")
    if settings.lora is not None:
        said += _about_lora(model, settings, settings.lora)
    if settings.dims.pp > 1 and any(x.kind == "head" and x.num_params == 0 for x in model.layers):
        said.append("The tied head holds its own copy of the embedding, as on a stage of its own.")
    return said


def _about_lora(model: ModelSpec, settings: CostSettings, lora: Lora) -> list[str]:
    """What is trained, and in which form the rest lies."""
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
_NO_MORE_READ = ("device.host_bytes_per_s", "device.host_memory_bytes")
"""Of profiles made when layers could be offloaded."""


def _read_number(place: str, kind: Any, value: Any, problems: list[str]) -> Any:
    """Costs, errors and a device's figures are finite and not negative; rates are more than 0, whole numbers 64 bit.

    Only transient bytes may fall below 0 in single terms: a traced one is a line through two sizes, right between them.
    """
    below = "transient_bytes." in place
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
    names = tiers_of(stage)
    found = []
    for i, layer in enumerate(profile.layers[stage.start : stage.stop], stage.start):
        tier = layer.tier(names.get(i, layer.tiers[0].name))
        if tier is None:
            raise PartitionError(
                f"layer {layer.name} is to take the tier {names[i]!r}, which its profile does not offer: "
                f"choose one of {', '.join(tier.name for tier in layer.tiers)}"
            )
        found.append(tier)
    return found
