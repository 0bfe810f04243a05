"""Timeline of a pipeline step whose micro-batches all cost differently; many steps on many ranks; their spread."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt

from trimtab.compiled import compiled
from trimtab.costs.profile import stage_seconds
from trimtab.errors import PartitionError
from trimtab.options import ScheduleName
from trimtab.partition.schedules import BACKWARD, FORWARD, WEIGHT, block_order, splits_backward
from trimtab.specs import FloatArray, IntArray, Profile, Stage, evaluate

# -- what a simulated step looks like ---------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Timeline:
    """Start and end of every block of one pipeline step.

    Use it to draw a step, or to sum idle time; `simulate` returns one and has an example.

    Blocks are rows of four equally long columns; `kind` is 0 forward, 1 backward, 2 weight gradients where a schedule
    runs them apart from the backward. Seconds from the step's start.
    """

    stage: npt.NDArray[np.int32]
    microbatch: npt.NDArray[np.int32]
    kind: npt.NDArray[np.int8]
    start_s: FloatArray
    end_s: FloatArray
    num_devices: int
    makespan_s: float
    stage_devices: tuple[int, ...] | None = None  # device of every stage; None: stage s on s mod num_devices

    def device_of(self, stage: int) -> int:
        """Return a stage's device: stages go round the devices unless `stage_devices` says otherwise (V shapes)."""
        return stage % self.num_devices if self.stage_devices is None else self.stage_devices[stage]

    @property
    def device(self) -> IntArray:
        """Return the device of every block."""
        num_stages = int(self.stage.max(initial=-1)) + 1
        return np.array([self.device_of(stage) for stage in range(num_stages)], np.int64)[self.stage]

    def busy_s(self) -> FloatArray:
        """Return the seconds each device computes."""
        busy: FloatArray = np.bincount(self.device, self.end_s - self.start_s, self.num_devices).astype(np.float64)
        return busy

    @property
    def bubble_ratio(self) -> float:
        """Return the idle share of the devices: 1 - busy / (devices x makespan)."""
        available_s = self.num_devices * self.makespan_s
        return float(1.0 - self.busy_s().sum() / available_s) if available_s > 0 else 0.0


# -- end of every block, each device in a fixed order, many steps at once ---------------------------------------------
#
# A block starts when its device is free and what it waits for has arrived. Blocks are numbered so that each comes after
# what it waits for: one pass over them gives their ends.
#
# Example: 1F1B of 2 stages and 2 micro-batches (F0 on stage 0, f0 on stage 1). Device 0 runs F0 F1 B0 B1, device 1 runs
# f0 b0 f1 b1. Numbered: F0 F1 | f0 b0 f1 b1 | B0 B1.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Blocks:
    """The n blocks of all devices, each after what it waits for."""

    kind: IntArray  # (n,) FORWARD, BACKWARD, WEIGHT
    stage: IntArray  # (n,)
    microbatch: IntArray  # (n,)
    sender: IntArray  # (n,) the stage whose result it takes; -1: what it takes is on its own device
    source: IntArray  # (n,) the block that makes this result; n: none
    before: IntArray  # (n,) the block before it on its device; n: none


@lru_cache(maxsize=256)
def blocks_of(schedule: ScheduleName, *, num_devices: int, num_chunks: int, num_microbatches: int) -> Blocks:
    """Number the blocks of `block_order`."""
    order = block_order(schedule, num_devices=num_devices, num_chunks=num_chunks, num_microbatches=num_microbatches)
    S, M = num_devices * num_chunks, num_microbatches
    stage, microbatch, kind = (x.ravel().astype(np.int64) for x in (order.stage, order.microbatch, order.kind))
    n, per_device = len(stage), order.stage.shape[1]
    # 1. What each block waits for: its kind on a neighbouring stage, if of another device. What it takes from its own
    #    device came before in the order.
    number = np.full((3, S, M), n)
    number[kind, stage, microbatch] = np.arange(n)
    sender = np.select([kind == FORWARD, kind == BACKWARD], [stage - 1, stage + 1], -1)
    waits = (sender >= 0) & (sender < S)
    waits &= order.device[sender % S] != order.device[stage]
    source = np.where(waits, number[kind, sender % S, microbatch], n)
    before = np.where(np.arange(n) % per_device > 0, np.arange(n) - 1, n)
    # 2. Each after what it waits for.
    sequence = _sequence(source, np.int64(per_device))
    renumbered = np.full(n + 1, n)
    renumbered[sequence] = np.arange(n)
    return Blocks(
        kind=kind[sequence],
        stage=stage[sequence],
        microbatch=microbatch[sequence],
        sender=np.where(waits, sender, -1)[sequence],
        source=renumbered[source[sequence]],
        before=renumbered[before[sequence]],
    )


