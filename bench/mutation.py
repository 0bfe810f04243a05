"""Mutation testing: plant small faults in the source one at a time, and count how many the tests see.

A fault changes one place of one function: a comparison, an operator, a number, `and` for `or`, `min` for `max`, a
condition negated, a call left out. Texts, annotations, `raise` and assertions (`strict` among them) are left alone.
Each fault is tried on a copy of the source by the tests nearest to the file (`near_tests.py`) and the cases of
`refusals.yaml`, the quickest first, and, if these pass, by those of two levels of imports more for a while; or, by
`--then marked`, by the nearest tests marked `integration` (ranks that share images are tested by many processes). A run
that ends with a failure, or takes three times the CPU seconds, has seen it. Faults that change nothing (a bound that is
never met, a tie) count as unseen, so that 100 % is out of reach.

Tests run in processes forked where torch is imported already. Files with loops that numba compiles are tried with an
empty cache, since numba does not see a change in another file: about four CPU seconds more for each test file.
Run: python bench/mutation.py [--rooms costs/formula plan/decide] [--per-room 12] [--seed 0] [--jobs 2]
     [--minutes 25] [--files compiled|uncompiled] [--then further|marked|nothing]
"""

import argparse
import ast
import compileall
import contextlib
import math
import multiprocessing
import os
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from queue import SimpleQueue

import numba
import pytest

from near_tests import ROOT, SOURCE, TESTS, tests_of

ROOMS = ("balance", "partition", "runtime/vision", "costs", "plan/decide")
REFUSALS = TESTS / "cli" / "test_refusals.py"  # of every room
LEVELS_MORE = 2
LIMIT_S = 90.0  # of CPU, for the tests of more levels in all
WAIT_S, WAIT_FACTOR = 60.0, 6.0  # longest wall time of a run: so much, and so many times its limit of CPU seconds

