"""Published peaks of accelerators, and clusters named in a few characters: "32xA100-80GB"."""

from __future__ import annotations

import csv
import difflib
import re
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any

from trimtab.errors import TrimtabError, join_problems, refuse_type
from trimtab.files import read_small
from trimtab.specs import ClusterSpec, DeviceSpec
from trimtab.typed_json import parse_yaml, read_typed
from trimtab.units import GIB, parse_bytes

# devices.csv: memory in GiB, dense bf16 Tflop/s, GB/s of memory, GB/s of the link to another device of its node, and of
# one device to other nodes, one direction, in the node that its vendor describes (`_OTHER_NODE_LINK` for others).
# Rates: datasheets of many devices print them with 2:4 sparsity, twice the figure here; GeForce cards' are those with
# sums in fp32. Links are printed for both directions together: one direction is half. Cards without a link of their
# own talk over PCIe x16: 31.5 GB/s one way in generation 4, 63 in generation 5.
# Memory is no datasheet figure where CUDA's report to a process is known (`total capacity` in PyTorch's messages),
# rounded down: ECC and the driver keep the rest of the GB on the label. "Label" behind a source: no report was found.
# A kind's first row is what its bare name means: "H100" is the SXM board.
_ROWS = tuple(csv.DictReader(files("trimtab.costs").joinpath("devices.csv").read_text(encoding="utf-8").splitlines()))
DEVICES = MappingProxyType(
    {
        row["name"]: DeviceSpec(
            name=row["name"],
            memory_bytes=int(float(row["memory_gib"]) * GIB),
            peak_flops=float(row["bf16_tflops"]) * 1e12,
            memory_bytes_per_s=float(row["memory_gb_per_s"]) * 1e9,
            link_bytes_per_s=float(row["link_gb_per_s"]) * 1e9,
            source=row["source"],
        )
        for row in _ROWS
    }
)
"""One row per device, in bytes, bytes/s and flop/s; each with its source."""
_NODE_LINK = {row["name"]: float(row["node_link_gb_per_s"]) for row in _ROWS if row["node_link_gb_per_s"]}
_OTHER_NODE_LINK = 25.0

_CLUSTER = re.compile(r"^\s*(?:([0-9]{1,100})\s*[xX*]\s*)?([A-Za-z./].*?)\s*$")
_PORTS = re.compile(
    r"(?:(?P<before>[0-9]{1,3})\s*x\s*)?(?P<rate>[0-9]{1,5}(?:\.[0-9]+)?)\s*G(?P<unit>[bB])(?:it)?(?:/s|ps)?"
    r"(?:\s*x\s*(?P<behind>[0-9]{1,3}))?"
)
_POWER = re.compile(r"[0-9]+(\.[0-9]*)?[eE]\+?[0-9]+")
_FILE = (".yaml", ".yml", ".json")
_VENDORS = "nvidia|geforce|rtx|amd|instinct|intel|huawei|google"
_NO_PART = re.compile(rf"{_VENDORS}|generation|tensorcoregpu|sxm[0-9]?|hbm[0-9]?e?|(?<=[0-9])gi?b")


def find_device(name: str, *, also: DeviceSpec | None = None) -> DeviceSpec:
    """The row of `DEVICES` that `name` means: case, dashes, blanks, a vendor's name, "SXM" and "GB" do not matter.

    Use it to look up memory (bytes), peaks (FLOP/s) and links (bytes/s) of a device.

    A beginning is enough where all devices that begin so are of one kind; of several, the first of the table is meant:
    "a100" is the one of 80 GB, "NVIDIA H100 80GB HBM3" the SXM board. A name that ends in .yaml or .json is a file
    with a device's own figures (`read_device`). `also`: one more device, known from a measurement.

    >>> find_device("a100").peak_flops / 1e12
    312.0
    """
    refuse_type("name", name, str, 'one as in "H100"')
    if name.lower().endswith(_FILE):
        return read_device(name)
    # a whole name first, so that "H100-PCIe" is never taken for the beginning of another
    wanted = _squeeze(name)
    for device in (*DEVICES.values(), *([] if also is None else [also])):
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
    text: str, *, devices_per_node: int = 8, node_link: str | None = None, also: DeviceSpec | None = None
) -> ClusterSpec:
    """Make a cluster of "32xA100-80GB", "4 x H200", "H100" (one device) or "8xmy.yaml" (see `find_device`).

    Use it for the cluster that `make_plan` takes. Raises `TrimtabError` for what is no cluster.

    Fewer devices than a node holds make one smaller node; more must fill their nodes. `node_link`: see
    `parse_node_link`; without it, the ports of the node that the device's vendor describes. `also`: see
    `find_device`.

    >>> cluster = parse_cluster("32xA100-80GB")
    >>> cluster.num_nodes, cluster.devices_per_node
    (4, 8)
    """
    refuse_type("cluster", text, str, 'one as in "32xA100-80GB"')
    # a mixture is understood, to be refused by name
    kinds = [kind.strip() for kind in re.split(r"[+,]", text)]
    if len(kinds) > 1 and all(_CLUSTER.match(kind) for kind in kinds):
        raise TrimtabError(f"{text!r} names {len(kinds)} kinds of devices: plan each by itself ({kinds[0]})")
    match = _CLUSTER.match(text)
    if match is None:
        raise TrimtabError(f"{text!r} names no cluster: write number and kind of its devices, as in 32xA100-80GB")
    # whole nodes, or one smaller node
    device = find_device(match.group(2), also=also)
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
        gigabytes = _NODE_LINK.get(device.name, _OTHER_NODE_LINK)
        link = gigabytes * 1e9
    else:
        link = parse_node_link(node_link, devices_per_node=per_node)
    return ClusterSpec(
        device=device, num_nodes=count // per_node, devices_per_node=per_node, node_link_bytes_per_s=link
    )


def parse_node_link(text: str, *, devices_per_node: int) -> float:
    """Read bytes per second of one device to other nodes from "8x400Gb" or "400Gb x8": ports of a node, and their rate.

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
    """Return the sizes with a unit as bytes, and 300e12, which YAML 1.1 takes for a text, as a number."""
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
