"""What page and terminal share: cleaned names, units of a column, tables for either; only here text is escaped."""

from __future__ import annotations

import base64
import hashlib
import unicodedata
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from itertools import groupby
from typing import TYPE_CHECKING

from trimtab.specs import FloatArray, LayerSpec, ModelSpec, Stage, tiers_of
from trimtab.units import GIB, KIB, MIB

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from trimtab.balance.metrics import BalanceReport
    from trimtab.plan.decide.compare import Variant
    from trimtab.plan.file.figures import PlanDetails
    from trimtab.plan.plan import BalanceEstimate, VisionDecision

MAX_TEXT = 400  # characters of a text from outside that are shown
MAX_SUMMARY = 2000  # those of a plan's summary: it is our own, and the longest there is has about 900
_BIDI_CONTROLS = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
GAIN_NOISE = 0.005  # ratios nearer to 1 than this read as "the same"


def clean(text: str, *, limit: int = MAX_TEXT) -> str:
    """Return one printable line of at most `limit` characters.

    Names come from data sets and configurations of others: control characters (terminal escapes), lone surrogates
    and marks that reverse the reading direction become U+FFFD; runs of white space become one blank.
    """
    line = " ".join(text[: 4 * limit].split())
    line = "".join("\ufffd" if c in _BIDI_CONTROLS or unicodedata.category(c) in ("Cc", "Cs") else c for c in line)
    return line if len(line) <= limit and len(text) <= 4 * limit else line[: limit - 1] + "…"


@dataclass(frozen=True, slots=True, kw_only=True)
class Scale:
    """One unit and one number of digits for all values of a column, so that they align."""

    unit: str
    factor: float
    digits: int

    def number(self, value: float) -> str:
        text = f"{value / self.factor:,.{self.digits}f}"
        return text.removeprefix("-") if float(text.replace(",", "")) == 0 else text

    def text(self, value: float) -> str:
        return f"{self.number(value)} {self.unit}"


def time_scale(seconds: Iterable[float]) -> Scale:
    """Return the unit that shows three digits of the largest value."""
    return _scale(seconds, (("h", 3600.0), ("s", 1.0), ("ms", 1e-3), ("µs", 1e-6)))


def memory_scale(num_bytes: Iterable[float]) -> Scale:
    """Return `time_scale` for bytes."""
    return _scale(num_bytes, (("GiB", float(GIB)), ("MiB", float(MIB)), ("KiB", float(KIB)), ("B", 1.0)))


def count_scale(values: Iterable[float]) -> Scale:
    """Return `time_scale` for plain counts and rates."""
    return _scale(values, (("", 1.0),))


def _scale(values: Iterable[float], units: tuple[tuple[str, float], ...]) -> Scale:
    largest = max((abs(value) for value in values), default=0.0)
    unit, factor = next((pair for pair in units if largest >= pair[1]), units[-1])
    shown = largest / factor
    return Scale(unit=unit, factor=factor, digits=0 if shown >= 99.95 or shown == 0 else 1 if shown >= 9.995 else 2)


def percent(share: float, *, digits: int = 1) -> str:
    """Write "19.8 %". The share is rounded to four digits first, as in a plan file, so that both show the same."""
    return f"{round(100.0 * round(share, 4), digits) + 0.0:.{digits}f} %"  # + 0.0: no "-0.0"


def signed_percent(share: float) -> str:
    """Write with its sign, as a minus of the width of the plus: "+2.0 %", "−0.7 %"."""
    text = f"{100.0 * share:+.1f} %"
    return "0.0 %" if text[1:] == "0.0 %" else text.replace("-", "−")


