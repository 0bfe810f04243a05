"""A saved profile in a plan: is it of these layers and settings, and what do other degrees make of its figures?"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from trimtab.costs.profile import layers_fingerprint
from trimtab.errors import TrimtabError, join_problems
from trimtab.specs import LayerCost, ModelSpec, Profile, RecomputeTier, Terms


def refuse_unlike(saved: Profile, model: ModelSpec, target: Profile) -> None:
    """Raises with a sentence for each thing that `saved` was priced for and `target`, the plan's formulas, is not."""
    problems = []
    # the same layers, with the same ways to recompute
    names = [layer.name for layer in saved.layers]
    if saved.layers_blake2b != layers_fingerprint(model) or names != [layer.name for layer in target.layers]:
        problems.append(
            f"the profile is of {len(saved.layers)} other layers than {model.name}'s: run `trimtab profile` on it"
        )
    elif problem := _unlike_tiers(saved, target):
        problems.append(problem)
    # and priced for the same run
    for what, has, wanted, cure in (
        ("device", saved.device.name, target.device.name, "give --cluster that device, or profile on this one"),
        ("dtype", saved.dtype, target.dtype, "plan with that --set dtype, or profile with this one"),
        ("attention", saved.attention, target.attention, "plan with that --set attention, or profile with this one"),
        (
            "frozen towers",
            ", ".join(saved.frozen_towers) or "none",
            ", ".join(target.frozen_towers) or "none",
            "give plan and profile the same --freeze",
        ),
        ("LoRA", saved.lora or "none", target.lora or "none", "give plan and profile the same --lora"),
        (
            "fused kernels",
            "yes" if saved.fused_kernels else "no",
            "yes" if target.fused_kernels else "no",
            "give plan and profile the same --set fused_kernels",
        ),
    ):
        if has != wanted:
            problems.append(f"the profile is for {what} {has}, and the plan for {wanted}: {cure}")
    if problems:
        raise TrimtabError(join_problems(problems))


def _unlike_tiers(saved: Profile, target: Profile) -> str | None:
    for has, wanted in zip(saved.layers, target.layers, strict=True):
        missing = [tier.name for tier in wanted.tiers if tier.name not in {own.name for own in has.tiers}]
        if missing:
            return f"the profile lacks recompute {' or '.join(missing)} of {has.name}: run `trimtab profile` again"
    return None


def carry_seconds(saved: Profile, *, base: Profile, target: Profile, linkless: Profile) -> Profile:
    """Give `target` the seconds of `saved`: each coefficient times what the formulas say the plan's degrees change.

    `base` and `target` are the formulas at the degrees of `saved` and of the plan, `linkless` those of the plan with
    links that take no time. A coefficient without traffic between devices becomes saved x linkless / base, and the
    formula's own traffic, target - linkless, is added: no device alone can measure it. One of a profile that was
    made with tp > 1 holds its traffic, and becomes saved x target / base. At the degrees of `saved` nothing changes.
    The host's seconds are those of `saved`, which has none where they were measured with the device's.
    Assumption: tp divides measured seconds as it divides the formulas'. Bytes, and what comes once a step, are the
    formulas'; what probed steps took beyond them once a step is added.
    """
    measured = partial(_carry_seconds, measured_links=base.dims.tp > 1)
    layers = []
    for alike in zip(saved.layers, base.layers, target.layers, linkless.layers, strict=True):
        # once a step: the formulas', and what probed steps took beyond them
        x, at_base, at_target, _ = alike
        step_s = at_target.step_s
        if saved.method == "probed":
            step_s = max(0.0, step_s + x.step_s - at_base.step_s)
        layers.append(
            replace(
                at_target,
                **_carry_terms(alike, ("forward_s", "backward_s", "weight_s"), measured),
                tiers=_carry_tiers(alike, extra_backward_s=measured),
                step_s=step_s,
                host_forward_s=x.host_forward_s,
                host_backward_s=x.host_backward_s,
            )
        )
    # say what was measured, and what was divided
    said = [sentence for sentence in saved.assumptions if sentence not in base.assumptions]
    if saved.dims.tp != target.dims.tp:
        said.append(
            f"Seconds measured at tp {saved.dims.tp} were divided for tp {target.dims.tp} by formula, traffic added."
        )
    return replace(
        target,
        layers=tuple(layers),
        method=saved.method,
        time_error=saved.time_error,
        assumptions=(*said, *target.assumptions[1:]),  # the first is the formulas' own, on their seconds
    )


