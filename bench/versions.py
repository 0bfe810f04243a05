"""What works with which Transformers: every example and a short training run under each version; writes a page.

    python bench/versions.py                                  the versions that are in the page, and the newest
    python bench/versions.py 4.57.6 5.6.0                     these alone; the others keep their column
    python bench/versions.py --folder /tmp/versions           where the versions are installed (kept between runs)

A version is installed beside the environment that runs this (`pip install --target`), with what it needs but torch. An
example that ends without an error within `--limit-s` works. Else the page has the last line that it wrote, shortened.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import version
from pathlib import Path

import yaml

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench" / "data" / "versions.json"
PAGE = ROOT / "docs" / "tables" / "compatibility.md"
VERSIONS = ("4.57.6", "5.6.0", "5.12.1", "5.17.0", "5.23.0")
"""Those that hosts are bound to (docs/tables/exports.md says which), and the one that this project is made with."""

COMMANDS: Mapping[str, str] = yaml.safe_load(RESULTS.with_name("versions_commands.yaml").read_text(encoding="utf-8"))

HEAD = RESULTS.with_name("versions_head.md").read_text(encoding="utf-8")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("versions", nargs="*", default=list(VERSIONS))
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()) / "trimtab-versions")
    parser.add_argument("--limit-s", type=float, default=300.0)
    given = parser.parse_args()
    results = read_results()
    for name in given.versions:
        installed = install(name, given.folder)
        column = results["versions"].setdefault(name, {})
        for example in sorted((ROOT / "examples").glob("*.py")):
            column[f"examples/{example.name}"] = run([sys.executable, str(example)], installed, given.limit_s)
        for command, script in COMMANDS.items():
            column[command] = run(["bash", "-euc", script], installed, given.limit_s)
        results["machine"] = {"torch": version("torch"), "python": ".".join(map(str, sys.version_info[:3]))}
        RESULTS.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n", encoding="utf-8")
        PAGE.write_text(make_page(results), encoding="utf-8")
        print(f"{name}: {sum(said == 'yes' for said in column.values())} of {len(column)} work", flush=True)
    return 0


def install(name: str, folder: Path) -> Path:
    target = folder / name
    if not target.is_dir():
        command = [sys.executable, "-m", "pip", "install", "-q", "--target", str(target), f"transformers=={name}"]
        subprocess.run(command, check=True)
    return target


def run(command: list[str], installed: Path, limit_s: float) -> str:
    """The word "yes", or why it did not work."""
    with tempfile.TemporaryDirectory() as folder:
        environment = {
            **os.environ,
            "PYTHONPATH": f"{installed}{os.pathsep}{ROOT / 'src'}",
            "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
            "HF_HUB_OFFLINE": "1",
            "OMP_NUM_THREADS": "1",
        }
        try:
            done = subprocess.run(
                command, cwd=folder, env=environment, capture_output=True, text=True, timeout=limit_s, check=False
            )
        except subprocess.TimeoutExpired:
            return f"not within {limit_s:.0f} s"
    return "yes" if done.returncode == 0 else last_words(done.stderr or done.stdout)


def last_words(text: str) -> str:
    """The line of an error, without addresses and paths, in at most 160 characters; of a child process, its own.

    >>> last_words("Traceback\\n  File ...\\nImportError: no AutoVideoProcessor in /a/b.py\\n")
    'ImportError: no AutoVideoProcessor in b.py'
    """
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(Error|Exception)\b|trimtab: ", line)]
    told = [line for line in errors if "CalledProcessError" not in line and "ChildFailedError" not in line]
    said = (told or errors or lines or ["it ended without a word"])[-1]
    return re.sub(r"/\S*/", "", said)[:160]


def read_results() -> dict[str, dict[str, dict[str, str]]]:
    if not RESULTS.exists():
        return {"versions": {}, "machine": {}}
    found: dict[str, dict[str, dict[str, str]]] = json.loads(RESULTS.read_text(encoding="utf-8"))
    return found


def make_page(results: Mapping[str, Mapping[str, Mapping[str, str]]]) -> str:
    """A row for each thing that was run, a column for each version; notes below say why one did not work."""
    columns = results["versions"]
    names = sorted(columns, key=lambda name: tuple(map(int, name.split("."))))
    rows = sorted({row for name in names for row in columns[name]})
    lines = ["| what was run | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    notes: dict[str, int] = {}
    for row in rows:
        cells = []
        for name in names:
            said = columns[name].get(row, "not tried")
            cells.append(said if said in ("yes", "not tried") else f"no [^{notes.setdefault(said, len(notes) + 1)}]")
        lines.append(f"| `{row}` | " + " | ".join(cells) + " |")
    said_with = ", ".join(f"{key} {value}" for key, value in sorted(results["machine"].items()))
    below = "".join(f"\n[^{number}]: `{said}`\n" for said, number in notes.items())
    return f"{HEAD}" + "\n".join(lines) + f"\n\nWith {said_with}.\n{below}"


if __name__ == "__main__":
    sys.exit(main())
