"""Building blocks of the page: sections, tables, lists, legends; the only place that escapes."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files

from trimtab.report.words import clean


@dataclass(frozen=True, slots=True)
class Column:
    header: str
    numeric: bool = False
    look: str = ""


def esc(text: object, limit: int = 400) -> str:
    return escape(clean(str(text), limit=limit))


def page(title: str, body: str) -> str:
    """One self-contained page; `title` and `body` are HTML, escaped already."""
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


def table(
    columns: Sequence[Column],
    rows: Iterable[Sequence[str]],
    *,
    caption: str,
    marked: int | None = None,
    look: str = "",
) -> str:
    """Cells are HTML; the first of each row is its header; row `marked` is the plan's."""
    head = "".join(f'<th scope="col"{_look(column)}>{column.header}</th>' for column in columns)
    lines = []
    for i, row in enumerate(rows):
        cells = "".join(f"<td{_look(c)}>{cell}</td>" for c, cell in zip(columns[1:], row[1:], strict=True))
        mark = ' class="plan"' if i == marked else ""
        lines.append(f'<tr{mark}><th scope="row"{_look(columns[0])}>{row[0]}</th>{cells}</tr>')
    return (
        f'<div class="scroll"><table class="{look}" aria-label="{escape(caption)}"><thead><tr>{head}</tr></thead>'
        f"<tbody>{''.join(lines)}</tbody></table></div>"
    )


def _look(column: Column) -> str:
    look = f"{'n' if column.numeric else ''} {column.look}".strip()
    return f' class="{look}"' if look else ""


def facts(pairs: Iterable[tuple[str, str]], *, look: str = "") -> str:
    return f'<dl class="facts {look}">' + "".join(f"<dt>{name}</dt><dd>{value}</dd>" for name, value in pairs) + "</dl>"


def legend(entries: Iterable[tuple[tuple[str, ...], str]]) -> str:
    items = ("".join(f'<i class="{look}"></i>' for look in looks) + text for looks, text in entries)
    return '<ul class="legend">' + "".join(f"<li>{item}</li>" for item in items) + "</ul>"


def bar(share: float) -> str:
    return f'<span class="bar" aria-hidden="true"><i style="width:{100 * min(max(share, 0.0), 1.0):.1f}%"></i></span>'
