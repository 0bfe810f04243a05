"""A run to compare a plan with, in a few words: how batches, stages and recompute come about without it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import get_args

from trimtab.options import PackMethod, RecomputeMode

METHODS = {name.replace("_", "-"): name for name in get_args(PackMethod)}
PADDED = ("random", "length_group", "device_group")
STAGES = ("equal-layers", "balanced-stages")
RECOMPUTE: dict[str, RecomputeMode] = {"full-recompute": "full", "no-recompute": "none"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Baseline:
    """What `--baseline random,batch=4,padded,equal-layers,full-recompute` says; each word has a default."""

    method: PackMethod = "random"
    batch: float | None = None  # samples; None: of the padded methods the size that is fastest and fits
    padded: bool | None = None  # None: as the method is
    stages: str = "equal-layers"
    recompute: RecomputeMode = "auto"  # auto: none if that fits, else full
    unknown: tuple[str, ...] = field(default=(), repr=False)  # words that mean nothing

    @property
    def is_padded(self) -> bool:
        """Whether its batches know no limits and are padded to their longest sample."""
        return self.method in PADDED

    def problems(self, text: str) -> list[str]:
        """A sentence for each thing in `text`, which it was read from, that cannot be."""
        found = []
        if self.unknown:
            words = ", ".join([*METHODS, "batch=N", "padded", "packed", *STAGES, *RECOMPUTE])
            found.append(f"baseline {text!r} has {', '.join(map(repr, self.unknown))} in it: its words are {words}")
        if self.batch is not None and not (math.isfinite(self.batch) and self.batch >= 1):
            found.append(f"baseline {text!r} has batches of {self.batch:g} samples: give 1 or more")
        if self.batch is not None and not self.is_padded:
            found.append(
                f"baseline {text!r} gives {self.method} a batch size, and it packs up to the plan's limits: leave "
                "batch= out"
            )
        if self.padded is not None and self.padded != self.is_padded:
            is_made = "pads its batches" if self.is_padded else "packs without padding"
            found.append(
                f"baseline {text!r} does not agree with itself, for {self.method} {is_made}: leave one word out"
            )
        return found


def parse_baseline(text: str) -> Baseline:
    """Words in any order, joined by commas; what is wrong with them is told by `Baseline.problems`.

    >>> parse_baseline("random,batch=4,padded,full-recompute")
    Baseline(method='random', batch=4.0, padded=True, stages='equal-layers', recompute='full')
    """
    said: dict[str, object] = {}
    unknown = []
    for word in (word.strip() for word in text.split(",")):
        name, _, number = word.partition("=")
        if word in METHODS:
            said["method"] = METHODS[word]
        elif word in STAGES:
            said["stages"] = word
        elif word in RECOMPUTE:
            said["recompute"] = RECOMPUTE[word]
        elif word in ("padded", "packed"):
            said["padded"] = word == "padded"
        elif name == "batch" and _is_number(number):
            said["batch"] = float(number)
        else:
            unknown.append(word)
    return Baseline(**said, unknown=tuple(unknown))  # type: ignore[arg-type]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
