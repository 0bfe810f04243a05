"""What micro-batches ask of the layers: packed end to end, padded, or as large as the limits allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from trimtab.costs.bands import WAITS
from trimtab.costs.formula.layers import document_multiple
from trimtab.costs.formula.settings import Efficiency
from trimtab.costs.profile import host_share, regime_of, time_band
from trimtab.errors import PlanError
from trimtab.options import Attention
from trimtab.partition.assess import DeviceMemory
from trimtab.partition.simulate import StageTimes, simulate_steps, stage_times
from trimtab.partition.stages import SplitProblem
from trimtab.specs import (
    NUM_WORK_TERMS,
    ClusterSpec,
    FloatArray,
    ImageCounts,
    IntArray,
    ModelSpec,
    Packing,
    ParallelDims,
    Profile,
    RecomputeChoice,
    SampleTable,
    Stage,
    evaluate,
)

MICROBATCHES, PATCHES, PATCHES_SQ, PATCHES_WINDOWED, TOKENS, TOKENS_SQ, TOKENS_WINDOWED = range(NUM_WORK_TERMS)
IMAGE_TERMS = slice(PATCHES, PATCHES_WINDOWED + 1)  # what images ask of the tower


def packed_work(packing: Packing, samples_work: FloatArray, attention: Attention = "flash") -> FloatArray:
    """Return (num_packs, T): rows of one pack are laid end to end, none is padded; pairs as `attention` has them."""
    work = np.asarray(packing.sums(samples_work), np.float64)
    work[:, MICROBATCHES] = 1.0
    return join_samples(work) if joins_samples(attention) else work


def pad_documents(samples: SampleTable, dims: ParallelDims) -> SampleTable:
    """The table with every sequence as long as context parallelism makes it; itself without."""
    multiple = document_multiple(dims)
    if multiple == 1:
        return samples
    second = samples.second_tokens
    if second is None:
        return replace(samples, num_tokens=-(-samples.num_tokens // multiple) * multiple)
    padded = [-(-one // multiple) * multiple for one in (samples.num_tokens - second, second)]
    return replace(samples, num_tokens=padded[0] + padded[1], second_tokens=padded[1])


def padded_work(packing: Packing, samples_work: FloatArray) -> FloatArray:
    """Return (num_packs, T): every sample is as long as the batch's longest; images are not padded."""
    work = packed_work(packing, samples_work)
    # a batch computes its longest sample as often as it holds samples
    size = np.diff(packing.offsets)
    gathered = samples_work[packing.indices]
    for term in (TOKENS, TOKENS_SQ, TOKENS_WINDOWED):
        work[:, term] = size * np.maximum.reduceat(gathered[:, term], packing.offsets[:-1])
    return work


_SQUARES = ((PATCHES_SQ, PATCHES), (PATCHES_WINDOWED, PATCHES), (TOKENS_SQ, TOKENS), (TOKENS_WINDOWED, TOKENS))


def limit_work(work: FloatArray, max_patches: int, max_tokens: int, *, joined: bool = False) -> FloatArray:
    """Return (T,): the largest micro-batch the limits allow; squares at the densest row of `work`.

    `joined`: attention holds the pairs between a pack's samples too (`joins_samples`), so tokens as one sample's.
    `work` holds samples or packs, one a row, or just their `extreme_rows`. A pack is no denser than its densest sample,
    so rows of samples bound every pack that can be made of them.
    """
    # squares are bounded by the densest sample: of a pack of short ones they are far below its own square
    largest = np.zeros(NUM_WORK_TERMS)
    largest[MICROBATCHES] = 1.0
    largest[PATCHES] = max(max_patches, work[:, PATCHES].max(initial=0.0))
    largest[TOKENS] = max(max_tokens, work[:, TOKENS].max(initial=0.0))
    for square, rows in _SQUARES:
        largest[square] = _density(work, square, rows).max(initial=0.0) * largest[rows]
    return join_samples(largest) if joined else largest


def joins_samples(attention: Attention) -> bool:
    """Return whether a pack's attention computes the pairs of one long sample: all but flash, which needs no mask."""
    return attention != "flash"


def join_samples(work: FloatArray) -> FloatArray:
    """Square the tokens of `work` (..., T) where `joins_samples`: pairs between a pack's samples are computed too."""
    joined = work.copy()
    joined[..., TOKENS_SQ] = work[..., TOKENS] ** 2
    return joined


