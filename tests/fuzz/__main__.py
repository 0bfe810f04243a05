"""Random damage to whatever trimtab reads: `python -m tests.fuzz --minutes 20`.

Each target takes a seed, makes one damaged input of it and reads that. A finding is any exception but trimtab's own, a
wrong answer, more than 5 CPU seconds, or more than 2 GB of memory; its seed is printed and belongs in `seeds.json`,
which `tests/cli/test_attacks.py` tries again. The first line says which seed comes first, for a process that dies.
"""

import argparse
import faulthandler
import random
import signal
import tempfile
import time
import traceback
from itertools import chain, count
from pathlib import Path

from tests.fuzz import files, maps, media, texts

TARGETS = files.TARGETS | maps.TARGETS | media.TARGETS | texts.TARGETS
MOST_MEMORY_BYTES, MOST_S, HANGS_S = 2 * 10**9, 5.0, 300


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=1.0, help="For each target.")
    parser.add_argument("--target", choices=sorted(TARGETS), action="append")
    parser.add_argument("--seed", type=int, action="append", default=[], help="Try this one, alone or before --from.")
    parser.add_argument("--from", dest="first", type=int, help="The first seed; default: a random one.")
    given = parser.parse_args()
    first = given.first
    if first is None and not given.seed:
        first = random.SystemRandom().randrange(2**32)
    faulthandler.enable()
    signal.signal(signal.SIGALRM, _give_up)
    num_findings = 0
    for name in given.target or sorted(TARGETS):
        with tempfile.TemporaryDirectory(prefix="trimtab-fuzz-") as folder:
            num_findings += attack(name, Path(folder), given.minutes * 60, given.seed, first)
    raise SystemExit(1 if num_findings else 0)


def attack(name: str, folder: Path, seconds: float, seeds: list[int], first: int | None) -> int:
    """Findings of one target: at `seeds`, then for so many seconds from `first` on, if any; each is printed."""
    try_seed = TARGETS[name](folder)
    print(f"{name}: seeds {seeds}, then from {first}", flush=True)
    end, done, slowest_s, peak_bytes, findings = 0.0, 0, 0.0, 0, 0
    for number in chain(seeds, () if first is None else count(first)):
        if done == len(seeds):
            end = time.monotonic() + seconds
        elif done > len(seeds) and time.monotonic() >= end:
            break
        began = time.process_time()
        signal.alarm(HANGS_S)
        try:
            try_seed(number)
            took_s = time.process_time() - began
            assert not done or took_s < MOST_S, f"it took {took_s:.1f} CPU s"  # the first compiles and imports
            held_bytes = _peak_bytes()
            peak_bytes = max(peak_bytes, held_bytes)
            assert held_bytes <= MOST_MEMORY_BYTES, f"the process held {held_bytes / 1e6:.0f} MB"
        except KeyboardInterrupt:
            raise
        except BaseException:  # a panic of a binding is no Exception
            findings += 1
            print(f"{name}: seed {number}\n{traceback.format_exc()}", flush=True)
            Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")  # the next is asked for its own peak
        signal.alarm(0)
        slowest_s, done = max(slowest_s, time.process_time() - began), done + 1
    print(f"{name}: {done} inputs, {findings} findings, slowest {slowest_s:.2f} CPU s, peak {peak_bytes / 1e6:.0f} MB")
    return findings


def _give_up(*_: object) -> None:
    raise TimeoutError(f"it hangs for {HANGS_S} s")


def _peak_bytes() -> int:
    """Of this process alone: what `getrusage` says of a child begins with its parent's peak."""
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("VmHWM:"))


if __name__ == "__main__":
    main()
