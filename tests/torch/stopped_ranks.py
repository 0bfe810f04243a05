"""A rank that stops itself at a collective of shared images, for the tests of ranks that are lost. Needs torch."""

from __future__ import annotations

import io
import os
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import psutil
import pytest
import torch
import torch.distributed as dist
from rounding import assert_close
from vision_runs import Case, make_case, sum_over_ranks

from trimtab.errors import TrimtabError
from trimtab.runtime.vision import exchange
from trimtab.runtime.vision.apply import vision_dp


def run_stopped(rank: int) -> None:
    """In the tower, and at the first collective of an exchange: named, and unharmed once it goes on."""
    other = pids_of_ranks()[1]
    logits_alone, gradients_alone = learn(make_case("qwen2_5_vl", "images"))
    both = {name: 2 * gradient for name, gradient in gradients_alone.items()}
    for how, number in (("gather", 0), ("gather", 1), ("dispatch", 1)):
        case = make_case("qwen2_5_vl", "images")
        with pytest.MonkeyPatch.context() as patch, vision_dp(case.model, exchange=how, timeout_s=300) as handle:
            handle.sharing.control.watch.patience_s = 1.0
            if rank and number:
                stop_before_collective(patch, number)
            elif rank:
                case.tower.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
            else:
                patch.setattr(sys, "stderr", Wakes(other))
            logits, gradients = learn(case)
        assert_close(logits, logits_alone, (how, number))
        assert_close(sum_over_ranks(gradients), both, (how, number))
    run_stopped_for_too_long(rank, other)


def run_stopped_for_too_long(rank: int, other: psutil.Process) -> None:
    """The other raises; so does the one that was stopped, once it goes on."""
    case = make_case("qwen2_5_vl", "images")
    failed = rf"rank {rank} of 2 .*get_image_features" + (".*rank 1 of 2" if rank == 0 else "")
    with vision_dp(case.model, timeout_s=3):
        if rank:
            case.tower.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        with pytest.raises(TrimtabError, match=failed):
            case.forward()
    if rank == 0:
        wake(other)


def wake(process: psutil.Process) -> None:
    while process.status() != psutil.STATUS_STOPPED:  # a busy machine, it is to stop yet
        time.sleep(0.05)
    process.send_signal(signal.SIGCONT)


class Wakes(io.StringIO):
    """As stderr of the rank that waits: it lets the stopped one go on once that was named."""

    def __init__(self, stopped: psutil.Process) -> None:
        super().__init__()
        self.stopped = stopped

    def write(self, text: str) -> int:
        if "rank 1 of 2" in text:
            wake(self.stopped)
        return super().write(text)


def learn(case: Case) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Logits and gradients."""
    logits = case.forward()
    case.loss(logits).backward()
    return logits.detach(), case.gradients()


def pids_of_ranks() -> list[psutil.Process]:
    pids: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(pids, os.getpid())
    return [psutil.Process(pid) for pid in pids]


def stop_before_collective(patch: pytest.MonkeyPatch, number: int) -> None:
    """This process stops itself before its collective of that number, counted from 1."""
    stops = iter([*[False] * (number - 1), True])

    def stopped(collective: Callable[..., Any]) -> Callable[..., Any]:
        def run(*given: Any, **more: Any) -> Any:
            if next(stops, False):
                os.kill(os.getpid(), signal.SIGSTOP)
            return collective(*given, **more)

        return run

    for owner, name in ((dist, "all_to_all_single"), (exchange, "_gather"), (exchange, "_reduce_scatter")):
        patch.setattr(owner, name, stopped(getattr(owner, name)))
