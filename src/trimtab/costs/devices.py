"""Published peaks of accelerators, and clusters named in a few characters: "32xA100-80GB"."""

from __future__ import annotations

import re
from types import MappingProxyType

from trimtab.errors import TrimtabError
from trimtab.specs import ClusterSpec, DeviceSpec
from trimtab.units import GIB

# Dense bf16 rates: datasheets of Hopper and later print the rate with 2:4 sparsity, twice the figure here.
# NVLink figures are printed for both directions together: one direction is half.
# Memory is no datasheet figure: it is what CUDA reports to a process (`total capacity` in PyTorch's messages),
# rounded down; ECC and the driver keep the rest of the GB on the label.
DEVICES = MappingProxyType(
    {
        device.name: device
        for device in (
            DeviceSpec(
                name="A100-80GB",
                memory_bytes=int(79.1 * GIB),
                peak_flops=312e12,
                memory_bytes_per_s=2.039e12,
                link_bytes_per_s=300e9,
                source="NVIDIA A100 datasheet, SXM4 80 GB: 312 TFLOPS bf16 dense, 2,039 GB/s, NVLink 600 GB/s",
            ),
            DeviceSpec(
                name="H100-80GB",
                memory_bytes=int(79.1 * GIB),
                peak_flops=989e12,
                memory_bytes_per_s=3.35e12,
                link_bytes_per_s=450e9,
                source="NVIDIA H100 datasheet, SXM5: 1,979 TFLOPS bf16 with sparsity, 3.35 TB/s, NVLink 900 GB/s",
            ),
            DeviceSpec(
                name="H200",
                memory_bytes=int(139.7 * GIB),
                peak_flops=989e12,
                memory_bytes_per_s=4.8e12,
                link_bytes_per_s=450e9,
                source="NVIDIA H200 datasheet, SXM: 1,979 TFLOPS bf16 with sparsity, 141 GB, 4.8 TB/s, NVLink 900 GB/s",
            ),
            DeviceSpec(
                name="H20",
                memory_bytes=int(95.0 * GIB),
                peak_flops=148e12,
                memory_bytes_per_s=4.0e12,
                link_bytes_per_s=450e9,
                source="NVIDIA H20 96 GB as server vendors list it: 148 TFLOPS bf16 dense, 4.0 TB/s, NVLink 900 GB/s",
            ),
            DeviceSpec(
                name="B200",
                memory_bytes=int(178.3 * GIB),
                peak_flops=2250e12,
                memory_bytes_per_s=8.0e12,
                link_bytes_per_s=900e9,
                source="NVIDIA HGX B200 at 1,000 W: 4.5 PFLOPS bf16 with sparsity, 8 TB/s, NVLink 1.8 TB/s",
            ),
        )
    }
)
"""One row per device, in bytes, bytes/s and flop/s; each with its source."""

_CLUSTER = re.compile(r"^\s*(?:([0-9]+)\s*[xX*]\s*)?([A-Za-z].*?)\s*$")


def find_device(name: str, *, beside: DeviceSpec | None = None) -> DeviceSpec:
    """The row of `DEVICES` that `name` means: case, dashes, blanks, a vendor's name, "SXM" and "GB" do not matter.

    A beginning of exactly one name is enough: "a100", "A100-80", "NVIDIA H100 80GB HBM3". `beside`: one more device,
    known from a measurement.

    >>> find_device("a100").peak_flops / 1e12
    312.0
    """
    wanted = _squeeze(name)
    for device in (*DEVICES.values(), *([] if beside is None else [beside])):
        if _squeeze(device.name) == wanted:
            return device
    found = [device for device in DEVICES.values() if wanted and _squeeze(device.name).startswith(wanted)]
    if len(found) == 1:
        return found[0]
    raise TrimtabError(
        f"no device is called {name!r}: the table holds {', '.join(DEVICES)}; choose one of them, "
        "or give a DeviceSpec with the figures of your own device"
    )


def parse_cluster(text: str, *, devices_per_node: int = 8, beside: DeviceSpec | None = None) -> ClusterSpec:
    """A cluster from "32xA100-80GB", "4 x H200" or "H100" (one device).

    Fewer devices than a node holds make one smaller node; more must fill their nodes. `beside`: see `find_device`.

    >>> cluster = parse_cluster("32xA100-80GB")
    >>> cluster.num_nodes, cluster.devices_per_node
    (4, 8)
    """
    match = _CLUSTER.match(text)
    if match is None:
        raise TrimtabError(
            f"{text!r} names no cluster: write the number and the kind of its devices, for example 32xA100-80GB"
        )
    device = find_device(match.group(2), beside=beside)
    count = int(match.group(1) or 1)
    if count < 1 or devices_per_node < 1:
        raise TrimtabError(
            f"{text!r} in nodes of {devices_per_node} is an empty cluster: give at least one device and one a node"
        )
    if count > devices_per_node and count % devices_per_node:
        raise TrimtabError(
            f"{count} devices do not fill nodes of {devices_per_node}: give a multiple of {devices_per_node}, "
            "or another number of devices per node"
        )
    per_node = min(count, devices_per_node)
    return ClusterSpec(device=device, num_nodes=count // per_node, devices_per_node=per_node)


def _squeeze(name: str) -> str:
    text = re.sub(r"[^a-z0-9]", "", name.lower())
    return re.sub(r"nvidia|tensorcoregpu|sxm[0-9]?|hbm[0-9]?e?|gi?b", "", text)