def extreme_rows(work: FloatArray) -> FloatArray:
    """The few rows of `work` that decide `limit_work`."""
    most = [int(work[:, PATCHES].argmax()), int(work[:, TOKENS].argmax())]
    return work[most + [int(_density(work, square, rows).argmax()) for square, rows in _SQUARES]]


def _density(work: FloatArray, square: int, rows: int) -> FloatArray:
    return np.divide(work[:, square], work[:, rows], out=np.zeros(len(work)), where=work[:, rows] > 0)


def price_samples(profile: Profile, samples_work: FloatArray) -> FloatArray:
    """Return (num_samples,) seconds of forward and backward over all layers, for the packer to balance."""
    per_term = profile.matrix("forward_s").sum(axis=0) + profile.matrix("backward_s").sum(axis=0)
    return evaluate(per_term, samples_work)


def in_patches(samples: SampleTable, model: ModelSpec) -> SampleTable:
    """The table with tiles turned into ViT patches, for a model that cuts images into equal tiles.

    Files of ready-made lengths know only how many tiles a sample has. A tower that sees tiles of one size sees the same
    rows for each of them; a tower of native resolution cannot be planned from a number of tiles.
    """
    if samples.patch_unit == "patches":
        return samples
    tile = one_tile(model)
    return replace(
        samples,
        num_patches=samples.num_patches * tile.patches,
        patches_sq=samples.num_patches * tile.patches_sq,
        patches_windowed=samples.num_patches * tile.patches_windowed,
        image_patches=None,
        patch_unit="patches",
    )


def above_all(samples: SampleTable) -> tuple[int, int]:
    """Return limits of patches and tokens that no sample reaches: for batches that know none."""
    return int(samples.num_patches.max()) + 1, int(samples.num_tokens.max()) + 1


def select_rows(samples: SampleTable, rows: IntArray) -> SampleTable:
    """The table with only these rows, in this order."""
    return replace(
        samples,
        num_images=samples.num_images[rows],
        num_patches=samples.num_patches[rows],
        num_tokens=samples.num_tokens[rows],
        patches_sq=samples.patches_sq[rows],
        patches_windowed=samples.patches_windowed[rows],
        image_patches=samples.images_of(rows),
        second_tokens=None if samples.second_tokens is None else samples.second_tokens[rows],
        source=samples.source[rows],
        ids=None if samples.ids is None else tuple(samples.ids[i] for i in rows.tolist()),
        file_index=None if samples.file_index is None else samples.file_index[rows],
        line=rows + 1 if samples.line is None else samples.line[rows],
    )


def one_tile(model: ModelSpec) -> ImageCounts:
    """Return a tile's counts: an image's counts over its tiles, which must be the same whatever the image's size."""
    shapes = [model.image_rule.count(width, height) for width, height in ((448, 448), (896, 448), (1344, 896))]
    # alike in images of one, two and six tiles
    per_tile = {(c.patches / c.tiles, c.patches_sq / c.tiles, c.patches_windowed / c.tiles) for c in shapes}
    if len(per_tile) != 1:
        raise PlanError(
            f"the sizes count tiles (vit_num), {model.name} sees native resolutions: size the data for it, or give "
            "image_wh"
        )
    first = shapes[0]
    return ImageCounts(
        patches=first.patches // first.tiles,
        tokens=first.tokens // first.tiles,
        tiles=1,
        patches_sq=first.patches_sq // first.tiles,
        patches_windowed=first.patches_windowed // first.tiles,
    )