def balance_rows(balance: BalanceReport | BalanceEstimate, *, patches: str = "patches") -> list[tuple[str, str, str]]:
    """Return name, figure and meaning of each ratio that says something.

    One rank never waits, and data of one source has no shuffle to measure.
    """
    waits = (
        ("dist ratio ViT", balance.dist_ratio_vit, f"share of a row's time that the ranks wait, by {patches}"),
        ("dist ratio LLM", balance.dist_ratio_llm, "the same by tokens"),
        ("dist ratio cost", balance.dist_ratio_cost, "the same by modelled time"),
        ("utilisation", balance.utilisation, "useful share of the ranks' time"),
    )
    rows = [("pad ratio", f"{balance.pad_ratio:.4f}", "share of the computed rows that is padding")]
    if balance.utilisation < 1 or balance.dist_ratio_vit > 0:
        rows += [(name, f"{value:.4f}", meaning) for name, value, meaning in waits]
    if balance.shuffle_chi2 is not None:
        rows.append(
            ("shuffle chi2", f"{balance.shuffle_chi2:.3f}", "sources of a step; 1 is as random, more is clustered")
        )
    return rows


def before_after(details: PlanDetails) -> dict[str, Variant]:
    """The baseline and the plan, by title."""
    return {"Baseline": details.baseline, "Plan": details.variants[-1]}


def error_sentence(details: PlanDetails, *, with_run: bool = False) -> str:
    """Return what the headline's error band covers, and what it does not."""
    estimates, costs = details.plan.estimates, f"{clean(details.plan.inputs.training.costs)} costs"
    if details.plan.inputs.training.costs == "probed":
        costs = "the costs of before the probe, which measured only bytes,"
    return (
        f"{'Nothing here but the training run below' if with_run else 'Nothing here'} was measured"
        f"{'' if with_run else ' in a training run'}: times come from {costs} and a simulated pipeline. "
        f"Each time and rate has an error band of ± {percent(estimates.time_error, digits=0)}, each memory figure of "
        f"± {percent(estimates.memory_error, digits=0)}."
        " Variants share their costs, so part of that error cancels in a ratio of two; how much is not known."
    )


def describe_layers(model: ModelSpec, stage: Stage) -> str:
    """Return a stage's layers in forward order: "vision blocks 12–44, projector, token embedding, language blocks 0–3".

    Block numbers count the blocks of their tower from 0.
    """
    parts: list[str] = []
    block_of = {i: n for tower in ("vision", "language") for n, i in enumerate(model.indices(tower, "block"))}
    layers = [(i, model.layers[i]) for i in range(stage.start, stage.stop)]
    for (tower, kind), group in groupby(layers, key=lambda pair: (pair[1].tower, pair[1].kind)):
        numbers = [i for i, _ in group]
        if kind == "block" and numbers[0] in block_of:
            first, last = block_of[numbers[0]], block_of[numbers[-1]]
            parts.append(f"{tower} block {first}" if first == last else f"{tower} blocks {first}–{last}")
        else:
            more = f" ({len(numbers)} layers)" if len(numbers) > 1 else ""
            parts.append(_name_of(model.layers[numbers[0]]) + more)
    return ", ".join(parts)


def _name_of(layer: LayerSpec) -> str:
    if layer.tower == "projector" or layer.kind == "projector":
        return "projector"
    if layer.kind == "embed":
        return "patch embedding" if layer.tower == "vision" else "token embedding"
    return {"norm": f"{layer.tower} norm", "head": "head"}.get(layer.kind, f"{layer.tower} {layer.kind}")


def describe_recompute(stage: Stage) -> str:
    """Return how many of a stage's layers recompute, by tier: "full 7, selective 3 of 24"."""
    text = ", ".join(f"{tier} {count}" for tier, count in Counter(tiers_of(stage).values()).items())
    return f"{text} of {stage.stop - stage.start}" if text else "none"


def relative_spread(values: FloatArray) -> float:
    """Return standard deviation over mean; 0 where all values are 0."""
    mean = float(values.mean()) if len(values) else 0.0
    return float(values.std()) / mean if mean > 0 else 0.0


