"""Chunks spread over processes, results in order."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from itertools import islice
from typing import Any, TypeVar

from trimtab.errors import SampleError

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_in_order(
    make_work: Callable[[], Callable[[Task], Result]],
    tasks: Iterable[Task],
    num_workers: int,
    on_result: Callable[[Task, Result], None],
) -> Iterator[Result]:
    """Results of `make_work()` on every task, in the order of the tasks; `on_result` sees each before it is given.

    One worker is this process. More are spawned, so `make_work` and tasks are pickled and a script needs its
    `if __name__ == "__main__"` guard. Workers end with this process, also when it is killed.
    """
    queue = iter(tasks)
    if num_workers <= 1:
        work = make_work()
        for task in queue:
            result = work(task)
            on_result(task, result)
            yield result
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, mp_context=context, initializer=_Worker.start, initargs=(make_work,))
    try:
        # a slow task must not let the results behind it pile up
        running = deque((task, pool.submit(_Worker.run, task)) for task in islice(queue, 8 * num_workers))
        while running:
            task, future = running.popleft()
            result = _result(task, future, make_work)
            running.extend((task, pool.submit(_Worker.run, task)) for task in islice(queue, 1))
            on_result(task, result)
            yield result
    finally:
        pool.shutdown(cancel_futures=True)


def _result(task: Task, future: Future[Result], make_work: Callable[[], Callable[[Task], Result]]) -> Result:
    try:
        return future.result()
    except RecursionError:  # nested deeper than pickle goes: done here
        return make_work()(task)
    except BrokenProcessPool:
        raise SampleError(
            "a worker process ended before its work was done: give it more memory or use fewer workers; in a script of "
            "your own, guard the call by if __name__ == '__main__'"
        ) from None


class _Worker:
    """The state of a worker process: what it does with a task, made at the first one."""

    make_work: Callable[[], Callable[[Any], Any]]
    work: Callable[[Any], Any] | None = None

    @staticmethod
    def start(make_work: Callable[[], Callable[[Any], Any]]) -> None:
        os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker is one core
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is told, and stops its workers
        threading.Thread(target=_end_with_parent, daemon=True).start()
        _Worker.make_work = staticmethod(make_work)

    @staticmethod
    def run(task: Any) -> Any:
        if _Worker.work is None:
            _Worker.work = staticmethod(_Worker.make_work())
        return _Worker.work(task)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None, "it runs in a worker"
    parent.join()
    os._exit(1)
