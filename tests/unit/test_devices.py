"""Devices and clusters by name."""

from __future__ import annotations

import pytest

from trimtab.costs.devices import DEVICES, find_device, parse_cluster
from trimtab.errors import TrimtabError


@pytest.mark.parametrize(
    ("said", "meant"),
    [
        ("a100", "A100-80GB"),
        ("A100-80", "A100-80GB"),
        ("A100 80gb", "A100-80GB"),
        ("NVIDIA A100-SXM4-80GB", "A100-80GB"),
        ("H100", "H100-80GB"),
        ("NVIDIA H100 80GB HBM3", "H100-80GB"),
        ("h200", "H200"),
        ("NVIDIA H200", "H200"),
        ("H20", "H20"),
        ("b200", "B200"),
    ],
)
def test_a_device_is_found_however_it_is_spelt(said, meant):
    assert find_device(said) is DEVICES[meant]


@pytest.mark.parametrize("said", ["V100", "", "H", "A100-40GB", "GB"])
def test_an_unknown_device_lists_the_known_ones(said):
    with pytest.raises(TrimtabError, match=r"the table holds A100-80GB, H100-80GB, H200, H20, B200; choose one"):
        find_device(said)


def test_every_device_has_a_source_and_plausible_figures():
    for name, device in DEVICES.items():
        assert device.name == name
        assert device.source
        # a GPU does 20-400 flop in the time it reads one byte, and holds less than its label's GB
        assert 20 < device.peak_flops / device.memory_bytes_per_s < 400
        assert device.link_bytes_per_s < device.memory_bytes_per_s
        assert 79e9 < device.memory_bytes < 192e9


def test_a_cluster_is_parsed_from_number_and_device():
    cluster = parse_cluster("32xA100-80")
    assert (cluster.device.name, cluster.num_nodes, cluster.devices_per_node) == ("A100-80GB", 4, 8)
    assert parse_cluster("4 x h200").num_devices == 4
    assert parse_cluster("H100").num_devices == 1
    assert parse_cluster("16xB200", devices_per_node=4).num_nodes == 4


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ("32", "'32' names no cluster: write the number and the kind of its devices"),
        ("", "names no cluster"),
        ("0xH200", "is an empty cluster: give at least one device"),
        ("12xH200", "12 devices do not fill nodes of 8: give a multiple of 8"),
        ("8xV100", "no device is called 'V100'"),
    ],
)
def test_a_bad_cluster_says_what_to_write(said, message):
    with pytest.raises(TrimtabError, match=message):
        parse_cluster(said)
