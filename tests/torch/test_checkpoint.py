"""Tests of training/checkpoint.py: what is no whole checkpoint is not resumed; needs torch."""

import resource
from itertools import pairwise

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from refusals import refused
from trimtab.errors import PlanError
from trimtab.runtime.ranks import process_group
from trimtab.runtime.training.checkpoint import (
    Progress,
    _read_progress,
    held_folder,
    list_checkpoints,
    load_checkpoint,
    refuse_unshared,
    save_checkpoint,
)
from trimtab.runtime.training.settings import TrainSettings, rate_factor

CPU = torch.device("cpu")


@pytest.fixture
def saved(tmp_path):
    """A layer that has taken a step, its optimizer, and the folder of its checkpoint; inside a process group."""
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    with process_group("cpu"):
        progress = Progress(step=4, loader={"epoch": 0}, optimizer="AdamW")
        yield layer, optimizer, save_checkpoint(tmp_path, dict(layer.named_parameters()), {}, optimizer, progress)


def load(saved):
    layer, optimizer, path = saved
    progress = _read_progress(path)
    load_checkpoint(path, progress, dict(layer.named_parameters()), {}, optimizer)
    return progress


def test_weights_and_the_optimizers_state_come_back(saved):
    layer, optimizer, _ = saved
    weight, moment = layer.weight.detach().clone(), optimizer.state[layer.weight]["exp_avg"].clone()
    layer.weight.data.zero_()
    optimizer.state[layer.weight]["exp_avg"].zero_()
    assert load(saved).step == 4
    assert torch.equal(layer.weight, weight)
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], moment)


def test_a_checkpoint_without_a_state_of_the_optimizer_is_refused(saved):
    """Its weights alone would go on with a fresh optimizer."""
    (file,) = saved[2].glob("*.safetensors")
    with safe_open(file, "pt") as content:
        kept = {name: content.get_tensor(name) for name in content.keys() if name != "optimizer/weight/exp_avg"}  # noqa: SIM118
        save_file(kept, file, metadata=content.metadata())
    with refused(PlanError, "5 of 6"):
        load(saved)


def test_a_folder_is_of_one_run_at_a_time(tmp_path):
    run = tmp_path / "run"
    with process_group("cpu"), held_folder(run, CPU), refused(PlanError, run), held_folder(run, CPU):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_a_half_written_checkpoint_is_none(saved):
    path = saved[2]
    (path.parent / ".step-00000009.writing").mkdir()
    assert list_checkpoints(path.parent) == [path]
    for content in (
        "[]",
        "[" * 100_000,
        '{"step": "1", "loader": {}, "optimizer": "SGD"}',
        '{"step": 1, "loader": []}',
    ):
        (path / "progress.json").write_text(content)
        with refused(PlanError, "progress.json"):
            _read_progress(path)


def test_a_disk_that_takes_no_more_is_named_and_no_checkpoint_is_left(saved):
    layer, optimizer, path = saved
    progress = Progress(step=5, loader={"epoch": 0}, optimizer="AdamW")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with refused(OSError, "step-00000005"):
            save_checkpoint(path.parent, dict(layer.named_parameters()), {}, optimizer, progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list(path.parent.iterdir()) == [path]


def test_ranks_that_do_not_see_the_checkpoint_are_counted(saved):
    refuse_unshared(saved[2], CPU)
    with refused(PlanError, "1 of 1"):
        refuse_unshared(saved[2].parent / "step-00000009", CPU)


# -- training/settings.py: what is refused, and the learning rate of each step ----------------------------------------


def test_the_learning_rate_rises_and_decays():
    factors = [rate_factor(step, 10, 2, "cosine") for step in range(1, 11)]
    assert factors[:3] == [0.5, 1.0, 1.0]
    assert all(a >= b for a, b in pairwise(factors[1:]))
    assert factors[-1] > 0
    assert [rate_factor(step, 6, 2, "linear") for step in (3, 4, 5, 6)] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert rate_factor(1, 6, 0, "constant") == 1.0


@pytest.mark.parametrize(
    ("asked", "cpu", "cuda"), [(None, "float32", "bfloat16"), ("bfloat16", "bfloat16", "bfloat16")]
)
def test_products_are_in_float32_on_a_cpu_unless_asked_otherwise(tmp_path, asked, cpu, cuda):
    settings = TrainSettings(plan=tmp_path, model=tmp_path, dtype=asked)
    assert (settings.dtype_on("cpu"), settings.dtype_on("cuda")) == (cpu, cuda)
