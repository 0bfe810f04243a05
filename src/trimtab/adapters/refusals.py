"""What refusals say alike."""

from __future__ import annotations

import math


def price_without_cuts(price: float | None, *, then: str = "") -> str:
    """In parentheses, the step time of the best plan without the refused cuts, relative to the plan's; none is silence.

    Infinite is a price too: without such cuts nothing fits, and `then` says what becomes of that.
    """
    if price is None:
        return ""
    if math.isinf(price):
        return f" (without such cuts nothing fits these degrees of parallelism{then})"
    return f" (the best plan without such cuts takes {price:.2f} x as long a step)"
