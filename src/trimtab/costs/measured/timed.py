"""Seconds of a model's real layers on the device present, each run alone on what the whole model hands it.

Needs torch and Transformers, loaded when this module is.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from trimtab.costs.devices import find_device
from trimtab.costs.formula.layers import Gradients, find_gradients
from trimtab.costs.formula.settings import Attention, CostSettings
from trimtab.costs.measured.timed_fit import LayerTimings, TimedProfile, Timing, timed_profile
from trimtab.costs.measured.timed_model import (
    DTYPES,
    RealModel,
    TimedCall,
    TimedRun,
    build_model,
    has_flash,
    refusing,
    runs,
)
from trimtab.costs.profile import group_layers, price_model
from trimtab.errors import TrimtabError
from trimtab.specs import DeviceSpec, LayerSpec, ModelSpec, Tower

Clock = Literal["wall", "process"]
"""Of the CPU: seconds that pass, or that this process's threads compute (for one thread on a machine with others)."""

Progress = Callable[[int, int], None]
"""Called with how many kinds of layers are timed, and how many there are."""

_WARM_UP = 2
_LEAST_ROWS = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class TimingOptions:
    """What is timed, and how often; None leaves the choice to the device.

    Give it to `profile_timed`, as examples/time_layers.py does.
    """

    dtype: str = "bf16"
    attention: Attention | None = None  # flash where it is installed, else sdpa
    sizes: tuple[int, ...] | None = None  # rows of each tower in one micro-batch, about
    repeats: int = 9
    frozen_towers: tuple[Tower, ...] = ()
    seed: int = 0
    clock: Clock = "wall"  # read only on the CPU

    def __post_init__(self) -> None:
        if self.sizes is not None and (not self.sizes or min(self.sizes) < _LEAST_ROWS):
            asked = ", ".join(map(str, self.sizes)) or "none"
            raise TrimtabError(f"sizes {asked} were to be timed: give one or more, each of {_LEAST_ROWS} rows or more")
        if self.repeats < 1:
            raise TrimtabError(f"{self.repeats} repeats were asked for, which time nothing: ask for 1 or more")
        if self.clock not in get_args(Clock):
            raise TrimtabError(f"clock {self.clock!r} was asked for: choose one of {', '.join(get_args(Clock))}")

    def sizes_on(self, device: torch.device) -> tuple[int, ...]:
        given = (1024, 2048, 4096, 8192) if device.type == "cuda" else (128, 256, 512, 1024)
        return tuple(sorted(set(self.sizes or given)))

    def settings_on(self, device: torch.device) -> CostSettings:
        attention = self.attention or ("flash" if device.type == "cuda" and has_flash() else "sdpa")
        return CostSettings(dtype=self.dtype, attention=attention, frozen_towers=frozenset(self.frozen_towers))


def profile_timed(
    config: Mapping[str, Any],
    model: ModelSpec,
    device: torch.device,
    options: TimingOptions | None = None,
    *,
    progress: Progress | None = None,
) -> TimedProfile:
    """The profile of `model` (described from `config`) with seconds measured on `device`, and the fits behind them.

    Use it on the device that you will train on; examples/time_layers.py shows it.

    At tp 1; see `time_layers` for how, `timed_profile` for what becomes of it.
    """
    options = options or TimingOptions()
    settings = options.settings_on(device)
    analytic = price_model(model, measure_device(device, options.dtype, clock=options.clock), settings)
    measured = time_layers(config, model, device, options, progress=progress)
    rows = ", ".join(map(str, options.sizes_on(device)))
    how = f"{options.dtype}, {settings.attention} attention, medians of {options.repeats} at {rows} rows"
    if options.clock == "process" and device.type == "cpu":
        how += ", in CPU seconds of the process"
    return timed_profile(analytic, measured, how=how)


