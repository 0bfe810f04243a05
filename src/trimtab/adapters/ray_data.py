"""Sizing on Ray Data: chunks of a data set spread over the machines of a Ray cluster, results in order.

Tested with Ray 2.60. Data files, images and the resume folder must have the same paths on all machines; trimtab must be
installed there.
"""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterable, Iterator
from pickle import PicklingError
from typing import Any, Generic, TypeVar, cast

import ray
import ray.cloudpickle
import ray.data

from trimtab.errors import SampleError

Task = TypeVar("Task")
Result = TypeVar("Result")

_NUMBER, _TASK, _RESULT, _FAILED = "number", "task", "result", "failed"


def map_on_ray(
    make_work: Callable[[], Callable[[Task], Result]],
    tasks: Iterable[Task],
    num_workers: int,
    on_result: Callable[[Task, Result], None],
) -> Iterator[Result]:
    """`samples.workers.map_in_order` on Ray Data: the same results in the same order, whatever the cluster.

    Joins the cluster that RAY_ADDRESS names, or the one this process has joined; else starts a local Ray and stops it
    at the end. At most `num_workers` actors, each on one CPU, each makes its work function once. Ray Data limits what
    is in flight, starts lost actors again and gives their tasks to others.
    """
    kept = list(tasks)
    if not kept:
        return
    started = _join_cluster(num_workers)
    try:
        yield from _map(make_work, kept, num_workers, on_result)
    finally:
        if started:
            ray.shutdown()


def count_cpus() -> int:
    """CPUs of the cluster that `map_on_ray` would run on: all its machines, or this one alone."""
    if not ray.is_initialized() and not os.environ.get("RAY_ADDRESS"):
        return os.cpu_count() or 1
    _join_cluster(1)
    return max(1, int(ray.cluster_resources().get("CPU", 1)))


def _join_cluster(num_workers: int) -> bool:
    """Whether a local Ray was started here."""
    if ray.is_initialized():
        return False
    address = os.environ.get("RAY_ADDRESS")
    try:
        if address:
            _reach(address)
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        else:
            ray.init(
                address="local",
                num_cpus=num_workers,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
            )
    except (OSError, RuntimeError, ValueError) as error:
        where = f"at RAY_ADDRESS {address}" if address else "on this machine"
        raise SampleError(
            f"sizing was asked to run on Ray, and no Ray answers {where} ({' '.join(str(error).split())[:200]}): "
            "start one with `ray start --head`, correct RAY_ADDRESS, or use the local engine"
        ) from None
    return not address


def _reach(address: str) -> None:
    """Raise OSError where nothing listens at host:port, which Ray itself would try for minutes."""
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if host and port.isdigit():
        socket.create_connection((host, int(port)), timeout=10).close()


def _map(
    make_work: Callable[[], Callable[[Task], Result]],
    tasks: list[Task],
    num_workers: int,
    on_result: Callable[[Task, Result], None],
) -> Iterator[Result]:
    rows, own = [], list[int]()
    for number, task in enumerate(tasks):
        try:
            rows.append({_NUMBER: number, _TASK: ray.cloudpickle.dumps(task)})
        except (RecursionError, PicklingError):  # nested deeper than pickle goes: done here
            own.append(number)
    own_work = make_work() if own else None
    results = _run(make_work, rows, num_workers) if rows else iter(())
    for number, task in enumerate(tasks):
        if own_work is not None and number in own:
            result = own_work(task)
        else:
            row = next(results)
            assert row[_NUMBER] == number, "Ray Data changed the order"
            value = ray.cloudpickle.loads(row[_RESULT])
            if row[_FAILED]:
                raise cast("BaseException", value)
            result = cast("Result", value)
        on_result(task, result)
        yield result


def _run(
    make_work: Callable[[], Callable[[Any], object]], rows: list[dict[str, Any]], num_workers: int
) -> Iterator[dict[str, Any]]:
    context = ray.data.DataContext.get_current()
    before = context.execution_options.preserve_order, context.enable_progress_bars, context.print_on_execution_start
    context.execution_options.preserve_order = True
    context.enable_progress_bars = context.print_on_execution_start = False
    try:
        num_actors = max(1, min(num_workers, len(rows), int(ray.cluster_resources().get("CPU", 1))))
        # a block is what an actor takes at once, and what is done again when it is lost
        data = ray.data.from_items(rows, override_num_blocks=len(rows)).map(
            cast("Any", _Worker),
            fn_constructor_args=(make_work,),
            compute=ray.data.ActorPoolStrategy(size=num_actors),
            num_cpus=1,
        )
        yield from data.iter_rows()
    finally:
        context.execution_options.preserve_order, context.enable_progress_bars = before[:2]
        context.print_on_execution_start = before[2]


class _Worker(Generic[Task, Result]):
    """One actor: makes the work function once, then takes tasks; an error of the work is a result like any other."""

    def __init__(self, make_work: Callable[[], Callable[[Task], Result]]) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one actor is one core
        self._work = make_work()

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        try:
            result: object = self._work(ray.cloudpickle.loads(row[_TASK]))
            failed = False
        except Exception as error:
            result, failed = error, True
        return {_NUMBER: row[_NUMBER], _RESULT: ray.cloudpickle.dumps(result), _FAILED: failed}
