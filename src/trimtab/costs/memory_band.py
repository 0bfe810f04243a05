"""How far real memory is from what is counted: what nobody counts, and the band of both, with the evidence of each.

    expected bytes of a device = counted x (1 + SLACK) + its memory x OUTSIDE

*Counted* are state, kept activations and one layer's backward. The *band* is the half-width, relative to the expected
bytes, that holds 90 % of devices: the error of the counted bytes (`Profile.memory_error`) and that of the slack are
independent, so their squares add. The error is taken as normal. `bench/memory_band.py` sets measured peaks beside it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from statistics import NormalDist

from trimtab.specs import Profile

FORMULAS_ERROR = 0.05
"""Of bytes by formula. 34 stages of H20 logs miss by -1.3 to -0.2 % (images of the first stages fitted; bench/
published_h20.py), 12 layers at full width by 0.3 % of autograd's bytes (bench/costs.py); OmniBal's Table 5 has four
stages 8 and 22 % above and 7 and 6 % below what is expected, of packs that are not published. Of the 38 the band holds
35 (bench/memory_band.py)."""

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
    """What is expected beside the counted bytes, and how far the truth may be from the expectation."""

    half_width: float  # of the expected bytes: 5 % of devices need more, 5 % less
    slack: float = 0.0  # of the counted bytes
    outside: float = 0.0  # of the device's memory

    def largest_share(self, risk: float) -> float:
        """Of a memory that may be expected to fill, if the chance that it does not suffice is to be `risk`."""
        return 1.0 / (1.0 + self.half_width / _EDGE * _NORMAL.inv_cdf(1.0 - risk))

    def largest_counted(self, risk: float) -> float:
        """The same of the bytes that are counted."""
        return (self.largest_share(risk) - self.outside) / (1.0 + self.slack)

    def misfit_chance(self, share: float) -> float:
        """That a device which is expected to fill `share` of its memory needs more than all of it."""
        if share <= 0:
            return 0.0
        return 1.0 - _NORMAL.cdf((1.0 / share - 1.0) * _EDGE / self.half_width)

    def verdict(self, share: float) -> str:
        """In words, for a device that is expected to fill `share` of its memory; the ends hold 90 % of devices.

        >>> memory_band(None).verdict(0.9)
        'it fits at -15 % .. -5 %, with a chance of 0.065 % that it does not'
        """
        low, high = (100.0 * (share * (1.0 + sign * self.half_width) - 1.0) for sign in (-1, 1))
        chance = self.misfit_chance(share)
        at = f"{round(low):+d} % .. {round(high):+d} %"
        if chance > 0.5:
            return f"it DOES NOT FIT: {at} of its memory"
        odds = f", with a chance of {100 * chance:.2g} % that it does not" if chance >= 1e-4 else ""
        return f"it fits at {at}{odds}"


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
    """Of a peak that was measured on the device itself; `allocator`: by what CUDA's held, without its slack."""
    if not allocator:
        return MemoryBand(half_width=COUNTED_ERROR)
    return MemoryBand(slack=SLACK, half_width=math.hypot(COUNTED_ERROR, SLACK_ERROR))