# Seconds of packs on stages, of steps, and of what a step costs on top of its micro-batches.


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Phases:
    """What encoding before and after the pipeline takes, where a tower is on every device of a replica."""

    seconds: FloatArray  # (num_steps, dp) of both phases, with the exchange of features
    forward_s: FloatArray  # of the first one
    update_s: float  # of the tower's gradients and parameters, on every device
    state_bytes: float  # of the tower, on every device
    saved_bytes: float  # that it holds from the first phase to the last
    moment_bytes: float  # on top of them while it computes, when the pipeline holds nothing

    @property
    def step_s(self) -> FloatArray:
        """Return (num_steps, dp) seconds that a step takes outside of its pipeline."""
        return self.seconds + self.update_s

    def of_steps(self, steps: IntArray) -> Phases:
        """The same of some steps."""
        return replace(self, seconds=self.seconds[steps], forward_s=self.forward_s[steps])


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Lanes:
    """A tower on devices of its own: the first stage of the pipelines of as many data-parallel ranks as share a lane.

    Arrays are (num_steps, lanes, num_microbatches): a call encodes the images of one micro-batch of each of its ranks.
    """

    forward_s: FloatArray  # of the slowest device of a lane
    backward_s: FloatArray
    send_s: FloatArray  # of features to the pipelines
    return_s: FloatArray  # of their gradients
    update_s: float  # of the tower's gradients and parameters
    num_devices: int
    state_bytes: float
    saved_bytes: float  # of the calls in flight
    transient_bytes: float
    recompute: tuple[RecomputeChoice, ...]  # of the tower's layers

    def of_steps(self, steps: IntArray) -> Lanes:
        """The same of some steps."""
        names = ("forward_s", "backward_s", "send_s", "return_s")
        return replace(self, **{name: getattr(self, name)[steps] for name in names})

    def memory(self, problem: SplitProblem) -> DeviceMemory:
        """Return the bytes of an encoder device."""
        held = DeviceMemory(
            state_bytes=self.state_bytes,
            saved_bytes=self.saved_bytes,
            transient_bytes=self.transient_bytes,
            overhead_bytes=problem.overhead_bytes,
        )
        return held.with_share(problem.overhead_share)

    def with_own(self, stages: Sequence[Stage], profile: Profile) -> tuple[Stage, ...]:
        """The pipelines' stages behind that of the tower, whose layers are the model's first."""
        num_tower = sum(layer.tower != "language" for layer in profile.layers)
        first, *rest = (replace(stage, index=stage.index + 1) for stage in stages)
        tower = Stage(index=0, start=0, stop=num_tower, recompute=self.recompute)
        return (tower, replace(first, start=num_tower), *rest)

    def before(self, times: StageTimes) -> StageTimes:
        """The pipelines' stages with the lanes as the first one; micro-batches as `as_run` numbers them."""

        def joined(own: FloatArray | float, stages: FloatArray) -> FloatArray:
            return np.concatenate([np.broadcast_to(np.ravel(own), (1, stages.shape[1])), stages])

        returned = times.send_backward_s.copy()
        returned[0] = self.return_s.ravel()
        return StageTimes(
            forward_s=joined(self.forward_s, times.forward_s),
            backward_s=joined(self.backward_s, times.backward_s),
            send_forward_s=joined(self.send_s, times.send_forward_s),
            send_backward_s=joined(0.0, returned),
        )


Apart = Phases | Lanes
"""What a tower does outside of the pipelines' stages."""


def stage_link(cluster: ClusterSpec) -> float:
    """Return bytes per second between stages: neighbours lie on different nodes, where there are several."""
    return cluster.slowest_link_bytes_per_s * Efficiency().link


def times_of(
    work: FloatArray, stages: Sequence[Stage], profile: Profile, cluster: ClusterSpec, *, apart: Apart | None = None
) -> StageTimes:
    """Return the seconds of every pack on every stage, sends included; `apart`: of a tower whose lanes are a stage."""
    found = stage_times(profile, stages, work, link_bytes_per_s=stage_link(cluster), latency_s=cluster.latency_s)
    return apart.before(found) if isinstance(apart, Lanes) else found


def in_lockstep(work: FloatArray, table: IntArray, profile: Profile) -> tuple[FloatArray, IntArray]:
    """Return packs and table (steps, 1, M) of ranks that gather every layer's weights together, as under ZeRO-3.

    No rank is more than a layer ahead of the others. So in each tower every rank waits for the one whose micro-batch
    takes longest there: its images may be one rank's, and its tokens another's.
    """
    # of every micro-batch the packs of all ranks
    slots, empty = np.maximum(table, 0).swapaxes(1, 2), (table < 0).swapaxes(1, 2)
    per_layer = profile.matrix("forward_s") + profile.matrix("backward_s")
    of_language = np.array([layer.tower == "language" for layer in profile.layers])
    slowest = np.zeros((*slots.shape[:2], NUM_WORK_TERMS))
    slowest[..., MICROBATCHES] = 1.0
    for layers, terms in ((~of_language, IMAGE_TERMS), (of_language, slice(TOKENS, NUM_WORK_TERMS))):
        seconds = np.where(empty, -1.0, evaluate(per_layer[layers].sum(axis=0), work)[slots])
        chosen = np.take_along_axis(slots, seconds.argmax(axis=2)[..., None], axis=2)[..., 0]
        slowest[..., terms] = work[chosen][..., terms]
    # a slot stays empty where no rank has a pack
    numbers = np.where(empty.all(axis=2), -1, np.arange(slowest[..., 0].size).reshape(slots.shape[:2]))
    return slowest.reshape(-1, NUM_WORK_TERMS), numbers[:, None, :]


