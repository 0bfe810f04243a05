"""Chunks spread over processes, results in order."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection, wait
from typing import TYPE_CHECKING, Generic, TypeVar, cast

from trimtab.errors import SampleError

if TYPE_CHECKING:
    from multiprocessing.context import SpawnProcess

Task = TypeVar("Task")
Result = TypeVar("Result")


def map_in_order(
    make_work: Callable[[], Callable[[Task], Result]],
    tasks: Iterable[Task],
    num_workers: int,
    on_result: Callable[[Task, Result], None],
) -> Iterator[Result]:
    """Results of `make_work()` on every task, in the order of the tasks; `on_result` sees each as soon as it is there.

    One worker is this process. More are spawned, so `make_work` and tasks are pickled and a script needs its
    `if __name__ == "__main__"` guard. Each makes its own work function once. Workers end with their pipe, hence also
    when this process is killed.
    """
    if num_workers <= 1:
        work = make_work()
        for task in tasks:
            result = work(task)
            on_result(task, result)
            yield result
        return
    crew = [_Worker[Task, Result](make_work) for _ in range(num_workers)]
    try:
        yield from _map(crew, tasks, make_work, on_result)
    finally:
        for worker in crew:
            worker.stop()


class _Worker(Generic[Task, Result]):
    """One spawned process and the pipe to it."""

    def __init__(self, make_work: Callable[[], Callable[[Task], Result]]) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process: SpawnProcess = context.Process(target=_serve, args=(theirs, make_work), daemon=True)
        self.process.start()
        theirs.close()

    def receive(self) -> Result:
        try:
            result = self.pipe.recv()
        except (EOFError, ConnectionResetError):
            self.process.join(5)
            raise SampleError(
                f"a worker process ended with exit code {self.process.exitcode} before its work was done: give it more "
                "memory or use fewer workers; in a script of your own, guard the call by if __name__ == '__main__'"
            ) from None
        if isinstance(result, BaseException):
            raise result
        return cast("Result", result)

    def stop(self) -> None:
        self.pipe.close()
        self.process.terminate()
        self.process.join()
        self.process.close()


def _serve(pipe: Connection, make_work: Callable[[], Callable[[Task], Result]]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one worker is one core
    try:
        work = make_work()
        while True:
            task = pipe.recv()
            try:
                result: object = work(task)
            except Exception as error:
                result = error
            pipe.send(result)
    except (EOFError, OSError, KeyboardInterrupt):  # the parent is gone or going
        return


def _map(
    crew: list[_Worker[Task, Result]],
    tasks: Iterable[Task],
    make_work: Callable[[], Callable[[Task], Result]],
    on_result: Callable[[Task, Result], None],
) -> Iterator[Result]:
    queue = enumerate(tasks)
    busy: dict[Connection, tuple[_Worker[Task, Result], int]] = {}
    running: dict[int, Task] = {}
    done: dict[int, Result] = {}
    own_work: Callable[[Task], Result] | None = None
    idle, next_out, exhausted = list(reversed(crew)), 0, False
    while True:
        # a slow task must not let the results behind it pile up
        while idle and not exhausted and len(done) < 8 * len(crew):
            number, task = next(queue, (-1, None))
            if task is None:
                exhausted = True
                break
            worker = idle.pop()
            try:
                worker.pipe.send(task)
            except RecursionError:  # nested deeper than pickle goes: done here
                idle.append(worker)
                own_work = own_work or make_work()
                done[number] = own_work(task)
                on_result(task, done[number])
                continue
            except (BrokenPipeError, ConnectionResetError):
                worker.receive()
                raise
            busy[worker.pipe] = (worker, number)
            running[number] = task
        while next_out in done:
            yield done.pop(next_out)
            next_out += 1
        if not busy:
            if exhausted:
                return
            continue
        for pipe in wait(list(busy)):
            worker, number = busy.pop(cast("Connection", pipe))
            done[number] = worker.receive()
            on_result(running.pop(number), done[number])
            idle.append(worker)
