"""`trimtab train` ended by SIGKILL at random moments, and resumed: losses to the bit, as if nobody had ended it."""

import random
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

STEPS = 16
ENDS_S = 300  # a run that has not ended then hangs


def attack(folder: Path, times: int, draw: random.Random) -> int:
    """Findings, each printed. A run that comes to its end under attack is followed by a new one."""
    sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))
    from train_runs import settings_of, start_training, write_run, write_variant

    from trimtab.plan.runs import read_run_log

    write_run(folder / "trained", "internvl")
    plan = write_variant(folder / "trained", "alone", num_stages=1)
    calm = settings_of(folder / "trained", plan, "calm", steps=STEPS, save_every=1)
    began = time.monotonic()
    with start_training(calm, 1) as run:
        assert run.process.wait(ENDS_S) == 0, run.errors
    took_s = time.monotonic() - began

    def losses(of: Any) -> list[float]:  # a step that was done again counts once
        return [step.loss for step in read_run_log(of.out / "run.jsonl").steps]

    kills = ended = findings = 0
    while kills < times:
        stormy, code, words = replace(calm, out=folder / "trained" / f"stormy-{ended}"), None, list[str]()
        while code is None:
            with start_training(stormy, 1, *words) as run:
                if kills < times:
                    await_moment(run, stormy, draw, took_s)
                    code = run.process.poll()
                    kills += code is None
                else:
                    code = run.process.wait(ENDS_S)
            words = ["--resume"]
        ended += 1
        for wrong, told in (
            (code != 0, f"it ends with {code}: {run.errors}"),
            (code == 0 and losses(stormy) != losses(calm), "the losses are others"),
            (code == 0 and any(stormy.out.glob(".*")), f"left behind {sorted(stormy.out.glob('.*'))}"),
        ):
            if wrong:
                findings += 1
                print(f"train: run {ended}, after {kills} kills: {told}")
    print(f"train: {kills} kills of {ended} runs, {findings} findings")
    return findings


def await_moment(run: Any, settings: Any, draw: random.Random, took_s: float) -> None:
    """Drawn over the time of a whole run, or so many steps from now, where a step and its checkpoint are written."""
    from train_runs import read_lines

    if draw.random() < 0.5:
        with suppress(subprocess.TimeoutExpired):
            run.process.wait(draw.uniform(0, took_s))
        return
    target, end = len(read_lines(settings)) + draw.randrange(1, 5), time.monotonic() + ENDS_S
    while run.process.poll() is None and len(read_lines(settings)) < target:
        assert time.monotonic() < end, run.errors
        time.sleep(0.01)
    time.sleep(draw.uniform(0, 0.3))
