"""The processes of a run: torchrun's process group, what becomes of it when one fails, and who holds what."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any, Literal, TypeVar

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trimtab.errors import PlanError, TrimtabError
from trimtab.runtime.watch import Late, Watch, join_words, say

Result = TypeVar("Result")

MARGIN_S = 30.0
"""Torch's own limit is so much later than ours, whose sentence says more."""


@dataclass(frozen=True, slots=True, eq=False)
class Ranks:
    """This rank's device, and who watches that the others come along; None: one process, or another's group."""

    device: torch.device
    watch: Watch | None = None
    timeout_s: float = 1800.0

    def arrive(self) -> None:
        """Say that this rank has come to the next place where all wait for one another."""
        if self.watch is not None:
            self.watch.arrive()


@contextmanager
def process_group(
    kind: Literal["cpu", "cuda"] | None,
    *,
    timeout_s: float = 1800.0,
    words: Mapping[str, str] | None = None,
    again: str = "go on from the last checkpoint (--resume)",
) -> Iterator[Ranks]:
    """This rank's device; in torchrun's process group, in one already there, or in one of this process alone.

    Under torchrun a rank that others wait for is named, and after `timeout_s` the run ends; so it does where ranks were
    started with other `words`. What one rank raises, the others raise or end by, marked as said; where a rank is lost
    `again` says how to start once more.
    """
    kind = kind or ("cuda" if torch.cuda.is_available() else "cpu")
    if kind == "cuda" and not torch.cuda.is_available():
        raise TrimtabError("device cuda was asked for, but torch sees none here: ask for cpu")
    device = torch.device("cpu")
    if kind == "cuda":
        device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(device)
    if dist.is_initialized():
        yield Ranks(device)
        return
    backend = "nccl" if kind == "cuda" else "gloo"
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
        try:
            yield Ranks(device)
        finally:
            dist.destroy_process_group()
        return
    store = _open_store(timeout_s)
    told = store.clone()
    watch = Watch(
        rank=int(os.environ["RANK"]),
        num_ranks=int(os.environ["WORLD_SIZE"]),
        store=store.clone(),
        give_up_s=timeout_s,
        give_up=lambda sentence: _give_up(sentence, watch, told),
    )
    try:
        # the signal outside: whoever tells of a lost rank is sent it meanwhile
        with _ended_by_signal(watch, told, again), _told_once(watch, told, again):
            watch.meet(words or {}, timeout_s)
            timeout = timedelta(seconds=timeout_s + MARGIN_S)
            dist.init_process_group(backend, store=store, rank=watch.rank, world_size=watch.num_ranks, timeout=timeout)
            yield Ranks(device, watch, timeout_s)
    finally:
        watch.close()
        if dist.is_initialized():
            dist.destroy_process_group()


def _open_store(timeout_s: float) -> Any:
    """Torchrun's own store, or one that rank 0 keeps; keys are of this start and this call."""
    host, port, rank = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), int(os.environ["RANK"])
    keeps = rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        store = TCPStore(host, port, is_master=keeps, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)
    except dist.DistError:
        raise TrimtabError(
            f"rank {rank} has waited {timeout_s} s for rank 0 at {host}:{port} (MASTER_ADDR, MASTER_PORT), and nobody "
            "answers there: start rank 0 too, at this address, or wait longer (--set timeout)"
        ) from None
    start = f"trimtab/{os.environ.get('TORCHELASTIC_RESTART_COUNT', 0)}"
    return PrefixStore(f"{start}/{store.add(f'{start}/{rank}', 1)}", store)


# -- a rank that fails ------------------------------------------------------------------------------------------------


@contextmanager
def _told_once(watch: Watch, store: Any, again: str) -> Iterator[None]:
    """What ends all ranks is marked as said on all but one; of a connection that broke it is told who has ended."""
    try:
        yield
    except (TrimtabError, OSError, RuntimeError, CheckpointException) as problem:
        watch.ending.acquire()
        if _is_lost(problem):
            lost = TrimtabError(_explain(watch, watch.find_missing(), again))
            lost.is_said = _others_left(watch) or not _is_first(store)
            raise lost from problem
        if isinstance(problem, (TrimtabError, OSError)) and getattr(problem, "is_said", None) is None:
            problem.is_said = not _is_first(store)  # type: ignore[union-attr]
        raise


def _is_first(store: Any) -> bool:
    """Whether no other rank has said why the run ends."""
    try:
        return bool(store.add("said", 1) == 1)
    except RuntimeError:  # who keeps it has ended
        return True