_COMPARED = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
_COMPUTED = {ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.Div, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult}
_NAMED = {"min": "max", "max": "min", "minimum": "maximum", "maximum": "minimum", "any": "all", "all": "any"}
_LEFT_ALONE = (ast.Raise, ast.Assert, ast.JoinedStr, ast.ImportFrom, ast.Import)


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One place of a file and what stands there instead."""

    file: Path
    line: int
    start: int  # bytes of the file
    stop: int
    old: str
    new: str

    def __str__(self) -> str:
        old, new = (" ".join(text.split())[:60] for text in (self.old, self.new))
        return f"{self.file.relative_to(SOURCE)}:{self.line}  {old}  ->  {new}"


# -- planting ---------------------------------------------------------------------------------------------------------


def faults_of(file: Path) -> list[Fault]:
    """Every fault that can be planted in the functions of a file.

    >>> import tempfile; path = Path(tempfile.mkdtemp()) / "m.py"
    >>> _ = path.write_text("def f(a, b):\\n    return a + 1 if a < b else 0\\n")
    >>> sorted({fault.new for fault in faults_of(path)})
    ['(a - 1)', '(a <= b)', '(not a < b)', '1', '2']
    """
    content = file.read_bytes()
    starts = [0]
    for line in content.splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    found = {}
    for function in ast.walk(ast.parse(content)):
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            for node, new in _changes(function.body):
                start = starts[node.lineno - 1] + node.col_offset
                stop = starts[(node.end_lineno or node.lineno) - 1] + (node.end_col_offset or 0)
                old = content[start:stop].decode()
                found[start, stop, new] = Fault(
                    file=file, line=node.lineno, start=start, stop=stop, old=old, new=new
                )  # of a function inside a function once
    return list(found.values())


def _changes(body: Sequence[ast.AST]) -> Iterator[tuple[ast.expr | ast.stmt, str]]:
    """Nodes and what could stand in their place."""
    for node in body:
        if isinstance(node, _LEFT_ALONE):
            continue
        if isinstance(node, ast.Expr):
            if isinstance(node.value, ast.Call):
                yield node, "pass"
            elif isinstance(node.value, ast.Constant):
                continue  # a docstring
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            yield node.test, f"(not {ast.unparse(node.test)})"
        if isinstance(node, ast.expr):
            yield from ((node, new) for new in _instead(node))
        if isinstance(node, ast.keyword) and node.arg == "strict":
            continue  # of zip: an assertion
        inside = [x for name, value in ast.iter_fields(node) if name not in _ANNOTATIONS for x in _as_list(value)]
        yield from _changes(inside)


_ANNOTATIONS = ("annotation", "returns", "decorator_list", "type_params", "ops", "op", "ctx")


def _as_list(value: object) -> list[ast.AST]:
    return [x for x in (value if isinstance(value, list) else [value]) if isinstance(x, ast.AST)]


def _instead(node: ast.expr) -> Iterator[str]:
    if isinstance(node, ast.Compare) and len(node.ops) == 1 and type(node.ops[0]) in _COMPARED:
        other = _COMPARED[type(node.ops[0])]()
        yield f"({ast.unparse(ast.Compare(left=node.left, ops=[other], comparators=node.comparators))})"
    elif isinstance(node, ast.BinOp) and type(node.op) in _COMPUTED:
        yield f"({ast.unparse(ast.BinOp(left=node.left, op=_COMPUTED[type(node.op)](), right=node.right))})"
    elif isinstance(node, ast.BoolOp):
        other_op = ast.Or() if isinstance(node.op, ast.And) else ast.And()
        yield f"({ast.unparse(ast.BoolOp(op=other_op, values=node.values))})"
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield str(not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int | float):
        yield repr(node.value + 1 if isinstance(node.value, int) else 2 * node.value + 1.0)
    elif isinstance(node, ast.Name) and node.id in _NAMED:
        yield _NAMED[node.id]
    elif isinstance(node, ast.Attribute) and node.attr in _NAMED:
        yield ast.unparse(ast.Attribute(value=node.value, attr=_NAMED[node.attr], ctx=ast.Load()))


# -- trying -----------------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the checkout in which faults are planted, and what its tests say of them."""

    def __init__(self, folder: Path, then: str) -> None:
        self.root, self.cache, self.then = folder / "checkout", folder / "numba", then
        left_out = shutil.ignore_patterns("__pycache__", ".*", "out", "build", "dist")
        shutil.copytree(ROOT, self.root, ignore=left_out)
        compileall.compile_dir(self.root / "src", quiet=2)
        self.baselines: dict[tuple[Path, str, bool], float | None] = {}

    def run(self, test: Path, mark: str, cpu_s: float, cache_folder: Path) -> tuple[bool | None, float]:
        """Whether a file's tests of a mark pass (None: out of time), and CPU seconds, child processes included."""
        words = ["-x", "-q", "-m", mark, "-p", "no:cacheprovider", str(test.relative_to(ROOT))]
        words += ["-W", "ignore::pytest.PytestAssertRewriteWarning"]  # of plugins that are imported already
        here, there = _WARM.Pipe(duplex=False)
        process = _WARM.Process(target=_run_tests, args=(self.root, words, cache_folder, math.ceil(cpu_s), there))
        process.start()
        there.close()
        process.join(WAIT_S + WAIT_FACTOR * cpu_s)
        if process.exitcode is None:  # ranks that wait for one another
            os.killpg(process.pid or 0, signal.SIGKILL)
            process.join()
            return None, cpu_s
        try:
            code, used_s = here.recv()
        except EOFError:  # killed when its seconds had run out, or by the fault
            return None, cpu_s
        return code in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED), used_s

    def baseline_s(self, test: Path, mark: str, is_compiled: bool) -> float | None:
        """CPU seconds without a fault, for a compiled module from an empty cache; None if the tests fail then."""
        key = (test, mark, is_compiled)
        if key not in self.baselines:
            with tempfile.TemporaryDirectory() as empty:
                passed, seconds = self.run(test, mark, 20 * LIMIT_S, Path(empty) if is_compiled else self.cache)
            self.baselines[key] = seconds if passed else None
        return self.baselines[key]

    def sees(self, fault: Fault) -> str:
        """ "seen", "unseen", or why it was not tried."""
        near, further = tests_of(fault.file, LEVELS_MORE if self.then == "further" else 0)
        if not near:
            return "no test imports it"
        near = [*near, REFUSALS]
        planted = self.root / fault.file.relative_to(ROOT)
        content = planted.read_bytes()
        is_compiled = _has_compiled_loops(content)
        marks = ["not integration", "integration"] if self.then == "marked" else ["not integration"]
        runs = [(self.baseline_s(test, mark, is_compiled), mark, test) for mark in marks for test in near]
        if any(seconds is None for seconds, _, _ in runs):
            return "its tests fail without a fault"
        quickest_first = sorted((marks.index(mark), seconds or 0.0, mark, test) for seconds, mark, test in runs)
        planted.write_bytes(content[: fault.start] + fault.new.encode() + content[fault.stop :])
        try:
            with tempfile.TemporaryDirectory() as empty:
                where = Path(empty) if is_compiled else self.cache
                for _, normal_s, mark, test in quickest_first:
                    if not self.run(test, mark, 3 * normal_s + 20, where)[0]:
                        return "seen"
                left_s = LIMIT_S
                for test in further:
                    passed, used_s = self.run(test, "not integration", max(left_s, 1.0), where)
                    left_s -= used_s
                    if passed is False:
                        return "seen"
                    if left_s <= 0.0:  # out of time: these are many tests, not a loop without end
                        break
        finally:
            planted.write_bytes(content)
        return "unseen"


