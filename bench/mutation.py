"""Mutation testing: plant small faults in the source one at a time, and count how many the tests see.

A fault changes one place of one function: a comparison, an operator, a number, `and` for `or`, `min` for `max`, a
condition negated, a call left out. Texts, annotations, assertions and `raise` statements are left alone. Each sampled
fault is tried on a copy of the source: first by the test files that import the changed module (or what imports it, one
level after the other until some test does), and, if these pass, by those of two levels more. A run that ends with a
failure, or takes three times the CPU seconds, has seen it. Faults that change
nothing (a bound that is never met, a tie) count as unseen, so that 100 % is out of reach.

Compiled modules are tried with an empty cache, since numba does not see a change in another file: half a minute each.
Run: python bench/mutation.py [--rooms balance partition runtime/vision] [--per-room 12] [--seed 0] [--jobs 2]
"""

from __future__ import annotations

import argparse
import ast
import math
import os
import random
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS = ROOT / "src" / "trimtab", ROOT / "tests"
ROOMS = ("balance", "partition", "runtime/vision")
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


# -- which tests ------------------------------------------------------------------------------------------------------


def _modules_in(text: str) -> set[str]:
    """Modules of the package that a text imports, and parts of it that may be modules."""
    found = set()
    for module, names in re.findall(r"from (trimtab[\w.]*) import (\([^)]*\)|[^\n]*)", text):
        found |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    return found | set(re.findall(r"import (trimtab[\w.]*)", text))


@cache
def _importers() -> dict[str, set[str]]:
    """Module -> modules of the package that import it."""
    found: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for module in _modules_in(file.read_text()):
            found.setdefault(module, set()).add(_module_of(file))
    return found


def _module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def _imported_by_tests() -> dict[Path, set[str]]:
    """Test file -> modules of the package that it imports, itself or by the helpers beside it."""
    texts = {path: path.read_text() for path in TESTS.rglob("*.py")}
    own = {path: _modules_in(text) for path, text in texts.items()}
    helpers = {path.stem: path for path in texts if not path.name.startswith("test_")}

    def reach(path: Path, seen: frozenset[str]) -> set[str]:
        used = {name for name in re.findall(r"^(?:from|import) (\w+)", texts[path], re.M) if name in helpers}
        return own[path].union(*(reach(helpers[name], seen | used) for name in used - seen))

    return {path: reach(path, frozenset()) for path in texts if path.name.startswith("test_")}


def tests_of(file: Path) -> tuple[list[Path], list[Path]]:
    """The test files nearest to a source file, and those of `LEVELS_MORE` levels more."""
    level, seen = {_module_of(file)}, {_module_of(file)}
    tests: list[list[Path]] = []
    while level and len(tests) <= LEVELS_MORE:
        known = {path for group in tests for path in group}
        own = sorted(path for path, used in _imported_by_tests().items() if used & level and path not in known)
        if own or tests:
            tests.append(own)
        level = {above for module in level for above in _importers().get(module, ())} - seen
        seen |= level
    return (tests[0] if tests else []), [path for group in tests[1:] for path in group]


# -- trying -----------------------------------------------------------------------------------------------------------