def time_layers(
    config: Mapping[str, Any],
    model: ModelSpec,
    device: torch.device,
    options: TimingOptions,
    *,
    progress: Progress | None = None,
) -> tuple[LayerTimings, ...]:
    """Time the forward and backward of one layer of each kind, at each size.

    Forward is timed with autograd recording; backward with gradients to inputs and weights, as far as the layer has
    them, the weights' added to those of earlier micro-batches. The head's time contains the cross-entropy in float32
    of every token. Towers of fixed tiles take the number of tiles next to each size. On CUDA nothing waits between
    repeats: kernels queue as in training. Not timed: bare parameters, and modules that training does not run.
    """
    settings, sizes = options.settings_on(device), options.sizes_on(device)
    groups = group_layers(model, settings.frozen_towers)
    # one layer of each kind
    chosen = sorted({groups.index(group) for group in groups})
    gradients = find_gradients(model.layers, settings.frozen_towers)
    result: list[LayerTimings] = []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(options.seed)
        try:
            # the whole model runs once a size, to see what each layer is handed
            real = build_model(config, model, chosen, settings, device)
            ran = list(runs(real, sizes))
            for done, number in enumerate(chosen):
                if progress is not None:
                    progress(done, len(chosen))
                # then the layer alone, on just that
                those = [run for run in ran if number in run.calls]
                if those:
                    with refusing(model):
                        module = real.module.get_submodule(model.layers[number].name)
                        timings = time_layer(module, real, number, gradients[number], those, options)
                    result.append(LayerTimings(layer=number, timings=timings))
        except torch.OutOfMemoryError as error:
            raise TrimtabError(f"{device} has no memory for {max(sizes)} rows: give smaller --set sizes") from error
    return tuple(result)


# -- devices --------------------------------------------------------------------------------------------------------


def open_device(name: str | None = None) -> torch.device:
    """The torch device of this name, if it is there; without a name CUDA's, or else the CPU.

    Use it for `profile_timed`: a device that is not there is named in a sentence. Raises `TrimtabError`.

    >>> open_device("cpu").type
    'cpu'
    """
    name = name or ("cuda" if torch.cuda.is_available() else "cpu")
    # a name that torch has, of a device that is there
    kind, _, index = name.partition(":")
    if kind not in ("cpu", "cuda") or not (index or "0").isdecimal() or (kind == "cpu" and index):
        raise TrimtabError(f"torch has no device {name!r}: give cpu, cuda or cuda:1")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TrimtabError(f"torch {torch.__version__} finds no CUDA device for {name}: give --device cpu")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise TrimtabError(f"no {name} among {torch.cuda.device_count()} CUDA devices: count from cuda:0")
    return torch.device(name)


def measure_device(device: torch.device, dtype: str, *, clock: Clock = "wall") -> DeviceSpec:
    """The published row of a device that has one; else the best of seven products and of seven copies.

    peak_flops of fp32 is twice the measured rate, for the formulas price fp32 products at half the peak. The link of a
    device without a row is assumed: 10 GB/s.
    """
    if device.type == "cuda":
        name, memory = torch.cuda.get_device_name(device), torch.cuda.get_device_properties(device).total_memory
        try:
            # a device that the table knows is not measured
            return find_device(name)
        except TrimtabError:
            width, moved = 8192, 2**30
    else:
        name, memory = "cpu", os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        width, moved = 768, 2**26
    # else one large product, and one large copy
    factor = torch.randn(width, width, device=device, dtype=DTYPES[dtype])
    block = torch.zeros(moved, dtype=torch.uint8, device=device)
    product_s, copy_s = (
        min(seconds)
        for seconds in time_each([lambda: factor @ factor, lambda: block.clone()], device, repeats=7, clock=clock)
    )
    rate = 2.0 * width**3 / product_s
    return DeviceSpec(
        name=name,
        memory_bytes=memory,
        peak_flops=rate * (2.0 if dtype == "fp32" else 1.0),
        memory_bytes_per_s=2.0 * moved / copy_s,
        link_bytes_per_s=10e9,
        source=f"measured: {dtype} products of {width} x {width}, a copy of {moved} bytes; link assumed",
    )


# -- the clock ------------------------------------------------------------------------------------------------------


def time_layer(
    module: nn.Module,
    real: RealModel,
    number: int,
    gradients: Gradients,
    those: Sequence[TimedRun],
    options: TimingOptions,
) -> tuple[Timing, ...]:
    """Time `module`, layer `number` of `real` or a part of it, on what the layer is handed in each of the runs.

    Sizes take turns, so that a machine that slows down for a while slows all of them.
    """
    layer = real.model.layers[number]
    module.requires_grad_(gradients.weights)
    # forward and backward of every size take turns
    steps: list[Callable[[], object]] = []
    for run in those:
        passes = _Passes(module, layer, gradients, run.calls[number])
        steps += [passes.forward, passes.backward]
    seconds = time_each(steps, real.device, repeats=options.repeats, clock=options.clock)
    module.zero_grad(set_to_none=True)
    # a frozen layer behind nothing trained has no backward
    ran = gradients.any and not layer.unread
    return tuple(
        Timing(
            work=run.work[number],
            forward_s=statistics.median(forward),
            backward_s=statistics.median(backward) if ran else 0.0,
            forward_spread=_spread(forward),
            backward_spread=_spread(backward) if ran else 0.0,
        )
        for run, forward, backward in zip(those, seconds[::2], seconds[1::2], strict=True)
    )