def vision_words(decision: VisionDecision) -> str:
    """The decision in a line: "tp 4, gather, balanced by time, 2 micro-batches a call, gradients averaged"."""
    calls = "each micro-batch by itself" if decision.pooling == 1 else f"{decision.pooling} micro-batches a call"
    runs = "in order, " if decision.rule == "contiguous" else ""
    sums = {"sum": ", gradients summed", "mean": ", gradients averaged", None: ""}[decision.reduction]
    how = f"{decision.exchange}, {runs}balanced by {decision.objective}"
    return f"{decision.group} {decision.degree}, {how}, {calls}{sums}"


_FOLDED = 20  # characters of a word that has no blank, a module path, after which a narrow terminal may fold it


@dataclass(frozen=True, slots=True)
class Column:
    """A column by its header, whose lines break at "\\n"."""

    header: str
    numeric: bool = False
    look: str = ""  # class of report.css


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A cell that is more than plain words."""

    text: str
    below: str = ""  # smaller, on lines of its own
    code: str = ""  # as `below`, only on the page
    share: float | None = None  # the page draws it as a bar
    bad: bool = False  # stands out


Cells = Sequence[str | Cell]


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Text from outside is cleaned and escaped where it is written, so cells hold it as it came."""

    title: str
    columns: Sequence[Column]
    rows: Sequence[Cells]
    marked: int | None = None  # the plan's own row
    bad: frozenset[int] = frozenset()  # rows that stand out


def numeric(*headers: str) -> tuple[Column, ...]:
    """Return the columns of figures."""
    return tuple(Column(header, numeric=True) for header in headers)


def on_page(table: Table) -> str:
    """Return HTML; the first cell of a row is its header."""
    head = "".join(f'<th scope="col"{_look(c)}>{_lines(c.header)}</th>' for c in table.columns)
    # narrow screens show a row as a list, each cell after its column's name
    names = [f' data-h="{escape(_header_of(column))}"' for column in table.columns]
    body = []
    for number, row in enumerate(table.rows):
        first, *others = (f"{_look(c)}>{_html_of(cell)}" for c, cell in zip(table.columns, row, strict=True))
        mark = ' class="plan"' if number == table.marked else ""
        cells = "".join(f"<td{name}{cell}</td>" for name, cell in zip(names[1:], others, strict=True))
        body.append(f'<tr{mark}><th scope="row"{names[0]}{first}</th>{cells}</tr>')
    look = "" if table.marked is None else "lead-column"
    return (
        f'<div class="scroll"><table class="{look}" aria-label="{escape(table.title)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(body)}</tbody></table></div>"
    )


def print_lines(console: Console, *lines: str, limit: int = MAX_TEXT, style: str = "") -> None:
    """Print a cleaned line of text for each of `lines`."""
    from rich.text import Text

    for line in lines:
        console.print(Text(clean(line, limit=limit), style=style))


def print_table(table: Table, console: Console) -> None:
    """Print in a terminal; words wrap, figures do not. Where that is wider, each row becomes a list."""
    from rich import box
    from rich.table import Table as Grid

    grid = Grid(
        title=clean(table.title),
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        show_edge=False,
        header_style="dim",
    )
    if _least_width(table) > console.width:
        grid.show_header, grid.box = False, None
        grid.add_column()
        grid.add_column(overflow="fold")
        for number, row in enumerate(table.rows):
            if number > 0:
                grid.add_row()
            for column, cell in zip(table.columns, row, strict=True):
                grid.add_row(_header_of(column), _text_of(cell), style=_style_of_row(table, number))
        console.print(grid)
        return
    for column in table.columns:
        grid.add_column(
            column.header,
            justify="right" if column.numeric else "left",
            no_wrap=column.numeric,
            overflow="fold",
        )
    for number, row in enumerate(table.rows):
        grid.add_row(*map(_text_of, row), style=_style_of_row(table, number))
    console.print(grid)


def _style_of_row(table: Table, number: int) -> str:
    return "bold green" if number == table.marked else "bold red" if number in table.bad else ""


