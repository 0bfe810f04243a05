"""Machines named in a few characters."""

from __future__ import annotations

from trimtab.placement.machine import parse_machine
from trimtab.units import GIB


def test_sizes_names_and_what_is_free_on_them():
    machine = parse_machine("2x24GiB, 40GiB,A100-80GB:31GiB,2xH200", cpu="64GiB", disk=True)
    assert [gpu.index for gpu in machine.gpus] == list(range(6))
    assert [gpu.free_bytes for gpu in machine.gpus[:4]] == [24 * GIB, 24 * GIB, 40 * GIB, 31 * GIB]
    assert [gpu.name for gpu in machine.gpus] == [None, None, None, "A100-80GB", "H200", "H200"]
    assert machine.gpus[4].memory_bytes_per_s == 4.8e12
    assert machine.cpu_bytes == 64 * GIB
    assert machine.disk
