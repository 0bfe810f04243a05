"""How a message shows a value that a user's file holds."""

from __future__ import annotations

MAX_SHOWN = 60


def quote(value: object) -> str:
    """`value` as Python writes it, cut to 60 characters; of a long list only the head is written at all."""
    head = value[: MAX_SHOWN + 1] if isinstance(value, (str, list, tuple)) else value
    shown = repr(head)
    return shown if len(shown) <= MAX_SHOWN else shown[: MAX_SHOWN - 3] + "..."