@compiled
def _sequence(source: IntArray, per_device: int) -> IntArray:
    """Return the blocks in an order in which they can run: the devices take turns, each until it has to wait."""
    n = len(source)
    # the next block of each device; what waits for nothing has source n
    following = np.arange(0, n, per_device)
    done = np.zeros(n + 1, np.bool_)
    done[n] = True
    sequence = np.empty(n, np.int64)
    placed = 0
    # devices by turns: each places its blocks until one waits for a block that is not placed yet
    while placed < n:
        placed_before = placed
        for device in range(len(following)):
            end = (device + 1) * per_device
            while following[device] < end and done[source[following[device]]]:
                block = following[device]
                done[block] = True
                sequence[placed] = block
                placed += 1
                following[device] += 1
        assert placed > placed_before, "no schedule deadlocks"
    return sequence


def replay(blocks: Blocks, seconds: FloatArray, sends: FloatArray, table: IntArray) -> FloatArray:
    """Return (steps, n) end of every block in every step, blocks as in `blocks`.

    `seconds` (3, S, num_packs): forward; backward, which the stage before waits for; weight gradients, which nothing
    waits for. `sends` (2, S, num_packs): after the forward, after the backward. `table[step, microbatch]` is a pack,
    or -1 for an empty slot, which takes no time.
    """
    ends = np.empty((len(table), len(blocks.stage)))
    parts = (blocks.kind, blocks.stage, blocks.microbatch, blocks.sender, blocks.source, blocks.before)
    _replay(*parts, seconds, sends, np.ascontiguousarray(table, np.int64), ends)
    return ends


@compiled
def _replay(
    kind: IntArray,
    stage: IntArray,
    microbatch: IntArray,
    sender: IntArray,
    source: IntArray,
    before: IntArray,
    seconds: FloatArray,
    sends: FloatArray,
    table: IntArray,
    ends: FloatArray,
) -> None:
    n = len(kind)
    # every step by itself: its blocks in their order
    for step in range(len(table)):
        end = ends[step]
        for block in range(n):
            # ready when what it takes has arrived and its device is free; an empty slot sends and takes nothing
            pack = table[step, microbatch[block]]
            ready = 0.0
            if source[block] < n:
                ready = end[source[block]]
                if pack >= 0:
                    ready += sends[kind[block], sender[block], pack]
            if before[block] < n:
                ready = max(ready, end[before[block]])
            end[block] = ready + (seconds[kind[block], stage[block], pack] if pack >= 0 else 0.0)


