"""How far the truth may be from a prediction: seconds by the regime of a run, bytes by how they were counted."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import NormalDist
from types import MappingProxyType
from typing import Literal

from trimtab.specs import Profile
from trimtab.units import GIB

# -- seconds ----------------------------------------------------------------------------------------------------------

Regime = Literal["dense models", "experts", "adapters", "short passes", "pipelines over nodes"]

TIME_BANDS: Mapping[Regime, float] = MappingProxyType(
    {
        "dense models": 0.30,
        "experts": 0.40,
        "adapters": 0.30,
        "short passes": 0.65,
        "pipelines over nodes": 0.40,
    }
)
"""Relative half-widths of seconds by formula. bench/published.py prints which share of published runs each holds, and
which share without the source that asks for the widest."""

TIME_ERROR = TIME_BANDS["dense models"]
"""Of formulas, where nothing is known of the run."""

WAITS = 0.02
"""Of forward and backward: from there on the host decides, and how fast it launches is the question."""


def find_regime(*, waits: float, adapters: bool, experts: bool, stages: int, nodes: int) -> Regime:
    """Return what decides how far a run's seconds may be off: the least known comes first.

    waits: the share of forward and backward that waits for the host (`host_share`).

    >>> find_regime(waits=0.0, adapters=False, experts=False, stages=4, nodes=2)
    'pipelines over nodes'
    """
    if waits >= WAITS:
        return "short passes"
    if adapters:
        return "adapters"
    if experts:
        return "experts"
    return "pipelines over nodes" if stages > 1 and nodes > 1 else "dense models"


# -- bytes ------------------------------------------------------------------------------------------------------------
#
#     expected bytes of a device = counted x (1 + SLACK) + its memory x OUTSIDE
#
# *Counted* are state, kept activations and one layer's backward. The *band* is the half-width, relative to the expected
# bytes, that holds 90 % of devices: the error of the counted bytes (`Profile.memory_error`) and that of the slack are
# independent, so their squares add. The error is taken as normal.


FORMULAS_ERROR = 0.05
"""Of bytes by formula. 34 stages of H20 logs miss by -1.3 to -0.2 % (images of the first stages fitted; bench/
published.py), 12 kinds of layers by 0.5 % of autograd's bytes at most (tests, at a quarter of their widths); OmniBal's
Table 5 has four stages 8 and 22 % above and 7 and 6 % below what is expected, of packs that are not published. Of the
38 the band holds 35."""

COUNTED_ERROR = 0.01
"""Of bytes counted on real layers (`profile --traced`) or measured (`probe`): saved bytes are exact to the byte in 92
of 97 families (bench/columns/traced.py); state stays by formula, 0.2 to 0.8 % too low on H20."""

SLACK = 0.035
"""Of the counted bytes: the allocator's rounding and fragmentation, buffers and workspaces of libraries. What torch's
allocator reserved at most is 1.009 to 1.069 times the counted bytes of those 34 stages, mean 1.035 (0.5 % of it in
tensors)."""

SLACK_ERROR = 0.027
"""Of the counted bytes: it holds 32 of the 34."""

OUTSIDE = 0.0125
"""Of a device's memory (1.0 GiB of 80): CUDA context, cuBLAS and NCCL, which torch's allocator does not hold. Reports
of what torch does not hold go from 0.2 to 2 GB a process; assumed, not measured here."""

_NORMAL = NormalDist()
_EDGE = _NORMAL.inv_cdf(0.95)  # standard deviations from the middle to either end of what holds 90 %


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBand:
    """What is expected next to the counted bytes, and how far the truth may be from the expectation."""

    half_width: float  # of the expected bytes: 5 % of devices need more, 5 % less
    slack: float = 0.0  # of the counted bytes
    outside: float = 0.0  # of the device's memory

    def largest_share(self, risk: float) -> float:
        """Return the share of a memory that may be expected to fill, where it does not suffice with chance `risk`."""
        return 1.0 / (1.0 + self.half_width / _EDGE * _NORMAL.inv_cdf(1.0 - risk))

    def largest_counted(self, risk: float) -> float:
        """Return the same share of the bytes that are counted."""
        return (self.largest_share(risk) - self.outside) / (1.0 + self.slack)

    def misfit_chance(self, share: float) -> float:
        """Return the chance that a device expected to fill `share` of its memory needs more than all of it."""
        if share <= 0:
            return 0.0
        return 1.0 - _NORMAL.cdf((1.0 / share - 1.0) * _EDGE / self.half_width)

    def verdict(self, peak_bytes: float, total_bytes: float) -> str:
        """Return the expected peak, the range that holds 90 % of devices in % of their memory, and the risk.

        >>> memory_band(None).verdict(72 * 2**30, 80 * 2**30)
        '72.0 GiB (-15 % / -5 %) of 80.0; 0.065 % chance of running out of memory'
        """
        share = peak_bytes / total_bytes
        low, high = (100.0 * (share * (1.0 + sign * self.half_width) - 1.0) for sign in (-1, 1))
        chance = self.misfit_chance(share)
        held = f"{peak_bytes / GIB:.1f} GiB ({round(low):+d} % / {round(high):+d} %) of {total_bytes / GIB:.1f}"
        if chance > 0.5:
            return f"{held}, which DOES NOT FIT"
        odds = f"; {100 * chance:.2g} % chance of running out of memory" if chance >= 1e-4 else ""
        return f"{held}{odds}"


def memory_band(profile: Profile | None) -> MemoryBand:
    """The band of what this profile prices; None: of the formulas. What a probe measured includes what lies outside.

    >>> band = memory_band(None)
    >>> round(band.largest_share(0.05), 3)
    0.946
    """
    error = FORMULAS_ERROR if profile is None else profile.memory_error
    probed = profile is not None and profile.method == "probed"
    return MemoryBand(slack=SLACK, outside=0.0 if probed else OUTSIDE, half_width=math.hypot(error, SLACK_ERROR))


def measured_band(*, allocator: bool) -> MemoryBand:
    """Return the band of a peak measured on the device; `allocator`: by what CUDA's held, without its slack."""
    if not allocator:
        return MemoryBand(half_width=COUNTED_ERROR)
    return MemoryBand(slack=SLACK, half_width=math.hypot(COUNTED_ERROR, SLACK_ERROR))
