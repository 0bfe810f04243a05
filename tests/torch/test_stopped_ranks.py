"""Tests of runtime/ (watch), vision/ (control, exchange) and probe/ (run): ranks lost in an exchange or a probe.

Needs torch, gloo, and Transformers 5 for the models.
"""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="5", reason="holds the models")

import stopped_ranks
from gloo_ranks import on_ranks
from probe_runs import write_probed
from train_runs import (
    Torchrun,
    assert_said_once,
    read_lines,
    said,
    settings_of,
    start_training,
    wait_for,
    write_run,
    write_variant,
)

pytestmark = pytest.mark.integration

FOREVER = 1_000_000  # steps: the run is ended before


def test_a_rank_that_stops_inside_an_exchange_of_images_is_named_and_unharmed() -> None:
    on_ranks(stopped_ranks.run_stopped)


def test_training_that_shares_images_names_a_rank_once(tmp_path: Path) -> None:
    """Stopped, so that the other waits for its images; on after it was named; then killed."""
    write_run(tmp_path, "internvl")
    plan = write_variant(tmp_path, "alone", num_stages=1)
    settings = settings_of(tmp_path, plan, "shared", steps=FOREVER, save_every=FOREVER)
    with start_training(settings, 2, "--vision-dp", "dispatch") as run:
        wait_for(lambda: len(read_lines(settings)) > 2, run)
        process = run.ranks()[1]
        process.suspend()
        wait_for(lambda: "rank 1 of 2" in run.errors, run)
        done = len(read_lines(settings))
        process.resume()
        wait_for(lambda: len(read_lines(settings)) > done + 3, run)
        assert all(f"rank 1 of 2 (process {process.pid} on" in line for line in said(run))
        process.kill()  # rank 0 may be in the exchange or about to be: the sentence is the same
        assert_said_once(run, r"the run has lost rank 1 of 2 \(.*\).* \(--resume\)")


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probed")
    write_probed(path, "internvl")
    return path


def start_probe(folder: Path, out: Path, *more: str) -> Torchrun:
    """On two ranks."""
    words = ["probe", str(folder / "two"), str(folder / "model"), "--set", "device=cpu", "--out", str(out / "plan")]
    return Torchrun([*words, *more], out, 2)


def test_a_probe_ends_by_its_timeout(probed: Path, tmp_path: Path) -> None:
    with start_probe(probed, tmp_path, "--set", "timeout=15") as run:
        wait_for(lambda: "everything recomputed, pack" in run.errors, run)  # the first of many runs
        process = run.ranks()[0]
        process.suspend()
        wait_for(lambda: "--set timeout" in run.errors, run)
        process.kill()  # torchrun would wait 30 s for it
        assert_said_once(run, rf"rank 1 .* rank 0 of 2 \(process {process.pid} on \S+\).*--set timeout.*")
    assert not (tmp_path / "plan").exists()
