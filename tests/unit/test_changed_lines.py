"""Tests of bench/changed_lines.py: what `balanced` asks of an example is an import and a line, at the right places."""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from refusals import refused

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))
import changed_lines

EXAMPLE = '''"""An example."""

from __future__ import annotations

import torch
from trl import SFTTrainer

if __name__ == "__main__":
    model = torch.nn.Linear(1, 1)
    trainer = SFTTrainer(
        model=model,
    )

    trainer.train()
'''


def test_the_change_is_two_lines_behind_the_trainer_that_is_made() -> None:
    after = changed_lines.with_plan(EXAMPLE, "folder")
    assert changed_lines.count_changes(EXAMPLE, after) == (2, 0)
    names = [ast.unparse(node).splitlines()[0] for node in ast.parse(after).body[-1].body]  # type: ignore[attr-defined]
    assert names[-3:-1] == ["trainer = SFTTrainer(model=model)", "trainer = trimtab.balanced(trainer, 'folder')"]
    assert after.index("__future__") < after.index("import trimtab") < after.index("import torch")


def test_an_example_without_a_trainer_is_refused() -> None:
    with refused(ValueError, "0"):
        changed_lines.with_plan("import torch\n")


def test_lines_taken_away_count_as_well() -> None:
    assert changed_lines.count_changes("a\nb\nc\n", "a\nx\nc\nd\n") == (2, 1)