def _is_lost(error: BaseException) -> bool:
    """Whether it, or what it came from, is a connection's: gloo has no class of its own, but names its files.

    >>> _is_lost(RuntimeError("[/pytorch/third_party/gloo/gloo/transport/tcp/pair.cc:553] Connection closed by peer"))
    True
    """
    seen: list[BaseException] = []  # what a disk refused is a failure of the exception that is its context
    causes = [error]
    while causes:
        cause = causes.pop()
        if isinstance(cause, dist.DistError) or "/gloo/" in str(cause):
            return True
        seen.append(cause)
        further = [cause.__cause__, cause.__context__]
        if isinstance(cause, CheckpointException):
            further += [failure[0] for failure in cause.failures.values()]
        causes += [x for x in further if x is not None and not any(x is other for other in seen)]
    return False


def _others_left(watch: Watch) -> bool:
    """Whether another rank has ended by itself: then it has said why."""
    return any(watch.has_left(rank) for rank in range(watch.num_ranks))


def _explain(watch: Watch, lost: Sequence[Late], again: str) -> str:
    """Name the ranks that a wait which failed was for."""
    if not lost:
        return (
            f"rank {watch.rank} lost its connections, and every rank is there: see whether the network holds, or allow "
            "longer waits (--set timeout)"
        )
    return (
        f"the run has lost {join_words(lost)}: see its messages and the system's log (did it exceed the memory?), and "
        f"{again}"
    )


def _give_up(sentence: str, watch: Watch, store: Any) -> None:
    """Called by a thread: the main one waits inside a collective, and nothing else wakes it."""
    if watch.ending.acquire(blocking=False):
        if _is_first(store):
            say(f"{sentence}: see what keeps it, or allow longer waits (--set timeout)")
        os._exit(2)


@contextmanager
def _ended_by_signal(watch: Watch, store: Any, again: str) -> Iterator[None]:
    """Torchrun ends the ranks that are left by SIGTERM, at once: first one of them says which rank it has lost.

    The main thread may wait inside a collective, where Python runs no handler: a thread waits for the signal.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    reads, writes = os.pipe()
    os.set_blocking(writes, False)
    process = os.getpid()

    def handle(*_: object) -> None:
        if os.getpid() != process:  # a loader's worker, forked from this one
            os._exit(128 + signal.SIGTERM)

    fd, handler = signal.set_wakeup_fd(writes), signal.signal(signal.SIGTERM, handle)
    os.register_at_fork(after_in_child=partial(_forget, writes))
    waits = partial(_wait_for_signal, reads, watch, store, again)
    threading.Thread(target=waits, name="trimtab signal", daemon=True).start()
    try:
        yield
    finally:
        signal.set_wakeup_fd(fd)
        signal.signal(signal.SIGTERM, handler)
        os.close(writes)


def _forget(writes: int) -> None:
    """A forked process has signals of its own."""
    fd = signal.set_wakeup_fd(-1)
    if fd != writes:
        signal.set_wakeup_fd(fd)


def _wait_for_signal(reads: int, watch: Watch, store: Any, again: str) -> None:
    while told := os.read(reads, 1):
        if told[0] == signal.SIGTERM and watch.ending.acquire(blocking=False):
            lost = [x for x in watch.find_missing() if x.is_silent]
            if lost and not _others_left(watch) and _is_first(store):
                say(_explain(watch, lost, again))
            watch.close()  # so that the others do not take this one for lost
            os._exit(128 + signal.SIGTERM)
    os.close(reads)


def tell(sentence: str) -> None:
    """Once for all ranks."""
    if dist.get_rank() == 0:
        say(sentence)


# -- who holds what ---------------------------------------------------------------------------------------------------


def device_mesh(num_devices: int, ranks: Ranks) -> DeviceMesh:
    """("pp", "dp") over all ranks, for a pipeline of `num_devices`: rank r is on pipeline device r div dp."""
    number = dist.get_world_size()
    if number % num_devices:
        raise PlanError(
            f"the plan cuts the model into stages for {num_devices} devices, and {number} processes were started: "
            f"start {num_devices}, or a multiple of it (torchrun --nproc-per-node {num_devices})"
        )
    mesh = init_device_mesh(ranks.device.type, (num_devices, number // num_devices), mesh_dim_names=("pp", "dp"))
    set_timeout = getattr(dist, "set_timeout", dist.distributed_c10d._set_pg_timeout)  # public | torch 2.13, private
    for name in ("pp", "dp"):  # a mesh's groups have torch's own limit, not the world's
        set_timeout(timedelta(seconds=ranks.timeout_s + MARGIN_S), mesh.get_group(name))
    return mesh


def on_first_rank(find: Callable[[], Result], device: torch.device) -> Result:
    """What `find` returns on rank 0, on every rank; what it raises of a user's input is raised on every rank.

    Collective: a problem that only rank 0 sees would leave the others waiting for it.
    """
    found: list[tuple[Result | None, Exception | None]] = [(None, None)]
    if dist.get_rank() == 0:
        try:
            found = [(find(), None)]
        except (TrimtabError, OSError) as problem:
            found = [(None, problem)]
    dist.broadcast_object_list(found, src=0, device=device)
    result, raised = found[0]
    if raised is not None:
        raise raised
    return result  # type: ignore[return-value]  # None only where `find` returned it
