"""The plan file's content: what was given, what was decided, what is expected, what was assumed.

Field order here is key order in the file. `decisions` hold exact integers and names, and are all that the runtime and
the adapters read; `estimates` are rounded, carry their error band, and are never read back into a decision.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from trimtab.lora import Lora
from trimtab.options import (
    Attention,
    AttentionKernel,
    Dispatcher,
    DType,
    ExpertProducts,
    HostName,
    Order,
    Oversize,
    PlanMethod,
    RecomputedTier,
    RecomputeMode,
    Rule,
    ScheduleName,
    Tower,
    VisionExchange,
    VisionGroup,
    VisionObjective,
    VisionReduction,
)
from trimtab.specs import DeviceSpec
from trimtab.units import format_degrees, three_lines

# What a plan expects: every figure of its file's `estimates`, rounded; runtime and adapters read none of them.


BASELINE = "baseline"  # the name of the variant that a plan is compared with


@dataclass(frozen=True, slots=True, kw_only=True)
class StageEstimate:
    """One stage at the mean micro-batch (times), and its device at the limits (memory: the four parts add up).

    `reserve_gib` is what is expected on top of the counted bytes: context, the allocator's slack.
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
        """Write in a line: "dp 4 x pp 2 x tp 1, ZeRO-1, 1F1B"; without what changes nothing."""
        chunks = f" with {self.num_chunks} chunks" if self.schedule == "Interleaved1F1B" else ""
        sharded = f", ZeRO-{self.zero_stage}" if self.dp * self.cp > 1 and self.zero_stage else ""
        return format_degrees(self) + sharded + (f", {self.schedule}{chunks}" if self.pp > 1 else "")


@dataclass(frozen=True, slots=True, kw_only=True)
class TipEstimate:
    """Of settings that are a tie, the fastest where one thing is not as it was taken to be."""

    changed: str
    fastest: str
    ahead: float  # of the next of them


@dataclass(frozen=True, slots=True, kw_only=True)
class FormEstimate:
    """The fastest that was found of one form of the tower's grid."""

    form: str  # as `--set towers=` takes it
    setting: str
    devices: int  # in use
    epoch_s: float
    bound_s: float | None  # of equal packs and even shares that wait for nothing; null: no bound is known
    busy_share: float  # of the devices' time that is in layers, each computed once
    peak_gib: float  # of the fullest device
    tower_gib: float | None  # of a device of the tower's own; null: it has none
    hosts: str  # who runs it


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
    step_p95_ms: float | None = None  # that one step in 20 takes, or more; null: an older plan
    vision_data_parallel: VisionEstimate | None = None
    forms: tuple[FormEstimate, ...] = ()  # of the tower's grid, the single one first; none: no other was simulated
    searched: tuple[SearchedSplit, ...] = ()
    settings: tuple[SettingEstimate, ...] = ()  # this plan's first, then the fastest others; none: nothing was open
    setting_error: float = 0.0  # of the ratio of two of them: so much speed may be given up for a simpler one
    tips: tuple[TipEstimate, ...] = ()  # none: no other setting is as fast as predictions can tell

    @property
    def basis(self) -> VariantEstimate:
        """Return what gains are compared with: the baseline, or the first row after it that fits; else this plan."""
        return next((row for row in self.compared if row.fits), self.variants[-1])

    def gain(self, row: VariantEstimate) -> float:
        """Return how many times as fast as `basis` a row is."""
        return self.basis.epoch_s / row.epoch_s

    @property
    def compared(self) -> tuple[VariantEstimate, ...]:
        """The baseline that the plan is compared with, then each decision added, this plan last."""
        return self.variants[find_baseline([variant.name for variant in self.variants]) :]


def find_baseline(names: Sequence[str]) -> int:
    """Find which variant is the baseline; before it stand others that were asked for and are slower, or do not fit."""
    return names.index(BASELINE) if BASELINE in names else 0


PLAN_VERSION = "1.0"


# -- inputs ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInput:
    """The model that was described; `config` is a path, or the name of a description that ships with trimtab.

    It is null for a model that was described from Python and not from a file.
    """

    name: str
    family: str
    config: str | None
    preprocessor: str | None
    max_pixels: int | None  # the user's own limits of an image; null: the model's
    max_tiles: int | None
    num_layers: int
    num_params: int
    layers_blake2b: str  # of every layer's name, widths and parameters, and of the image rule
    forbidden_cuts: tuple[int, ...]  # no stage begins at these layers: the model's own, and those of a target framework


@dataclass(frozen=True, slots=True, kw_only=True)
class DataFile:
    """One file of the data set; the fingerprint covers its size, its first and its last MiB."""

    path: str
    num_bytes: int
    blake2b: str
    media_root: str | None = None  # null, and no such key: none was stated for this file


