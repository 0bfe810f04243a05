"""Tests of runtime/ (watch) and training/ (ranks, loop): ranks that stop, end, refuse or differ. Needs torch, gloo.

Each run is `torchrun ... trimtab train`, of a tiny InternVL. What is waited for is an event, never a moment.
"""

import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from train_runs import (
    assert_said_once,
    read_lines,
    said,
    settings_of,
    start_training,
    wait_for,
    write_run,
    write_variant,
)

from trimtab.runtime.training.settings import TrainSettings

pytestmark = pytest.mark.integration

FOREVER = 10_000  # steps: the run is ended before


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks")
    write_run(path, "internvl")
    write_variant(path, "alone", num_stages=1)
    return path


def endless(folder: Path, out: str, **more: object) -> TrainSettings:
    return settings_of(folder, folder / "plan", out, **{"steps": FOREVER, "save_every": FOREVER, **more})


@pytest.mark.parametrize(("every", "rank"), [(FOREVER, 1), (1, 0)], ids=["step", "checkpoint"])
def test_a_stopped_rank_is_named_and_goes_on_unharmed_or_ends_the_run(folder: Path, every: int, rank: int) -> None:
    """Stopped in a step of a pipeline, or with checkpoints behind every step; on after it was named; stopped again."""
    settings = endless(folder, f"stopped-{rank}", save_every=every)
    with start_training(settings, 2, "--set", "timeout=40") as run:
        wait_for(lambda: len(read_lines(settings)) > 2, run)
        process = run.ranks()[rank]
        process.suspend()
        wait_for(lambda: f"rank {rank} of 2 (process {process.pid} on" in run.errors, run)
        done = len(read_lines(settings))
        process.resume()
        wait_for(lambda: len(read_lines(settings)) > done + 3, run)
        process.suspend()
        wait_for(lambda: "--set timeout" in run.errors, run)
        process.kill()  # torchrun would wait 30 s for it
        assert_said_once(run, rf"rank \d .* rank {rank} of 2 \(process {process.pid} on \S+\).*--set timeout.*")


def test_a_killed_rank_ends_the_run_and_torchrun_names_it(folder: Path) -> None:
    settings = endless(folder, "killed")
    with start_training(settings, 4) as run:
        wait_for(lambda: len(read_lines(settings)) > 2, run)
        run.ranks()[2].kill()
        assert run.process.wait(timeout=300) != 0
        wait_for(lambda: re.search(r"rank\s*: 2 ", run.errors) is not None, run)


def test_what_one_rank_or_all_refuse_is_said_once(folder: Path, tmp_path: Path) -> None:
    """Three processes for two stages, on all ranks; an image that cannot be read, on the ranks that have it; a wrong
    option, before there are ranks."""
    write_run(tmp_path, "internvl")
    for image in sorted((tmp_path / "data").rglob("*.png")):
        image.write_bytes(image.read_bytes()[:60])
    unread = replace(endless(tmp_path, "unread"), plan=write_variant(tmp_path, "alone", num_stages=1))
    planned = endless(folder, "refused")
    cases = [
        (planned, 3, (), r"3 processes .* 2: .*"),
        (planned, 2, ("--lr", "-1"), r".*\(--lr\).* -1\.0.*"),
        (unread, 2, (), r"sample s\d+ .* cannot be read .*"),
    ]
    for settings, number, more, sentence in cases:
        with start_training(settings, number, *more) as run:
            assert_said_once(run, sentence)
            assert len(said(run)) == 1


def start_by_hand(settings: TrainSettings, rank: int, port: int, *more: str) -> subprocess.Popen[str]:
    """One of two ranks, without torchrun."""
    words = ["train", str(settings.plan), str(settings.model), "--out", str(settings.out), "--device", "cpu"]
    ranks = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
    return subprocess.Popen(
        [str(Path(sys.executable).parent / "trimtab"), *words, "--random-weights", *more],
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ranks, "MASTER_PORT": str(port)},
    )


def free_port() -> int:
    import socket

    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def test_a_rank_that_never_comes_or_was_started_otherwise_is_named(folder: Path) -> None:
    settings = endless(folder, "never")
    alone = start_by_hand(settings, 0, free_port(), "--set", "timeout=3")
    port = free_port()
    pair = [start_by_hand(settings, rank, port, "--set", f"seed={rank}") for rank in range(2)]
    found = [process.communicate(timeout=300)[1] for process in (alone, *pair)]
    assert [process.returncode for process in (alone, *pair)] == [2, 2, 2]
    assert re.fullmatch(r"trimtab: rank 0 has waited \d+ s at the start for rank 1 of 2: start every .*\n", found[0])
    told = r"trimtab: rank 1 was started with seed 1, rank 0 with 0: .*\n"
    assert re.fullmatch(told, found[1] + found[2])
    assert not settings.out.exists()