def makespans(blocks: Blocks, seconds: FloatArray, sends: FloatArray, table: IntArray) -> FloatArray:
    """Return (steps,) makespan of each step: see `replay`."""
    at_once = max(1, MOST_AT_ONCE // len(blocks.stage))
    parts = [
        replay(blocks, seconds, sends, table[first : first + at_once]).max(axis=1)
        for first in range(0, len(table), at_once)
    ]
    return np.concatenate(parts)


MOST_AT_ONCE = 2**18  # ends of blocks: 2 MiB


# -- stages' seconds, one step and many -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class StageTimes:
    """Seconds of every (virtual) stage for every micro-batch or pack: (S, N) arrays.

    A send is the delay between its sender's end and the earliest start of its receiver: row s is what stage s sends,
    after its forward to stage s + 1 (last row unused), after its backward to stage s - 1 (first row unused). Sends
    occupy no device, as asynchronous transfers do, and do not queue behind one another.
    """

    forward_s: FloatArray
    backward_s: FloatArray  # whole, with recompute
    send_forward_s: FloatArray
    send_backward_s: FloatArray
    weight_s: FloatArray | None = None  # the part of backward_s that zero-bubble schedules may run later


def stage_times(
    profile: Profile,
    stages: Sequence[Stage],
    work: FloatArray,
    *,
    link_bytes_per_s: float | None = None,
    latency_s: float = 0.0,
) -> StageTimes:
    """Return the times of the stages for micro-batches of `work` (N, len(WORK_TERMS)).

    Use it between `split_stages` and `simulate`; docs/pipeline.md shows the three.

    A send takes latency + output_bytes of the stage's last layer / link rate; the gradient, of the activation's shape
    and type, takes as long on its way back. `link_bytes_per_s` None: sends cost nothing. Under a host whose stages wait
    for their sends (`Profile.send_wait_bytes_per_s`) both ends are also busy with them, at that rate.
    """
    # what stages compute, what they wait for in sends, and how long those take to arrive
    found = [stage_seconds(profile, stage, work) for stage in stages]
    waited = np.array([_waited_s(profile, stage, work) for stage in stages])
    send_forward, send_backward = np.zeros((2, len(stages), len(work)))
    if link_bytes_per_s is not None and len(stages) > 1:
        sent = evaluate(profile.matrix("output_bytes")[[stage.stop - 1 for stage in stages[:-1]]], work).T
        send_forward[:-1] = send_backward[1:] = latency_s + sent / link_bytes_per_s
    return StageTimes(
        forward_s=np.array([x.forward for x in found]) + waited,
        backward_s=np.array([x.backward for x in found]) + waited,
        weight_s=np.array([x.weight for x in found]),
        send_forward_s=send_forward,
        send_backward_s=send_backward,
    )


def _waited_s(profile: Profile, stage: Stage, work: FloatArray) -> FloatArray:
    """Return (N,) seconds that the stage is busy with what it receives and what it sends on, in either pass."""
    if profile.send_wait_bytes_per_s is None:
        return np.zeros(len(work))
    ends = [i for i in (stage.start - 1, stage.stop - 1) if 0 <= i < len(profile.layers) - 1]
    sent = sum((work @ np.array(profile.layers[i].output_bytes) for i in ends), np.zeros(len(work)))
    return np.asarray(sent / profile.send_wait_bytes_per_s)


def simulate(times: StageTimes, *, schedule: ScheduleName = "1F1B", num_devices: int | None = None) -> Timeline:
    """Start and end of every block of one step of M micro-batches.

    Use it to see how long a pipeline step takes and where devices wait, for seconds that you measured or planned.

    Each device (num_devices None: as many as stages) runs its blocks in `block_order`. A forward waits for the stage
    before, a backward for the stage behind (the last stage's for its own forward), sends included; stages of one device
    send each other nothing. Where the schedule splits the backward, the stage before waits for its first part only.
    Not modelled: contention between sends and compute, the optimizer. Blocks are listed device by device in
    the order they run.

    >>> import numpy as np
    >>> from trimtab.partition.simulate import StageTimes
    >>> ones, none = np.ones((2, 4)), np.zeros((2, 4))
    >>> simulate(StageTimes(forward_s=ones, backward_s=2 * ones, send_forward_s=none, send_backward_s=none)).makespan_s
    15.0
    """
    costs = block_costs(times, schedule)
    S, M = times.forward_s.shape
    P = S if num_devices is None else num_devices
    # ends of all blocks; then device by device
    blocks = _blocks(schedule, S, P, M)
    end = np.zeros((3, S, M))
    end[blocks.kind, blocks.stage, blocks.microbatch] = replay(blocks, costs.seconds, costs.sends, np.arange(M)[None])[
        0
    ]
    order = block_order(schedule, num_devices=P, num_chunks=S // P, num_microbatches=M)
    stage, microbatch, kind = order.stage.flatten(), order.microbatch.flatten(), order.kind.flatten()
    ends = end[kind, stage, microbatch]
    return Timeline(
        stage=stage,
        microbatch=microbatch,
        kind=kind,
        start_s=ends - costs.seconds[kind, stage, microbatch],
        end_s=ends,
        num_devices=P,
        makespan_s=float(ends.max()),
        stage_devices=tuple(order.device.tolist()),
    )


def simulate_steps(
    times: StageTimes,
    table: IntArray,
    *,
    schedule: ScheduleName = "1F1B",
    num_devices: int | None = None,
    all_reduce_s: float = 0.0,
    phases_s: FloatArray | None = None,
) -> FloatArray:
    """Return (num_steps,) seconds of each step: the slowest data-parallel rank's makespan + the gradients' all-reduce.

    `times` hold all packs; `table[step, rank, microbatch]` says which run where (-1: an empty slot, run at no cost).
    `all_reduce_s` is what of it no compute hides, as the caller knows it; `phases_s` (steps, ranks) what a rank does
    before and after its pipeline.
    """
    costs = block_costs(times, schedule)
    S, num_packs = times.forward_s.shape
    if table.ndim != 3 or table.size == 0 or table.max() >= num_packs or table.min() < -1:
        raise PartitionError(f"a table of shape {table.shape}: give (steps, ranks, micro-batches) of {num_packs} packs")
    P = S if num_devices is None else num_devices
    blocks = _blocks(schedule, S, P, table.shape[2])
    # every rank of every step on its own; a step lasts as long as its slowest
    each = makespans(blocks, costs.seconds, costs.sends, table.reshape(-1, table.shape[2]))
    ranks = each.reshape(table.shape[:2])
    result: FloatArray = (ranks if phases_s is None else ranks + phases_s).max(axis=1) + all_reduce_s
    return result


def _blocks(schedule: ScheduleName, S: int, P: int, M: int) -> Blocks:
    if P < 1 or S % P:
        raise PartitionError(f"{S} stages do not spread evenly over {P} devices: give a divisor of {S} as num_devices")
    return blocks_of(schedule, num_devices=P, num_chunks=S // P, num_microbatches=M)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCosts:
    """Stage times in the one memory layout that `replay` knows."""

    seconds: FloatArray  # (3, S, N), rows FORWARD, BACKWARD, WEIGHT
    sends: FloatArray  # (2, S, N), after FORWARD and BACKWARD


def block_costs(times: StageTimes, schedule: ScheduleName) -> BlockCosts:
    """Return seconds of every block: a schedule that does not split backwards gives weight blocks none."""
    arrays = [times.forward_s, times.backward_s, times.send_forward_s, times.send_backward_s]
    if splits_backward(schedule):
        if times.weight_s is None:
            raise PartitionError(f"{schedule} needs weight_s: give it, or take a schedule with whole backwards")
        arrays.append(times.weight_s)
    # arrays of one shape, finite, none below 0
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 or times.forward_s.ndim != 2 or times.forward_s.size == 0:
        raise PartitionError(f"stage times have unlike shapes {sorted(shapes)}: give (stages, micro-batches)")
    if not all(np.isfinite(array).all() and (array >= 0).all() for array in arrays):
        raise PartitionError("a stage time is negative or not finite: give seconds >= 0")
    seconds = np.zeros((3, *times.forward_s.shape))
    seconds[FORWARD], seconds[BACKWARD] = times.forward_s, times.backward_s
    if splits_backward(schedule) and times.weight_s is not None:
        seconds[WEIGHT] = np.minimum(times.weight_s, times.backward_s)
        seconds[BACKWARD] -= seconds[WEIGHT]
    return BlockCosts(seconds=seconds, sends=np.array([times.send_forward_s, times.send_backward_s], np.float64))
