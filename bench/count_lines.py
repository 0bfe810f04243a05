"""The size of the project: code lines and characters by room, files, tests, bench, public names, options.

A line counts if it holds a token that is neither a comment nor part of a docstring. Then every file of more than 400
and every function of more than 60 such lines.
Run: python bench/count_lines.py [--against COMMIT]   (a few seconds; COMMIT: its figures stand first)
"""

import argparse
import ast
import io
import subprocess
import tempfile
import tokenize
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from tarfile import open as open_archive

ROOT = Path(__file__).parents[1]
MAX_FILE_LINES, MAX_FUNCTION_LINES = 400, 60  # of code; the house's own rule
GOALS = {"src": 34_500, "characters a line": 42.0, "src files": 220, "tests": 25_000, "bench": 6_500}
GOALS |= {"public names": 45, "options": 200}
_NOTHING = {
    *(tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT),
    *(tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER),
}
_OPTIONS = """
import typer
try:
    from trimtab.cli.app import app
except ImportError:
    from trimtab.cli.main import app
def count(command, context):
    names = getattr(command, "list_commands", lambda _: ())(context)
    if not names:
        return sum(one.param_type_name == "option" for one in command.params)
    return sum(count(command.get_command(context, name), context) for name in names)
group = typer.main.get_command(app)
print(count(group, typer.Context(group)))
"""


def code_lines(text: str) -> set[int]:
    """Numbers of the lines that hold code.

    >>> sorted(code_lines('def f():\\n    "What it does."\\n\\n    return 1  # one\\n'))
    [1, 4]
    """
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                docstrings |= set(range(statement.lineno, (statement.end_lineno or statement.lineno) + 1))
    found: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in _NOTHING:
            found |= set(range(token.start[0], token.end[0] + 1))
    return found - docstrings


@dataclass
class Size:
    """Files of one room, their code lines and the characters on these lines, without indents."""

    files: int = 0
    lines: int = 0
    characters: int = 0

    def add(self, text: str) -> None:
        rows, code = text.split("\n"), code_lines(text)
        self.files += 1
        self.lines += len(code)
        self.characters += sum(len(rows[line - 1].strip()) for line in code)


def count_rooms(root: Path) -> dict[str, Size]:
    """Sizes of src by room, of src as a whole, of tests and of bench."""
    rooms: dict[str, Size] = defaultdict(Size)
    source = root / "src" / "trimtab"
    for path in sorted(source.rglob("*.py")):
        inside = path.relative_to(source).parts
        for room in (inside[0] if len(inside) > 1 else "(floor 0)", "src"):
            rooms[room].add(path.read_text(encoding="utf-8"))
    for folder in ("tests", "bench"):
        for path in sorted((root / folder).rglob("*.py")):
            rooms[folder].add(path.read_text(encoding="utf-8"))
    return rooms


def count_public_names(root: Path) -> int:
    """Names at the top of the package."""
    stub = ast.parse((root / "src" / "trimtab" / "__init__.pyi").read_text(encoding="utf-8"))
    return sum(len(node.names) for node in stub.body if isinstance(node, ast.ImportFrom))


def count_options(root: Path) -> int:
    """Options of all verbs, counted once a verb."""
    import os
    import sys

    environment = {**os.environ, "PYTHONPATH": str(root / "src")}
    done = subprocess.run([sys.executable, "-c", _OPTIONS], env=environment, capture_output=True, text=True, check=True)
    return int(done.stdout)


def figures(root: Path) -> dict[str, float]:
    """What there are goals for."""
    rooms = count_rooms(root)
    source = rooms["src"]
    return {
        **{name: size.lines for name, size in rooms.items() if name not in GOALS},
        "src": source.lines,
        "characters a line": source.characters / source.lines,
        "src files": source.files,
        "tests": rooms["tests"].lines,
        "bench": rooms["bench"].lines,
        "public names": count_public_names(root),
        "options": count_options(root),
    }


def long_parts(root: Path) -> list[str]:
    """Files and functions that are too long."""
    found = []
    for path in sorted((root / "src").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        code, place = code_lines(text), path.relative_to(root)
        if len(code) > MAX_FILE_LINES:
            found.append(f"{place}: {len(code)} lines, more than {MAX_FILE_LINES}")
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                count = sum(node.lineno <= line <= (node.end_lineno or node.lineno) for line in code)
                if count > MAX_FUNCTION_LINES:
                    found.append(f"{place}:{node.lineno} {node.name}: {count} lines, more than {MAX_FUNCTION_LINES}")
    return found


def figures_of(commit: str) -> dict[str, float]:
    """The same of a commit, from its own files."""
    packed = subprocess.run(
        ["git", "archive", commit, "src", "tests", "bench"], cwd=ROOT, capture_output=True, check=True
    )
    with tempfile.TemporaryDirectory() as folder:
        with open_archive(fileobj=io.BytesIO(packed.stdout)) as archive:
            archive.extractall(folder, filter="data")
        return figures(Path(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--against", help="A commit whose figures stand first.")
    commit = parser.parse_args().against
    after = figures(ROOT)
    before = {} if commit is None else figures_of(commit)
    print(f"{'':20}{commit or '':>12}{'now':>12}{'goal':>12}")
    for name in dict.fromkeys([*before, *after]):
        digits = ".1f" if name == "characters a line" else ",.0f"
        first, now = (format(found[name], digits) if name in found else "" for found in (before, after))
        print(f"{name:20}{first:>12}{now:>12}{'<= ' + format(GOALS[name], digits) if name in GOALS else '':>12}")
    print("\n".join(long_parts(ROOT)))


if __name__ == "__main__":
    main()