@dataclass(frozen=True, slots=True, kw_only=True)
class MixedSource:
    """A source that was drawn by weight: `num_drawn` of its rows in an epoch, equally often or once more."""

    name: str
    weight: float
    num_rows: int
    num_drawn: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DataInput:
    """The data set that was sized; `table` holds one row of sizes per sample and lies next to the plan."""

    files: tuple[DataFile, ...]
    num_samples: int
    num_skipped: int  # samples left out because they were bad
    tokens_exact: bool
    table: str
    table_blake2b: str
    mixture: tuple[MixedSource, ...] = ()  # none, and no such key: every sample is in an epoch once


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterInput:
    """The devices, and the memory of each that the plan may use."""

    device: str
    num_nodes: int
    devices_per_node: int
    device_blake2b: str  # of the device's published figures
    node_link_bytes_per_s: float
    latency_s: float
    memory_bytes: int
    risk: float | None = None  # accepted chance that the fullest device needs more; null: reserve_bytes stay free
    reserve_bytes: int | None = None
    device_figures: DeviceSpec | None = None  # of a device from the user's own file; null: a table or profile has them


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingInput:
    """Settings of the training run that change costs."""

    dtype: str
    optimizer: str
    zero_stage: int
    attention: Attention
    fused_kernels: bool | None  # norms, rotary and gates as single kernels; null: as the host has them
    frozen_towers: tuple[Tower, ...]
    recompute: RecomputeMode  # what was asked for
    costs: str  # method of the profile: analytic, traced, timed, logged
    profile: TableFile | None = None  # the profile that gave the seconds, next to the plan; null: formulas did
    search: Literal["exact", "omnibal"] = "exact"  # of the stages
    radius: int = 3  # of OmniBal's search
    top: int = 10
    host: HostName = "none"  # whose settings hold where they are null, and no such key
    host_block_s: float | None = None
    blocking_launches: bool = False
    sequence_parallel: bool | None = None
    vision_sequence_parallel: bool | None = None
    grad_dtype: DType | None = None
    attention_kernel: AttentionKernel | None = None
    early_stop: bool | None = None
    tp_overlap: bool | None = None
    ep_overlap: bool = False
    expert_imbalance: float | None = None  # rows of the busiest expert-parallel device over the mean
    expert_products: ExpertProducts | None = None
    dispatcher: Dispatcher | None = None
    lora: Lora | None = None  # only adapters are trained; null, and no such key: the weights are
    baselines: tuple[str, ...] = ()  # that were asked for, as in "random,batch=4,padded"; none: the fastest that fits


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    model: ModelInput
    data: DataInput
    cluster: ClusterInput
    training: TrainingInput


# -- decisions ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ParallelDecision:
    dp: int
    pp: int
    tp: int
    cp: int
    ep: int = 1  # of experts, among the dp x cp x tp devices of a stage
    etp: int | None = None  # none, and no such key: as many as tp


@dataclass(frozen=True, slots=True, kw_only=True)
class ScheduleDecision:
    name: ScheduleName
    num_microbatches: int  # per data-parallel rank and step
    num_chunks: int  # virtual stages per device


@dataclass(frozen=True, slots=True, kw_only=True)
class StageDecision:
    """Layers of one stage, in forward order; ranges as in "model.visual.blocks[0..23]" include both ends."""

    stage: int
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RecomputeDecision:
    """Layers whose activations are computed again in the backward; layers not listed keep theirs."""

    stage: int
    granularity: RecomputedTier
    modules: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class TableFile:
    """A large table next to the plan file."""

    file: str
    blake2b: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ContinuedPlan:
    """The plan that a run began with, whose steps hold the same samples: its place in the data is kept."""

    tables_blake2b: str  # of its offsets, indices and schedule, joined
    packs_per_step: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PackingDecision:
    """Which samples share a micro-batch, and which rank runs it in which step.

    Pack p holds rows `indices[offsets[p]:offsets[p + 1]]` of the sample table, each row once or, in a mixture, as often
    as it is drawn; `schedule[step, rank, microbatch]` is a pack number, or -1 for an empty slot of the last step.
    """

    method: PlanMethod
    order: Order
    max_patches: int
    max_tokens: int
    seed: int
    oversize: Oversize
    num_packs: int
    num_steps: int
    num_oversize: int
    offsets: TableFile
    indices: TableFile
    schedule: TableFile
    global_batch: int | None = None  # samples of every step, the last may hold fewer; none, and no such key: it varies
    continues: ContinuedPlan | None = None  # none, and no such key: runs begin with this plan


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionDecision:
    """Which ranks share the images of a micro-batch, so that each encodes a part of them with a whole vision tower.

    Ranks of tp and of cp hold the same images (`gather`), those of dp images of their own (`dispatch`). With `replica`
    the tower is on every device of tp x pp x cp, and encodes a step's images before its pipeline, which has no tower.
    With `own` it is on `degree` devices after those of the pipelines, and sends features to their first stages.
    """

    group: VisionGroup
    degree: int  # ranks of the group
    exchange: VisionExchange
    pooling: int  # consecutive micro-batches of a rank that share one call of the tower; 1: each has its own
    rule: Rule
    objective: VisionObjective  # what the shares are balanced by: the tower's seconds, or the bytes it holds
    reduction: VisionReduction | None  # of the vision gradients over tp; null: the sum over dp and cp stays as it is
    recompute: Literal["full"] | None = None  # of a tower apart; none, and no such key: activations are kept


@dataclass(frozen=True, slots=True, kw_only=True)
class Decisions:
    """What runs: all that the runtime and the exports read."""

    parallel: ParallelDecision
    schedule: ScheduleDecision
    stages: tuple[StageDecision, ...]
    recompute: tuple[RecomputeDecision, ...]
    packing: PackingDecision
    vision_data_parallel: VisionDecision | None = None  # none, and no such key: every rank encodes what it holds

    @property
    def num_devices(self) -> int:
        """Return the devices that the run uses, those of a tower's own included."""
        dims, vision = self.parallel, self.vision_data_parallel
        own = vision.degree if vision is not None and vision.group == "own" else 0
        return dims.dp * dims.pp * dims.tp * dims.cp + own


# -- the plan ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """One reviewable set of decisions with its inputs and expectations.

    Use `load_plan` to read one. Your code reads `decisions` (exact), never `estimates` (rounded, with their error).
    """

    plan_version: str
    created_by: str
    command: str
    summary: str
    inputs: Inputs
    decisions: Decisions
    estimates: Estimates
    assumptions: tuple[str, ...]

    def __repr__(self) -> str:
        shape, _, expected = self.summary.partition(". ")
        return three_lines(f"Plan of {self.inputs.model.name}", f"{shape}.", expected)
