"""SIGKILL at random moments over an older result: `python -m tests.kills --times 200`.

Every verb first makes an older result and a newer one in peace. Then it makes the newer one over the older one and is
killed, at a moment drawn over the time that it takes. Whatever lies there afterwards must be of one of the two results,
never of both, and be read as a whole one or refused; and the verb that is let run must come to the same bytes, with
nothing left beside them.
"""

import argparse
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

from tests.kills import training

Contents = dict[str, bytes]


@dataclass(frozen=True)
class Verb:
    """The words of the older and of the newer command, and the one that reads what they wrote in the folder `out`."""

    older: list[str]
    newer: list[str]
    reads: list[str]


def verbs(folder: Path) -> dict[str, Verb]:
    from trimtab.demo import draw_dataset

    data = draw_dataset(folder / "data", num_samples=300)
    size = ["size", str(data / "data.jsonl"), "--model", "Qwen2.5-VL-7B", "--tokenizer", str(data / "tokenizer.json")]
    sizes = str(folder / "sizes.npz")
    run([*size, "--out", sizes])
    plan = ["plan", "Qwen2.5-VL-7B", sizes, "--cluster", "8xA100-80GB", "--tp", "2", "--set", "num_microbatches=4"]
    pack = ["pack", sizes, "--max-patches", "20000", "--max-tokens", "20000", "--set", "oversize=skip"]
    profile = ["profile", "Qwen2.5-VL-7B", "--out", "out/p.json", "--device"]
    for seed in ("0", "1"):
        run([*plan, "--pp", "2", "--set", f"seed={seed}", "--out", str(folder / f"plan{seed}")])
    export = ["--data", str(data / "data.jsonl"), "--out", "out/e.jsonl"]
    places = ["map", "Qwen2.5-VL-7B", "--gpus", "2x24GiB"]
    return {
        "size": Verb([*size, "--set", "special_tokens=processor", "--set", "exif=apply", "--out", "out/s.npz"],
                     [*size, "--set", "resume=kept", "--out", "out/s.npz"],
                     ["pack", "out/s.npz", "--max-patches=99999", "--max-tokens=99999", "--set", "oversize=skip"]),
        "pack": Verb([*pack, "--set", "seed=1", "--out", "out"], [*pack, "--out", "out"], []),
        "plan": Verb([*plan, "--pp", "2", "--out", "out"], [*plan, "--pp", "1", "--out", "out"], ["check", "out"]),
        "map": Verb([*places, "--reserve", "10", "--out", "out"], [*places, "--out", "out"], []),
        "describe": Verb(["describe", "Qwen2.5-VL-3B", "--out", "out/m.json"],
                         ["describe", "Qwen2.5-VL-7B", "--out", "out/m.json"], ["describe", "out/m.json"]),
        "profile": Verb([*profile, "H200"], [*profile, "A100-80GB"], []),
        "export": Verb(["export", "jsonl", str(folder / "plan0"), *export],
                       ["export", "qwen-packs", str(folder / "plan1"), *export], []),
    }  # fmt: skip


def run(words: list[str], cwd: Path | None = None) -> float:
    """Seconds; the command must succeed."""
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *words], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{words}: {done.stderr}"
    return time.monotonic() - began


def kill(words: list[str], cwd: Path, after_s: float) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "trimtab", *words],
        cwd=cwd,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(after_s)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def contents(folder: Path) -> Contents:
    """What a reader may find; files aside begin with a point."""
    return {file.name: file.read_bytes() for file in folder.glob("*") if not file.name.startswith(".")}


def torn(found: Contents, older: Contents, newer: Contents) -> bool:
    return not (found.items() <= older.items() or found.items() <= newer.items())


def attack(name: str, verb: Verb, folder: Path, times: int, draw: random.Random) -> int:
    """Findings of one verb, each printed."""
    peace, war = folder / f"{name}-peace", folder / f"{name}-war"
    made: list[Contents] = []
    for words in (verb.older, verb.newer):
        shutil.rmtree(peace, ignore_errors=True)
        peace.mkdir()
        took_s = run(words, peace)
        made.append(contents(peace / "out"))
    findings = whole = 0
    for number in range(times):
        shutil.rmtree(war / "out", ignore_errors=True)
        (war / "out").mkdir(parents=True)
        for file, content in made[0].items():
            (war / "out" / file).write_bytes(content)
        # half of the moments where files take their names: the end
        after_s = draw.uniform(0.0, took_s) if number % 2 else took_s * draw.uniform(0.8, 1.05)
        kill(verb.newer, war, after_s)
        found = contents(war / "out")
        whole += found in made
        if torn(found, *made):
            findings += 1
            print(f"{name}: killed after {after_s:.3f} s, files of both results: {sorted(found)}")
        if found in made and verb.reads:
            run(verb.reads, war)
    run(verb.newer, war)
    if contents(war / "out") != made[1]:
        findings += 1
        print(f"{name}: after {times} kills the result is another")
    if left := [file.name for file in (war / "out").iterdir() if file.name.startswith(".")]:
        findings += 1
        print(f"{name}: left behind {left}")
    print(f"{name}: {times} kills, {whole} whole results found, {findings} findings")
    return findings


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.kills", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--times", type=int, default=20, help="Kills of each verb.")
    parser.add_argument("--only", action="append")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(2**32))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    with tempfile.TemporaryDirectory(prefix="trimtab-kills-") as folder:
        draw, names = random.Random(given.seed), given.only
        findings = 0
        if not names or "train" in names:
            findings += training.attack(Path(folder), given.times, draw)
        if not names or set(names) - {"train"}:
            found = verbs(Path(folder))
            findings += sum(attack(n, found[n], Path(folder), given.times, draw) for n in names or found if n in found)
        return findings


if __name__ == "__main__":
    raise SystemExit(1 if main() else 0)
