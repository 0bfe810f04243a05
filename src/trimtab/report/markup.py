"""Building blocks of the page: sections, tiles, lists, legends; only here and in `table` text is escaped."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable
from html import escape
from importlib.resources import files

from trimtab.report.words import clean


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


def tile(name: str, big: str, sub: str, *, look: str = "") -> str:
    """One figure that stands out."""
    return f'<div class="tile {look}"><dt>{name}</dt><dd class="big">{big}</dd><dd class="sub">{sub}</dd></div>'


def legend(entries: Iterable[tuple[tuple[str, ...], str]]) -> str:
    items = ("".join(f'<i class="{look}"></i>' for look in looks) + text for looks, text in entries)
    return '<ul class="legend">' + "".join(f"<li>{item}</li>" for item in items) + "</ul>"
