"""Which layer lets one sample of a pack see another, or computes a sample otherwise than alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from trimtab.runtime.data.packing_runs import row_change

Trace: TypeAlias = dict[tuple[str, int], tuple[Tensor, Tensor]]
"""Rows that went into and came out of each module of one forward, by (path, call), in the order of their ends."""


@contextmanager
def traced(model: nn.Module, num_rows: int) -> Iterator[Trace]:
    """Records every module that turns (1, tokens, ...) or (tokens, ...) rows into as many."""
    trace, counts = Trace(), dict[str, int]()

    def record(name: str) -> Callable[..., None]:
        def hook(_: nn.Module, args: Any, kwargs: dict[str, Any], output: Any) -> None:
            given = kwargs.get("hidden_states", next(iter(args), None))
            before, after = _rows(given, num_rows), _rows(output, num_rows)
            counts[name] = counts.get(name, -1) + 1
            if before is not None and after is not None:
                trace[name, counts[name]] = (before, after)

        return hook

    handles = [
        module.register_forward_hook(record(name), with_kwargs=True) for name, module in model.named_modules() if name
    ]
    try:
        yield trace
    finally:
        for handle in handles:
            handle.remove()


def _rows(value: Any, num_rows: int) -> Tensor | None:
    if isinstance(value, (tuple, list)) and value:
        value = value[0]
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return None
    if value.dim() >= 3 and value.shape[:2] == (1, num_rows):
        return value.detach()[0].flatten(1).float()
    if value.dim() == 2 and value.shape[0] == num_rows:
        return value.detach().float()
    return None


def first_leak(base: Trace, changed: Trace, victims: Tensor, *, bound: float) -> str | None:
    """The first module whose rows of unchanged samples change though those it was given do not. None: no module."""
    return _first(base, changed, lambda rows: rows[victims], bound)


def first_difference(packed: Trace, apart: Sequence[Trace], *, bound: float) -> str | None:
    """The first module that gives a sample's rows in a pack otherwise than alone, from rows that are the same."""
    joined = Trace()
    for key in packed:
        if all(key in trace for trace in apart):
            before, after = (torch.cat([trace[key][side] for trace in apart]) for side in (0, 1))
            joined[key] = (before, after)
    return _first(joined, packed, lambda rows: rows, bound)


def _first(base: Trace, other: Trace, pick: Callable[[Tensor], Tensor], bound: float) -> str | None:
    for key, (before, after) in base.items():
        if key not in other:
            continue
        given, made = other[key]
        if before.shape != given.shape or after.shape != made.shape:
            continue
        if row_change(pick(given), pick(before)) <= bound < row_change(pick(made), pick(after)):
            return key[0]
    return None
