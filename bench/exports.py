"""Real plans through every export, made with `--for`: `python bench/exports.py [--models M ...] [--frameworks F ...]`.

For every model a plan is made for every framework, on the drawn data set of `trimtab demo`, with 16 A100s and 128
samples a step, and exported. The table at the end has, for each, the predicted step over that of the fastest plan of
the model, and behind it what single samples cost (x) where the host takes no packs; or a number of the sentences below
it, by which the planner or the export refuses. Exit code 1 where an export of a plan that was made for it warns.
Qwen3.5 is Transformers' default configuration, asked of Transformers (needs torch); the other models are shipped.
"""

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from trimtab.adapters.frameworks import FRAMEWORKS

MODELS = ("Qwen2.5-VL-7B", "Qwen3-VL-8B", "Qwen3-VL-30B-A3B", "Qwen3.5", "InternVL3_5-8B", "LLaVA-OneVision-7B")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What became of one plan."""

    step_ms: float | None = None  # predicted, of the plan; None: refused
    single: float | None = None  # time of single samples over that of the packs, where the host takes no packs
    refusal: str = ""
    warnings: tuple[str, ...] = ()


def trimtab(*words: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "trimtab", *map(str, words)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def try_export(model: str | Path, framework: str, data: Path, folder: Path, cluster: str) -> Cell:
    """One plan made for the framework, and its export."""
    more = ["--max-pixels", "1003520"] if Path(model).name.startswith("Qwen") else []
    plan = folder / f"{Path(model).name}-{framework}"
    words = ["plan", model, data / "data.jsonl", "--tokenizer", data / "tokenizer.json", "--cluster", cluster]
    made = trimtab(*words, "--global-batch", "128", "--for", framework, "--out", plan, *more)
    if made.returncode:
        return Cell(refusal=_one_line(made.stderr))
    told = trimtab("export", framework, plan, "--json")
    fields: dict[str, Any] = json.loads(told.stdout)
    if told.returncode:
        return Cell(refusal=_one_line(fields["error"]))
    single = None
    if fields["packs"] is None:
        price = re.search(r"take ([\d.]+) x as long", trimtab("export", framework, plan).stdout)
        assert price is not None, f"{framework} takes no packs, and its export does not say what that costs"
        single = float(price[1])
    estimates = yaml.safe_load((plan / "plan.yaml").read_text(encoding="utf-8"))["estimates"]
    return Cell(step_ms=float(estimates["step_ms"]), single=single, warnings=tuple(fields["warnings"]))


def _one_line(text: str) -> str:
    return " ".join(text.strip().removeprefix("trimtab: ").split())


def table(cells: Mapping[tuple[str, str], Cell], models: Sequence[str], frameworks: Sequence[str]) -> Iterator[str]:
    """Markdown: a row a framework, a column a model, and the refusals by number."""
    refusals: list[str] = []
    fastest = {
        model: min((cell.step_ms for (of, _), cell in cells.items() if of == model and cell.step_ms), default=1.0)
        for model in models
    }
    yield f"| `--for` | {' | '.join(models)} |"
    yield "|---" * (len(models) + 1) + "|"
    for framework in frameworks:
        row = [framework]
        for model in models:
            cell = cells[model, framework]
            if cell.step_ms is None:
                if cell.refusal not in refusals:
                    refusals.append(cell.refusal)
                row.append(f"({refusals.index(cell.refusal) + 1})")
                continue
            warned = f", {len(cell.warnings)} warnings" if cell.warnings else ""
            single = "" if cell.single is None else f" x {cell.single:.2f}"
            row.append(f"{cell.step_ms / fastest[model]:.2f}{single}{warned}")
        yield f"| {' | '.join(row)} |"
    yield ""
    yield from (f"({number}) {refusal}" for number, refusal in enumerate(refusals, start=1))


def qwen3_5(folder: Path) -> Path:
    """The default configuration of Transformers, with the preprocessor that it goes with."""
    import transformers

    model = folder / "Qwen3.5"
    transformers.AutoConfig.for_model("qwen3_5").save_pretrained(model)
    rule = {"image_processor_type": "Qwen2VLImageProcessorFast", "patch_size": 16, "merge_size": 2}
    rule |= {"temporal_patch_size": 2, "size": {"shortest_edge": 65536, "longest_edge": 16777216}}
    (model / "preprocessor_config.json").write_text(json.dumps(rule), encoding="utf-8")
    return model


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="*", default=MODELS)
    parser.add_argument("--frameworks", nargs="*", default=list(FRAMEWORKS))
    parser.add_argument("--cluster", default="16xA100-80GB")
    given = parser.parse_args()
    from trimtab.demo import draw_dataset

    cells: dict[tuple[str, str], Cell] = {}
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        data = draw_dataset(folder / "data", num_samples=256)
        for name in given.models:
            model = qwen3_5(folder) if name == "Qwen3.5" else name
            for framework in given.frameworks:
                cell = try_export(model, framework, data, folder, given.cluster)
                cells[name, framework] = cell
                print(f"{name}, {framework}: {cell}", file=sys.stderr, flush=True)
    print("\n".join(table(cells, given.models, given.frameworks)))
    return 1 if any(cell.warnings for cell in cells.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