def carry_bytes(saved: Profile, *, base: Profile, target: Profile, linkless: Profile) -> Profile:
    """Give `target` the bytes that `saved` counted: each coefficient times what the formulas say the degrees change.

    `base` and `target` are the formulas at the degrees of `saved` and of the plan; in `base` and in `linkless` (those
    of the plan, with links that take no time) no weights are gathered. Kept and sent bytes become saved x target /
    base, tier by tier and term by term; a term that no formula has (masks) stays as it was counted. Transients become
    saved x linkless / base, and weights that ZeRO-3 gathers are added. At the degrees of `saved` nothing changes.
    Assumption: tp divides counted bytes as it divides the formulas'. Seconds and what comes once a step are the
    formulas'; what recompute takes is scaled from `saved`, which knows where it stops.
    """
    again = partial(_carry_seconds, measured_links=False)
    layers = []
    for alike in zip(saved.layers, base.layers, target.layers, linkless.layers, strict=True):
        # bytes change with the degrees as the formulas' do
        x, at_base, at_target, alone = alike
        layers.append(
            replace(
                at_target,
                tiers=_carry_tiers(alike, extra_backward_s=again, saved_bytes=_scale),
                **_carry_terms(alike, ("output_bytes",), _scale),
                transient_bytes=_carry_transient(x.transient_bytes, at_base, at_target, alone),
                other_transient_bytes=_carry_transient(x.other_transient_bytes, at_base, at_target, alone),
                entry_bytes=x.entry_bytes,
                group=x.group,
            )
        )
    # say what was counted, and what was divided
    said = [sentence for sentence in saved.assumptions if sentence not in target.assumptions]
    if saved.dims.tp != target.dims.tp:
        said.append(
            f"Bytes counted at tp {saved.dims.tp} were divided for tp {target.dims.tp} as the formulas divide them."
        )
    return replace(
        target,
        layers=tuple(layers),
        method=saved.method,
        assumptions=(target.assumptions[0], *said, *target.assumptions[1:]),
    )


def carry_probed_bytes(saved: Profile, carried: Profile, *, base: Profile) -> Profile:
    """Give `carried`, whose bytes are the formulas' at the plan's degrees, the bytes that were measured in `saved`.

    `base` are the formulas at the degrees of `saved`. Kept bytes and state become measured x carried / base; of the
    transients, which hold what no formula prices, the difference measured - base is added. At the degrees of
    `saved` nothing changes. Optimizer and ZeRO stage are those of `saved`.
    """
    layers = []
    for alike in zip(saved.layers, base.layers, carried.layers, strict=True):
        # kept bytes and state in proportion; transients by their difference
        x, at_base, at_target = alike
        layers.append(
            replace(
                at_target,
                tiers=_carry_tiers(alike, saved_bytes=_scale),
                **_carry_terms(alike, ("output_bytes",), _scale),
                **_carry_terms(alike, ("transient_bytes", "other_transient_bytes"), _shift),
                state_bytes=_in_proportion(x.state_bytes, at_base.state_bytes, at_target.state_bytes),
                entry_bytes=x.entry_bytes,
                group=x.group,
            )
        )
    return replace(carried, layers=tuple(layers), memory_error=saved.memory_error)


# -- one layer as the saved profile, the formulas at its degrees, and those at the plan's have it --------------------


def _carry_terms(alike: Sequence[LayerCost], names: Sequence[str], rule: Callable[..., Terms]) -> dict[str, Any]:
    """Carry each of these tuples of the layer by `rule`, which takes what each profile says of it."""
    return {name: rule(*(getattr(layer, name) for layer in alike)) for name in names}


def _carry_tiers(alike: Sequence[LayerCost], **rules: Callable[..., Terms]) -> tuple[RecomputeTier, ...]:
    """The tiers of the plan's formulas; of each the tuples named by their rules."""
    result = []
    for tier in alike[2].tiers:
        own = [found for layer in alike if (found := layer.tier(tier.name)) is not None]
        assert len(own) == len(alike), "`refuse_unlike` comes first"
        made: dict[str, Any] = {name: rule(*(getattr(x, name) for x in own)) for name, rule in rules.items()}
        result.append(replace(tier, **made))
    return tuple(result)


def _carry_seconds(saved: Terms, base: Terms, target: Terms, linkless: Terms, *, measured_links: bool) -> Terms:
    if base == target:
        return saved
    result = []
    for s, b, t, alone in zip(saved, base, target, linkless, strict=False):  # weight_s is empty where it is not known
        kept = t if measured_links else alone
        result.append((s * kept / b if b > 0 else s) + (t - kept))
    return tuple(result)


def _scale(saved: Terms, base: Terms, target: Terms, *_: Terms) -> Terms:
    return tuple(map(_in_proportion, saved, base, target))


def _in_proportion(saved: float, base: float, target: float) -> float:
    return saved * target / base if base > 0 and base != target else saved


def _shift(saved: Terms, base: Terms, target: Terms) -> Terms:
    if base == target:
        return saved
    return tuple(t + (s - b) for s, b, t in zip(saved, base, target, strict=True))


def _carry_transient(saved: Terms, base: LayerCost, target: LayerCost, linkless: LayerCost) -> Terms:
    """Scale; and add what `target` gathers on top of `linkless`. Nothing stays nothing."""
    if not saved:
        return ()
    scaled = _scale(saved, _most_moment(base), _most_moment(linkless))
    gathered = zip(target.transient_bytes, linkless.transient_bytes, strict=True)
    return tuple(own + (more - less) for own, (more, less) in zip(scaled, gathered, strict=True))


def _most_moment(layer: LayerCost) -> Terms:
    """The larger of a formula's two moments, term by term."""
    return tuple(map(max, layer.transient_bytes, layer.other_transient_bytes or layer.transient_bytes))
