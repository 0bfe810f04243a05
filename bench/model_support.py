"""Every image-text family of the installed Transformers through trimtab: writes docs/model-support.md.

    python bench/model_support.py                    # the page, from what the columns' last sweeps found
    python bench/model_support.py --sweep            # every column anew, then the page: some twenty minutes of CPU time
    python bench/model_support.py --sweep traced     # one column anew

A column is a script in bench/columns: for every family a yes, or the reason of a no.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).parent
sys.path.insert(0, str(BENCH / "columns"))
from cell import FAMILIES, Cell, read_column, read_version  # noqa: E402

PAGE = BENCH.parent / "docs" / "model-support.md"
COLUMNS = {  # name: script with its arguments, heading, what a yes means
    "described": (
        ["described.py"],
        "described",
        "of the default configuration; each parameter in exactly one layer, equal to the model's own to the parameter",
    ),
    "sized": (
        ["sized.py"],
        "sized",
        "patches and tokens of 200 image sizes (and clips, where the processor takes them) are the real processor's",
    ),
    "traced": (["traced.py"], "traced", "saved bytes of random recompute subsets are those that autograd keeps"),
    "timed": (["timed.py"], "timed", "one layer of each kind is timed on inputs that the model itself hands it"),
    "packed": (["packed.py"], "packed", "logits and gradients of texts in a pack are those of the texts alone"),
    "packed_images": (["packed.py", "--images"], "with images", "the same with images inside and at the ends"),
    "vision_dp": (
        ["vision_dp.py"],
        "vision DP",
        "images encoded apart give the features and gradients of all together",
    ),
    "pipeline_whole_tower": (
        ["pipeline_whole_tower.py"],
        "pipeline",
        "decoder cut, tower whole on the first stage: loss and gradients of one process",
    ),
    "pipeline_cut_tower": (["pipeline_cut_tower.py"], "tower cut", "the same with the tower cut too"),
    "mapped": (
        ["mapped.py"],
        "mapped",
        "every module of the real model has one device, the bytes are those counted there",
    ),
    "loaded": (
        ["loaded.py"],
        "loaded",
        "placed over devices, host memory and disk it generates the plain model's tokens",
    ),
}


def page() -> str:
    """docs/model-support.md."""
    columns = {name: read_column(name) for name in COLUMNS}
    lines = [
        "# Which models are supported, and how far",
        "",
        "Written by `bench/model_support.py`; not by hand. A column that a family lacks has its reason below.",
        "",
        f"Transformers {read_version('described')} maps {len(FAMILIES)} families to image-text-to-text. A small model",
        "of each goes through every column; `described` and `mapped` take the default configuration, which for some",
        "families is no consistent model.",
        "",
        "| column | families | a yes means |",
        "|---|---|---|",
    ]
    for name, (_, heading, meaning) in COLUMNS.items():
        lines.append(f"| {heading} | {sum(x.yes for x in columns[name].values())} | {meaning} |")
    lines += ["", "| family | " + " | ".join(heading for _, heading, _ in COLUMNS.values()) + " |"]
    lines.append("|---|" + "---|" * len(COLUMNS))
    for family in FAMILIES:
        cells = ["yes" if columns[name][family].yes else "" for name in COLUMNS]
        lines.append(f"| `{family}` | " + " | ".join(cells) + " |")
    lines += [
        "",
        "## Descriptions",
        "",
        "- *By hand*: without torch, from the configuration alone ([models](models.md)); else Transformers is asked.",
        "- *Price*: by formulas; by counting on the library's own code where a layer is of another make; or not known.",
        "- *Order*: seen in a forward pass without weights of a text and an image, of one of them, or that of modules.",
        "",
        "| family | source | layers | parameters | price | order |",
        "|---|---|---|---|---|---|",
    ]
    for family, cell in columns["described"].items():
        if cell.yes:
            lines.append(f"| `{family}` | " + " | ".join(cell.note.removesuffix("; ").split("; ")) + " |")
    lines += ["", "## Reasons", ""]
    for family in FAMILIES:
        missing = {name: columns[name][family] for name in COLUMNS if not columns[name][family].yes}
        lines += [_reasons(family, missing)] if missing else []
    return "\n".join(lines) + "\n"


def _reasons(family: str, missing: dict[str, Cell]) -> str:
    """One line; columns with the same reason together."""
    by_reason: dict[str, list[str]] = {}
    for name, cell in missing.items():
        by_reason.setdefault(cell.note, []).append(COLUMNS[name][1])
    said = "; ".join(f"*{', '.join(names)}*: {_escape(reason)}" for reason, names in by_reason.items())
    return f"- `{family}`: {said}"


def _escape(text: str) -> str:
    return text.replace("|", "/").replace("<", "&lt;").replace("*", "\\*").strip()


def main() -> None:
    """Sweep what is asked for, then write the page."""
    if "--sweep" in sys.argv:
        for name in sys.argv[sys.argv.index("--sweep") + 1 :] or list(COLUMNS):
            subprocess.run(
                [sys.executable, *[BENCH / "columns" / COLUMNS[name][0][0], *COLUMNS[name][0][1:]]], check=True
            )
    PAGE.write_text(page(), encoding="utf-8")
    print(f"wrote {PAGE}")


if __name__ == "__main__":
    main()
