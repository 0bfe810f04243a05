"""How much of a device's memory the plan may use."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import PlanError
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec
from trimtab.units import MIB, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of one device: all that may be used, and the part of it that stays free."""

    total_bytes: int
    reserve_bytes: int

    @staticmethod
    def of(cluster: ClusterSpec, options: PlanOptions) -> MemoryBudget:
        device = cluster.device
        total = options.memory_bytes if options.memory_bytes is not None else device.memory_bytes
        if 0 < total < MIB:
            raise PlanError(f"{total} bytes of memory per device were asked for: give a unit, as in {total}GiB")
        if not 0 < total <= device.memory_bytes:
            raise PlanError(
                f"{format_bytes(total)} of memory per device was asked for, and {device.name} has "
                f"{format_bytes(device.memory_bytes)}: give that or less, or another device"
            )
        reserve = int(total * options.reserve) if options.reserve_bytes is None else options.reserve_bytes
        if not 0 <= reserve < total:
            raise PlanError(
                f"{format_bytes(reserve)} of {format_bytes(total)} were to stay free, which leaves nothing: free less"
            )
        return MemoryBudget(total_bytes=total, reserve_bytes=reserve)
