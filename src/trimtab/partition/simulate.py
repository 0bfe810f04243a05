"""Timeline of a pipeline step whose micro-batches all cost differently; and of many steps on many ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from trimtab.costs.seconds import stage_seconds
from trimtab.errors import PartitionError
from trimtab.options import ScheduleName
from trimtab.partition.replay import Waves, makespans, replay, waves_of
from trimtab.partition.schedules import BACKWARD, FORWARD, WEIGHT, block_order, splits_backward
from trimtab.partition.timeline import Timeline
from trimtab.specs import FloatArray, IntArray, Profile, Stage, evaluate


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
    """Times of the stages for micro-batches of `work` (N, len(WORK_TERMS)).

    Use it between `split_stages` and `simulate`; docs/partition.md shows the three.

    A send takes latency + output_bytes of the stage's last layer / link rate; the gradient, of the activation's shape
    and type, takes as long on its way back. `link_bytes_per_s` None: sends cost nothing. Under a host whose stages wait
    for their sends (`Profile.send_wait_bytes_per_s`) both ends are also busy with them, at that rate.
    """
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
    """(N,) seconds that the stage is busy with what it receives and what it sends on, in either pass."""
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
    waves = _waves(schedule, S, P, M)
    end = np.zeros((3, S, M))
    end[waves.kind, waves.stage, waves.microbatch] = replay(waves, costs.seconds, costs.sends, np.arange(M)[None])[:, 0]
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
) -> FloatArray:
    """(num_steps,) seconds of each step: the slowest data-parallel rank's makespan + the gradients' all-reduce.

    `times` hold all packs; `table[step, rank, microbatch]` says which run where (-1: an empty slot, run at no cost).
    `all_reduce_s` is what of it no compute hides, as the caller knows it.
    """
    costs = block_costs(times, schedule)
    S, num_packs = times.forward_s.shape
    if table.ndim != 3 or table.size == 0 or table.max() >= num_packs or table.min() < -1:
        raise PartitionError(
            f"a table of shape {table.shape} over {num_packs} packs cannot be simulated: give (steps, ranks, "
            "micro-batches) of pack numbers, -1 for an empty slot"
        )
    P = S if num_devices is None else num_devices
    waves = _waves(schedule, S, P, table.shape[2])
    each = makespans(waves, costs.seconds, costs.sends, table.reshape(-1, table.shape[2]))
    result: FloatArray = each.reshape(table.shape[:2]).max(axis=1) + all_reduce_s
    return result


def _waves(schedule: ScheduleName, S: int, P: int, M: int) -> Waves:
    if P < 1 or S % P:
        raise PartitionError(f"{S} stages do not spread evenly over {P} devices: give a divisor of {S} as num_devices")
    return waves_of(schedule, num_devices=P, num_chunks=S // P, num_microbatches=M)


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class BlockCosts:
    """Stage times in the one memory layout that `replay` knows."""

    seconds: FloatArray  # (3, S, N), rows FORWARD, BACKWARD, WEIGHT
    sends: FloatArray  # (2, S, N), after FORWARD and BACKWARD


def block_costs(times: StageTimes, schedule: ScheduleName) -> BlockCosts:
    """Seconds of every block: a schedule that does not split backwards runs them whole, and weight blocks take none."""
    arrays = [times.forward_s, times.backward_s, times.send_forward_s, times.send_backward_s]
    if splits_backward(schedule):
        if times.weight_s is None:
            raise PartitionError(
                f"{schedule} runs weight gradients apart, and the stage times have none: give weight_s, or a schedule "
                "that keeps backwards whole"
            )
        arrays.append(times.weight_s)
    shapes = {array.shape for array in arrays}
    if len(shapes) > 1 or times.forward_s.ndim != 2 or times.forward_s.size == 0:
        raise PartitionError(
            f"stage times have the shapes {', '.join(map(str, sorted(shapes)))}: give arrays of one shape, "
            "(stages, micro-batches), neither of them 0"
        )
    if not all(np.isfinite(array).all() and (array >= 0).all() for array in arrays):
        raise PartitionError(
            "a stage time is negative or not finite: give seconds >= 0; profile again if they come from a fit"
        )
    seconds = np.zeros((3, *times.forward_s.shape))
    seconds[FORWARD], seconds[BACKWARD] = times.forward_s, times.backward_s
    if splits_backward(schedule) and times.weight_s is not None:
        seconds[WEIGHT] = np.minimum(times.weight_s, times.backward_s)
        seconds[BACKWARD] -= seconds[WEIGHT]
    return BlockCosts(seconds=seconds, sends=np.array([times.send_forward_s, times.send_backward_s], np.float64))
