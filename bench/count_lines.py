"""Code lines of the source tree, without comments, docstrings and blank lines: a folder a row, the longest files last.

A line counts if it holds a token that is neither a comment nor part of a docstring; strings over several lines that are
no docstring count whole. Then every file of more than 350 and every function of more than 60.
Run: python bench/count_lines.py [FOLDER ...]   (default: src and tests; a few seconds)
"""

from __future__ import annotations

import ast
import io
import sys
import tokenize
from collections import Counter
from pathlib import Path

MAX_FILE_LINES, MAX_FUNCTION_LINES = 350, 60  # of code; the house's own rule
_NOTHING = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENCODING,
    tokenize.ENDMARKER,
}


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


def long_functions(path: Path) -> list[str]:
    """Functions of more than `MAX_FUNCTION_LINES` lines of code, as "path:line name lines"."""
    text = path.read_text()
    code = code_lines(text)
    found = []
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            count = sum(node.lineno <= line <= (node.end_lineno or node.lineno) for line in code)
            if count > MAX_FUNCTION_LINES:
                found.append(f"{path}:{node.lineno} {node.name} {count}")
    return found


def print_folder(root: Path) -> None:
    counts = {path: len(code_lines(path.read_text())) for path in sorted(root.rglob("*.py"))}
    rooms: Counter[str] = Counter()
    for path, count in counts.items():
        inside = path.relative_to(root).parts[:-1]
        rooms["/".join((str(root), *inside[:2]))] += count
    for name, count in sorted(rooms.items()):
        print(f"{count:8,d}  {name}")
    print(f"{sum(counts.values()):8,d}  {root}, {len(counts)} files")
    for path, count in counts.items():
        if count > MAX_FILE_LINES:
            print(f"          {path}: {count} lines, more than {MAX_FILE_LINES}")
    for line in (line for path in counts for line in long_functions(path)):
        print(f"          {line} lines, more than {MAX_FUNCTION_LINES}")


if __name__ == "__main__":
    for folder in sys.argv[1:] or ["src", "tests"]:
        print_folder(Path(folder))
