"""Published peaks of accelerators, and clusters named in a few characters: "32xA100-80GB"."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trimtab.errors import TrimtabError, join_problems, refuse_type
from trimtab.files import read_small
from trimtab.specs import ClusterSpec, DeviceSpec
from trimtab.typed_json import parse_yaml, read_typed
from trimtab.units import GIB, parse_bytes

# Of each device: memory in GiB, dense bf16 Tflop/s, GB/s of memory, GB/s of the link to another device of its node.
# Rates: datasheets of many devices print them with 2:4 sparsity, twice the figure here; GeForce cards' are those with
# sums in fp32. Links are printed for both directions together: one direction is half. Cards without a link of their
# own talk over PCIe x16: 31.5 GB/s one way in generation 4, 63 in generation 5.
# Memory is no datasheet figure where CUDA's report to a process is known (`total capacity` in PyTorch's messages),
# rounded down: ECC and the driver keep the rest of the GB on the label. "Label" behind a source: no report was found.
# A kind's first row is what its bare name means: "H100" is the SXM board.
_ROWS: tuple[tuple[str, float, float, float, float, str], ...] = (
    (
        "A100-80GB",
        79.1,
        312,
        2039,
        300,
        "NVIDIA A100 datasheet, SXM4 80 GB: 312 TFLOPS bf16 dense, 2,039 GB/s, NVLink 600 GB/s",
    ),
    ("A100-80GB-PCIe", 79.1, 312, 1935, 31.5, "NVIDIA A100 datasheet, PCIe 80 GB; PCIe Gen4 (NVLink joins two)"),
    ("A100-40GB", 39.3, 312, 1555, 300, "NVIDIA A100 datasheet, SXM4 40 GB; NVLink 600 GB/s"),
    ("A800-80GB", 79.1, 312, 2039, 200, "NVIDIA A800 datasheet: an A100 80 GB with NVLink 400 GB/s"),
    (
        "H100-80GB",
        79.1,
        989,
        3350,
        450,
        "NVIDIA H100 datasheet, SXM5: 1,979 TFLOPS bf16 with sparsity, 3.35 TB/s, NVLink 900 GB/s",
    ),
    ("H100-PCIe", 79.1, 756, 2000, 63, "NVIDIA H100 PCIe brief: 1,513 with sparsity; PCIe Gen5 (NVLink joins two)"),
    (
        "H100-NVL",
        93.0,
        835,
        3938,
        63,
        "NVIDIA H100 NVL brief: 1,671 with sparsity, 94 GB; PCIe Gen5 (NVLink joins two)",
    ),
    ("H800", 79.1, 989, 3350, 200, "NVIDIA H800 datasheet, SXM5: an H100 with NVLink 400 GB/s"),
    (
        "H200",
        139.7,
        989,
        4800,
        450,
        "NVIDIA H200 datasheet, SXM: 1,979 TFLOPS bf16 with sparsity, 141 GB, 4.8 TB/s, NVLink 900 GB/s",
    ),
    ("H200-NVL", 139.7, 835, 4800, 450, "NVIDIA H200 datasheet, NVL: 1,671 with sparsity; a bridge of four, 900 GB/s"),
    (
        "H20",
        95.0,
        148,
        4000,
        450,
        "NVIDIA H20 96 GB as server vendors list it: 148 TFLOPS bf16 dense, 4.0 TB/s, NVLink 900 GB/s",
    ),
    (
        "B200",
        178.3,
        2250,
        8000,
        900,
        "NVIDIA HGX B200 at 1,000 W: 4.5 PFLOPS bf16 with sparsity, 8 TB/s, NVLink 1.8 TB/s",
    ),
    ("B300", 251.4, 2250, 8000, 900, "NVIDIA HGX B300: 4,500 with sparsity, 270 GB (label); NVLink 1.8 TB/s"),
    ("GB200", 173.2, 2500, 8000, 900, "NVIDIA GB200 NVL72: 5,000 with sparsity, 186 GB (label); NVLink 1.8 TB/s"),
    ("GB300", 258.7, 2500, 8000, 900, "NVIDIA GB300 NVL72: 5,000 with sparsity, 20 TB by 72 (label); NVLink 1.8 TB/s"),
    (
        "V100-32GB",
        31.7,
        125,
        900,
        150,
        "NVIDIA V100 datasheet, SXM2 32 GB: 125 TFLOPS fp16 (it has no bf16), 900 GB/s, NVLink 300 GB/s",
    ),
    ("V100-16GB", 15.7, 125, 900, 150, "NVIDIA V100 datasheet, SXM2 16 GB; fp16, NVLink 300 GB/s"),
    ("A10", 22.0, 125, 600, 31.5, "NVIDIA A10 datasheet; PCIe Gen4"),
    ("A10G", 22.0, 70, 600, 31.5, "NVIDIA A10G as AWS lists it (G5): 140 with sparsity; PCIe Gen4"),
    ("A40", 44.3, 149.7, 696, 31.5, "NVIDIA A40 datasheet; PCIe Gen4 (NVLink joins two)"),
    ("A6000", 47.5, 154.8, 768, 31.5, "NVIDIA RTX A6000 datasheet: 309.7 with sparsity; PCIe Gen4 (NVLink joins two)"),
    ("6000-Ada", 47.4, 364.2, 960, 31.5, "NVIDIA RTX 6000 Ada datasheet: 728.5 with sparsity; PCIe Gen4"),
    ("L4", 21.9, 121, 300, 31.5, "NVIDIA L4 datasheet: 242 with sparsity; PCIe Gen4"),
    ("L40", 44.3, 181, 864, 31.5, "NVIDIA L40 datasheet: 362 with sparsity; PCIe Gen4"),
    ("L40S", 44.3, 362, 864, 31.5, "NVIDIA L40S datasheet: 733 with sparsity; PCIe Gen4"),
    ("L20", 44.3, 119.5, 864, 31.5, "NVIDIA L20 as server vendors list it; PCIe Gen4"),
    ("RTX-3090", 23.6, 71, 936, 31.5, "NVIDIA Ampere GA102 whitepaper, sums in fp32; PCIe Gen4 (NVLink joins two)"),
    ("RTX-4090", 23.6, 165.2, 1008, 31.5, "NVIDIA Ada GPU whitepaper, sums in fp32; PCIe Gen4"),
    ("RTX-5090", 31.3, 209.5, 1792, 63, "NVIDIA RTX Blackwell GPU whitepaper, sums in fp32; PCIe Gen5"),
    ("MI210", 63.9, 181, 1638, 150, "AMD MI210 data sheet; three Infinity Fabric links of 100 GB/s both ways"),
    ("MI250X", 63.9, 191.5, 1638, 50, "AMD MI250X data sheet, one of its two dies, as torch sees it: 383 for both"),
    ("MI300X", 191.6, 1307.4, 5300, 448, "AMD MI300X data sheet; seven Infinity Fabric links, 896 GB/s both ways"),
    ("MI325X", 255.6, 1307.4, 6000, 448, "AMD MI325X data sheet; seven Infinity Fabric links, 896 GB/s both ways"),
    ("MI350X", 287.6, 2306.9, 8000, 537, "AMD MI350X data sheet; seven Infinity Fabric links, 1,075 GB/s both ways"),
    ("MI355X", 287.6, 2516.6, 8000, 537, "AMD MI355X data sheet; seven Infinity Fabric links, 1,075 GB/s both ways"),
    ("Gaudi-2", 89.4, 432, 2450, 262, "Intel Gaudi 2 white paper, 96 GB (label); 21 ports of 100 GbE in the node"),
    ("Gaudi-3", 119.2, 1835, 3700, 525, "Intel Gaudi 3 white paper, 128 GB (label); 21 ports of 200 GbE in the node"),
    ("Ascend-910B", 59.6, 313, 1600, 196, "Huawei Atlas 800T A2 with 910B3, 64 GB (label); HCCS 392 GB/s both ways"),
    ("Ascend-910C", 59.6, 376, 1600, 196, "arXiv:2506.12708: one of its two dies, 64 GB (label), 196 GB/s one way"),
    ("TPU-v5p", 88.4, 459, 2765, 600, "Google Cloud TPU v5p, 95 GB (label); 4,800 Gbit/s between chips"),
    ("TPU-v6e", 29.8, 918, 1640, 448, "Google Cloud TPU v6e, 32 GB (label); 3,584 Gbit/s between chips"),
)
DEVICES = MappingProxyType(
    {
        name: DeviceSpec(
            name=name,
            memory_bytes=int(memory * GIB),
            peak_flops=rate * 1e12,
            memory_bytes_per_s=memory_rate * 1e9,
            link_bytes_per_s=link * 1e9,
            source=source,
        )
        for name, memory, rate, memory_rate, link, source in _ROWS
    }
)
"""One row per device, in bytes, bytes/s and flop/s; each with its source."""

# GB/s of one device to other nodes, one direction, in the node that its vendor describes; 25 for others.
_NODE_LINK = {
    "A100-80GB": (25, "NVIDIA DGX A100: eight ports of 200 Gbit/s for eight devices"),
    "H100-80GB": (50, "NVIDIA DGX H100: eight ports of 400 Gbit/s"),
    "H200": (50, "NVIDIA DGX H200: eight ports of 400 Gbit/s"),
    "B200": (50, "NVIDIA DGX B200: eight ports of 400 Gbit/s"),
    "B300": (100, "NVIDIA DGX B300: eight ports of 800 Gbit/s"),
    "GB200": (50, "NVIDIA GB200 NVL72: a port of 400 Gbit/s a device"),
    "GB300": (100, "NVIDIA GB300 NVL72: a port of 800 Gbit/s a device"),
    "MI300X": (50, "AMD Instinct MI300X cluster reference architecture: a port of 400 Gbit/s a device"),
    "MI325X": (50, "AMD Instinct MI325X cluster reference architecture: a port of 400 Gbit/s a device"),
    "MI355X": (50, "AMD Instinct MI355X platform: a port of 400 Gbit/s a device"),
    "Gaudi-3": (75, "Intel Gaudi 3 white paper: three of 24 ports of 200 Gbit/s leave the node"),
}
_OTHER_NODE_LINK = 25

_CLUSTER = re.compile(r"^\s*(?:([0-9]{1,100})\s*[xX*]\s*)?([A-Za-z./].*?)\s*$")
_PORTS = re.compile(
    r"(?:(?P<before>[0-9]{1,3})\s*x\s*)?(?P<rate>[0-9]{1,5}(?:\.[0-9]+)?)\s*G(?P<unit>[bB])(?:it)?(?:/s|ps)?"
    r"(?:\s*x\s*(?P<behind>[0-9]{1,3}))?"
)
_POWER = re.compile(r"[0-9]+(\.[0-9]*)?[eE]\+?[0-9]+")
_FILE = (".yaml", ".yml", ".json")
_VENDORS = "nvidia|geforce|rtx|amd|instinct|intel|huawei|google"
_NO_PART = re.compile(rf"{_VENDORS}|generation|tensorcoregpu|sxm[0-9]?|hbm[0-9]?e?|(?<=[0-9])gi?b")


def find_device(name: str, *, beside: DeviceSpec | None = None) -> DeviceSpec:
    """The row of `DEVICES` that `name` means: case, dashes, blanks, a vendor's name, "SXM" and "GB" do not matter.

    Use it to look up memory (bytes), peaks (FLOP/s) and links (bytes/s) of a device.

    A beginning is enough where all devices that begin so are of one kind; of several, the first of the table is meant:
    "a100" is the one of 80 GB, "NVIDIA H100 80GB HBM3" the SXM board. A name that ends in .yaml or .json is a file
    with a device's own figures (`read_device`). `beside`: one more device, known from a measurement.

    >>> find_device("a100").peak_flops / 1e12
    312.0
    """
    refuse_type("name", name, str, 'one as in "H100"')
    if name.lower().endswith(_FILE):
        return read_device(name)
    # a whole name first, so that "H100-PCIe" is never taken for the beginning of another
    wanted = _squeeze(name)
    for device in (*DEVICES.values(), *([] if beside is None else [beside])):
        if _squeeze(device.name) == wanted:
            return device
    # then a beginning, if all that begin so are of one kind
    found = [device for device in DEVICES.values() if wanted and _squeeze(device.name).startswith(wanted)]
    if found and len({device.name.split("-")[0] for device in found}) == 1:
        return found[0]
    # else name what may have been meant
    near = difflib.get_close_matches(wanted, map(_squeeze, DEVICES), n=3, cutoff=0.5)
    meant = [device.name for device in DEVICES.values() if device in found or _squeeze(device.name) in near]
    raise TrimtabError(
        f"no device is called {name!r}"
        + (f" (did you mean {', '.join(meant)}?)" if meant else "")
        + f": the table holds {', '.join(DEVICES)}; choose one of them, or give a file with the figures of your own "
        "device, as in my.yaml"
    )


_MOST_DEVICES = 1_000_000


def read_device(path: str | Path) -> DeviceSpec:
    """Read a device that is in no table from a YAML or JSON file with the fields of `DeviceSpec`.

    Sizes may carry a unit: `memory_bytes: 64GiB`; rates are numbers in flop/s or bytes/s: `peak_flops: 300e12`.
    """
    try:
        read = parse_yaml(read_small(Path(path)).decode("utf-8"))
    except (OSError, ValueError) as error:
        raise TrimtabError(f"{path} should hold the figures of a device and cannot be read: {error}") from None
    problems: list[str] = []
    device = read_typed(DeviceSpec, _spell_out(read), "", problems, read_number=_positive)
    if problems:
        raise TrimtabError(join_problems([f"{path} is no device: {problem}" for problem in problems]))
    assert isinstance(device, DeviceSpec)
    return device


def parse_cluster(
    text: str, *, devices_per_node: int = 8, node_link: str | None = None, beside: DeviceSpec | None = None
) -> ClusterSpec:
    """Make a cluster of "32xA100-80GB", "4 x H200", "H100" (one device) or "8xmy.yaml" (see `find_device`).

    Use it for the cluster that `make_plan` takes. Raises `TrimtabError` for what is no cluster.

    Fewer devices than a node holds make one smaller node; more must fill their nodes. `node_link`: see
    `parse_node_link`; without it, the ports of the node that the device's vendor describes. `beside`: see
    `find_device`.

    >>> cluster = parse_cluster("32xA100-80GB")
    >>> cluster.num_nodes, cluster.devices_per_node
    (4, 8)
    """
    refuse_type("cluster", text, str, 'one as in "32xA100-80GB"')
    # a mixture is understood, to be refused by name
    kinds = [kind.strip() for kind in re.split(r"[+,]", text)]
    if len(kinds) > 1 and all(_CLUSTER.match(kind) for kind in kinds):
        raise TrimtabError(
            f"{text!r} names {len(kinds)} kinds of devices: plan each by itself ({kinds[0]}), or all as the slowest"
        )
    match = _CLUSTER.match(text)
    if match is None:
        raise TrimtabError(f"{text!r} names no cluster: write number and kind of its devices, as in 32xA100-80GB")
    # whole nodes, or one smaller node
    device = find_device(match.group(2), beside=beside)
    count = int(match.group(1) or 1)
    if count < 1 or devices_per_node < 1:
        raise TrimtabError(f"{text!r} in nodes of {devices_per_node} is empty: give a device and one a node")
    if count > _MOST_DEVICES:
        raise TrimtabError(f"{text!r} has {count} devices, more than any cluster: give up to {_MOST_DEVICES:,}")
    if count > devices_per_node and count % devices_per_node:
        raise TrimtabError(f"{count} devices do not fill nodes of {devices_per_node}: give a multiple, or other nodes")
    # the network: as given, else as the vendor builds the node
    per_node = min(count, devices_per_node)
    if node_link is None:
        gigabytes, _ = _NODE_LINK.get(device.name, (_OTHER_NODE_LINK, ""))
        link = gigabytes * 1e9
    else:
        link = parse_node_link(node_link, devices_per_node=per_node)
    return ClusterSpec(
        device=device, num_nodes=count // per_node, devices_per_node=per_node, node_link_bytes_per_s=link
    )


def parse_node_link(text: str, *, devices_per_node: int) -> float:
    """Bytes per second of one device to other nodes, from "8x400Gb" or "400Gb x8": ports of a node, and their rate.

    "Gb" are gigabits, "GB" gigabytes a second. Without a number of ports every device has one of its own; with it, the
    devices of a node share the ports. Half the rate says a network that is oversubscribed twice.

    >>> [parse_node_link(text, devices_per_node=8) / 1e9 for text in ("400Gb", "4x400Gb", "400Gb x8", "25GB")]
    [50.0, 25.0, 50.0, 25.0]
    """
    match = _PORTS.fullmatch(text.strip())
    rate = float(match["rate"]) if match else 0.0
    ports = int(match["before"] or match["behind"] or devices_per_node) if match else 0
    if match is None or not (rate > 0 and ports > 0) or (match["before"] and match["behind"]):
        raise TrimtabError(f"{text!r} is no link: write a node's ports and their rate, as in 8x400Gb (bits) or 8x50GB")
    # all ports of the node, shared by its devices
    bits = 1e9 if match["unit"] == "B" else 1e9 / 8
    return rate * bits * ports / devices_per_node


def _squeeze(name: str) -> str:
    return _NO_PART.sub("", re.sub(r"[^a-z0-9]", "", name.lower()))


def _spell_out(read: Any) -> Any:
    """Sizes with a unit as bytes, and 300e12, which YAML 1.1 takes for a text, as a number."""
    if not isinstance(read, dict):
        return read
    spelled = dict(read)
    for field, value in read.items():
        if field == "memory_bytes" and isinstance(value, str):
            spelled[field] = parse_bytes(value)
        elif isinstance(value, str) and _POWER.fullmatch(value):
            spelled[field] = float(value)
    return spelled


def _positive(place: str, kind: Any, value: Any, problems: list[str]) -> Any:
    if not 0 < value < 1e18:
        problems.append(f"{place}: {value} is no figure of a device, give more than 0")
    return kind(value)
