"""One way to run the whole data set, and what the simulation says of it."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.partition.assess import DeviceMemory
from trimtab.partition.timeline import Timeline
from trimtab.specs import FloatArray, Stage


@dataclass(frozen=True, slots=True, kw_only=True)
class IdleParts:
    """Why devices are idle: four shares of all devices' time that add up to `Variant.idle_share`."""

    bubble: float  # what this schedule leaves with so many micro-batches, however even all of them and all stages are
    stages: float  # the slowest stage makes the others wait
    packs: float  # micro-batches of one rank take unlike times
    ranks: float  # data-parallel ranks wait for the slowest at the end of the step


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Variant:
    """One way to run the whole data set: its packs, its stages, and what the simulation says of them."""

    name: str  # "baseline", ..., "plan"
    packs: str  # how micro-batches were made, in two or three words
    stages_rule: str
    recompute_rule: str
    pack_patches: FloatArray  # (num_packs,) rows the vision tower computes, padding included
    pack_tokens: FloatArray  # (num_packs,) rows the language model computes, padding included
    stages: tuple[Stage, ...]
    stage_forward_s: FloatArray  # (num_stages,) at the mean pack
    stage_backward_s: FloatArray  # (num_stages,) recompute included
    memory: tuple[DeviceMemory, ...]  # of each pipeline rank, at the largest micro-batch
    step_s: FloatArray  # (num_steps,) slowest rank, gradient exchange and optimizer included
    idle_share: float  # of all devices while pipelines run; padding and recompute count as work
    idle: IdleParts
    rank_s: FloatArray  # (3, dp) least, mean and most seconds of each data-parallel rank's pipeline in a step
    fits: bool  # no device holds more than the cap
    timeline: Timeline  # of the step whose time is nearest the median, on its slowest rank

    @property
    def epoch_s(self) -> float:
        return float(self.step_s.sum())

    def pack_sizes(self, unit: str) -> FloatArray:
        """(num_packs,) "patches" or "tokens"."""
        return self.pack_tokens if unit == "tokens" else self.pack_patches
