"""What a plan expects: every figure of its file's `estimates`, rounded; runtime and adapters read none of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from trimtab.options import ScheduleName
from trimtab.units import format_degrees

BASELINE = "baseline"  # the name of the variant that a plan is told against


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """One stage at the mean micro-batch (times), and its device at the limits (memory: the four parts add up).

    `reserve_gib` is what is expected beside the counted bytes: context, the allocator's slack.
    """

    stage: int
    forward_ms: float
    backward_ms: float
    memory_gib: float
    state_gib: float
    activations_gib: float
    transient_gib: float
    reserve_gib: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VariantEstimate:
    """One row of the before/after table: what the whole data set costs when only some parts are balanced."""

    name: str
    packs: str
    stages: str
    recompute: str
    step_ms: float
    epoch_s: float
    samples_per_s: float
    idle_share: float  # of all devices while pipelines run; padding and recompute count as work
    peak_memory_gib: float
    fits: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BalanceEstimate:
    """Evenness of the packs; dist ratios as the OmniBal paper defines them, per micro-step over the ranks."""

    pad_ratio: float
    dist_ratio_vit: float
    dist_ratio_llm: float
    dist_ratio_cost: float
    utilisation: float
    fill_patches: float
    fill_tokens: float
    shuffle_chi2: float | None  # 1.0: sources meet as at random; null: there is one source
    lower_bound_packs: int


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionRankEstimate:
    """What one rank of the group encodes in a mean step, with and without sharing."""

    rank: int
    tower_ms: float
    tower_without_ms: float


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionEstimate:
    """Sharing the images, on the slowest rank and on the one that holds most, with and without.

    Times are those of a mean step: forward and backward of vision tower and projector, without recompute. Memory is
    that of these layers at the largest micro-batch, if none of them recomputes: recompute differs with and without.
    """

    tower_ms: float  # exchange included
    tower_without_ms: float
    ideal_ms: float  # equal shares and no exchange
    exchange_ms: float
    update_ms: float  # once a step, not in tower_ms: gradients of these layers exchanged, parameters updated
    update_without_ms: float
    exchange_mib: float  # received by a rank, forward and backward
    features_mib: float  # rows of features that a rank holds in its largest call
    state_gib: float
    state_without_gib: float
    activations_gib: float
    activations_without_gib: float
    sizes_known: float  # share of the patches that lie in images of known size
    ranks: tuple[VisionRankEstimate, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchedSplit:
    """A split that OmniBal's search simulated; the last one is the exact optimum, to compare with."""

    stages: tuple[int, ...]  # layers of each
    spread_ms: float  # standard deviation of the stages' forward times
    sent_mib: float  # that pass all cuts
    step_ms: float | None  # None: it does not fit the memory


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingEstimate:
    """Degrees, ZeRO stage and schedule that fit, at their mean pack; `kind` says how much they ask of a launcher."""

    kind: str
    dp: int
    pp: int
    tp: int
    zero_stage: int
    schedule: ScheduleName
    num_chunks: int
    num_microbatches: int
    step_ms: float
    samples_per_s: float
    peak_memory_gib: float
    cp: int = 1
    ep: int = 1
    etp: int | None = None

    @property
    def label(self) -> str:
        """In a line: "dp 4 x pp 2 x tp 1, ZeRO-1, 1F1B"; without what changes nothing."""
        chunks = f" with {self.num_chunks} chunks" if self.schedule == "Interleaved1F1B" else ""
        sharded = f", ZeRO-{self.zero_stage}" if self.dp * self.cp > 1 and self.zero_stage else ""
        return format_degrees(self) + sharded + (f", {self.schedule}{chunks}" if self.pp > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimates:
    time_error: float  # relative half-width of every time below
    memory_error: float  # of the expected bytes below: 5 % of devices need more, 5 % less
    step_ms: float
    epoch_s: float
    samples_per_s: float
    stage_imbalance: float  # slowest / mean - 1, at the mean micro-batch
    stages: tuple[StageEstimate, ...]
    balance: BalanceEstimate
    variants: tuple[VariantEstimate, ...]  # other baselines, the baseline, decisions one by one, this plan last
    memory_share: float | None = None  # of its memory that the fullest device is expected to fill; null: an older plan
    misfit_chance: float | None = None  # that it needs more than it has
    step_expected_ms: float | None = None  # with jitter of the devices; null: an older plan
    step_p95_ms: float | None = None  # that one step in 20 takes, or more
    vision_data_parallel: VisionEstimate | None = None
    searched: tuple[SearchedSplit, ...] = ()
    settings: tuple[SettingEstimate, ...] = ()  # this plan's first, then the fastest others; none: nothing was open
    setting_error: float = 0.0  # of the ratio of two of them: so much speed may be given up for a simpler one

    @property
    def told(self) -> VariantEstimate:
        """What gains are told against: the baseline, or the first row after it that fits; this plan if none does."""
        return next((row for row in self.compared if row.fits), self.variants[-1])

    def gain(self, row: VariantEstimate) -> float:
        """How many times as fast as `told` a row is."""
        return self.told.epoch_s / row.epoch_s

    @property
    def compared(self) -> tuple[VariantEstimate, ...]:
        """The baseline that the plan is told against, then each decision added, this plan last."""
        return self.variants[find_baseline([variant.name for variant in self.variants]) :]


def find_baseline(names: Sequence[str]) -> int:
    """Which variant is the baseline; before it stand others that were asked for and are slower, or do not fit."""
    return names.index(BASELINE) if BASELINE in names else 0
