"""The map to take where no objective was asked for."""

from __future__ import annotations

from dataclasses import replace

from trimtab.placement.machine import Machine
from trimtab.placement.place import place
from trimtab.placement.placed import Placement
from trimtab.placement.workload import Workload
from trimtab.specs import ModelSpec

ROOMY = 0.8  # GPUs that are filled to this leave room for what is not counted and for a longer prompt


def place_unasked(model: ModelSpec, machine: Machine, workload: Workload) -> Placement:
    """The fewest GPUs, as every further one is a crossing for every token, where they stay roomy; else the least full.

    A note says what the other objective gives. Use `place` where you know what you want.
    """
    even = place(model, machine, workload)
    if even.spilled or _num_used(even) == 1:
        return even
    near = place(model, machine, workload, objective="latency")
    if _num_used(near) == _num_used(even):
        return even
    few, all_of = _told(near), _told(even)
    if near.fullest <= ROOMY:
        return replace(near, notes=(*near.notes, f"It takes {few}; --for memory spreads it over {all_of}."))
    return replace(even, notes=(*even.notes, f"It takes {all_of}; --for latency needs only {few}."))


def _num_used(placement: Placement) -> int:
    return sum(bool(use.modules) for use in placement.uses)


def _told(placement: Placement) -> str:
    num = _num_used(placement)
    return f"{num} GPU{'s' if num > 1 else ''}, the fullest to {100 * placement.fullest:.0f} %"
