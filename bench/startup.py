"""CPU seconds of `import trimtab` and `trimtab --help`, next to an empty interpreter. `python bench/startup.py`."""

import resource
import subprocess
import sys

RUNS = 9
COMMANDS = (
    ("python -c pass", ["-c", "pass"], None),
    ("import trimtab", ["-c", "import trimtab"], 0.2),
    ("trimtab --help", ["-m", "trimtab", "--help"], 0.12),
    ("trimtab describe Qwen2.5-VL-7B --json", ["-m", "trimtab", "describe", "Qwen2.5-VL-7B", "--json"], 0.35),
)


def cpu_s(arguments: list[str]) -> float:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], check=True, capture_output=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    print(f"{'command':40}{'CPU s, median of ' + str(RUNS):>24}{'goal':>8}")
    for name, arguments, goal in COMMANDS:
        times = sorted(cpu_s(arguments) for _ in range(RUNS))
        print(f"{name:40}{times[RUNS // 2]:24.3f}{'' if goal is None else f'<= {goal}':>8}")


if __name__ == "__main__":
    main()
