"""One run of a rank's stages under a recompute choice, and what they held."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trimtab.costs.measured.traced_step import young_garbage
from trimtab.errors import PlanError
from trimtab.runtime.pipeline import Pipeline
from trimtab.runtime.pipeline.flow import Batch
from trimtab.runtime.pipeline.stage import PackedStage
from trimtab.runtime.probe.meter import Meter, storage_bytes
from trimtab.runtime.recompute.apply import Granularity, apply

CURES = "give more memory (--budget) or a larger --risk, or plan with more stages or smaller packs"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one rank's device held in one run."""

    state_bytes: int  # parameters, buffers, gradients, optimizer state, once the run was over
    kept_bytes: int  # when the first backward of the last step began, state aside
    peak_bytes: int
    in_flight: tuple[int, ...]  # micro-batches that each stage of the rank had run forward at that moment


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class ProbedRank:
    """What a rank runs: its part of the pipeline, built without recompute, and how it is counted."""

    pipeline: Pipeline
    optimizer: torch.optim.Optimizer
    meter: Meter
    autocast: Callable[[], AbstractContextManager[Any]]

    def static(self) -> list[Tensor]:
        """Tensors that outlive a step, gradients aside."""
        tensors = [
            x
            for stage in self.pipeline.stages
            for named in (stage.model.named_parameters(), stage.model.named_buffers())
            for _, x in stage.module.named_own(named)
        ]
        tensors += [
            x
            for state in self.optimizer.state.values()
            for x in state.values()
            if isinstance(x, Tensor) and x.device == self.pipeline.device
        ]
        return tensors


def run_trial(
    rank: ProbedRank, choice: Mapping[str, Granularity], batch: Batch, *, num_steps: int, update: bool = True
) -> Reading:
    """Whole training steps of this micro-batch, over and over, with exactly `choice` recomputed; collective.

    `choice` may name layers of other ranks. `update`: with the optimizer's step, whose learning rate the caller has set
    to 0. Raises `PlanError` on the rank whose device has not even the memory to run; torchrun then ends the others.
    """
    pipeline, meter = rank.pipeline, rank.meter
    batches = [batch] * pipeline.layout.num_microbatches
    parameters = list(pipeline.parameters())
    with ExitStack() as stack:
        for stage in pipeline.stages:
            for granularity in sorted(set(choice.values())):
                own = [x for x, how in choice.items() if how == granularity and _holds(pipeline, stage, x, batch)]
                stack.callback(apply(stage.model, own, granularity=granularity).remove)
        watch = stack.enter_context(_Watch(pipeline, meter))
        for parameter in parameters:
            parameter.grad = None
        stack.enter_context(young_garbage(generation=2))
        stack.enter_context(meter.watch(rank.static(), _tensors_of(batch)))
        try:
            for _ in range(num_steps):
                watch.begin()
                with rank.autocast():
                    pipeline.step(batches, denominator=1.0)
                pipeline.gradient_norm()
                if update:
                    gc.collect(0)
                    rank.optimizer.step()
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise PlanError(f"rank {dist.get_rank()} of a probe ran out of its device's memory: {CURES}") from error
            raise
        peak = meter.peak_bytes
    static = storage_bytes(rank.static())
    reading = Reading(
        state_bytes=static + storage_bytes(p.grad for p in parameters if p.grad is not None),
        kept_bytes=watch.held_bytes - static,
        peak_bytes=peak,
        in_flight=watch.in_flight,
    )
    for parameter in parameters:
        parameter.grad = None
    return reading


def gather_readings(reading: Reading, rank: ProbedRank) -> tuple[Reading, ...]:
    """Of each device of the pipeline, the most over the data-parallel ranks; collective, the same on every rank."""
    own = (dist.get_rank(rank.pipeline.pp_group), reading)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    found = []
    for device in range(rank.pipeline.layout.num_devices):
        here = [x for place, x in every if place == device]
        most = {name: max(getattr(x, name) for x in here) for name in ("state_bytes", "kept_bytes", "peak_bytes")}
        found.append(Reading(**most, in_flight=here[0].in_flight))
    return tuple(found)


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it came from, is an allocator's: torch's stages raise their own around it."""
    while error is not None:
        if isinstance(error, torch.OutOfMemoryError):
            return True
        error = error.__cause__ or error.__context__
    return False


# -- watching ---------------------------------------------------------------------------------------------------------


class _Watch:
    """Stands around what a schedule calls on the stages, until the end of a `with` block."""

    CALLS = ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk")

    def __init__(self, pipeline: Pipeline, meter: Meter) -> None:
        self._pipeline, self._meter = pipeline, meter
        self.held_bytes = 0
        self.in_flight: tuple[int, ...] = (0,) * len(pipeline.stages)
        self._run: dict[int, int] = {}
        self._in_backward = False

    def begin(self) -> None:
        """A step begins."""
        self._run = {stage.stage_index: 0 for stage in self._pipeline.stages}
        self._in_backward = False

    def __enter__(self) -> _Watch:
        for stage in self._pipeline.stages:
            for name in self.CALLS:
                setattr(stage, name, partial(self._call, stage, name, getattr(stage, name)))
        return self

    def __exit__(self, *_: object) -> None:
        for stage in self._pipeline.stages:
            for name in self.CALLS:
                delattr(stage, name)
            stage.expect((), backward=True)  # lets go of what a step left

    def _call(self, stage: PackedStage, name: str, run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        gc.collect(0)
        if name == "backward_one_chunk" and not self._in_backward:
            self._in_backward = True
            self.held_bytes = self._meter.held_bytes
            self.in_flight = tuple(self._run[x.stage_index] for x in self._pipeline.stages)
        result = run(*args, **kwargs)
        self._run[stage.stage_index] += name == "forward_one_chunk"
        return result


def _holds(pipeline: Pipeline, stage: PackedStage, name: str, batch: Batch) -> bool:
    """Whether the stage holds the layer, and something reads its result."""
    return name in pipeline.layout.stages[stage.stage_index] and name in stage.module.cuts.way(batch).read


def _tensors_of(batch: Batch) -> list[Tensor]:
    """Of a micro-batch, the masks of each layer type too."""
    found = [x for x in batch.values() if isinstance(x, Tensor)]
    return found + [x for value in batch.values() if isinstance(value, Mapping) for x in value.values()]


@contextmanager
def frozen_heap() -> Iterator[None]:
    """What is there already is left out of collections: those between runs then take no time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
