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
from trimtab.runtime.vision import exchange, vision_dp

PLACES = {  # of each collective on the host's group, in order
    "gather": ("the forward of", "the backward of"),
    "dispatch": (*["the forward of"] * 3, "the backward of"),  # two kinds of pixels, rows
}


def run_stopped(rank: int) -> None:
    """In the tower, and at every collective of both exchanges: named, and unharmed once it goes on."""
    other = pids_of_ranks()[1]
    logits_alone, gradients_alone = learn(make_case("qwen2_5_vl", "images"))
    both = {name: 2 * gradient for name, gradient in gradients_alone.items()}
    for how, places in PLACES.items():
        for number, place in enumerate(("the end of", *places)):
            case = make_case("qwen2_5_vl", "images")
            with (
                pytest.MonkeyPatch.context() as patch,
                vision_dp(case.model, exchange=how, timeout_s=300, patience_s=1.0),
            ):
                if rank and number:
                    stop_before_collective(patch, number)
                elif rank:
                    case.tower.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
                else:
                    patch.setattr(sys, "stderr", Wakes(f"at {place} get_image_features", other))
                logits, gradients = learn(case)
            assert_close(logits, logits_alone, (how, place))
            assert_close(sum_over_ranks(gradients), both, (how, place))
    run_stopped_for_too_long(rank, other)


def run_stopped_for_too_long(rank: int, other: psutil.Process) -> None:
    """The other raises; so does the one that was stopped, once it goes on."""
    case = make_case("qwen2_5_vl", "images")
    told = r"for rank 1 .*, which does not answer since [\d:]+" if rank == 0 else ""
    failed = rf"rank {rank} of 2 waited \d+ s at the end of get_image_features .*{told}"
    with vision_dp(case.model, timeout_s=3, patience_s=1.0):
        if rank:
            case.tower.register_forward_pre_hook(lambda *_: os.kill(os.getpid(), signal.SIGSTOP))
        with pytest.raises(TrimtabError, match=failed):
            case.forward()
    if rank == 0:
        other.send_signal(signal.SIGCONT)


class Wakes(io.StringIO):
    """As stderr of the rank that waits: it lets the stopped one go on once that was named as such at this place."""

    def __init__(self, place: str, stopped: psutil.Process) -> None:
        super().__init__()
        self.place, self.stopped = place, stopped

    def write(self, text: str) -> int:
        if self.place in text and "for rank 1 of 2" in text and "which does not answer since" in text:
            while self.stopped.status() != psutil.STATUS_STOPPED:  # a busy machine, it is to stop yet
                time.sleep(0.05)
            self.stopped.send_signal(signal.SIGCONT)
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
