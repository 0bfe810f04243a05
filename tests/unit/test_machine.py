"""Machines named in a few characters."""

from __future__ import annotations

import pytest

from refusals import refused
from trimtab.errors import PartitionError, TrimtabError
from trimtab.placement.machine import Machine, machine_of, parse_machine
from trimtab.units import GIB


def test_sizes_names_and_what_is_free_on_them():
    machine = parse_machine("2x24GiB, 40GiB,A100-80GB:31GiB,2xH200", cpu="64GiB", disk=True)
    assert [gpu.index for gpu in machine.gpus] == list(range(6))
    assert [gpu.free_bytes for gpu in machine.gpus[:4]] == [24 * GIB, 24 * GIB, 40 * GIB, 31 * GIB]
    assert [gpu.name for gpu in machine.gpus] == [None, None, None, "A100-80GB", "H200", "H200"]
    assert machine.gpus[4].memory_bytes_per_s == 4.8e12
    assert machine.cpu_bytes == 64 * GIB
    assert machine.disk


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "GPU"),
        ("24GiB,,24GiB", "GPU"),
        ("0x24GiB", ("0", "GPUs")),
        ("65x24GiB", ("65", "GPUs")),
        ("40x1GiB,40x2GiB", ("80", "GPUs")),
        ("24 stones", ()),
        ("2²", ()),  # a digit to str.isdigit, not to int
        ("9" * 5000, ()),
        ("H300", ()),
        ("24GiB:40GiB", ()),
        ("A100-80GB:90GiB", "A100-80GB"),
    ],
)
def test_what_is_no_machine_is_refused(text, reason):
    with refused(TrimtabError, reason):
        parse_machine(text)


def test_all_bad_groups_are_named_at_once():
    with pytest.raises(PartitionError) as error:
        parse_machine("0x24GiB,H300,9 stones")
    assert len(str(error.value).splitlines()) == 3


def test_a_machine_has_a_gpu_and_no_negative_memory():
    with refused(PartitionError, "GPU"):
        Machine(gpus=())
    with refused(PartitionError, "-1"):
        machine_of([-1])
