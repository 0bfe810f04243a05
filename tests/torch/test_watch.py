"""Tests of runtime/ (watch) and training/ (ranks, resume) in one process: whom they name and how. Needs torch."""

import json
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch.distributed as dist
from torch.distributed import FileStore, HashStore
from torch.distributed.checkpoint.api import CheckpointException

from refusals import refused
from trimtab.errors import TrimtabError
from trimtab.runtime.ranks import Late, Watch, _is_lost

HOUR_S = 3600.0


def watches(num_ranks: int) -> list[Watch]:
    """Of the ranks of one group, their threads not begun."""
    store = HashStore()
    return [Watch(rank=rank, num_ranks=num_ranks, store=store) for rank in range(num_ranks)]


def read(own: Watch, others: list[Watch], *, waited_s: float = HOUR_S) -> list[Late]:
    """Whom `own` waits for after so long, once all have written and it has read."""
    for other in others:
        other.beat()
    own.read()
    own._since = own._awake = time.monotonic() - waited_s
    return own.late()


def test_a_rank_that_has_not_come_as_far_is_late_once_the_wait_is_long():
    here, behind, ahead = watches(3)
    here.arrive()
    ahead.arrive()
    ahead.arrive()
    (late,) = read(here, [behind, ahead])
    assert (late.rank, late.is_silent) == (1, False)
    assert late.waited_s == pytest.approx(HOUR_S, abs=60)
    assert "rank 1 of 3 (process" in late.words
    assert read(here, [behind, ahead], waited_s=1.0) == []
    behind.arrive()
    assert read(here, [behind, ahead]) == []


def test_a_rank_that_writes_no_more_is_silent_wherever_it_is():
    here, gone, there = watches(3)
    assert read(here, [gone, there]) == []
    here._heard[1] = here._heard[1][0], time.monotonic() - HOUR_S / 2
    (late,) = read(here, [there])
    assert (late.rank, late.is_silent) == (1, True)
    assert late.waited_s == pytest.approx(HOUR_S / 2, abs=60)  # it wrote until then
    here._awake = time.monotonic()  # this rank itself was stopped meanwhile
    assert here.late() == []


def test_each_late_rank_is_named_once_over_all_ranks(capsys):
    first, late, last = watches(3)
    for watch in (first, last):
        watch.arrive()
        read(watch, [late, first, last])
    for watch in (first, last, first):
        watch.name()
    (line,) = capsys.readouterr().err.splitlines()
    assert "rank 0 " in line
    assert "rank 1 of 3" in line
    first._heard[1] = first._heard[1][0], time.monotonic() - HOUR_S
    first.name()
    assert len(capsys.readouterr().err.splitlines()) == 1  # once more, for it does not answer any longer


def test_who_waits_too_long_gives_up():
    here, there = watches(2)
    said: list[str] = []
    here.give_up, here.give_up_s = said.append, 60.0
    here.arrive()
    read(here, [there], waited_s=30.0)
    here.name()
    assert said == []
    read(here, [there], waited_s=90.0)
    here.name()
    assert len(said) == 1


@pytest.mark.parametrize("words", [{"seed": "0"}, {"seed": "1"}])
def test_ranks_meet_with_equal_words_alone(words):
    first, last = watches(2)
    last.store.set("words/1", '{"seed": "0"}')
    if words["seed"] == "0":
        first.meet(words, 60.0)
        first.close()
        return
    with refused(TrimtabError, "1", "0"):
        first.meet(words, 60.0)


def test_a_rank_that_does_not_come_is_named_and_waited_for_no_longer_than_asked(capsys):
    first, _ = watches(2)
    first.patience_s = 0.1
    with refused(TrimtabError, "0", "1", "2"):
        first.meet({}, 0.3)
    assert "rank 1 of 2" in capsys.readouterr().err


def test_lost_ranks_are_those_that_write_no_more(monkeypatch):
    monkeypatch.setattr("trimtab.runtime.ranks.PATIENCE_S", 0.5)
    here, gone, there = watches(3)
    read(here, [gone, there])
    threads = [threading.Thread(target=run_for, args=(watch, 1.0)) for watch in (here, there)]
    for thread in threads:
        thread.start()
    assert [x.rank for x in here.find_missing()] == [1]
    for thread in threads:
        thread.join()


def run_for(watch: Watch, seconds: float) -> None:
    ends = time.monotonic() + seconds
    while time.monotonic() < ends:
        watch.beat()
        watch.read()
        time.sleep(0.05)


def test_a_connections_errors_are_told_from_others():
    gloo = RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer")
    assert _is_lost(gloo)
    assert _is_lost(dist.DistStoreError("wait timeout"))
    inside = RuntimeError("stage 1 failed")
    inside.__cause__ = gloo
    assert _is_lost(inside)
    assert _is_lost(CheckpointException("save", {0: (gloo, [])}))
    full = OSError(28, "No space left on device")  # as torch raises it: a failure of the exception that is its context
    full.__context__ = CheckpointException("save", {0: (full, [])})
    assert not _is_lost(full)
    assert not _is_lost(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))


def test_a_process_that_ends_without_closing_has_left(tmp_path: Path):
    """Else a thread in the store's code would end the process by SIGABRT, and the others would wait for it."""
    ends = """
import sys
from torch.distributed import FileStore
from trimtab.runtime.ranks import Watch
Watch(rank=0, num_ranks=1, store=FileStore(sys.argv[1], 2)).meet({}, 60)
"""
    subprocess.run([sys.executable, "-c", ends, str(tmp_path / "store")], check=True)
    assert json.loads(FileStore(str(tmp_path / "store"), 2).get("beat/0"))["has_left"]
