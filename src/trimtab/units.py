"""How things are shown: sizes, times and rates with their units (GiB is 2**30 bytes, tera 10**12), names, objects."""

import math
import re
from collections.abc import Iterable

from trimtab.errors import PlanError, TrimtabError

KIB, MIB, GIB, TIB = 2**10, 2**20, 2**30, 2**40
TERA, GIGA, MEGA = 1e12, 1e9, 1e6

_FACTORS = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": TIB, "kb": 1e3, "mb": 1e6, "gb": 1e9, "tb": 1e12}
_SIZE = re.compile(r"^\s*([0-9]{1,30}(?:\.[0-9]+)?)\s*([A-Za-z]*)\s*$")


def parse_bytes(text: str) -> int:
    """Return bytes named by "80GiB", "80 GB" (10**9), "1.5TiB" or a plain number of bytes."""
    match = _SIZE.match(text)
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is None or factor is None:
        raise TrimtabError(f"{text!r} is not a size in bytes: write it as 80GiB, 80GB or a number of bytes")
    return int(float(match.group(1)) * factor)


def format_degrees(record: object) -> str:
    """Return degrees of parallelism in a line; those that experts and contexts have only where they are more than 1.

    >>> from trimtab import ParallelDims
    >>> format_degrees(ParallelDims(dp=4, pp=2)), format_degrees(ParallelDims(dp=4, tp=2, cp=2, ep=8))
    ('dp 4 x pp 2 x tp 1', 'dp 4 x pp 1 x tp 2 x ep 8 x cp 2')
    """
    said = [f"{axis} {getattr(record, axis)}" for axis in ("dp", "pp", "tp")]
    said += [f"ep {ep}"] if (ep := getattr(record, "ep", 1)) > 1 else []
    said += [f"etp {etp}"] if (etp := getattr(record, "etp", None)) not in (None, getattr(record, "tp", 1)) else []
    said += [f"cp {cp}"] if (cp := getattr(record, "cp", 1)) > 1 else []
    return " x ".join(said)


def format_bytes(num_bytes: float) -> str:
    """Return three significant digits with a binary unit: "1.52 GiB"."""
    sign, value = ("-" if num_bytes < 0 else ""), abs(float(num_bytes))
    for unit, factor in (("TiB", TIB), ("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if value >= factor:
            return f"{sign}{_three_digits(value / factor)} {unit}"
    return f"{sign}{value:.0f} B"


def format_seconds(seconds: float) -> str:
    """Return three significant digits: "703 ms", "12.4 s", "35.0 us"; hours from two hours up: "13.0 h"."""
    if not math.isfinite(seconds):
        return str(seconds)
    if abs(seconds) >= 2 * 3600:
        return f"{_three_digits(seconds / 3600)} h"
    for unit, factor in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if abs(seconds) >= factor:
            return f"{_three_digits(seconds / factor)} {unit}"
    return "0 s" if seconds == 0 else f"{seconds / 1e-9:.3g} ns"


def format_count(value: float) -> str:
    """Return a count in short form: "7.62 B" parameters, "1.24 M" samples, "512"."""
    for unit, factor in (("T", TERA), ("B", GIGA), ("M", MEGA), ("k", 1e3)):
        if abs(value) >= factor:
            return f"{_three_digits(value / factor)} {unit}"
    return f"{value:g}"


def format_number(value: float) -> str:
    """Return three significant digits, or all whole ones, without an exponent: "0.125", "42.9", "2,048"."""
    return f"{value:,.0f}" if abs(value) >= 999.5 else f"{value:.3g}"


def format_ratio(ratio: float) -> str:
    """Return how many times: "1.97x"."""
    return f"{ratio:.2f}x"


def round_digits(value: float) -> float:
    """Round to four significant digits, as estimates stand in a plan."""
    return float(f"{value:.4g}")


def round_gib(num_bytes: float) -> float:
    """Return GiB to two decimals."""
    return round(num_bytes / GIB, 2)


def _three_digits(value: float) -> str:
    if value >= 99.95:
        return f"{value:.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"


# -- module paths in short form: "blocks[0..23]" for blocks.0 to blocks.23, both included ------------------------------


_NUMBERED = re.compile(r"^(?P<stem>.+)\.(?P<number>\d+)$")
_RANGE = re.compile(r"^(?P<stem>.+)\[(?P<first>\d+)\.\.(?P<last>\d+)\]$")
_MAX_RANGE = 100_000  # a plan from outside must not make us build a list of a billion names


def fold_modules(names: Iterable[str]) -> tuple[str, ...]:
    """The names with runs of consecutive numbers written as one range; order is kept.

    >>> fold_modules(["visual.blocks.0", "visual.blocks.1", "visual.blocks.2", "lm_head"])
    ('visual.blocks[0..2]', 'lm_head')
    """
    runs: list[tuple[str, int, int]] = []  # stem, first, last number; of a name without one the name, -2, -2
    for name in names:
        match = _NUMBERED.match(name)
        stem, number = (match["stem"], int(match["number"])) if match else (name, -2)
        if match and runs and runs[-1][0] == stem and runs[-1][2] + 1 == number:
            runs[-1] = (stem, runs[-1][1], number)
        else:
            runs.append((stem, number, number))
    return tuple(
        stem if last < 0 else f"{stem}.{first}" if first == last else f"{stem}[{first}..{last}]"
        for stem, first, last in runs
    )


def unfold_modules(folded: Iterable[str]) -> tuple[str, ...]:
    """The inverse of `fold_modules`."""
    names: list[str] = []
    for entry in folded:
        match = _RANGE.match(entry)
        if match is None:
            names.append(entry)
            continue
        first, last = int(match["first"]), int(match["last"])
        if not first <= last <= first + _MAX_RANGE:
            raise PlanError(f"the plan names modules {entry!r}, which is no range: write first..last, both included")
        names.extend(f"{match['stem']}.{i}" for i in range(first, last + 1))
    return tuple(names)


# -- objects at a prompt and in a notebook ----------------------------------------------------------------------------


def three_lines(title: str, first: str, second: str) -> str:
    """Return what `__repr__` says of something with thousands of numbers."""
    return f"{title}\n  {first}\n  {second}"
