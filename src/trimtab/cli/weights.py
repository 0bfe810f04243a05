"""What `pack` and `plan` share: weights of a data set's sources, as a user types them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import typer

from trimtab.errors import PlanError, join_problems

WeightsOption = Annotated[
    list[str] | None,
    typer.Option(help="Draw sources in proportion, as in web=1,docs=2.5: every source, 0 leaves one out."),
]
NumDrawnOption = Annotated[
    int | None, typer.Option(min=1, help="Samples that --weights draws; default: as many as there are.")
]


def parse_weights(given: Sequence[str]) -> tuple[tuple[str, float], ...]:
    """Names and numbers of `web=1,docs=2.5`; who uses them says which names and numbers there may be."""
    weights, problems = [], []
    for word in (word for text in given for word in text.split(",")):
        name, mark, number = word.rpartition("=")
        try:
            weights.append((name.strip(), float(number)))
        except ValueError:
            mark = ""
        if not mark or not name.strip():
            problems.append(f"{word!r} is no weight of a source: write it as NAME=NUMBER, as in web=0.5,docs=2")
    if problems:
        raise PlanError(join_problems(problems))
    return tuple(weights)
