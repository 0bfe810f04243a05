"""How much of a device's memory the plan may use."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.costs.memory_band import MemoryBand, memory_band
from trimtab.errors import PlanError
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec
from trimtab.units import MIB, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of one device: all that it has, and how many of them a plan may expect to fill."""

    total_bytes: int
    fill_bytes: float
    band: MemoryBand
    slack: float = 0.0  # expected beside the counted bytes, as a share of them
    outside_bytes: float = 0.0  # and whatever they are

    @staticmethod
    def of(cluster: ClusterSpec, options: PlanOptions) -> MemoryBudget:
        """By the risk that was accepted; where a probe or an older plan named bytes to keep free, by those."""
        device = cluster.device
        total = options.memory_bytes if options.memory_bytes is not None else device.memory_bytes
        if 0 < total < MIB:
            raise PlanError(f"{total} bytes of memory per device were asked for: give a unit, as in {total}GiB")
        if not 0 < total <= device.memory_bytes:
            raise PlanError(
                f"{format_bytes(total)} of memory per device was asked for, and {device.name} has "
                f"{format_bytes(device.memory_bytes)}: give that or less, or another device"
            )
        band = memory_band(options.profile)
        reserve = options.reserve_bytes
        if reserve is not None:
            if not 0 <= reserve < total:
                raise PlanError(
                    f"{format_bytes(reserve)} of {format_bytes(total)} were to stay free, which leaves nothing: free "
                    "less"
                )
            return MemoryBudget(total_bytes=total, fill_bytes=total - reserve, band=band)
        return MemoryBudget(
            total_bytes=total,
            fill_bytes=total * band.largest_share(options.risk),
            band=band,
            slack=band.slack,
            outside_bytes=total * band.outside,
        )
