"""The settings that fit, and which of them is taken: of those that are alike in speed the simplest to run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trimtab.options import same_fields
from trimtab.plan.decide.case import Setting
from trimtab.plan.options import PlanOptions, Preference
from trimtab.plan.plan import SettingEstimate
from trimtab.units import format_bytes, format_number, round_digits, round_gib

CHOICE_ERROR = 0.05
"""Relative half-width of the error in the ratio of two settings' speeds, both priced by the same costs.

Smaller than that of a time, for what they share cancels. Where shares fitted to two sizes of one source predict its
other 64 runs on 8 to 64 devices, the median error is 2.4 % and nine tenths are within 6.1 % (bench/published_text.py).
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
_LISTED = 6  # fastest settings in the plan, beside the fastest of every kind


def complexity(setting: SettingEstimate) -> tuple[int, ...]:
    """Sorts settings by what a user must change to run them, the simplest first.

    First by kind: plain data parallel is what launchers do by themselves, ZeRO-1 and ZeRO-2 are a flag of theirs;
    ZeRO-3 gathers weights in every layer, tensor parallelism divides the layers, a pipeline divides model and batch,
    and last come both. Within a kind by ZeRO-3, by expert and context parallelism, which few frameworks have; by the
    schedule, as few have more than 1F1B and GPipe; then by the devices of one replica.
    """
    pp_or_tp = setting.pp * setting.tp > 1
    special = setting.schedule not in _PLAIN_SCHEDULES
    shared = (setting.ep > 1) + 2 * (setting.cp > 1)
    kind, replica = _kind(setting.pp, setting.tp, setting.zero_stage), setting.pp * setting.tp * setting.cp
    gathers = pp_or_tp and setting.zero_stage == 3
    return (kind, int(gathers), shared, int(special), replica, setting.pp, setting.ep)


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

    @property
    def estimate(self) -> SettingEstimate:
        """As the plan file lists it."""
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
        """So much of the fastest's speed may be given up for a simpler setting."""
        return CHOICE_ERROR if self.prefer == "simplest" else EQUAL

    @property
    def best(self) -> Priced:
        """The one that is taken."""
        return self.by_preference[0] if self.taken is None else self.taken

    @property
    def by_preference(self) -> tuple[Priced, ...]:
        """The simplest of those that are alike in speed first, of equally simple ones the fastest; then the others."""
        least = (1 - self.error) * self.considered[0].samples_per_s
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
        best, kinds, listed = self.best, set[str](), list[SettingEstimate]()
        for place, found in enumerate(self.considered):
            estimate = found.estimate
            if found is not best and (place < _LISTED or estimate.kind not in kinds):
                listed.append(estimate)
            kinds.add(estimate.kind)
        return (best.estimate, *listed)

    def sentences(self) -> tuple[str, ...]:
        """What was considered, for the plan's reader; nothing where there was no choice."""
        said: list[str] = []
        best = self.best
        if len(self.considered) + self.num_misfits > 1:
            more = "1 more does" if self.num_misfits == 1 else f"{self.num_misfits} more do"
            misfits = f"; {more} not fit" if self.num_misfits else ""
            rule = f"the simplest of those within {100 * self.error:g} % of the fastest"
            said.append(
                f"Degrees, ZeRO and schedule are {best.estimate.label}: of {len(self.considered)} settings that fit, "
                f"{rule}{misfits}. Speeds at their mean packs stand under estimates.settings."
            )
        return (*said, *self._why_shared())

    def _why_shared(self) -> Iterator[str]:
        """What the best setting without expert or context parallelism would be, where the plan has them."""
        best = self.best
        for axis, what in (("ep", "expert parallelism"), ("cp", "context parallelism")):
            if getattr(best.setting.dims, axis) > 1:
                other = next((x for x in self.considered if getattr(x.setting.dims, axis) == 1), None)
                if other is None:
                    yield f"No setting without {what} fits the memory, of those that were tried."
                else:
                    yield (
                        f"The fastest that fits without {what} is {other.estimate.label}: "
                        f"{format_number(other.samples_per_s)} samples/s instead of "
                        f"{format_number(best.samples_per_s)}, {format_bytes(other.peak_bytes)} on the fullest device "
                        f"instead of {format_bytes(best.peak_bytes)}."
                    )
