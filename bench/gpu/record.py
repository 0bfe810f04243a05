"""JSON lines that survive being cut off: every repetition of every case is on the disk as soon as it is known."""

import json
import os
import platform
import re
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "accelerate", "numpy", "numba", "flash-attn")


def describe_machine(device: str) -> dict[str, str]:
    """What a figure depends on besides the code: the device, its driver, the versions."""
    import torch

    found = {"device": platform.processor() or platform.machine(), "driver": "none"}
    if device.startswith("cuda"):
        found["device"] = torch.cuda.get_device_name()
        found["driver"] = _ask("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader")
    found["python"] = platform.python_version()
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "none"
    return found


class Record:
    """One suite's file: a line for the machine, then a line for each repetition of each case.

    A run that was cut off goes on where it stopped: what the same machine has measured is not measured again. A line
    that was half written is dropped. A case that failed is tried again by the next run.
    """

    def __init__(self, folder: Path, suite: str, machine: dict[str, str]) -> None:
        name = re.sub(r"[^A-Za-z0-9]+", "-", machine["device"]).strip("-")
        self.path = folder / name / f"{suite}.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)
        lines = self._whole_lines()
        self._done: set[tuple[str, int]] = set()
        here: dict[str, str] | None = None
        for line in lines:
            if "machine" in line:
                here = line["machine"]
            elif here == machine and "error" not in line:
                self._done.add((line["case"], line["repetition"]))
        if here != machine:
            self._write({"machine": machine})

    def has(self, case: str, repetition: int) -> bool:
        return (case, repetition) in self._done

    def add(self, case: str, repetition: int, figures: dict[str, Any]) -> None:
        now = datetime.now(UTC).isoformat(timespec="seconds")
        self._write({"case": case, "repetition": repetition, "at": now, "commit": _commit(), **figures})
        if "error" not in figures:
            self._done.add((case, repetition))

    def _whole_lines(self) -> list[dict[str, Any]]:
        """The lines that were written to their end; the file is cut behind the last of them."""
        if not self.path.exists():
            return []
        content = self.path.read_bytes()
        whole = content[: content.rfind(b"\n") + 1]
        if len(whole) < len(content):
            with self.path.open("r+b") as file:
                file.truncate(len(whole))
        return [json.loads(line) for line in whole.splitlines()]

    def _write(self, line: dict[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line, sort_keys=True) + "\n")
            file.flush()
            os.fsync(file.fileno())


def read_records(folder: Path) -> list[dict[str, Any]]:
    """All lines of all suites and machines, each with its `suite` and `machine`; the newest of a repetition last."""
    found: list[dict[str, Any]] = []
    for path in sorted(folder.glob("*/*.jsonl")):
        machine: dict[str, str] = {}
        for text in path.read_text(encoding="utf-8").splitlines():
            line = json.loads(text)
            if "machine" in line:
                machine = line["machine"]
            else:
                found.append({"suite": path.stem, "machine": machine, **line})
    return found


def _commit() -> str:
    given = os.environ.get("TRIMTAB_COMMIT")
    return given or _ask("git", "-C", str(ROOT), "rev-parse", "--short", "HEAD")


def _ask(*command: str) -> str:
    try:
        answer = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    return answer.strip().splitlines()[0] if answer.strip() else "unknown"
