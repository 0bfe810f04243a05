"""Lines that an example of a Trainer needs to run a plan: `python bench/changed_lines.py EXAMPLE.py ...`

The change is made, not estimated: an import, and `balanced` behind the statement that makes the trainer. Counted are
the lines that a diff adds and takes away. That the class of that trainer then trains as planned is what
tests/torch/test_balanced.py and tests/integration/test_trainer_hosts.py run.
"""

from __future__ import annotations

import ast
import difflib
import sys
from pathlib import Path


def with_plan(source: str, plan: str = "plan") -> str:
    """The example with the change; `ValueError` where no statement makes a trainer and gives it a name."""
    lines, tree = source.splitlines(keepends=True), ast.parse(source)
    made = [
        node
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith("Trainer")
        and isinstance(node.targets[0], ast.Name)
    ]
    if len(made) != 1:
        raise ValueError(f"{len(made)} statements make a trainer, and one was expected")
    (statement,) = made
    target = ast.unparse(statement.targets[0])
    assert statement.end_lineno is not None, "parsed from text"
    lines.insert(statement.end_lineno, f"{' ' * statement.col_offset}{target} = trimtab.balanced({target}, {plan!r})\n")
    first = next(node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom)) and not _is_future(node))
    lines.insert(first.lineno - 1, "import trimtab\n")
    return "".join(lines)


def _is_future(node: ast.Import | ast.ImportFrom) -> bool:
    return isinstance(node, ast.ImportFrom) and node.module == "__future__"


def count_changes(before: str, after: str) -> tuple[int, int]:
    """Lines added and taken away."""
    found = list(difflib.ndiff(before.splitlines(), after.splitlines()))
    return sum(line.startswith("+ ") for line in found), sum(line.startswith("- ") for line in found)


def main(files: list[str]) -> None:
    for file in files:
        before = Path(file).read_text(encoding="utf-8")
        added, removed = count_changes(before, with_plan(before))
        print(f"{file}: {len(before.splitlines())} lines, {added} added, {removed} removed")


if __name__ == "__main__":
    main(sys.argv[1:])
