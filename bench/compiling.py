"""CPU seconds that numba compiles for in a cold command, by function. Run: python bench/compiling.py [demo | pack]

The command runs in a process of its own with an empty cache: `trimtab demo` of 300 samples, or `trimtab pack` of 40,941
lengths drawn from the distributions of three real sets. A function's seconds are without those of what it calls.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from lengths import draw_lengths
from trimtab.samples.table import SizingResult, save_sizing

HERE = Path(__file__).parent
COMMANDS = {
    "demo": ["demo", "--num-samples", "300", "--out", "demo"],
    "pack": ["pack", "lengths.npz", "--max-patches", "18", "--max-tokens", "6016", "--dp", "8"],
}


def run_cold(verb: str) -> None:
    """Runs the verb in this process and prints what was compiled on the way."""
    from numba.core import event

    seconds, number = Counter[str](), Counter[str]()
    begun: list[list[float]] = []  # of the functions being compiled: when, and seconds of those inside

    class Listener(event.Listener):
        def on_start(self, _: event.Event) -> None:
            begun.append([time.process_time(), 0.0])

        def on_end(self, happened: event.Event) -> None:
            start, inside = begun.pop()
            took = time.process_time() - start
            function = happened.data["dispatcher"].py_func
            name = f"{function.__module__}.{function.__qualname__}"
            seconds[name] += took - inside
            number[name] += 1
            if begun:
                begun[-1][1] += took

    event.register("numba:compile", Listener())
    from trimtab.cli.app import app

    try:
        app(COMMANDS[verb], standalone_mode=False)
    finally:
        total, ours = sum(seconds.values()), sum(s for name, s in seconds.items() if name.startswith("trimtab"))
        count = sum(number.values())
        print(f"\n{verb}: {time.process_time():.1f} CPU s, of which {total:.1f} compiling {count} functions")
        print(f"of these {ours:.1f} s ours, {total - ours:.1f} s numba's own; the largest:")
        for name, s in seconds.most_common(12):
            print(f"{s:8.2f} s {number[name]:3d} x  {name}")


def main() -> None:
    """Each verb cold."""
    for verb in sys.argv[1:] or list(COMMANDS):
        with tempfile.TemporaryDirectory() as folder:
            save_sizing(SizingResult(table=draw_lengths("real")), Path(folder) / "lengths.npz")
            environment = {**os.environ, "NUMBA_CACHE_DIR": folder, "TRIMTAB_CACHE": folder}
            code = f"import sys; sys.path.insert(0, {str(HERE)!r}); import compiling; compiling.run_cold({verb!r})"
            subprocess.run([sys.executable, "-c", code], cwd=folder, env=environment, check=True)


if __name__ == "__main__":
    main()
