"""Peaks of real training steps under each choice of recompute: by formula, counted without weights, probed; measured.

`formula` and `traced` are what a plan states for the choice, state and activations; `probed` is the formulas' statement
corrected as `trimtab probe` corrects it, from two runs: everything recomputed, and one layer of each kind not. The
peak is that of torch's allocator over a whole step, AdamW included; on a CPU live storages are counted.
"""

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from bench.gpu.setting import Case, Setting
from bench.gpu.training import Measured, Trainee, names_of, relative

from timed_profile import make_cases
from trimtab.models.describe import describe
from trimtab.models.description import read_shipped
from trimtab.partition.stages import split_stages
from trimtab.plan.decide.probed import freed_bytes
from trimtab.specs import Profile, Stage, recomputing


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """A published model and its batch, and the memory it needs at 18 bytes a parameter."""

    model: str
    patches: int
    tokens: int  # words beside the images
    room_bytes: float
    text_layers: int | None = None  # None: all that it has


SIZES = (
    Size(model="Qwen3-VL-2B", patches=8192, tokens=6144, room_bytes=60e9),
    Size(model="Qwen2.5-VL-3B", patches=8192, tokens=6144, room_bytes=90e9),
    Size(model="Qwen2.5-VL-7B", patches=8192, tokens=6144, room_bytes=130e9, text_layers=14),  # all 28 take 149e9
    Size(model="Qwen3-VL-2B", patches=2048, tokens=1024, room_bytes=42e9),
    Size(model="Qwen3-VL-2B", patches=1024, tokens=512, room_bytes=23e9, text_layers=4),
)
CAPS = (0.25, 0.5, 0.75)
"""Of the way from everything recomputed to nothing."""


def cases(setting: Setting) -> list[Case]:
    return [
        Case(name=name, run=lambda make=make: compare(make())) for name, make in trainees(setting, tiny_trainee).items()
    ]


def trainees(setting: Setting, tiny: Callable[[Setting], Trainee]) -> dict[str, Callable[[], Trainee]]:
    """Makers of the models that the device can hold, by name: built when their case runs."""
    if setting.tiny:
        return {"tiny": partial(tiny, setting)}
    return {
        f"{size.model}{f', {size.text_layers} text layers' if size.text_layers else ''}, {size.patches} patches, "
        f"{size.tokens} words": partial(build_trainee, size, setting)
        for size in SIZES
        if size.room_bytes <= setting.memory_bytes
    }


def build_trainee(size: Size, setting: Setting) -> Trainee:
    config = copy.deepcopy(dict(read_shipped(size.model)["config"]))
    spec = describe(size.model)
    if size.text_layers is not None:
        config["text_config"]["num_hidden_layers"] = size.text_layers
        spec = describe(config, name=size.model)
    return Trainee(config, spec, setting, patches=size.patches, tokens=size.tokens)


def tiny_trainee(setting: Setting) -> Trainee:
    config = make_cases(large=False)[1].config
    return Trainee(config, describe(dict(config)), setting, patches=256, tokens=192)


def compare(model: Trainee) -> dict[str, Any]:
    """Nothing, selective, everything recomputed, and what is chosen at three caps between."""
    choices = model.choices()
    measured = {name: model.measure(stage) for name, stage in choices.items()}
    low, high = measured["full"].peak_bytes, measured["none"].peak_bytes
    probed = probe(model, choices, measured["full"])
    rows = {name: _row(model, probed, stage, measured[name]) for name, stage in choices.items()}
    for share in CAPS:
        cap = low + share * (high - low)
        (chosen,) = split_stages(model.problem(probed, cap)).stages
        ran = model.measure(chosen)
        rows[f"chosen at {share:.0%}"] = {
            **_row(model, probed, chosen, ran),
            "cap_bytes": cap,
            "within_cap": ran.peak_bytes <= cap,
        }
    return {"rows": rows, "work": model.work.tolist()}


def probe(model: Trainee, choices: Mapping[str, Stage], full: Measured) -> Profile:
    """The formulas' profile with what one layer of each kind keeps, and with the peak of full recompute, measured."""
    profile, everything = model.formulas, choices["full"]
    ratios: dict[int, float] = {}
    able = [i for choice in everything.recompute for i in choice.layers]
    for group in sorted({profile.layers[i].group for i in able}):
        alike = [i for i in able if profile.layers[i].group == group]
        half = alike[: max(1, len(alike) // 2)]
        kept = recomputing(model.whole(), {i: "full" for i in able if i not in half})
        more = model.measure(kept, repeats=1).peak_bytes - full.peak_bytes
        predicted = sum(freed_bytes(profile.layers[i], "none", model.work) for i in half)
        if len(alike) > 1 and predicted > 0:
            ratios[group] = more / predicted
    layers = []
    for layer in profile.layers:
        ratio, base = ratios.get(layer.group), layer.tier("full")
        if ratio is not None and base is not None:
            tiers = (
                replace(
                    tier,
                    saved_bytes=tuple(
                        f + ratio * (t - f) for t, f in zip(tier.saved_bytes, base.saved_bytes, strict=True)
                    ),
                )
                for tier in layer.tiers
            )
            layer = replace(layer, tiers=tuple(tiers))
        layers.append(layer)
    corrected = replace(profile, layers=tuple(layers))
    off = full.peak_bytes - model.assess(corrected, everything).peak_bytes
    first = corrected.layers[0]  # state is held all the time: what is missing, or too much, at the anchor
    return replace(corrected, layers=(replace(first, state_bytes=first.state_bytes + off), *corrected.layers[1:]))


def _row(model: Trainee, probed: Profile, stage: Stage, ran: Measured) -> dict[str, Any]:
    row: dict[str, Any] = {
        "recompute": names_of(stage),
        "step_s": ran.step_s,
        "peak_bytes": ran.peak_bytes,
        "reserved_bytes": ran.reserved_bytes,
    }
    for name, profile in (("formula", model.formulas), ("traced", model.traced), ("probed", probed)):
        row[f"{name}_error"] = relative(model.assess(profile, stage).peak_bytes, ran.peak_bytes)
    return row
