"""Tests of runtime/ (watch) and training/ (ranks, resume) in one process: whom they name and how. Needs torch."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import FileStore, HashStore
from torch.distributed.checkpoint.api import CheckpointException

from trimtab.errors import TrimtabError
from trimtab.runtime.training.ranks import _is_lost
from trimtab.runtime.training.settings import TrainSettings
from trimtab.runtime.watch import Late, Place, Watch

HOUR_S = 3600.0


def watches(num_ranks: int) -> list[Watch]:
    """Of the ranks of one group, their threads not begun."""
    store = HashStore()
    return [Watch(rank=rank, num_ranks=num_ranks, store=store) for rank in range(num_ranks)]


def read(own: Watch, others: list[Watch]) -> list[Late]:
    """Who is late at the place of `own`, once all have written and it has read."""
    for other in others:
        other.places.write(other.store)
    own.others.read(own.store)
    return late_here(own)


def late_here(own: Watch) -> list[Late]:
    assert own.places.current is not None
    return own.others.late_at(own.places.current)


def test_a_rank_that_is_at_another_place_is_named_with_it():
    here, there = watches(2)
    for watch in (here, there):
        watch.come_to("reading the samples of step 7", waits=False)
    here.come_to("step 7")
    (late,) = read(here, [there])
    told = r"rank 1 of 2 \(process \d+ on \S+\), which is at reading the samples of step 7 since \d\d:\d\d:\d\d"
    assert re.fullmatch(told, here.describe([late]))
    there.come_to("step 7")
    assert read(here, [there]) == []
    there.come_to("step 8")  # ahead: nobody waits for it
    assert read(here, [there]) == []


def test_a_backward_is_missed_wherever_the_other_rank_is():
    here, there = watches(2)
    here.come_to("the start of a forward")
    for _ in range(3):
        there.come_to("the start of a forward")
    read(here, [there])
    (late,) = here.others.late_at(Place("the backward of get_image_features, exchange 1", None))
    assert late.rank == 1


def test_a_forward_to_which_all_come_names_those_that_are_not_so_far():
    """Rank 2 is through, where rank 0 waits still: rank 1 alone is missing."""
    here, stopped, through = watches(3)
    for watch in (here, stopped, through):
        watch.come_to("the end of a tower")
        watch.come_to(None)
    through.wait_for(Work(), "the forward of a tower", torch.ones(1), may_skip=False)
    late: list[Late] = []
    work = Work(lambda: late.extend(late_at_wait(here, [stopped, through])))
    here.wait_for(work, "the forward of a tower", torch.ones(1), may_skip=False)
    assert [x.rank for x in late] == [1]
    assert here.places.open() == []
    with pytest.raises(RuntimeError):
        here.wait_for(Work(fail), "the forward of a tower", torch.ones(1), may_skip=False)
    assert here.places.open() == []  # a wait that failed is over


@dataclass(frozen=True)
class Work:
    """Of a collective: what happens while it is waited for."""

    wait: Callable[[], object] = lambda: None


def fail() -> None:
    raise RuntimeError("a connection broke")


def late_at_wait(own: Watch, others: list[Watch]) -> list[Late]:
    for other in others:
        other.places.write(other.store)
    own.others.read(own.store)
    (place,) = own.places.open()
    return own.others.late_at(place)


def test_a_rank_that_writes_no_more_is_silent_with_its_last_place():
    here, gone, there = watches(3)
    for watch in (here, gone, there):
        watch.come_to("step 7")
    assert read(here, [gone, there]) == []
    here.others.heard[1] = replace(here.others.heard[1], changed=time.monotonic() - HOUR_S)
    assert here.places.current is not None
    here.places.current.since -= 2 * HOUR_S
    here.others.awake -= 3 * HOUR_S
    (late,) = read(here, [there])
    assert late.is_silent
    assert late.waited_s == pytest.approx(HOUR_S, abs=60)  # it wrote until then
    told = r"rank 1 of 3 \(.*\), which does not answer since [\d:]+ \(it was at step 7 since [\d:]+\)"
    assert re.fullmatch(told, here.describe([late]))
    here.others.awake = time.monotonic()  # this rank itself was stopped for two hours
    assert late_here(here)[0].waited_s < 60


def test_a_store_that_does_not_answer_is_rank_0s():
    _, here = watches(2)
    here.come_to("step 7")
    here.others.answered = here.others.awake = time.monotonic() - HOUR_S
    assert [late.rank for late in late_here(here)] == [0]


def test_a_rank_that_has_left_is_late_where_it_did_not_come():
    here, gone = watches(2)
    for watch in (here, gone):
        watch.come_to("step 7")
    gone.come_to(None)
    gone.places.write(gone.store, has_left=True)
    here.others.read(here.store)
    assert late_here(here) == []  # it was there too
    here.come_to("step 8")
    (late,) = late_here(here)
    assert here.describe([late]).endswith("which has left")


def test_the_first_rank_speaks_and_the_last_where_it_is_the_late_one(capsys):
    first, last = watches(2)
    for watch in (first, last):
        watch.come_to("step 7")
    assert read(last, [first]) == []
    assert last.others.first_speaks([])
    assert not last.others.first_speaks([Late(0, 1.0, True)])
    first.come_to("step 8")
    read(first, [last])
    assert first.places.current is not None
    first.tell(first.places.current)
    first.tell(first.places.current)
    told = r"trimtab: rank 0 has waited \d+ s \(since .*\) at step 8 for rank 1 of 2 .*"
    (line,) = capsys.readouterr().err.splitlines()  # once
    assert re.fullmatch(f"{told}, which has not come there|{told}, which is at step 7 since .*", line)
    first.others.heard[1] = replace(first.others.heard[1], changed=time.monotonic() - HOUR_S)
    first.tell(first.places.current)
    (line,) = capsys.readouterr().err.splitlines()  # once more, for it does not answer any longer
    assert re.fullmatch(f"{told}, which does not answer since .*", line)


def test_who_waits_too_long_gives_up():
    here, there = watches(2)
    said: list[str] = []
    here.give_up, here.give_up_s = said.append, 0.0
    here.come_to("step 7")
    read(here, [there])
    assert here.places.current is not None
    here.tell(here.places.current)
    assert len(said) == 1


@pytest.mark.parametrize("words", [{"seed": "0"}, {"seed": "1"}])
def test_ranks_meet_with_equal_words_alone(words):
    first, last = watches(2)
    last.store.set("words/1", '{"seed": "0"}')
    last.places.write(last.store)
    if words["seed"] == "0":
        first.meet("the start", words, 60.0)
        first.close()
        assert first.place == "its end"
        return
    with pytest.raises(TrimtabError, match="rank 1 was started with seed 0, and rank 0 with 1: start every"):
        first.meet("the start", words, 60.0)


def test_a_rank_that_does_not_come_is_named_and_waited_for_no_longer_than_asked(capsys):
    first, _ = watches(2)
    first.patience_s = 0.1
    with pytest.raises(TrimtabError, match="rank 0 has waited 0 s at the start for rank 1 of 2: start every rank"):
        first.meet("the start", {}, 0.3)
    assert "trimtab: rank 0 has waited 0 s at the start for rank 1 of 2\n" in capsys.readouterr().err


def test_a_connections_errors_are_told_from_others():
    gloo = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert _is_lost(gloo)
    assert _is_lost(dist.DistStoreError("wait timeout"))
    inside = RuntimeError("stage 1 failed")
    inside.__cause__ = gloo
    assert _is_lost(inside)
    assert _is_lost(CheckpointException("save", {0: (gloo, [])}))
    assert not _is_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


@pytest.mark.parametrize(
    ("value", "told"),
    [(0, "give 1 or more"), (-1, "give 1 or more"), (10**30, "give 604800 or less"), (1.5, "give a whole number")],
)
def test_timeouts_that_are_none_are_refused(tmp_path, value, told):
    settings = TrainSettings(plan=tmp_path, model=tmp_path)
    with pytest.raises(TrimtabError, match=rf"timeout_s \(--set timeout\) {value}.*: {told}"):
        replace(settings, timeout_s=value)


def test_a_process_that_ends_without_closing_has_left(tmp_path: Path):
    """Else a thread in the store's code would end the process by SIGABRT, and the others would wait for it."""
    ends = """
import sys
from torch.distributed import FileStore
from trimtab.runtime.watch import Watch
Watch(rank=0, num_ranks=1, store=FileStore(sys.argv[1], 2)).meet("the start", {}, 60)
"""
    subprocess.run([sys.executable, "-c", ends, str(tmp_path / "store")], check=True)
    assert json.loads(FileStore(str(tmp_path / "store"), 2).get("rank/0"))["has_left"]
