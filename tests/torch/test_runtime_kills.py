"""Training killed with SIGKILL at random moments, and resumed on other numbers of ranks: needs torch, Transformers."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import plan_runs
import pytest
import torch

Lines = list[tuple[int, tuple[int, ...], float]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All runs of `plan_runs`, in a process of their own that forks the ranks; shows the seed where a test fails."""
    folder = tmp_path_factory.mktemp("kills")
    plan_runs.write_small_plan(folder / "plan")
    seed = random.Random().randrange(10**6)
    command = [sys.executable, plan_runs.__file__, str(folder), str(seed)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    print(f"seed {seed}\n" + "\n".join(line for line in done.stdout.splitlines() if line.startswith("killed")))
    assert done.returncode == 0, done.stderr
    return folder


def lines_of(folder: Path, name: str, rank: int) -> Lines:
    lines = map(json.loads, (folder / f"{name}-{rank}.jsonl").read_text().splitlines())
    return [(line["step"], tuple(line["rows"]), line["loss"]) for line in lines]


@pytest.mark.integration
def test_runs_killed_at_any_moment_come_to_the_same_packs_losses_and_weights(folder: Path) -> None:
    for rank in range(2):
        calm, stormy = lines_of(folder, "calm", rank), lines_of(folder, "stormy", rank)
        assert len(calm) == 24
        assert set(stormy) == set(calm)  # to the last bit: floats compared as they are
        assert len(stormy) > len(calm), "nothing was run twice: nothing was killed"
    calm, stormy = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("calm", "stormy"))
    assert all(torch.equal(calm[key], stormy[key]) for key in calm)


@pytest.mark.integration
@pytest.mark.parametrize("num_ranks", [1, 4])
def test_a_checkpoint_of_two_ranks_resumes_on_one_and_on_four(folder: Path, num_ranks: int) -> None:
    """The same packs and the same mean loss in every step that was left; the weights but for rounding."""

    def steps(name: str, ranks: int) -> dict[int, tuple[list[tuple[int, ...]], float]]:
        found: dict[int, Lines] = defaultdict(list)
        for rank in range(ranks):
            for line in lines_of(folder, name, rank):
                found[line[0]].append(line)
        return {
            step: (sorted(rows for _, rows, _ in lines), sum(loss for *_, loss in lines) / ranks)
            for step, lines in found.items()
        }

    calm, resumed = steps("calm", 2), steps(f"on-{num_ranks}", num_ranks)
    assert sorted(resumed) == [8, 9, 10, 11]
    for step, (packs, loss) in resumed.items():
        assert packs == calm[step][0]
        assert loss == pytest.approx(calm[step][1], rel=1e-5)
    whole, other = (torch.load(folder / f"{name}.pt", weights_only=True) for name in ("calm", f"on-{num_ranks}"))
    assert all(torch.allclose(whole[key], other[key], atol=1e-5) for key in whole)
