"""Everything that only a device can prove, in order of value, by one command.

    python -m bench.gpu                       all suites, as far as they get in half an hour
    python -m bench.gpu costs gain            these
    python -m bench.gpu --minutes 9           what fits in nine minutes; run it again and it goes on
    python -m bench.gpu --tiny --device cpu   the same code on tiny models

Every repetition is a JSON line under bench/gpu/results/DEVICE/SUITE.jsonl at once, so that nothing is lost when the
run is cut off. A suite is a process of its own and gets at most --suite-minutes: what breaks it breaks one suite.
`python -m bench.gpu.page` writes docs/tables/on-gpu.md from the lines.
"""

import argparse
import gc
import os
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "bench", "tests/torch", "tests/unit")]

import torch  # noqa: E402
from bench.gpu.page import SUITES  # noqa: E402
from bench.gpu.record import Record, describe_machine  # noqa: E402

RESULTS = Path(__file__).parent / "results"


def main() -> int:
    arguments = _parse()
    if arguments.device.startswith("cuda") and not torch.cuda.is_available():
        print(f"torch {torch.__version__} finds no CUDA device: run it where there is one, or give --tiny --device cpu")
        return 2
    if arguments.inside:
        return run_suite(arguments.suites[0], arguments)
    ends = time.monotonic() + 60 * arguments.minutes
    worst = 0
    for suite in arguments.suites or SUITES:
        left = min(ends - time.monotonic(), 60 * arguments.suite_minutes)
        if left < 5:
            print(f"{suite}: no time is left; run the command again and it goes on here", flush=True)
            continue
        command = [sys.executable, "-m", "bench.gpu", suite, "--inside", "--device", arguments.device]
        command += ["--out", str(arguments.out), "--repetitions", str(arguments.repetitions)]
        command += ["--tiny"] * arguments.tiny
        try:
            done = subprocess.run(command, cwd=ROOT, env=_environment(), timeout=left, check=False)
            worst = max(worst, done.returncode)
        except subprocess.TimeoutExpired:
            print(f"{suite}: cut off after {left:.0f} s; run the command again and it goes on here", flush=True)
    return worst


def _environment() -> dict[str, str]:
    """Suites start processes of their own, which find this clone's package, installed or not."""
    paths = [str(ROOT / "src"), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}


def run_suite(suite: str, arguments: argparse.Namespace) -> int:
    """Every case, then every case again; 1 if one failed."""
    import torch
    from bench.gpu.setting import Setting

    setting = Setting(device=torch.device(arguments.device), tiny=arguments.tiny)
    record = Record(arguments.out, suite, describe_machine(arguments.device))
    try:
        cases = import_module(f"bench.gpu.{suite}").cases(setting)
    except ImportError as error:  # a package is missing or too old: the other suites run
        record.add("all", 0, {"error": f"the suite needs a package that is missing or of another version: {error}"})
        print(f"{suite}: a package is missing or of another version: {error}", flush=True)
        return 1
    failed = 0
    for repetition in range(arguments.repetitions):
        for case in cases:
            if record.has(case.name, repetition):
                continue
            started = time.monotonic()
            figures: dict[str, Any]
            try:
                figures = case.run()
            except torch.OutOfMemoryError:
                figures = {"out_of_memory": True}
            except Exception as error:  # a case's failure is a line, and the next case runs
                figures = {"error": f"{type(error).__name__}: {' '.join(str(error).split())[:400]}"}
                failed = 1
            record.add(case.name, repetition, {**figures, "case_s": round(time.monotonic() - started, 3)})
            told = ", ".join(f"{key} {_short(value)}" for key, value in figures.items())
            print(f"{suite} / {case.name} #{repetition}: {told}"[:300], flush=True)
            gc.collect()
            if setting.device.type == "cuda":
                torch.cuda.empty_cache()
    return failed


def _short(value: Any) -> str:
    return (
        f"{value:.4g}"
        if isinstance(value, float)
        else f"{len(value)} entries"
        if isinstance(value, list)
        else str(value)
    )


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu", description=__doc__.splitlines()[0])
    parser.add_argument("suites", nargs="*", choices=[*SUITES, []], help="default: all, in this order")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=30.0, help="in all")
    parser.add_argument("--suite-minutes", type=float, default=8.0, help="each suite")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--tiny", action="store_true", help="tiny models: the same code, on a CPU too")
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


if __name__ == "__main__":
    sys.exit(main())
