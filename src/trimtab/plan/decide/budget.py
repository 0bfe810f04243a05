"""How much of a device's memory the plan may use, and of its host's."""

from __future__ import annotations

import math
from dataclasses import dataclass

from trimtab.errors import PlanError
from trimtab.plan.options import PlanOptions
from trimtab.specs import ClusterSpec, DeviceSpec
from trimtab.units import MIB, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """Bytes of one device: all that may be used, and the part of it that stays free."""

    total_bytes: int
    reserve_bytes: int
    host_bytes: float = math.inf  # of host memory, for what one device offloads

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
        host = host_memory_bytes(device, options) if options.offload else math.inf
        return MemoryBudget(total_bytes=total, reserve_bytes=reserve, host_bytes=host)


def host_memory_bytes(device: DeviceSpec, options: PlanOptions) -> int:
    """What was asked for; or half of the device's share of its vendor's own server, the rest being for the data."""
    if options.host_memory_bytes is not None:
        return options.host_memory_bytes
    if device.host_memory_bytes is None:
        raise PlanError(
            f"offload was asked for, and nothing says how much host memory servers with {device.name} have: give "
            "--host-memory, a device's share of it"
        )
    return device.host_memory_bytes // 2


def host_bytes_per_s(device: DeviceSpec, options: PlanOptions) -> float:
    """What was asked for, or the device's published link."""
    rate = device.host_bytes_per_s if options.host_bytes_per_s is None else options.host_bytes_per_s
    if rate is None:
        raise PlanError(
            f"offload was asked for, and no link of {device.name} to host memory is known: give --host-link, bytes a "
            "second in one direction, as in 50GB"
        )
    return rate
