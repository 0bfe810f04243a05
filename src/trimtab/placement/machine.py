"""The machine that serves a model: GPUs of any sizes, host memory, a disk."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from trimtab.costs.devices import find_device
from trimtab.errors import PartitionError, TrimtabError, join_problems, refuse_type
from trimtab.units import MIB, parse_bytes

MAX_GPUS = 64
CONTEXT_BYTES = 512 * MIB  # what a CUDA process takes before its first tensor: 0.3-0.6 GiB, by GPU and libraries


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu:
    """One GPU as a device map names it."""

    index: int
    free_bytes: int  # what a process may take of it, its own context included
    name: str | None = None  # a row of `costs.devices.DEVICES`
    memory_bytes_per_s: float | None = None  # None: unknown, and then as fast as any other unknown one

    def __post_init__(self) -> None:
        assert self.index >= 0
        if self.free_bytes < 0:
            raise PartitionError(f"GPU {self.index} cannot have {self.free_bytes} bytes free: give 0 or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What a model may be spread over."""

    gpus: tuple[Gpu, ...]
    cpu_bytes: int = 0  # host memory for weights that no GPU holds; 0: none may lie there
    disk: bool = False  # whether weights may stay on disk
    context_bytes: int = CONTEXT_BYTES  # of each GPU in use
    kept_share: float = 0.0  # of what is free on each GPU: no map fills it

    def __post_init__(self) -> None:
        indices = [gpu.index for gpu in self.gpus]
        assert len(set(indices)) == len(indices), "two GPUs have one index"
        if not self.gpus:
            raise PartitionError("a machine without a GPU has nothing to balance: give at least one, as in 1x24GiB")
        if not 0 <= self.kept_share < 1:
            raise PartitionError(f"a reserve of {100 * self.kept_share:g} % leaves nothing: give 0 up to but not 100")
        if len(self.gpus) > MAX_GPUS:
            raise PartitionError(f"{len(self.gpus)} GPUs are more than one process drives: give at most {MAX_GPUS}")


_GROUP = re.compile(r"^\s*(?:(?P<count>[0-9]{1,4})\s*[xX*]\s*)?(?P<kind>[^:]+?)\s*(?::\s*(?P<free>[^:]+?)\s*)?$")


def parse_machine(text: str, *, cpu: str | None = None, disk: bool = False, kept_share: float = 0.0) -> Machine:
    """GPUs from "4x24GiB", "40GiB,80GiB,80GiB", "2xA100-80GB,H200" or with less free: "A100-80GB:31GiB,3xA100-80GB".

    Use it for the GPUs that `place` takes.

    A size is what is free on the GPU; a name is a row of the device table, all of its memory free unless a size
    follows after a colon. GPUs are numbered in the order given.

    >>> [gpu.free_bytes >> 30 for gpu in parse_machine("2x24GiB,80GiB").gpus]
    [24, 24, 80]
    """
    refuse_type("machine", text, str, 'one as in "4x24GiB"')
    gpus: list[Gpu] = []
    problems: list[str] = []
    for group in text.split(","):
        match = _GROUP.match(group)
        if match is None or not match["kind"]:
            problems.append(f"{group!r} names no GPU: write 4x24GiB, 80GiB, A100-80GB or A100-80GB:31GiB")
            continue
        try:
            gpu = _parse_gpu(match["kind"], match["free"])
        except TrimtabError as error:
            problems.append(str(error))
            continue
        count = int(match["count"] or 1)
        if not 1 <= count <= MAX_GPUS:
            problems.append(f"{group.strip()!r} asks for {count} GPUs: give 1 to {MAX_GPUS}")
            continue
        gpus += [replace(gpu, index=len(gpus) + i) for i in range(count)]
    if problems:
        raise PartitionError(join_problems(problems))
    host = 0 if cpu is None else _parse_size(cpu)
    return Machine(gpus=tuple(gpus), cpu_bytes=host, disk=disk, kept_share=kept_share)


def _parse_size(text: str) -> int:
    size = parse_bytes(text)
    if (number := text.strip()).isdecimal() and 0 < size < MIB:
        raise PartitionError(f"{text!r} names no unit, and so few bytes hold nothing: write {number}GiB")
    return size


def _parse_gpu(kind: str, free: str | None) -> Gpu:
    if kind[0].isdigit():
        size = _parse_size(kind)
        if free is not None and _parse_size(free) > size:
            raise PartitionError(f"{kind}:{free} has more free than it holds: give at most {kind} after the colon")
        return Gpu(index=0, free_bytes=size if free is None else _parse_size(free))
    device = find_device(kind)
    free_bytes = device.memory_bytes if free is None else _parse_size(free)
    if free_bytes > device.memory_bytes:
        raise PartitionError(f"{kind}:{free} has more free than a {device.name} holds: give less after the colon")
    return Gpu(index=0, free_bytes=free_bytes, name=device.name, memory_bytes_per_s=device.memory_bytes_per_s)


def machine_of(free_bytes: Sequence[int], *, cpu_bytes: int = 0, disk: bool = False) -> Machine:
    """GPUs of the given free memories, numbered in order."""
    gpus = tuple(Gpu(index=i, free_bytes=free) for i, free in enumerate(free_bytes))
    return Machine(gpus=gpus, cpu_bytes=cpu_bytes, disk=disk)
