"""The settings: degrees that are tried, what each costs, and which is taken: of those alike in speed the simplest."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.measured.saved import carry_bytes, carry_probed_bytes, carry_seconds, refuse_unlike
from trimtab.costs.profile import profile_model
from trimtab.errors import PlanError
from trimtab.options import same_fields
from trimtab.plan.decide.case import Setting
from trimtab.plan.options import PlanOptions, Preference
from trimtab.plan.plan import SettingEstimate
from trimtab.specs import ClusterSpec, DeviceSpec, ModelSpec, ParallelDims, Profile
from trimtab.units import round_digits, round_gib

CHOICE_ERROR = 0.05
"""Relative half-width of the error in the ratio of two settings' speeds, both priced by the same costs.

Smaller than that of a time, for what they share cancels. Where shares fitted to two sizes of one source predict its
other 64 runs on 8 to 64 devices, the median error is 2.4 % and nine tenths are within 6.1 % (bench/published.py).
"""

EQUAL = 0.01
"""Settings that are alike in speed for every purpose: the simplest of them is taken."""

_PLAIN_SCHEDULES = ("1F1B", "GPipe")  # every framework with a pipeline has them
_KINDS = (
    "data parallel",
    "data parallel, ZeRO-{}",
    "data parallel, ZeRO-3",
    "tensor parallel",
    "pipeline",
    "pipeline and tensor parallel",
)
_LISTED = 6  # fastest settings in the plan, and the fastest of every kind


def complexity(setting: SettingEstimate) -> tuple[int, ...]:
    """Sorts settings by what a user must change to run them, the simplest first.

    First by kind: plain data parallel is what launchers do by themselves, ZeRO-1 and ZeRO-2 are a flag of theirs;
    ZeRO-3 gathers weights in every layer, tensor parallelism divides the layers, a pipeline divides model and batch,
    and last come both. Within a kind by ZeRO-3, by expert and context parallelism, which few frameworks have; by the
    schedule, as few have more than 1F1B and GPipe; then by the devices of one replica.
    """
    # what few frameworks have makes a setting less simple, not the number of devices alone
    special = setting.schedule not in _PLAIN_SCHEDULES
    shared = (setting.ep > 1) + 2 * (setting.cp > 1)
    kind, replica = _kind(setting.pp, setting.tp, setting.zero_stage), setting.pp * setting.tp * setting.cp
    return (kind, int(setting.zero_stage == 3), shared, int(special), replica, setting.pp, setting.ep)


def _kind(pp: int, tp: int, zero_stage: int) -> int:
    if pp * tp == 1:
        return (zero_stage + 1) // 2
    return 2 + (tp > 1) + 2 * (pp > 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Priced:
    """A setting with its price at the mean pack; `options` name its schedule and ZeRO stage."""

    setting: Setting
    options: PlanOptions
    step_s: float
    samples_per_s: float
    peak_bytes: float  # of the fullest device, at the limits
    recompute_share: float = 0.0  # of forward and backward

    @property
    def samples_per_step(self) -> float:
        return self.samples_per_s * self.step_s

    @property
    def estimate(self) -> SettingEstimate:
        """Return the setting as the plan file lists it."""
        dims, zero_stage, schedule = self.setting.dims, self.options.sharding, self.options.schedule
        assert schedule != "auto", "it is chosen before a setting is priced"
        shared = ", expert parallel" * (dims.ep > 1) + ", context parallel" * (dims.cp > 1)
        return SettingEstimate(
            kind=_KINDS[_kind(dims.pp, dims.tp, zero_stage)].format(zero_stage) + shared,
            **same_fields(dims, SettingEstimate),
            zero_stage=zero_stage,
            schedule=schedule,
            num_chunks=self.options.num_chunks,
            num_microbatches=self.setting.num_microbatches,
            step_ms=round_digits(self.step_s * 1e3),
            samples_per_s=round_digits(self.samples_per_s),
            peak_memory_gib=round_gib(self.peak_bytes),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class ChosenSetting:
    """The settings that fit, the fastest first; a simpler one is taken where it is nearly as fast."""

    considered: tuple[Priced, ...]
    num_misfits: int  # divisions of the devices for which nothing fits the memory, or the model's shapes
    prefer: Preference = "fastest"
    taken: Priced | None = None  # None: the first by preference

    @property
    def error(self) -> float:
        """Return how much of the fastest's speed may be given up for a simpler setting."""
        return CHOICE_ERROR if self.prefer == "simplest" else EQUAL

    @property
    def best(self) -> Priced:
        """The one that is taken."""
        return self.by_preference[0] if self.taken is None else self.taken

    @property
    def by_preference(self) -> tuple[Priced, ...]:
        """The simplest of those that are alike in speed first, of equally simple ones the fastest; then the others."""
        # speeds within the error are alike: a plan should not move to a pipeline for half a per cent
        least = self.considered[0].samples_per_s / (1 + self.error)
        alike = [x for x in self.considered if x.samples_per_s >= least]
        alike.sort(key=lambda x: complexity(x.estimate))
        return (*alike, *self.considered[len(alike) :])

    def taking(self, priced: Priced) -> ChosenSetting:
        """The same settings, with this one taken."""
        return replace(self, taken=priced)

    @property
    def listed(self) -> tuple[SettingEstimate, ...]:
        """The one that is taken, then the fastest others and the fastest of every kind; none where nothing was open."""
        if len(self.considered) < 2:
            return ()
        # the fastest few, and one of every kind, so that a reader sees what was turned down
        best, kinds, listed = self.best, set[str](), list[SettingEstimate]()
        for place, found in enumerate(self.considered):
            estimate = found.estimate
            if found is not best and (place < _LISTED or estimate.kind not in kinds):
                listed.append(estimate)
            kinds.add(estimate.kind)
        return (best.estimate, *listed)

    def sentences(self) -> tuple[str, ...]:
        """Return what was considered, for the plan's reader; nothing where there was no choice."""
        if len(self.considered) + self.num_misfits < 2:
            return ()
        more = "1 more does" if self.num_misfits == 1 else f"{self.num_misfits} more do"
        misfits = f"; {more} not fit" if self.num_misfits else ""
        rule = f"the simplest of those within {100 * self.error:g} % of the fastest"
        if self.best.samples_per_s * (1 + self.error) < self.considered[0].samples_per_s:
            rule = "the one whose epoch, simulated on its own steps, is shortest"
        return (
            f"Degrees, ZeRO and schedule are {self.best.estimate.label}: of {len(self.considered)} settings that fit, "
            f"{rule}{misfits}. Speeds at their mean packs stand under estimates.settings.",
        )


