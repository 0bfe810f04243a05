"""How much of a device's memory the plan may use."""

from __future__ import annotations

from dataclasses import dataclass

from trimtab.errors import PlanError
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec
from trimtab.units import format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of one device: all that may be used, and the part of it that stays free."""

    total_bytes: int
    reserve_bytes: int

    @staticmethod
    def of(cluster: ClusterSpec, options: PlanOptions) -> MemoryBudget:
        device = cluster.device
        total = options.memory_bytes if options.memory_bytes is not None else device.memory_bytes
        if not 0 < total <= device.memory_bytes:
            raise PlanError(
                f"{format_bytes(total)} of memory per device was asked for, and {device.name} has "
                f"{format_bytes(device.memory_bytes)}: give that or less, or another device"
            )
        return MemoryBudget(total_bytes=total, reserve_bytes=int(total * options.reserve))
