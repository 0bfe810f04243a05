"""What stands behind a plan's figures: the tables, timelines and pack sizes that the report draws."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from trimtab.plan.decide.variant import Variant
from trimtab.plan.estimates import find_baseline
from trimtab.plan.plan import Plan
from trimtab.specs import ModelSpec, Packing, Profile, SampleTable, Schedule


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanDetails:
    """A plan with everything it was computed from; what `make_plan` returns and `write_plan` saves.

    Use `plan` for the decisions and `variants` for the figures beside the baseline; `make_plan` has an example.
    """

    plan: Plan
    model: ModelSpec
    samples: SampleTable
    packing: Packing
    schedule: Schedule
    profile: Profile
    memory_cap_bytes: float  # per device: what it may be expected to hold
    variants: tuple[Variant, ...]  # other baselines, the baseline, decisions one by one, the plan last
    # file name -> content of what lies beside the plan file, as its hashes name it
    tables: Mapping[str, bytes] = field(default_factory=dict, repr=False)

    def __repr__(self) -> str:
        return f"PlanDetails: {self.plan!r}"

    def _repr_html_(self) -> str:
        return self.plan._repr_html_()

    @property
    def baseline(self) -> Variant:
        """What the plan is told against."""
        return self.variants[find_baseline([variant.name for variant in self.variants])]