class _Passes:
    """Forward and backward of one layer on what it was handed; the graph lives from one to the other."""

    def __init__(self, module: nn.Module, layer: LayerSpec, gradients: Gradients, calls: Sequence[TimedCall]) -> None:
        self.module, self.is_head = module, layer.kind == "head"
        self.runs_backward = gradients.any and not layer.unread
        self.calls = [_with_leaf(call, wanted=gradients.inputs) for call in calls]
        self.results: list[Tensor] = []
        self.seeds: list[Tensor] = []
        self.labels: list[Tensor] = []  # made in the warm-up

    def forward(self) -> None:
        self.results = [x for call in self.calls for x in self._run(call)]

    def backward(self) -> None:
        results, self.results = self.results, []
        if not self.runs_backward:
            return
        self.seeds = self.seeds or [torch.ones_like(result) for result in results]  # made in the warm-up
        torch.autograd.backward(results, self.seeds)
        for call in self.calls:
            call.rows.grad = None

    def _run(self, call: TimedCall) -> list[Tensor]:
        result = self.module(*call.args, **call.kwargs)
        if self.is_head:
            logits = result.flatten(0, -2).float()
            self.labels = self.labels or [torch.randint(logits.shape[1], logits.shape[:1], device=logits.device)]
            return [nn.functional.cross_entropy(logits, self.labels[0])]
        leaves = tree_leaves(getattr(result, "to_tuple", lambda: result)())
        return [x for x in leaves if isinstance(x, Tensor) and (x.requires_grad or not self.runs_backward)]


def _with_leaf(call: TimedCall, *, wanted: bool) -> TimedCall:
    """The call with its rows as a leaf of the graph; token ids stay as they are."""
    rows = call.rows
    if not rows.is_floating_point():
        return call
    leaf = rows.detach().clone().requires_grad_(wanted)
    kwargs = {name: leaf if value is rows else value for name, value in call.kwargs.items()}
    return TimedCall(args=tuple(leaf if value is rows else value for value in call.args), kwargs=kwargs)


def time_each(
    steps: Sequence[Callable[[], object]], device: torch.device, *, repeats: int, clock: Clock = "wall"
) -> list[tuple[float, ...]]:
    """Return seconds of every repeat of each step, after a warm-up; the steps of one repeat run one after the other."""
    for _ in range(_WARM_UP):
        for step in steps:
            step()
    if device.type == "cuda":
        return list(zip(*_cuda_rounds(steps, device, repeats), strict=True))
    now = time.perf_counter if clock == "wall" else time.process_time
    return list(zip(*(_cpu_round(steps, now) for _ in range(repeats)), strict=True))


def _cpu_round(steps: Sequence[Callable[[], object]], now: Callable[[], float]) -> list[float]:
    marks = [now()]
    for step in steps:
        step()
        marks.append(now())
    return [end - start for start, end in itertools.pairwise(marks)]


def _cuda_rounds(steps: Sequence[Callable[[], object]], device: torch.device, repeats: int) -> list[list[float]]:
    rounds: list[list[Any]] = []
    with torch.cuda.device(device):
        # events between steps: nothing waits until all have been queued
        torch.cuda.synchronize()
        for _ in range(repeats):
            marks = [torch.cuda.Event(enable_timing=True) for _ in range(len(steps) + 1)]  # type: ignore[no-untyped-call]
            marks[0].record()
            for step, mark in zip(steps, marks[1:], strict=True):
                step()
                mark.record()
            rounds.append(marks)
        torch.cuda.synchronize()
    return [[1e-3 * a.elapsed_time(b) for a, b in itertools.pairwise(marks)] for marks in rounds]


def _spread(seconds: Sequence[float]) -> float:
    """Return half the width of the middle 68 %, relative to the median."""
    low, high = np.percentile(seconds, [16, 84])
    return float((high - low) / 2 / np.median(seconds))
