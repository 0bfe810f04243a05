"""The parts of page and terminal: tables, written to either, and the page's sections; only here text is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from typing import TYPE_CHECKING

from trimtab.report.words import MAX_TEXT, clean

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

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
    """Columns of figures."""
    return tuple(Column(header, numeric=True) for header in headers)


def on_page(table: Table) -> str:
    """HTML; the first cell of a row is its header."""
    head = "".join(f'<th scope="col"{_look(c)}>{_lines(c.header)}</th>' for c in table.columns)
    # narrow screens show a row as a list, each cell after its column's name
    names = [f' data-h="{escape(_name_of(column))}"' for column in table.columns]
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
    """In a terminal; words wrap, figures do not. Where that takes more than its width, each row becomes a list."""
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
                grid.add_row(_name_of(column), _text_of(cell), style=_style_of_row(table, number))
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
    """Characters that the columns need so that no figure is cut and no word is broken but a module path."""
    from rich.cells import cell_len

    total = 2 * len(table.columns) - 1  # a blank after each column, and one between two
    for number, column in enumerate(table.columns):
        texts = [column.header, *(str(_text_of(row[number])) for row in table.rows)]
        if column.numeric:
            total += max(cell_len(line) for text in texts for line in text.split("\n"))
        else:
            total += max(min(cell_len(word), _FOLDED) for text in texts for word in text.split() or [""])
    return total


def _name_of(column: Column) -> str:
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
    """Module paths may break after a dot, and nowhere else but between two of them."""
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
