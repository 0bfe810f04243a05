"""Code lines of `src` by the feature that they serve, and by kind, as the Markdown of CONTRIBUTING.

A file belongs to the first row that names it or a folder around it; one that no row names is an error.
Run: python bench/lines_by_feature.py   (a few seconds)
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from count_lines import code_lines

ROOT = Path(__file__).parent.parent / "src" / "trimtab"
ROWS = (
    ("balance", "packs even in patches and tokens (README 1); ISF and the paper's baselines (15)"),
    (
        "partition/bmp partition/flops_rule partition/baselines partition/search cli/uneven",
        "OmniBal's search, also on real runs; Pai's notebook (15)",
    ),
    ("partition", "the exact cut, recompute with it (README 2, 3); schedules, jitter (18)"),
    ("costs/traced costs/timed costs/kind_model costs/least_squares", "layers counted and timed (18)"),
    ("costs/fit costs/logs costs/minima costs/observed plan/runs", "formulas fitted to logged runs (18)"),
    ("lora costs/adapters adapters/lora runtime/training/loop", "LoRA: priced, exported, trained (17)"),
    ("costs", "seconds and bytes of every layer by formula; devices, networks (18)"),
    ("models/asking models/ask", "any VLM: layers, images and videos asked of Transformers, in a child process (13)"),
    ("models", "32 shipped models, odd families, image rules (13, 15)"),
    ("samples address", "formats of data, sizes of media, tokens, bad samples, resume (16, 20)"),
    (
        "plan/decide/sharing plan/decide/exchange runtime/vision",
        "images shared among ranks (README 4); verl and ROLL (15)",
    ),
    (
        "plan/file/check plan/decide/probed runtime/probe cli/check cli/probe",
        "`check`, `probe` (15, 20)",
    ),
    ("plan/predict plan/given adapters/launch_files cli/predict", "`predict` of a run that somebody has (18)"),
    (
        "placement plan/file/placement runtime/placing cli/map",
        "the device map, its file, loaded and run (README 5); `split_model` (15)",
    ),
    ("plan/file plan/plan plan/options cli/plan", "plan files, options said once (14, 20)"),
    ("plan", "degrees, schedule, limits and ZeRO chosen (18); what is compared with (15)"),
    (
        "adapters/torchserve adapters/accelerate adapters/engines serve/torchserve_handler",
        "TorchServe, Accelerate (15); vLLM and SGLang (14)",
    ),
    ("serve cli/serve", "`serve` (README 5) with its limits (14, 20)"),
    (
        "adapters/data_files adapters/host_packs adapters/record_files adapters/verl cli/export",
        "packs as files for other trainers (17); verl's workload (15)",
    ),
    ("adapters cli/frameworks", "twelve launchers: what each can run, in its words, at which price (17)"),
    ("report demo cli/report cli/demo", "the report, tables in the terminal, the demo (16)"),
    (
        "runtime/pipeline runtime/layout runtime/recompute parallel",
        "a plan's stages and recompute, run on any model of Transformers (README 2, 3)",
    ),
    ("runtime", "exact packs, `train`, Trainers, checkpoints, lost ranks (16, 17, 20)"),
    ("", "one sentence for every error, whole files, the other verbs (20)"),
)
"""What the names of files and folders begin with, and what these serve: point of the README's list, or issue."""


def row_of(path: Path) -> int:
    """The first row of `ROWS` that the file belongs to.

    >>> ROWS[row_of(ROOT / "balance" / "isf.py")][0]
    'balance'
    """
    name = str(path.relative_to(ROOT).with_suffix(""))
    return next(i for i, (files, _) in enumerate(ROWS) if not files or name.startswith(tuple(files.split())))


def kinds(text: str) -> Iterator[str]:
    """What each code line of a file is."""
    tree, found = ast.parse(text), dict[int, str]()
    for node in ast.walk(tree):
        last = node.end_lineno if isinstance(node, ast.stmt) else None
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            kind, last = "heads of functions and classes", node.body[0].lineno - 1
        elif isinstance(node, ast.Import | ast.ImportFrom):
            kind = "imports"
        elif isinstance(node, ast.Raise):
            kind = "refusals"
        else:
            kind = "fields and tables" if node in tree.body or isinstance(node, ast.AnnAssign) else ""
        if kind and last:
            found |= {line: kind for line in range(node.lineno, last + 1) if line not in found}
    return (found.get(line, "statements") for line in code_lines(text))


def main() -> None:
    lines: Counter[int] = Counter()
    by_kind: Counter[str] = Counter()
    for path in sorted(ROOT.rglob("*.py")):
        text = path.read_text()
        lines[row_of(path)] += len(code_lines(text))
        by_kind.update(kinds(text))
    print("| lines | where | what for |\n|---|---|---|")
    for row, (files, feature) in enumerate(ROWS):
        where = ", ".join(f"`{file}`" for file in files.split()) or "the rest"
        print(f"| {lines[row]:,} | {where} | {feature} |")
    told = ", ".join(f"{kind} {count:,}" for kind, count in by_kind.most_common())
    print(f"\n{lines.total():,} lines: {told}.")


if __name__ == "__main__":
    main()