_MOST_STAGES = 16  # pipeline degree, where it is left open
_LONG_TOKENS = 8192
"""Rows that a device of cp has left, where cp is tried though packs fit: Megatron-Core's guide advises cp for sequences
of 8K tokens and more (megatron/core/transformer/moe/README.md, rule 5)."""
_LEAST_TOKENS = 1024
"""The same where nothing fits otherwise: with fewer, products are too narrow for their device."""


def parallel_dims(
    model: ModelSpec, cluster: ClusterSpec, options: PlanOptions, *, longest: int, crowded: bool = False
) -> Iterator[ParallelDims]:
    """Yield degrees whose product is the number of devices; those that divide less come first.

    cp is tried where the longest document (or pack that was asked for) of `longest` tokens leaves each device many;
    `crowded`: nothing fits without it. ep is tried for models with experts, one expert on one device: inside a node,
    and over as many devices as there are. Raises `PlanError` where the degrees asked for do not divide the devices.
    """
    _refuse_unequal(cluster, options)
    devices, found = cluster.num_devices, False
    tokens = max(longest, options.max_tokens or 0)
    least = _LEAST_TOKENS if crowded else _LONG_TOKENS
    # every product of degrees that uses all devices; tp inside a node
    for tp in _degrees(options.tp, devices, limit=cluster.devices_per_node):
        if options.tp_degrees and tp not in options.tp_degrees:
            continue
        for pp in _degrees(options.pp, devices, limit=min(_MOST_STAGES, len(model.layers))):
            if cluster.devices_per_node % tp or (pp == 1 and options.num_chunks > 1):
                continue
            for cp in _context_degrees(options.cp, devices, limit=tokens // least, crowded=crowded):
                if devices % (tp * pp * cp) or options.dp not in (None, devices // (tp * pp * cp)):
                    continue
                for ep, etp in _expert_degrees(model, cluster, options, devices // pp, tp):
                    found = True
                    yield ParallelDims(dp=devices // (tp * pp * cp), pp=pp, tp=tp, cp=cp, ep=ep, etp=etp)
    # nothing: say which degrees do not divide the devices
    if not found and not crowded:
        names = ("dp", "pp", "tp", "cp", "ep", "etp")
        asked = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
        raise PlanError(
            f"no whole number of replicas of {asked} fills {devices} devices: leave one of "
            f"{', '.join(asked) or 'the degrees'} out, or change the cluster"
        )


def _refuse_unequal(cluster: ClusterSpec, options: PlanOptions) -> None:
    asked = {name: getattr(options, name) for name in ("dp", "pp", "tp", "cp")}
    product = math.prod(degree for degree in asked.values() if degree is not None)
    names = "dp x pp x tp" if options.cp is None else "dp x pp x tp x cp"
    if cluster.num_devices % product:
        raise PlanError(
            f"{names} makes {product}, no divisor of {cluster.num_devices} devices: choose degrees whose product "
            "divides them"
        )
    if options.tp is not None and cluster.devices_per_node % options.tp:
        raise PlanError(f"tp {options.tp} does not divide a node's {cluster.devices_per_node} devices: choose another")


def _degrees(asked: int | None, devices: int, *, limit: int) -> list[int]:
    """The degree asked for, or every divisor of the devices up to `limit`."""
    if asked is not None:
        return [asked]
    return [degree for degree in range(1, limit + 1) if devices % degree == 0]


def _context_degrees(asked: int | None, devices: int, *, limit: int, crowded: bool) -> list[int]:
    found = _degrees(asked, devices, limit=max(1, min(limit, devices)))
    return [cp for cp in found if cp > 1] if crowded else found


def _expert_degrees(
    model: ModelSpec, cluster: ClusterSpec, options: PlanOptions, ranks: int, tp: int
) -> list[tuple[int, int | None]]:
    """Return pairs of ep and etp for the `ranks` devices of a pipeline stage; etp None is that of the dense layers."""
    # degrees that divide the experts of every layer
    mlps = [layer.mlp for layer in model.layers if layer.mlp is not None]
    experts = math.gcd(*(m.num_experts for m in mlps if m.num_experts is not None))
    if options.ep is not None or not experts:
        size = (options.ep or 1) * (options.etp or tp)
        return [(options.ep or 1, options.etp)] if ranks % size == 0 else []
    etp = options.etp or 1
    divisors = [ep for ep in range(2, experts + 1) if experts % ep == 0 and ranks % (ep * etp) == 0]
    # rows that stay in the node travel ten times as fast: all degrees inside, and the largest over nodes
    inside = [ep for ep in divisors if ep * etp <= cluster.devices_per_node]
    return [(1, options.etp), *((ep, options.etp or (1 if tp > 1 else None)) for ep in {*inside, *divisors[-1:]})]


def profile_setting(model: ModelSpec, cluster: ClusterSpec, options: PlanOptions, dims: ParallelDims) -> Profile:
    """The cost table for these degrees of parallelism: by formula, with the seconds of a profile that was given.

    A traced profile gives its bytes instead, a probed one both.
    """
    # whose seconds and bytes stand: the formula's, or those that were measured
    traced = options.profile is not None and options.profile.method == "traced"
    fused = {}  # left open: as in what was measured
    if options.profile is not None and options.fused_kernels is None:
        fused = {"fused_kernels": options.profile.fused_kernels}

    def formulas(device: DeviceSpec, dims: ParallelDims, *, links: bool = True, gathered: bool = True) -> Profile:
        rates = link_rates(cluster, dims)
        return profile_model(
            model,
            device,
            **same_fields(options, CostSettings)
            | {
                "dims": dims,
                "zero_stage": options.sharding if gathered else min(options.sharding, 2),
                "frozen_towers": frozenset(options.frozen_towers),
            }
            | fused
            | (rates if links else dict.fromkeys(rates, math.inf)),
        )

    # 1. by formula
    target, saved = formulas(cluster.device, dims), options.profile
    if saved is None:
        return target
    refuse_unlike(saved, model, target)
    if saved.method == "probed" and (saved.optimizer, saved.zero_stage) != (options.optimizer, options.sharding):
        raise PlanError(
            f"the profile was probed with {saved.optimizer} at ZeRO stage {saved.zero_stage}, not {options.optimizer} "
            f"at {options.sharding}: plan with those, or probe again"
        )
    # 2. what was measured, carried from its own device and degrees by the ratio of formulas
    base = formulas(saved.device, saved.dims, gathered=not traced)
    carry = carry_bytes if traced else carry_seconds
    carried = carry(
        saved,
        base=base,
        target=target,
        # with such links gathering takes no seconds either
        linkless=formulas(replace(cluster.device, link_bytes_per_s=math.inf), dims, links=False, gathered=not traced),
    )
    return carry_probed_bytes(saved, carried, base=base) if saved.method == "probed" else carried


def link_rates(cluster: ClusterSpec, dims: ParallelDims) -> dict[str, float]:
    """Return bytes per second between the devices that share something; neighbours as `ParallelDims` orders them."""
    return {
        "dp_bytes_per_s": cluster.ring_bytes_per_s(dims.replicas, stride=dims.tp),
        "expert_dp_bytes_per_s": cluster.ring_bytes_per_s(dims.expert_replicas, stride=dims.ep * dims.expert_tp),
        "cp_bytes_per_s": cluster.ring_bytes_per_s(dims.cp, stride=dims.tp),
        "ep_bytes_per_s": cluster.node_link_bytes_per_s,
        "ep_in_node": max(1, cluster.devices_per_node // dims.expert_tp),
    }
