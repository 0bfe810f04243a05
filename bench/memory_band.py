"""The memory band beside measured peaks: which it holds.

    python bench/memory_band.py

Peaks that torch's allocator logged are set beside what is expected without the context, those of a whole device with.
"""

from __future__ import annotations

from dataclasses import dataclass

from costs import omnibal_used_bytes
from published_h20 import fit_images, h20_runs, stage_peaks
from trimtab.costs.memory_band import memory_band
from trimtab.units import GIB

A100_BYTES = 80e9  # as OmniBal's table counts a device


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One device's peak beside its expectation."""

    source: str
    expected_bytes: float
    measured_bytes: float

    @property
    def off(self) -> float:
        return self.measured_bytes / self.expected_bytes - 1


def measured_peaks() -> list[Measured]:
    band, runs = memory_band(None), h20_runs()
    found = [
        Measured(
            source=f"H20, {p.group[0]} wide, tp {p.group[1]}, {p.run}, stage {p.stage}",
            expected_bytes=p.counted_bytes * (1 + band.slack),
            measured_bytes=p.reserved_bytes,
        )
        for p in stage_peaks(runs, fit_images(runs))
    ]
    for stage, (counted, used) in enumerate(omnibal_used_bytes()):
        found.append(
            Measured(
                source=f"OmniBal, Table 5, full recompute, stage {stage}",
                expected_bytes=counted * (1 + band.slack) + band.outside * A100_BYTES,
                measured_bytes=used,
            )
        )
    return found


def print_band() -> None:
    band, peaks = memory_band(None), measured_peaks()
    print(f"formulas: expected x (1 +- {band.half_width:.3f}) is to hold 90 %\n")
    for x in peaks:
        mark = "" if abs(x.off) <= band.half_width else "  OUTSIDE"
        print(
            f"  {x.source:42} expected {x.expected_bytes / GIB:6.2f} GiB, measured {x.measured_bytes / GIB:6.2f}  "
            f"{x.off:+6.1%}{mark}"
        )
    inside = sum(abs(x.off) <= band.half_width for x in peaks)
    above = sum(x.off > band.half_width for x in peaks)
    print(f"\n{inside} of {len(peaks)} inside ({inside / len(peaks):.0%}), {above} above")


if __name__ == "__main__":
    print_band()