def as_run(
    work: FloatArray, table: IntArray, problem: SplitProblem, apart: Apart | None = None
) -> tuple[FloatArray, IntArray]:
    """Return the packs and table that are simulated: those `in_lockstep` where ranks run so, else as they are.

    Ranks that share a lane are taken to run so: it encodes for all of them in one call, and needs all their gradients.
    That is an upper bound, for their stages wait for each other only there.
    """
    if isinstance(apart, Lanes):
        # ranks of a lane as those of ZeRO-3, slot by slot
        steps, lanes, M = apart.forward_s.shape
        work, joined = in_lockstep(work, table.reshape(steps * lanes, -1, M), problem.profile)
        return work, joined.reshape(steps, lanes, M)
    return in_lockstep(work, table, problem.profile) if problem.lockstep else (work, table)


def steps_of(
    work: FloatArray,
    table: IntArray,
    stages: Sequence[Stage],
    problem: SplitProblem,
    cluster: ClusterSpec,
    *,
    apart: Apart | None = None,
) -> FloatArray:
    """Return (num_steps,) seconds: the slowest rank's pipeline, then gradient exchange and optimizer, in turn."""
    work, table = as_run(work, table, problem, apart)
    return timed_steps(
        times_of(work, stages, problem.profile, cluster, apart=apart), table, stages, problem, apart=apart
    )


def timed_steps(
    times: StageTimes,
    table: IntArray,
    stages: Sequence[Stage],
    problem: SplitProblem,
    *,
    apart: Apart | None = None,
) -> FloatArray:
    """Return `steps_of` where the seconds of packs and table `as_run` are known."""
    phases_s = apart.step_s if isinstance(apart, Phases) else None
    if problem.lockstep and phases_s is not None:
        phases_s = phases_s.max(axis=1, keepdims=True)
    # tower and pipelines update at the same time: the longer one counts
    update_s = rank_step_s(problem, stages)
    return simulate_steps(
        times,
        table,
        schedule=problem.schedule,
        num_devices=problem.num_stages + isinstance(apart, Lanes),
        all_reduce_s=max(update_s, apart.update_s) if isinstance(apart, Lanes) else update_s,
        phases_s=phases_s,
    )


def host_sentences(profile: Profile, work: FloatArray) -> tuple[str, ...]:
    """Say where the host decides, and not the device: how long the mean micro-batch waits for it."""
    waits = host_share(profile, work)
    if waits < WAITS:
        return ()
    return (
        f"The host decides here: {waits:.0%} of the mean micro-batch's forward and backward wait for its launches. "
        "Larger packs gain that. Hosts differ by a factor of 4: one run settles yours (trimtab profile --from-logs).",
    )


def with_band(profile: Profile, model: ModelSpec, work: FloatArray, cluster: ClusterSpec) -> Profile:
    """Return the profile with the band of its seconds for a run of mean micro-batches `work` on this cluster."""
    regime = regime_of(profile, model, work, nodes=cluster.num_nodes)
    return replace(profile, time_error=time_band(profile, regime))


def band_sentence(profile: Profile, model: ModelSpec, work: FloatArray, cluster: ClusterSpec) -> str:
    """Say how far seconds may be off, and how that is known."""
    regime = regime_of(profile, model, work, nodes=cluster.num_nodes)
    formulas = profile.method in ("analytic", "traced")
    source = f"as those of published runs of this regime: {regime}" if formulas else f"as they were {profile.method}"
    return f"Seconds are within {time_band(profile, regime):.0%}, {source}."


def rank_step_s(problem: SplitProblem, stages: Sequence[Stage]) -> float:
    """Return the seconds of gradient exchange and optimizer on the pipeline rank that has most of both."""
    # chunks of one device update one after the other
    devices = problem.order.device
    per_rank = [0.0] * problem.num_stages
    for stage in stages:
        layers = problem.profile.layers[stage.start : stage.stop]
        per_rank[devices[stage.index]] += sum(layer.step_s for layer in layers)
    return max(per_rank)
