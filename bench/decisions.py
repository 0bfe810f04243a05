"""Published choices, decided again: `python bench/decisions.py [--write docs/tables/decisions.md]`.

A sweep of data/decisions.json is rows of data/runs that train one model on the same devices, and differ in what a plan
decides. Of each: the pairs that we put in order (rows within 2 % of each other are no pair), and the regret, which is
what the row that we would pick takes over the fastest one. All by seconds of a sample. Where a row ran out of memory,
also whether we say which rows fit.

*Defaults* and *stated* are those of published.py. The table has *stated*, for a choice is compared as it was run.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from published import DATA, Row, predict, read_rows
from trimtab.errors import TrimtabError

TIE = 0.02
"""Relative; iterations of one run differ by as much."""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """A row that ran: seconds of a sample as measured and as predicted, or both in a unit of their own."""

    row: Row
    measured: float
    ours: float


@dataclass(frozen=True, kw_only=True)
class Edge:
    """Whether a row fitted its devices, and whether we say so."""

    row: Row
    fitted: bool
    fits: bool


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """A choice with what became of each row."""

    name: str
    what: str
    source: str
    outcomes: tuple[Outcome, ...]
    edges: tuple[Edge, ...]

    @property
    def pairs(self) -> list[tuple[Outcome, Outcome]]:
        """Pairs of unlike settings that a measurement tells apart, the faster row first."""
        pairs = itertools.combinations(sorted(self.outcomes, key=lambda x: x.measured), 2)
        return [(a, b) for a, b in pairs if b.measured > (1 + TIE) * a.measured and not a.row.is_run_again(b.row)]

    @property
    def in_order(self) -> int:
        return sum(a.ours < b.ours for a, b in self.pairs)

    @property
    def pick(self) -> Outcome:
        return min(self.outcomes, key=lambda x: x.ours)

    @property
    def regret(self) -> float:
        return self.pick.measured / min(x.measured for x in self.outcomes)


def read_sweeps(*, stated: bool) -> Iterator[Sweep]:
    """Predict the rows of each sweep; rows that are left out, or refused, are not in it."""
    rows = {row.name: row for row in read_rows()}
    for sweep in json.loads((DATA / "decisions.json").read_text(encoding="utf-8")):
        names = sweep["rows"] or [row.name for row in rows.values() if row.source == sweep["source"]]
        found = [_decide(rows[name], stated=stated) for name in names if not rows[name].left_out]
        outcomes = tuple(x for x, _ in found if x is not None)
        edges = tuple(x for _, x in found if x is not None)
        failed = any(not x.fitted for x in edges)  # rows that ran are edges next to those that did not
        yield Sweep(
            **{key: sweep[key] for key in ("name", "what", "source")},
            outcomes=outcomes,
            edges=edges if failed else (),
        )


def _decide(row: Row, *, stated: bool) -> tuple[Outcome | None, Edge | None]:
    try:
        found = predict(row, stated=stated)
    except TrimtabError as error:
        print(f"{row.name} is refused: {error}", file=sys.stderr)
        return None, None
    n, relative = row.samples["n"], row.measured.get("relative")
    edge = Edge(row=row, fitted=not row.measured.get("out_of_memory", False), fits=found.variant.fits)
    measured = relative if row.step_s is None else row.step_s / n
    if measured is None:
        return None, edge
    return Outcome(row=row, measured=measured, ours=found.mean_step_s / (1 if relative else n)), edge


# -- the page --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Score:
    """All sweeps together."""

    sweeps: int
    pairs: int
    in_order: int
    first: int  # sweeps whose fastest row we pick
    near: int  # sweeps whose regret is at most 1.10
    edges: int
    right: int  # edges that are said right

    @classmethod
    def of(cls, sweeps: Sequence[Sweep]) -> Score:
        known = [x for x in sweeps if x.pairs]
        edges = [edge for x in sweeps for edge in x.edges]
        return cls(
            sweeps=len(known),
            pairs=sum(len(x.pairs) for x in known),
            in_order=sum(x.in_order for x in known),
            first=sum(x.regret == 1.0 for x in known),
            near=sum(x.regret <= 1.10 for x in known),
            edges=len(edges),
            right=sum(edge.fits == edge.fitted for edge in edges),
        )

    def sentence(self) -> str:
        return (
            f"{self.in_order} of {self.pairs} pairs in order ({self.in_order / self.pairs:.0%}); of {self.sweeps} "
            f"sweeps the fastest row is picked in {self.first}, one within 10 % of it in {self.near}; "
            f"{self.right} of {self.edges} rows at the edge of memory are said right"
        )


_PAGE = (DATA / "decisions_page.md").read_text(encoding="utf-8")


def line(x: Sweep) -> str:
    counts = f"{len(x.outcomes)} | {x.in_order} of {len(x.pairs)}"
    return f"| {x.name} | {x.what} | {counts} | {x.pick.row.name} | {x.regret:.2f} |"


def wrong(sweeps: Sequence[Sweep]) -> Iterator[str]:
    """Yield a line for each pick that takes more than 10 % longer than the fastest row."""
    for x in sweeps:
        if x.pairs and x.regret > 1.10:
            best = min(x.outcomes, key=lambda y: y.measured)
            ours, measured = x.pick.ours / best.ours, x.pick.measured / best.measured
            yield f"- {x.name}: {x.pick.row.name} over {best.row.name}: ours {ours:.2f}, measured {measured:.2f}"


def page(stated: Sequence[Sweep], defaults: Sequence[Sweep]) -> str:
    known = [x for x in stated if x.pairs]
    return _PAGE.format(
        summary=Score.of(stated).sentence(),
        defaults=Score.of(defaults).sentence(),
        table="".join(line(x) + "\n" for x in known),
        wrong="".join(text + "\n" for text in wrong(known)),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", type=Path, help="write the page")
    given = parser.parse_args()
    stated, defaults = (list(read_sweeps(stated=said)) for said in (True, False))
    if given.write is not None:
        given.write.write_text(page(stated, defaults), encoding="utf-8")
    print("\n".join(line(x) for x in stated if x.pairs))
    for name, sweeps in (("stated", stated), ("defaults", defaults)):
        print(f"{name}: {Score.of(sweeps).sentence()}")


if __name__ == "__main__":
    main()
