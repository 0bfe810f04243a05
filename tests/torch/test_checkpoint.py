"""Tests of training/checkpoint.py: what is no whole checkpoint is not resumed; needs torch."""

from __future__ import annotations

import json

import pytest
import torch

from trimtab.errors import PlanError
from trimtab.runtime.training.checkpoint import (
    Progress,
    list_checkpoints,
    load_checkpoint,
    read_progress,
    save_checkpoint,
)
from trimtab.runtime.training.loop import refuse_unshared
from trimtab.runtime.training.ranks import process_group


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
    return load_checkpoint(path, dict(layer.named_parameters()), {}, optimizer)


def test_weights_and_the_optimizers_state_come_back(saved):
    layer, optimizer, _ = saved
    weight, moment = layer.weight.detach().clone(), optimizer.state[layer.weight]["exp_avg"].clone()
    layer.weight.data.zero_()
    optimizer.state[layer.weight]["exp_avg"].zero_()
    assert load(saved).step == 4
    assert torch.equal(layer.weight, weight)
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], moment)


def test_a_half_written_checkpoint_is_none(saved):
    path = saved[2]
    (path.parent / ".step-00000009.writing").mkdir()
    (path.parent / "step-00000008").mkdir()  # no progress.json: not ours
    assert list_checkpoints(path.parent) == [path]


@pytest.mark.parametrize("change", [{"step": "x"}, {"step": -5}, {"loader": []}, {"num_tensors": "a"}])
def test_progress_that_is_none_is_refused(saved, change):
    file = saved[2] / "progress.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | change))
    with pytest.raises(PlanError, match=rf"is no checkpoint of `trimtab train` \({next(iter(change))} is "):
        read_progress(saved[2])


def test_a_checkpoint_that_lost_tensors_is_refused(saved):
    path = saved[2]
    (file,) = path.glob("*.safetensors")
    whole = file.read_bytes()
    file.write_bytes(whole[:-100])
    with pytest.raises(PlanError, match=r"its tensors cannot be read .*: remove this folder and resume from the one"):
        load(saved)
    file.write_bytes(whole)
    progress = json.loads((path / "progress.json").read_text())
    (path / "progress.json").write_text(json.dumps(progress | {"num_tensors": progress["num_tensors"] + 3}))
    with pytest.raises(PlanError, match=rf"{progress['num_tensors']} of its {progress['num_tensors'] + 3} tensors are"):
        load(saved)


def test_ranks_that_do_not_see_the_checkpoint_are_counted(tmp_path):
    with process_group("cpu") as device:
        refuse_unshared(None, device)
        with pytest.raises(PlanError, match=r"which 1 of 1 ranks do not see: give a folder that all nodes share"):
            refuse_unshared(tmp_path / "step-00000004", device)
