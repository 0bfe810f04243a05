"""One run of a rank's stages under a recompute choice: what they held, or that the memory did not last.

A rank that runs out of memory must not leave the others waiting for its tensors. From then on its stages run no layer
and send zeros of the right sizes, so that every rank ends the step and all learn of it.
"""

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

from trimtab.runtime.pipeline import Pipeline
from trimtab.runtime.pipeline.flow import Batch
from trimtab.runtime.pipeline.stage import PackedStage
from trimtab.runtime.probe.meter import Meter, storage_bytes
from trimtab.runtime.recompute.apply import Granularity, apply


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What one rank's device held in one run; of a run that failed, up to there."""

    failed: bool  # for want of memory, on this rank
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
    rank: ProbedRank,
    choice: Mapping[str, Granularity],
    batch: Batch,
    *,
    num_steps: int,
    limit_bytes: int | None,
    update: bool = True,
) -> Reading:
    """Whole training steps of this micro-batch, over and over, with exactly `choice` recomputed; collective.

    `choice` may name layers of other ranks. Ends behind the first step in which some rank fails. `update`: with the
    optimizer's step, whose learning rate the caller has set to 0.
    """
    pipeline, meter = rank.pipeline, rank.meter
    batches = [batch] * pipeline.layout.num_microbatches
    with ExitStack() as stack:
        for stage in pipeline.stages:
            for granularity in sorted(set(choice.values())):
                own = [x for x, how in choice.items() if how == granularity and _holds(pipeline, stage, x, batch)]
                stack.callback(apply(stage.model, own, granularity=granularity).remove)
        watch = stack.enter_context(_Watch(pipeline, meter))
        pipeline_parameters = list(pipeline.parameters())
        for parameter in pipeline_parameters:
            parameter.grad = None
        stack.enter_context(_young_garbage())
        stack.enter_context(_watching(rank, batch, limit_bytes))
        for _ in range(num_steps):
            watch.begin()
            with rank.autocast():
                pipeline.step(batches, denominator=1.0)
            if _any_failed(watch, pipeline):
                break
            pipeline.gradient_norm()
            if update:
                watch.attempt(rank.optimizer.step)
                if _any_failed(watch, pipeline):
                    break
        peak = meter.peak_bytes
    gradients = [p.grad for p in pipeline_parameters if p.grad is not None]
    static = storage_bytes(rank.static())
    reading = Reading(
        failed=watch.failed,
        state_bytes=static + storage_bytes(gradients),
        kept_bytes=watch.held_bytes - static,
        peak_bytes=peak,
        in_flight=watch.in_flight,
    )
    for parameter in pipeline_parameters:
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
        found.append(
            Reading(
                failed=any(x.failed for x in here),
                state_bytes=max(x.state_bytes for x in here),
                kept_bytes=max(x.kept_bytes for x in here),
                peak_bytes=max(x.peak_bytes for x in here),
                in_flight=here[0].in_flight,
            )
        )
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

    def __init__(self, pipeline: Pipeline, meter: Meter) -> None:
        self._pipeline, self._meter = pipeline, meter
        self.failed = False
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
            for name, around in (
                ("forward_one_chunk", self._forward),
                ("backward_one_chunk", self._backward),
                ("backward_weight_one_chunk", self._weight),
            ):
                setattr(stage, name, partial(around, stage, getattr(stage, name)))
            for name in ("get_fwd_recv_ops", "get_bwd_recv_ops"):
                setattr(stage, name, partial(self._receive, getattr(stage, name)))
        schedule = self._pipeline.schedule
        self._loss = schedule._loss_fn  # private, torch 2.13: the loss is computed outside of the stages
        schedule._loss_fn = self._guarded_loss
        return self

    def __exit__(self, *_: object) -> None:
        for stage in self._pipeline.stages:
            for name in ("forward_one_chunk", "backward_one_chunk", "backward_weight_one_chunk"):
                delattr(stage, name)
            for name in ("get_fwd_recv_ops", "get_bwd_recv_ops"):
                delattr(stage, name)
            stage.expect((), backward=True)  # lets go of what a step that failed left
        self._pipeline.schedule._loss_fn = self._loss

    # -- calls of the schedule ----------------------------------------------------------------------------------------

    def _forward(
        self, stage: PackedStage, run: Callable[..., Any], fwd_chunk_id: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not self.failed:
            result = self.attempt(partial(run, fwd_chunk_id, *args, **kwargs))
            if not self.failed:
                self._run[stage.stage_index] += 1
                return result
        stage.received.pop(fwd_chunk_id, None)
        wires = stage.wires_out(stage.microbatches[fwd_chunk_id])
        sent = tuple(stage._buffer(wire).zero_() for wire in wires)
        stage.fwd_cache[fwd_chunk_id] = (sent, [])
        return sent

    def _backward(
        self, stage: PackedStage, run: Callable[..., Any], bwd_chunk_id: int, *args: Any, **kwargs: Any
    ) -> None:
        if not self._in_backward:
            self._in_backward = True
            self.held_bytes = self._meter.held_bytes
            self.in_flight = tuple(self._run[x.stage_index] for x in self._pipeline.stages)
        if not self.failed:
            self.attempt(partial(run, bwd_chunk_id, *args, **kwargs))
            if not self.failed:
                return
        received = stage.wires_in(stage.microbatches[bwd_chunk_id])
        stage.fwd_cache.pop(bwd_chunk_id, None)
        stage.gradients.pop(bwd_chunk_id, None)
        stage.bwd_cache[bwd_chunk_id] = (None,) * len(received)

    def _weight(
        self, stage: PackedStage, run: Callable[..., Any], bwd_chunk_id: int, *args: Any, **kwargs: Any
    ) -> None:
        if not self.failed:
            self.attempt(partial(run, bwd_chunk_id, *args, **kwargs))
        if self.failed:
            stage.later.pop(bwd_chunk_id, None)
            stage.dw_runner.pop(bwd_chunk_id, None)

    def _receive(self, run: Callable[..., Any], chunk_id: int) -> Any:
        """Buffers; once more where the first try made room."""
        if self.failed:
            return run(chunk_id)
        result = self.attempt(partial(run, chunk_id))
        return run(chunk_id) if self.failed else result

    def _guarded_loss(self, logits: Any, target: Any) -> Any:
        if not self.failed:
            result = self.attempt(partial(self._loss, logits, target))
            if not self.failed:
                return result
        return torch.zeros((), device=self._pipeline.device)

    def attempt(self, run: Callable[[], Any]) -> Any:
        gc.collect(0)
        try:
            return run()
        except RuntimeError as error:
            if not is_out_of_memory(error):
                raise
        self._give_up()  # outside of the handler: its traceback holds tensors
        return None

    def _give_up(self) -> None:
        self.failed = True
        self._meter.lift()
        losses = self._pipeline.schedule._internal_losses
        losses[:] = [torch.zeros((), device=self._pipeline.device) for _ in losses]
        for stage in self._pipeline.stages:
            for chunk, (sent, _) in list(stage.fwd_cache.items()):
                stage.fwd_cache[chunk] = (tuple(x.detach() for x in sent), [])
            stage.backward_state.clear()
            stage.later.clear()
            stage.dw_runner.clear()
        for parameter in self._pipeline.parameters():
            parameter.grad = None
        gc.collect()


def _any_failed(watch: _Watch, pipeline: Pipeline) -> bool:
    failed = torch.tensor(int(watch.failed), device=pipeline.device)
    dist.all_reduce(failed, op=dist.ReduceOp.MAX)
    return bool(failed)


def _holds(pipeline: Pipeline, stage: PackedStage, name: str, batch: Batch) -> bool:
    """Whether the stage holds the layer, and something reads its result."""
    return name in pipeline.layout.stages[stage.stage_index] and name in stage.module.cuts.way(batch).read


def _watching(rank: ProbedRank, batch: Batch, limit_bytes: int | None) -> AbstractContextManager[Any]:
    inputs = [x for x in batch.values() if isinstance(x, Tensor)]
    inputs += [x for value in batch.values() if isinstance(value, Mapping) for x in value.values()]
    return rank.meter.watch(rank.static(), inputs, limit_bytes=limit_bytes)


@contextmanager
def frozen_heap() -> Iterator[None]:
    """What is there already is left out of collections: those between runs then take no time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def _young_garbage() -> Iterator[None]:
    """Cycles are collected where we say, so that what is held is no matter of chance."""
    was_enabled = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