def _has_compiled_loops(content: bytes) -> bool:
    return b"trimtab.compiled import" in content


def _run_tests(root: Path, words: list[str], cache_folder: Path, cpu_s: int, told: Connection) -> None:
    """In a process that was forked where pytest, torch and Transformers are imported already, and nothing of ours."""
    os.setsid()  # tests start processes of their own
    # a loop without end takes CPU time, which a busy machine does not stretch
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 5))
    os.chdir(root)
    sys.path.insert(0, str(root / "src"))
    os.environ.update(PYTHONPATH=str(root / "src"), NUMBA_CACHE_DIR=str(cache_folder), PYTHONDONTWRITEBYTECODE="1")
    sys.dont_write_bytecode = True
    numba.config.reload_config()
    with contextlib.suppress(ModuleNotFoundError):
        import torch.multiprocessing as ranks

        start = ranks.start_processes  # forked as well: a server of its own would import all that again
        ranks.start_processes = lambda *a, **more: start(*a, **{**more, "start_method": "fork"})
    with Path(os.devnull).open("w") as nowhere:
        for stream in (1, 2):
            os.dup2(nowhere.fileno(), stream)
    code = pytest.main(words)
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    told.send((int(code), sum(x.ru_utime + x.ru_stime for x in used)))
    os._exit(0)  # whatever threads a fault has left


_WARM = multiprocessing.get_context("forkserver")
_WARM.set_forkserver_preload(["numba", "pytest", "torch", "transformers.models.auto.modeling_auto"])


def sample(rooms: Sequence[str], per_room: int, seed: int, *, files: str) -> list[Fault]:
    """Of each room as many faults, every line equally likely; of files with compiled loops, without, or of all."""
    chooser = random.Random(seed)
    chosen: list[Fault] = []
    for room in rooms:
        by_line: dict[tuple[Path, int], list[Fault]] = {}
        for file in sorted((SOURCE / room).rglob("*.py")):
            if files == ("uncompiled" if _has_compiled_loops(file.read_bytes()) else "compiled"):
                continue
            for fault in faults_of(file):
                by_line.setdefault((file, fault.line), []).append(fault)
        lines = chooser.sample(sorted(by_line), min(per_room, len(by_line)))
        chosen += [chooser.choice(by_line[line]) for line in lines]
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rooms", nargs="+", default=ROOMS, help="folders of src/trimtab")
    parser.add_argument("--per-room", type=int, default=12)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=2)
    parser.add_argument("--minutes", type=float, default=math.inf, help="no fault is begun later")
    parser.add_argument("--files", choices=["all", "compiled", "uncompiled"], default="all", help="with compiled loops")
    parser.add_argument("--then", choices=["further", "marked", "nothing"], default="further", help="which tests next")
    arguments = parser.parse_args()
    faults = sample(arguments.rooms, arguments.per_room, arguments.seed, files=arguments.files)
    random.Random(1).shuffle(faults)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    results: dict[Fault, str] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(arguments.jobs):
            copies.put(Copy(Path(folder, str(number)), arguments.then))

        def attempt(fault: Fault) -> tuple[Fault, str | None]:
            copy = copies.get()
            try:
                is_late = time.monotonic() - started > 60.0 * arguments.minutes
                return fault, None if is_late else copy.sees(fault)
            finally:
                copies.put(copy)

        for future in as_completed([pool.submit(attempt, fault) for fault in faults]):
            fault, result = future.result()
            if result is None:
                continue
            results[fault] = result
            print(f"{time.monotonic() - started:6.0f} s  {result:7}  {fault}", flush=True)
    for room in arguments.rooms:
        own = [result for fault, result in results.items() if fault.file.is_relative_to(SOURCE / room)]
        seen, tried = own.count("seen"), own.count("seen") + own.count("unseen")
        print(f"{room}: {seen} of {tried} seen" + (f", {seen / tried:.0%}" if tried else ""))


if __name__ == "__main__":
    main()
