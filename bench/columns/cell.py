"""One column of docs/tables/model-support.md: a yes or a reason for every family that the installed Transformers maps.

A column is a module beside this one with `check(family) -> Cell`. Its main calls `sweep`, which writes what it found to
`results/COLUMN.json`; `bench/model_support.py` puts the columns together. One family that fails, in whatever way, is a
cell with its reason and never the end of the sweep.
"""

import json
import os
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"  # before the library is imported

import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

FAMILIES = sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)
RESULTS = Path(__file__).with_name("results")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """What one family answers to one question; `note`: the reason of a no, or a remark to a yes, in a few words."""

    yes: bool
    note: str = ""


def sweep(check: Callable[[str], Cell], column: str) -> None:
    """Run `check` over the families named on the command line, or over all, and write their cells into the column."""
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    named = sys.argv[1:]
    cells = {family: _guarded(check, family) for family in named or FAMILIES}
    print(f"{column}: {sum(x.yes for x in cells.values())} of {len(cells)}")
    RESULTS.mkdir(exist_ok=True)
    kept = read_column(column) if named and (RESULTS / f"{column}.json").is_file() else {}
    families = {family: asdict(cell) for family, cell in sorted({**kept, **cells}.items())}
    written = {"transformers": transformers.__version__, "families": families}
    (RESULTS / f"{column}.json").write_text(json.dumps(written, indent=1) + "\n", encoding="utf-8")


def read_column(column: str) -> dict[str, Cell]:
    """The cells of a column as its last sweep left them, by family."""
    written = json.loads((RESULTS / f"{column}.json").read_text(encoding="utf-8"))
    return {family: Cell(**cell) for family, cell in written["families"].items()}


def read_version(column: str) -> str:
    """The version of Transformers that the column's last sweep ran with."""
    return str(json.loads((RESULTS / f"{column}.json").read_text(encoding="utf-8"))["transformers"])


def _guarded(check: Callable[[str], Cell], family: str) -> Cell:
    try:
        cell = check(family)
    except Exception as error:  # whatever another library raises of its own defaults is the reason
        first = str(error).strip().splitlines() or [""]
        cell = Cell(yes=False, note=f"{type(error).__name__}: {first[0]}"[:200])
    print(f"{family:28} {'yes' if cell.yes else 'no ':4} {cell.note}", flush=True)
    return cell