class Copy:
    """A copy of the checkout in which faults are planted, and what its tests say of them."""

    def __init__(self, folder: Path) -> None:
        self.root, self.cache = folder / "checkout", folder / "numba"
        shutil.copytree(ROOT, self.root, ignore=shutil.ignore_patterns("__pycache__", ".*", "out", "build", "dist"))
        self.baselines: dict[tuple[object, ...], float | None] = {}

    def run(self, tests: Sequence[Path], cpu_s: float, cache_folder: Path) -> tuple[bool | None, float]:
        """Whether the tests pass (None: out of time), and the CPU seconds they took, with their child processes."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.root / "src"),
            "NUMBA_CACHE_DIR": str(cache_folder),
            "OMP_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        words = [sys.executable, "-m", "pytest", "-x", "-q", "-m", "not integration"]
        words += ["-p", "no:cacheprovider", *(str(path.relative_to(ROOT)) for path in tests)]
        process = subprocess.Popen(
            words,
            cwd=self.root,
            env=environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,  # tests start processes of their own
        )
        # a loop without end takes CPU time, which a busy machine does not stretch
        resource.prlimit(process.pid, resource.RLIMIT_CPU, (math.ceil(cpu_s), math.ceil(cpu_s) + 5))
        started = time.monotonic()
        while True:
            found, status, used = os.wait4(process.pid, os.WNOHANG)
            if found:
                break
            if time.monotonic() - started > WAIT_S + WAIT_FACTOR * cpu_s:  # ranks that wait for one another
                os.killpg(process.pid, signal.SIGKILL)
                os.wait4(process.pid, 0)
                return None, cpu_s
            time.sleep(0.1)
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode in (-signal.SIGXCPU, -signal.SIGKILL):
            return None, cpu_s
        return process.returncode == 0, used.ru_utime + used.ru_stime

    def baseline_s(self, tests: Sequence[Path], compiled: bool) -> float | None:
        """CPU seconds without a fault, for a compiled module from an empty cache; None if the tests fail then."""
        key = (compiled, *tests)
        if key not in self.baselines:
            with tempfile.TemporaryDirectory() as empty:
                passed, seconds = self.run(tests, 20 * LIMIT_S, Path(empty) if compiled else self.cache)
            self.baselines[key] = seconds if passed else None
        return self.baselines[key]

    def sees(self, fault: Fault) -> str:
        """ "seen", "unseen", or why it was not tried."""
        near, further = tests_of(fault.file)
        if not near:
            return "no test imports it"
        planted = self.root / fault.file.relative_to(ROOT)
        content = planted.read_bytes()
        compiled = b"njit" in content
        normal_s = self.baseline_s(near, compiled)
        if normal_s is None:
            return "its tests fail without a fault"
        planted.write_bytes(content[: fault.start] + fault.new.encode() + content[fault.stop :])
        try:
            with tempfile.TemporaryDirectory() as empty:
                where = Path(empty) if compiled else self.cache
                passed, _ = self.run(near, 3 * normal_s + 20, where)
                if passed and further:
                    passed, _ = self.run(further, LIMIT_S, where)
                    passed = passed is not False  # out of time: these are many tests, not a loop without end
        finally:
            planted.write_bytes(content)
        return "unseen" if passed else "seen"


def sample(rooms: Sequence[str], per_room: int, seed: int) -> list[Fault]:
    """Of each room as many faults, every line equally likely."""
    chooser = random.Random(seed)
    chosen: list[Fault] = []
    for room in rooms:
        by_line: dict[tuple[Path, int], list[Fault]] = {}
        for file in sorted((SOURCE / room).rglob("*.py")):
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
    arguments = parser.parse_args()
    faults = sample(arguments.rooms, arguments.per_room, arguments.seed)
    random.Random(1).shuffle(faults)
    started = time.monotonic()
    results: dict[Fault, str] = {}
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(arguments.jobs) as pool:
        copies: SimpleQueue[Copy] = SimpleQueue()
        for number in range(arguments.jobs):
            copies.put(Copy(Path(folder, str(number))))

        def attempt(fault: Fault) -> tuple[Fault, str]:
            copy = copies.get()
            try:
                return fault, copy.sees(fault)
            finally:
                copies.put(copy)

        for future in as_completed([pool.submit(attempt, fault) for fault in faults]):
            fault, result = future.result()
            results[fault] = result
            print(f"{time.monotonic() - started:6.0f} s  {result:7}  {fault}", flush=True)
    for room in arguments.rooms:
        own = [result for fault, result in results.items() if fault.file.is_relative_to(SOURCE / room)]
        seen, tried = own.count("seen"), own.count("seen") + own.count("unseen")
        print(f"{room}: {seen} of {tried} seen" + (f", {seen / tried:.0%}" if tried else ""))


if __name__ == "__main__":
    main()
