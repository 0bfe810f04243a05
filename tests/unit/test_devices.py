"""costs/ (devices): devices and clusters by name."""

import pytest
from plan_cases import tile_samples

from trimtab import PlanOptions, describe, load_plan, make_plan, write_plan
from trimtab.costs.devices import DEVICES, find_device, parse_cluster
from trimtab.placement.machine import parse_machine
from trimtab.plan.file.reload import find_cluster
from trimtab.units import GIB
from yaml_tables import read_table


@pytest.mark.parametrize(("said", "meant"), read_table("published", "devices"))
def test_a_device_is_found_however_it_is_spelt(said, meant):
    assert find_device(said) is DEVICES[meant]


def test_every_device_has_a_source_and_plausible_figures():
    for name, device in DEVICES.items():
        assert device.name == name
        assert device.source
        # an accelerator does 30-600 flop in the time it reads one byte, and holds at most the 288 GiB of the largest
        assert 30 < device.peak_flops / device.memory_bytes_per_s < 600
        assert 15 < device.memory_bytes_per_s / device.link_bytes_per_s * 10 < 800
        assert 16e9 < device.memory_bytes < 288 * 2**30
        assert find_device(name) is device
    assert len(DEVICES) >= 25


def test_a_cluster_is_parsed_from_number_and_device():
    cluster = parse_cluster("32xA100-80")
    assert (cluster.device.name, cluster.num_nodes, cluster.devices_per_node) == ("A100-80GB", 4, 8)
    assert parse_cluster("4 x h200").num_devices == 4
    assert parse_cluster("H100").num_devices == 1
    assert parse_cluster("16xB200", devices_per_node=4).num_nodes == 4


@pytest.mark.parametrize(
    ("said", "gigabytes"), [("400Gb", 50), ("8x400Gb", 50), ("400Gb x8", 50), ("4 x 400Gb/s", 25), ("4x50GB", 25)]
)
def test_links_between_nodes_are_shared_by_the_devices_of_a_node(said, gigabytes):
    assert parse_cluster("16xH100", node_link=said).node_link_bytes_per_s == gigabytes * 1e9


def test_a_node_is_its_vendors_own_unless_said():
    assert [parse_cluster(f"16x{name}").node_link_bytes_per_s / 1e9 for name in ("A100", "H100", "B300", "L40S")] == [
        *(25, 50, 100, 25)
    ]


@pytest.mark.parametrize(
    ("degree", "stride", "gigabytes"), [(8, 1, 450), (4, 2, 450), (16, 1, 400), (8, 2, 200), (4, 8, 50), (2, 16, 50)]
)
def test_a_ring_leaves_a_node_by_the_ports_of_its_members(degree, stride, gigabytes):
    cluster = parse_cluster("64xH100")
    assert cluster.ring_bytes_per_s(degree, stride=stride) == gigabytes * 1e9


def test_a_device_from_a_file_plans_and_is_kept_in_the_plan(tmp_path):
    mine = tmp_path / "mine.yaml"
    mine.write_text(
        "name: Mine\nmemory_bytes: 192GiB\npeak_flops: 300e12\nmemory_bytes_per_s: 2e+12\nlink_bytes_per_s: 1.0e11\n"
        "source: a letter\n"
    )
    cluster = parse_cluster(f"8x{mine}")
    assert (cluster.num_devices, cluster.device.memory_bytes, cluster.device.peak_flops) == (8, 192 * 2**30, 3e14)
    details = make_plan(describe("InternVL-Chat-V1-5"), tile_samples(60), cluster, PlanOptions(pp=4, dp=2))
    write_plan(details, tmp_path / "plan")
    mine.unlink()
    assert find_cluster(load_plan(tmp_path / "plan")) == cluster


# -- Machines named in a few characters -------------------------------------------------------------------------------


def test_sizes_names_and_what_is_free_on_them():
    machine = parse_machine("2x24GiB, 40GiB,A100-80GB:31GiB,2xH200", cpu="64GiB", disk=True)
    assert [gpu.index for gpu in machine.gpus] == list(range(6))
    assert [gpu.free_bytes for gpu in machine.gpus[:4]] == [24 * GIB, 24 * GIB, 40 * GIB, 31 * GIB]
    assert [gpu.name for gpu in machine.gpus] == [None, None, None, "A100-80GB", "H200", "H200"]
    assert machine.gpus[4].memory_bytes_per_s == 4.8e12
    assert machine.cpu_bytes == 64 * GIB
    assert machine.disk
