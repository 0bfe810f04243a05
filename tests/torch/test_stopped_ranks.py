"""Tests of runtime/ (watch), vision/ (control, exchange) and probe/ (run): ranks lost in an exchange or a probe.

Needs torch, gloo, and Transformers 5 for the models.
"""

from __future__ import annotations

import re
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

from trimtab.plan.measured.check import check_plan

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
        wait_for(lambda: "which does not answer since" in run.errors, run)
        done = len(read_lines(settings))
        process.resume()
        wait_for(lambda: len(read_lines(settings)) > done + 3, run)
        named = [line for line in said(run) if "does not answer" in line]
        assert len(named) in (1, 2), run.errors  # one that was late as well is told so first
        assert all(f"for rank 1 of 2 (process {process.pid} on" in line for line in named)
        process.kill()  # rank 0 may be in the exchange or about to be: the sentence is the same
        assert_said_once(
            run,
            r"at (step|reading the samples of step) \d+ the run has lost rank 1 of 2 \(.*\), which .*: "
            r"see its messages and the system's log .*, and go on from the last checkpoint \(--resume\)",
        )


@pytest.fixture(scope="module")
def probed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("probed")
    write_probed(path, "internvl")
    return path


def start_probe(folder: Path, out: Path, *more: str) -> Torchrun:
    """On two ranks."""
    words = ["probe", str(folder / "two"), str(folder / "model"), "--device", "cpu", "--out", str(out / "plan")]
    return Torchrun([*words, *more], out, 2)


def wait_for_first_run(run: Torchrun) -> None:
    """Of many: one more of each kind of layer, and of the choice."""
    wait_for(lambda: "everything recomputed, pack" in run.errors, run)


def test_a_probe_names_a_stopped_rank_and_goes_on_unharmed(probed: Path, tmp_path: Path) -> None:
    with start_probe(probed, tmp_path) as run:
        wait_for_first_run(run)
        process = run.ranks()[1]
        process.suspend()
        wait_for(lambda: "which does not answer since" in run.errors, run)
        process.resume()
        assert run.process.wait(timeout=300) == 0, run.errors
    told = (
        rf"rank 0 has waited \d+ s \(since [\d:]+\) at the probe for rank 1 of 2 \(process {process.pid} on \S+\), "
        r"which does not answer since .*"
    )
    *late, silent = said(run)  # one that was late as well is told so first
    assert re.fullmatch(told, silent), run.errors
    assert len(late) <= 1, run.errors
    assert check_plan(tmp_path / "plan") == []


def test_a_probe_ends_by_its_timeout(probed: Path, tmp_path: Path) -> None:
    with start_probe(probed, tmp_path, "--set", "timeout=15") as run:
        wait_for_first_run(run)
        process = run.ranks()[0]
        process.suspend()
        wait_for(lambda: "see what keeps it, or allow longer waits (--set timeout)" in run.errors, run)
        process.kill()  # torchrun would wait 30 s for it
        assert_said_once(
            run,
            rf"rank 1 has waited \d+ s \(since [\d:]+\) at the probe for rank 0 of 2 "
            rf"\(process {process.pid} on \S+\), which does not answer since .*: see what keeps it, or .*",
        )
    assert not (tmp_path / "plan").exists()


def test_a_probe_names_a_killed_rank_once(probed: Path, tmp_path: Path) -> None:
    with start_probe(probed, tmp_path) as run:
        wait_for_first_run(run)
        run.ranks()[1].kill()
        assert_said_once(
            run,
            r"at the probe the run has lost rank 1 of 2 \(.*\), which .*: see its messages and the system's log .*, "
            "and start the probe again",
        )
    assert not (tmp_path / "plan").exists()
