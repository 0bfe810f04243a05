"""ZeRO-3's gathering beside products instead of behind them, on the published FSDP runs: `python bench/overlap.py`.

A pass takes the longer of its work and its messages, as with perfect prefetching; shares of the peak are fitted anew.
The formulas add both: docs/costs.md says why, with the figures that this prints.
"""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import numpy as np

import published_text
from published_text import Fit, Run, fits, predict

_FREE = 1e18  # bytes/s


def overlapped(run: Run, **shares: Any) -> float:
    """Seconds of a step: forward has a third of the messages, and of the work a third, a quarter with recompute."""
    whole = predict(run, **shares)
    if run.zero_stage != 3:
        return whole
    rates = published_text.link_rates
    with patch.object(published_text, "link_rates", lambda *at: {**rates(*at), "dp_bytes_per_s": _FREE}):
        work = predict(run, **shares)
    sent, forward = whole - work, 0.25 if run.recompute == "full" else 1 / 3
    return max(forward * work, sent / 3) + max((1 - forward) * work, 2 / 3 * sent)


def main() -> None:
    added = fits()
    with patch.object(published_text, "predict", overlapped):
        beside = fits()
    for name, fit in added.items():
        if any(run.zero_stage == 3 for run in fit.runs):
            print(f"{name:40} added {_words(fit)}; beside {_words(beside[name])}")


def _words(fit: Fit) -> str:
    errors = np.abs(fit.blind())
    return f"median {np.median(errors):.1%}, 90 % within {np.quantile(errors, 0.9):.0%}, widest {errors.max():.0%}"


if __name__ == "__main__":
    main()
