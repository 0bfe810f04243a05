"""The tests nearest to a change, a minute or less: `pytest -m "not integration" $(python bench/near_tests.py)`.

Nearest to a source file are the test files whose docstring names its folder and itself ("partition/ (simulate,
replay)"); where there is none, a `test_X.py` of its name that imports it; and where there is none, the test files that
import it, or what imports it, one level after the other until some test does: four of them, those that import least
else. A changed test file is its own; of its helpers (no `test_` before the name) those that import them.
Run: python bench/near_tests.py [FILES; else what git says has changed since the branch left main]
"""

import argparse
import ast
import re
import subprocess
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
SOURCE, TESTS = ROOT / "src" / "trimtab", ROOT / "tests"
MOST = 4  # test files of a source file that none is about


def tests_of(file: Path, levels_more: int) -> tuple[list[Path], list[Path]]:
    """The test files nearest to a source file, and those that `levels_more` levels of imports more reach."""
    module, files = _module_of(file), _test_files()
    folder, stem = f"{file.parent.relative_to(SOURCE).as_posix()}/", file.stem
    about = [path for path, (said, _) in files.items() if stem in _names_after(folder, said)]
    about = about or [path for path, (_, used) in files.items() if path.stem == f"test_{stem}" and module in used]
    levels = [sorted(about)] if about else []
    level, seen = {module}, {module}
    while level and len(levels) <= levels_more:
        known = {path for group in levels for path in group}
        own = [path for path, (_, used) in files.items() if used & level and path not in known]
        own.sort(key=lambda path: (path.parent.name != "unit", len(files[path][1]), path))  # about least else first
        if own or levels:
            levels.append(own if levels else own[:MOST])
        level = {above for below in level for above in _importers().get(below, ())} - seen
        seen |= level
    return (levels[0] if levels else []), [path for group in levels[1:] for path in group]


def _names_after(folder: str, said: str) -> set[str]:
    """What a docstring names of a folder: "partition/simulate.py", "partition/ (simulate, replay)"."""
    found = re.findall(rf"\b{re.escape(folder)}(?:(\w+)\.py|\s*\(([^)]*)\))", said)
    return {name for one, several in found for name in (one, *re.findall(r"\w+", several))}


def tests_of_change(files: list[Path]) -> list[Path]:
    """The test files nearest to any of these files."""
    found: set[Path] = set()
    for file in files:
        if file.suffix == ".py" and file.is_relative_to(SOURCE) and file.exists():
            found.update(tests_of(file, 0)[0], [TESTS / "unit" / "test_floors.py"])
        elif file.suffix == ".py" and file.is_relative_to(TESTS) and file.exists():
            found.update([file] if file.name.startswith("test_") else _users_of(file.stem))
    return sorted(found)


def _modules_in(text: str) -> set[str]:
    """Modules of the package that a text imports, and parts of it that may be modules."""
    found = set()
    for module, names in re.findall(r"from (trimtab[\w.]*) import (\([^)]*\)|[^\n]*)", text):
        found |= {module, *(f"{module}.{name}" for name in re.findall(r"\w+", names))}
    found |= {home for name, home in _homes().items() if name in found}
    return found | set(re.findall(r"import (trimtab[\w.]*)", text))


@cache
def _homes() -> dict[str, str]:
    """Public name -> the module that has it, as stubs say."""
    return {
        f"{_module_of(stub)}.{name}": home
        for stub in SOURCE.rglob("*.pyi")
        for home, name in re.findall(r"from (trimtab[\w.]*) import \w+ as (\w+)", stub.read_text())
    }


def _module_of(file: Path) -> str:
    return ".".join(file.relative_to(SOURCE.parent).with_suffix("").parts).removesuffix(".__init__")


@cache
def _importers() -> dict[str, set[str]]:
    """Module -> modules of the package that import it."""
    found: dict[str, set[str]] = {}
    for file in SOURCE.rglob("*.py"):
        for module in _modules_in(file.read_text()):
            found.setdefault(module, set()).add(_module_of(file))
    return found


@cache
def _texts() -> dict[Path, str]:
    return {path: path.read_text() for path in TESTS.rglob("*.py")}


@cache
def _helpers_of(path: Path) -> frozenset[Path]:
    """Files beside the tests that a test imports, or they."""
    by_name = {other.stem: other for other in _texts() if not other.name.startswith("test_")}
    found: set[Path] = set()
    ahead = [path]
    while ahead:
        names = re.findall(r"^(?:from|import) (\w+)", _texts()[ahead.pop()], re.M)
        new = {by_name[name] for name in names if name in by_name} - found
        found |= new
        ahead += new
    return frozenset(found)


@cache
def _test_files() -> dict[Path, tuple[str, set[str]]]:
    """Test file -> its docstring, and the modules of ours that it imports, itself or by the helpers beside it."""
    tests = [path for path in _texts() if path.name.startswith("test_")]
    return {
        path: (
            ast.get_docstring(ast.parse(_texts()[path])) or "",
            {module for file in (path, *_helpers_of(path)) for module in _modules_in(_texts()[file])},
        )
        for path in tests
    }


def _users_of(helper: str) -> list[Path]:
    return [path for path in _test_files() if any(other.stem == helper for other in _helpers_of(path))]


def _changed() -> list[Path]:
    """What differs from where the branch left main, and what git does not know yet."""

    def ask(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, check=True, capture_output=True, text=True).stdout.split()

    (left,) = ask("merge-base", "HEAD", "main")
    names = ask("diff", "--name-only", left) + ask("ls-files", "--others", "--exclude-standard")
    return [ROOT / name for name in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=lambda name: Path(name).resolve())
    files = parser.parse_args().files or _changed()
    print(*(path.relative_to(ROOT) for path in tests_of_change(files)))


if __name__ == "__main__":
    main()
