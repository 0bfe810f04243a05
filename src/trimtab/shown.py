"""Specs and results at a prompt and in a notebook: a few lines, and no column or layer of theirs."""

from __future__ import annotations

import html
from collections.abc import Sequence


def three_lines(title: str, first: str, second: str) -> str:
    """What `__repr__` says of something with thousands of numbers."""
    return f"{title}\n  {first}\n  {second}"


def html_table(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """What `_repr_html_` shows in a notebook; every text is escaped."""

    def line(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(line(row, "td") for row in rows)
    return f"<p>{html.escape(title)}</p><table>{line(head, 'th')}{body}</table>"
