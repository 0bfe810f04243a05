"""Random damage to whatever trimtab reads: `python -m tests.fuzz --minutes 20`.

Each target takes a seed, makes one damaged input of it and reads that. A finding is any exception but trimtab's own, a
size that Pillow does not give, or more than 2 GB of memory; its seed is printed and belongs in `seeds.json`, which
`tests/hostile/test_fuzz.py` reads again.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
import traceback
from pathlib import Path

from tests.fuzz.targets import TARGETS

MOST_MEMORY_BYTES = 2 * 10**9


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="For each target.")
    parser.add_argument("--only", choices=sorted(TARGETS), action="append")
    parser.add_argument("--seed", type=int, default=None, help="Try this one seed.")
    given = parser.parse_args()
    num_findings = 0
    for name in given.only or sorted(TARGETS):
        with tempfile.TemporaryDirectory(prefix="trimtab-fuzz-") as folder:
            num_findings += attack(name, Path(folder), given.minutes * 60, given.seed)
    raise SystemExit(1 if num_findings else 0)


def attack(name: str, folder: Path, seconds: float, seed: int | None = None) -> int:
    """Findings of one target in so many seconds; each is printed."""
    try_seed = TARGETS[name](folder)
    first = random.SystemRandom().randrange(2**32)
    end, done, slowest_s, findings = time.monotonic() + seconds, 0, 0.0, 0
    while time.monotonic() < end and (seed is None or not done):
        number = first + done if seed is None else seed
        began = time.process_time()
        try:
            try_seed(number)
        except Exception:
            findings += 1
            print(f"{name}: seed {number}\n{traceback.format_exc()}")
        slowest_s, done = max(slowest_s, time.process_time() - began), done + 1
    peak_bytes = _peak_bytes()
    print(f"{name}: {done} inputs, {findings} findings, slowest {slowest_s:.2f} CPU s, peak {peak_bytes / 1e6:.0f} MB")
    return findings + (peak_bytes > MOST_MEMORY_BYTES)


def _peak_bytes() -> int:
    """Of this process alone: what `getrusage` says of a child begins with its parent's peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
