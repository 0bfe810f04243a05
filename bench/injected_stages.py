"""Real torch.distributed.pipelining schedules whose blocks sleep for given seconds. Needs torch and gloo.

A stage's module passes a small tensor on. Its forward sleeps; of its backward one part lies on the way to the inputs'
gradient and another on the way to a weight's alone, so that torch's own split of the backward separates them. Sleeping
processes share cores without delaying one another, so a small machine can play many devices.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import PipelineScheduleSingle, get_schedule_class

from trimtab.options import ScheduleName
from trimtab.partition.schedules import BACKWARD, FORWARD, WEIGHT, device_of_stage
from trimtab.partition.simulate import BlockCosts
from trimtab.specs import IntArray

WIDTH = 16  # numbers that pass from stage to stage
TORCH_NAMES = {"ZBH1": "InterleavedZeroBubble"}  # with one stage a rank; others are called as we call them


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """One schedule and the seconds of its blocks."""

    schedule: ScheduleName
    num_devices: int
    num_chunks: int
    num_microbatches: int
    costs: BlockCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """One block as it ran; seconds of one clock for all processes."""

    stage: int
    microbatch: int
    kind: int
    start_s: float
    end_s: float


@dataclass(slots=True)
class Recorder:
    """What a process has run in this step."""

    blocks: list[Block] = field(default_factory=list)

    def sleep(self, stage: int, microbatch: int, kind: int, seconds: float) -> None:
        start = time.perf_counter()
        left = seconds
        while left > 0:
            time.sleep(left)
            left = seconds - (time.perf_counter() - start)
        end = time.perf_counter()
        self.blocks.append(Block(stage=stage, microbatch=microbatch, kind=kind, start_s=start, end_s=end))


class _Sleep(torch.autograd.Function):
    """Passes its input on and its gradient back; the backward sleeps."""

    @staticmethod
    def forward(ctx, x, wait):  # type: ignore[no-untyped-def]
        ctx.wait = wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):  # type: ignore[no-untyped-def]
        ctx.wait()
        return gradient, None


class SleepingStage(torch.nn.Module):
    """One stage of a run; its forwards come in the order of the micro-batches, as in all schedules."""

    def __init__(self, index: int, run: Run, recorder: Recorder) -> None:
        super().__init__()
        self.index, self.run, self.recorder, self.num_forwards = index, run, recorder, 0
        self.weight = torch.nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        microbatch = self.num_forwards % self.run.num_microbatches
        self.num_forwards += 1
        weight = _Sleep.apply(self.weight, self.waiter(microbatch, WEIGHT))
        self.waiter(microbatch, FORWARD)()
        if self.index == 0:  # nothing asks for the gradient of its inputs: torch runs all of its backward at once
            return x * _Sleep.apply(weight, self.waiter(microbatch, BACKWARD))
        return _Sleep.apply(x, self.waiter(microbatch, BACKWARD)) * weight

    def waiter(self, microbatch: int, kind: int) -> Callable[[], None]:
        seconds = float(self.run.costs.seconds[kind, self.index, microbatch])
        return lambda: self.recorder.sleep(self.index, microbatch, kind, seconds)


def run_steps(run: Run, rank: int, num_steps: int) -> list[tuple[float, list[Block]]]:
    """Makespan of every step over all ranks, and this rank's blocks; left out is the first, which infers shapes."""
    recorder = Recorder()
    count, shape = run.num_microbatches, {"num_devices": run.num_devices, "num_chunks": run.num_chunks}
    own = [s for s in range(run.num_devices * run.num_chunks) if device_of_stage(run.schedule, s, **shape) == rank]
    modules = [SleepingStage(s, run, recorder) for s in own]
    total = run.num_devices * run.num_chunks
    stages = [PipelineStage(m, m.index, total, torch.device("cpu")) for m in modules]
    kind = get_schedule_class(TORCH_NAMES.get(run.schedule, run.schedule))
    first = stages[0] if issubclass(kind, PipelineScheduleSingle) else stages
    schedule = kind(first, count, loss_fn=lambda out, _: out.sum(), scale_grads=False)
    results = []
    for _ in range(1 + num_steps):
        recorder.blocks = []
        for module in modules:
            module.num_forwards = 0
        rows = torch.ones(count, WIDTH)
        args = (rows,) if 0 in own else ()
        target = {"target": torch.zeros(count, 1)} if total - 1 in own else {}
        dist.barrier()
        begin = torch.tensor([time.perf_counter()], dtype=torch.float64)
        schedule.step(*args, **target, return_outputs=False)
        end = torch.tensor([max(block.end_s for block in recorder.blocks)], dtype=torch.float64)
        dist.all_reduce(begin, op=dist.ReduceOp.MAX)
        dist.all_reduce(end, op=dist.ReduceOp.MAX)
        results.append((float(end - begin), recorder.blocks))
    return results[1:]


def ping_pong_s(rank: int, repeats: int = 200) -> float:
    """Seconds from a send to the arrival of a message that ranks 0 and 1 both wait for: 25th percentile."""
    message = torch.ones(1, WIDTH)
    seconds = []
    for _ in range(repeats):
        dist.barrier()
        if rank > 1:
            continue
        start = time.perf_counter()
        if rank == 0:
            dist.send(message, 1)
            dist.recv(message, 1)
        else:
            dist.recv(message, 0)
            dist.send(message, 0)
        seconds.append((time.perf_counter() - start) / 2)
    return sorted(seconds)[len(seconds) // 4] if seconds else 0.0


def spawn(work: Callable[..., object], num_ranks: int, *arguments: object) -> list[object]:
    """`work(rank, *arguments)` on every gloo rank; what each returned."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(_on_rank, args=(num_ranks, folder, work, arguments), nprocs=num_ranks)
        return [torch.load(Path(folder) / f"{rank}.pt", weights_only=False) for rank in range(num_ranks)]


def _on_rank(
    rank: int, num_ranks: int, folder: str, work: Callable[..., object], arguments: tuple[object, ...]
) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=num_ranks)
    try:
        torch.save(work(rank, *arguments), Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def order_of(blocks: list[Block]) -> IntArray:
    """(n, 3) stage, micro-batch and kind in the order in which blocks ran."""
    import numpy as np

    return np.array([(x.stage, x.microbatch, x.kind) for x in sorted(blocks, key=lambda x: x.start_s)])