def _least_width(table: Table) -> int:
    """Count the characters that the columns need so that no figure is cut and no word is broken but a module path."""
    from rich.cells import cell_len

    total = 2 * len(table.columns) - 1  # a blank after each column, and one between two
    for number, column in enumerate(table.columns):
        texts = [column.header, *(str(_text_of(row[number])) for row in table.rows)]
        if column.numeric:
            total += max(cell_len(line) for text in texts for line in text.split("\n"))
        else:
            total += max(min(cell_len(word), _FOLDED) for text in texts for word in text.split() or [""])
    return total


def _header_of(column: Column) -> str:
    """Return its header on one line: "Samples/s" of "Samples\\n/s"."""
    return clean(column.header).replace(" /", "/").replace("- ", "")


def _html_of(cell: str | Cell) -> str:
    if isinstance(cell, str):
        return _lines(cell)
    text = f'<span class="bad">{_lines(cell.text)}</span>' if cell.bad else _lines(cell.text)
    below = f"<br><small>{_lines(cell.below)}</small>" if cell.below else ""
    code = f"<br><code>{_dotted(escape(clean(cell.code, limit=3 * MAX_TEXT)))}</code>" if cell.code else ""
    return text + below + code + ("" if cell.share is None else bar(cell.share))


def _dotted(names: str) -> str:
    """Let module paths break after a dot, and nowhere else but between two of them."""
    return names.replace(".", ".<wbr>").replace(".<wbr>.<wbr>", "..")


def _lines(text: str) -> str:
    return "<br>".join(escape(line) for line in _clean_lines(text))


def _clean_lines(text: str) -> Iterable[str]:
    return (clean(line, limit=MAX_TEXT) for line in text.split("\n"))


def _text_of(cell: str | Cell) -> Text:
    from rich.text import Text

    if isinstance(cell, str):
        return Text("\n".join(_clean_lines(cell)))
    text = Text("\n".join(_clean_lines(cell.text)), style="red" if cell.bad else "")
    return text.append("\n" + "\n".join(_clean_lines(cell.below)), style="dim") if cell.below else text


def bar(share: float) -> str:
    return f'<span class="bar" aria-hidden="true"><i style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></i></span>'


def _look(column: Column) -> str:
    look = f"{'n' if column.numeric else ''} {column.look}".strip()
    return f' class="{look}"' if look else ""


def esc(text: object, limit: int = MAX_TEXT) -> str:
    return escape(clean(str(text), limit=limit))


def page(title: str, body: str) -> str:
    """Return one self-contained page; `title` and `body` are HTML, escaped already."""
    package = files("trimtab.report")
    style, script = (package.joinpath(name).read_text(encoding="utf-8") for name in ("report.css", "report.js"))
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = (
        f"default-src 'none'; style-src 'unsafe-inline'; script-src 'sha256-{digest}'; "
        "base-uri 'none'; form-action 'none'"
    )
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        f'<meta http-equiv="Content-Security-Policy" content="{policy}">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n"
        f"<body>\n<main>\n{body}</main>\n"
        f'<div id="tip" aria-hidden="true"></div>\n<script>{script}</script>\n</body>\n</html>\n'
    )


def section(title: str, note: str, body: str, *, css_class: str = "") -> str:
    lead = f'<p class="note">{note}</p>' if note else ""
    return f'<section class="{css_class}"><h2>{title}</h2>{lead}{body}</section>\n'


def tile(name: str, big: str, sub: str, *, look: str = "") -> str:
    """Return one figure that stands out."""
    return f'<div class="tile {look}"><dt>{name}</dt><dd class="big">{big}</dd><dd class="sub">{sub}</dd></div>'


def legend(entries: Iterable[tuple[tuple[str, ...], str]]) -> str:
    items = ("".join(f'<i class="{look}"></i>' for look in looks) + text for looks, text in entries)
    return '<ul class="legend">' + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
