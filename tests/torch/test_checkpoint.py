"""Tests of training/checkpoint.py: what is no whole checkpoint is not resumed; needs torch."""

from __future__ import annotations

import re
import resource
import shutil

import pytest
import torch

from trimtab.errors import PlanError
from trimtab.runtime.ranks import process_group
from trimtab.runtime.training.checkpoint import (
    Progress,
    check_checkpoint,
    held_folder,
    list_checkpoints,
    load_checkpoint,
    refuse_unshared,
    save_checkpoint,
)

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
    progress = check_checkpoint(path, CPU)
    assert isinstance(progress, Progress), progress
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


def test_a_folder_is_of_one_run_at_a_time(tmp_path):
    run = tmp_path / "run"
    refused = pytest.raises(PlanError, match=re.escape(str(run)))
    with process_group("cpu"), held_folder(run, CPU), refused, held_folder(run, CPU):
        pass
    assert not list((tmp_path / "run").iterdir())


def test_a_half_written_checkpoint_is_none(saved):
    path = saved[2]
    (path.parent / ".step-00000009.writing").mkdir()
    assert list_checkpoints(path.parent) == [path]
    (path.parent / "step-00000008").mkdir()
    assert check_checkpoint(list_checkpoints(path.parent)[-1], CPU) == "it has no progress.json"


def test_whatever_happens_to_a_checkpoints_files_is_seen(saved):
    path = saved[2]
    (tensors,) = path.glob("*.safetensors")
    assert isinstance(check_checkpoint(path, CPU), Progress)
    for file, damage, told in (
        (tensors, lambda x: x[:-100], rf"{tensors.name} has \d+ of \d+ bytes"),
        (tensors, lambda x: x[:-9] + bytes([x[-9] ^ 1]) + x[-8:], f"{tensors.name} has other content"),
        (tensors, lambda _: None, f"{tensors.name} cannot be read"),
        (path / "progress.json", lambda x: x.replace(b'"step": 4', b'"step": 5'), "progress.json has other content"),
        (path / "progress.json", lambda x: x[:-5], "progress.json is none of ours: .*"),
        (path / "progress.json", lambda _: b"[]", "progress.json is none of ours: .*"),
        (path / "progress.json", lambda _: b"{}", "progress.json is none of ours: 'crc32'"),
    ):
        whole = file.read_bytes()
        content = damage(whole)
        if content is None:
            file.unlink()
        else:
            assert content != whole
            file.write_bytes(content)
        assert re.fullmatch(told, str(check_checkpoint(path, CPU))), told
        file.write_bytes(whole)
    assert isinstance(check_checkpoint(path, CPU), Progress)


def test_a_disk_that_takes_no_more_is_named_and_no_checkpoint_is_left(saved):
    layer, optimizer, path = saved
    progress = Progress(step=5, loader={"epoch": 0}, optimizer="AdamW")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (64, limits[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            save_checkpoint(path.parent, dict(layer.named_parameters()), {}, optimizer, progress)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert list_checkpoints(path.parent) == [path]


def test_later_checkpoints_that_were_damaged_do_not_count_among_those_kept(saved):
    layer, optimizer, path = saved
    later = path.parent / "step-00000009"
    shutil.copytree(path, later)
    for step in (5, 6):
        progress = Progress(step=step, loader={"epoch": 0}, optimizer="AdamW")
        save_checkpoint(path.parent, dict(layer.named_parameters()), {}, optimizer, progress, keep=2)
    assert [found.name[-1] for found in list_checkpoints(path.parent)] == ["5", "6", "9"]


def test_ranks_that_do_not_see_the_checkpoint_are_counted(saved):
    refuse_unshared(saved[2], CPU)
    with pytest.raises(PlanError, match=r"which 1 of 1 ranks do not see: give a folder that all nodes share"):
        refuse_unshared(saved[2].parent / "step-00000009", CPU)
