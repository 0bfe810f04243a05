"""The sizing pass in limited children: chunks spread over them, parts in order."""

from __future__ import annotations

import json
import pickle
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from itertools import islice
from pathlib import Path
from queue import LifoQueue

from trimtab.errors import ConfigError, SampleError
from trimtab.limited import ChildEndedError, LimitedChild, at, limited_child
from trimtab.samples.chunks import TOO_DEEP, Broken, Chunk
from trimtab.samples.resume import ChunkFile, load_part, part_bytes, part_from, save_part
from trimtab.samples.sizer import Sizer, SizerSettings
from trimtab.samples.table import Part

_TOKENIZER_CPU_S = 10  # the largest take 2
_HERE = "trimtab.samples.workers"


def size_chunks(
    settings: SizerSettings,
    chunks: Iterable[Chunk],
    num_workers: int,
    *,
    kept_in: Path | None = None,
    most_bad: int | None = None,
    on_result: Callable[[Chunk], None] = lambda _: None,
) -> Iterator[Part]:
    """The part of every chunk, in order; `on_result` sees each chunk before its part is given.

    Parts lie in `kept_in` (None: nowhere), and those that are there already are taken over.
    """
    queue = iter(chunks)
    with ExitStack() as stack:
        children = [_SizingChild(settings, stack) for _ in range(max(1, num_workers))]
        idle: LifoQueue[_SizingChild] = LifoQueue()
        for child in children:
            idle.put(child)

        def work(chunk: Chunk) -> Part:
            child = idle.get()
            try:
                return _part_of(child, chunk, kept_in, most_bad)
            finally:
                idle.put(child)

        pool = ThreadPoolExecutor(len(children))
        try:
            # a slow chunk must not let the parts behind it pile up
            running = deque((chunk, pool.submit(work, chunk)) for chunk in islice(queue, 8 * len(children)))
            while running:
                chunk, future = running.popleft()
                part = future.result()
                running.extend((chunk, pool.submit(work, chunk)) for chunk in islice(queue, 1))
                on_result(chunk)
                yield part
        except BaseException:  # whatever is running has no reader any more
            for child in children:
                child.stop()
            raise
        finally:
            pool.shutdown(cancel_futures=True)


def _part_of(child: _SizingChild, chunk: Chunk, kept_in: Path | None, most_bad: int | None) -> Part:
    if kept_in is None:
        return child.size(chunk, most_bad)
    file = ChunkFile.of_chunk(kept_in, chunk, child.settings.key())
    part = load_part(file)
    if part is None:
        part = child.size(chunk, most_bad)
        if most_bad is None or len(part.bad) <= most_bad:  # else it is not whole
            save_part(file, part)
    return part


def ask_assumptions(settings: SizerSettings) -> list[str]:
    """What the tokenizer and its template make sizes assume; `ConfigError` where they cannot be used."""
    with ExitStack() as stack:
        return _SizingChild(settings, stack).start()


class _SizingChild:
    """One limited child that sizes; another takes its place when it ends."""

    def __init__(self, settings: SizerSettings, stack: ExitStack) -> None:
        self.settings, self._stack = settings, stack
        self._child: LimitedChild | None = None
        self._is_stopped = False

    def start(self) -> list[str]:
        """Begin a pass in a child."""
        if self._is_stopped:
            raise SampleError("the pass was stopped: start it again")
        self._child = self._stack.enter_context(limited_child(network=self.settings.network))
        try:
            assumptions: list[str] = json.loads(self._child.ask(f"{_HERE}:start", self.settings))
        except ChildEndedError as error:
            self._child = None
            raise ConfigError(
                f"the tokenizer or its chat template cannot be used: {error.reason}; name another with --tokenizer or "
                "--set chat_template"
            ) from None
        return assumptions

    def stop(self) -> None:
        self._is_stopped = True
        if self._child is not None:
            self._child.close()

    def size(self, chunk: Chunk, most_bad: int | None) -> Part:
        """The chunk's samples; one that ends the child is bad, and where reading ends it the chunk is cut."""
        broken = Broken()
        while True:
            if self._child is None:
                self.start()
            assert self._child is not None
            try:
                return part_from(self._ask(self._child, chunk, most_bad, broken))
            except ChildEndedError as error:
                self._child = None
                broken = _after(broken, error)

    def _ask(self, child: LimitedChild, chunk: Chunk, most_bad: int | None, broken: Broken) -> bytes:
        try:
            return child.ask(f"{_HERE}:size", chunk, most_bad, broken)
        except RecursionError:  # a row of a JSON list that is nested deeper than pickle goes
            rows = tuple(row if _can_be_sent(row) else TOO_DEEP for row in chunk.rows)
            return child.ask(f"{_HERE}:size", replace(chunk, rows=rows), most_bad, broken)


def _can_be_sent(row: object) -> bool:
    try:
        pickle.dumps(row)
    except RecursionError:
        return False
    return True


def _after(broken: Broken, error: ChildEndedError) -> Broken:
    """What is known of a chunk once a child has ended over it."""
    kind, _, line = error.place.partition(" ")
    if kind == "texts":
        return replace(broken, one_by_one=True)
    if kind != "record":
        raise SampleError(f"the data cannot be sized: {error.reason}; give fewer workers or more memory") from None
    if int(line) in broken.records:  # not its content: what is read to get there
        return replace(broken, ends_at=int(line))
    return replace(broken, records={**broken.records, int(line): error.reason})


# -- in the child -----------------------------------------------------------------------------------------------------


class _Pass:
    """The pass that this child takes part in."""

    sizer: Sizer | None = None


def start(settings: SizerSettings) -> bytes:
    """Make ready for the chunks of a pass; the answer is what tokenizer and template make it assume."""
    at("the tokenizer", cpu_s=_TOKENIZER_CPU_S)
    _Pass.sizer = Sizer(settings)
    return json.dumps(_Pass.sizer.assumptions).encode()


def size(chunk: Chunk, most_bad: int | None, broken: Broken) -> bytes:
    """The chunk's part."""
    assert _Pass.sizer is not None, "the pass has begun"
    return part_bytes(_Pass.sizer.size(chunk, most_bad, broken))
