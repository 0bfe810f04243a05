"""Published training runs, predicted: `python bench/published.py [--source NAME ...] [--rows]`.

A source is one file of data/runs: where it was printed, which host ran it, its rows with the settings as printed and
what was measured. A row's settings are committed before its prediction is looked at. Each source is predicted thrice:

- *defaults*: degrees, batch, recompute, ZeRO, precision, adapters and frozen towers; all else as its host does it;
- *stated*: also what the source says of kernels, overlap, dispatcher, routing;
- *left out*: as defaults, with every constant of the product that was taken from this source put back to what the
  others give (`CONSTANTS`).

Rows with "left_out" are not predicted and are counted with their reason.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from lengths import draw_lengths
from published_models import model_of
from trimtab.costs.devices import parse_cluster
from trimtab.costs.formula import settings
from trimtab.costs.formula.host import Host
from trimtab.errors import TrimtabError
from trimtab.lora import Lora
from trimtab.options import HostName
from trimtab.plan.decide.work import in_patches
from trimtab.plan.options import GivenRun
from trimtab.plan.predict import Prediction, predict_run
from trimtab.specs import ClusterSpec, ModelSpec, SampleTable

DATA = Path(__file__).resolve().parent / "data"
HELD_OUT = ("opentau", "mindspeed-mm-2", "mbridge-cards", "xtuner-megatron-moe")
"""Sources of which no constant was taken: predicted once, when all else stood."""

_TILE_ROWS = 1025
CONSTANTS: Mapping[str, Mapping[str, Any]] = MappingProxyType(
    {
        "loongforge": {"block_s": 2.2e-3, "expert_s": 16e-6},
        "nanotron": {"block_s": 1.9e-3, "send_bytes_per_s": None},
        "mindspeed-mm": {"block_s": 2.1e-3},
    }
)
"""For each source that gave the hosts' table a constant: what the others give."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published run."""

    source: str
    host: str
    name: str
    model: str
    cluster: str
    settings: Mapping[str, Any]  # of `GivenRun`
    samples: Mapping[str, Any]
    stated: Mapping[str, Any]  # what the source says of how it ran
    measured: Mapping[str, Any]
    network: Mapping[str, Any]
    quality: str
    left_out: str | None
    is_fitted: bool
    is_built_as_stages_say: bool

    @property
    def step_s(self) -> float | None:
        return self.measured.get("step_s")

    @property
    def is_full(self) -> bool:
        return self.quality == "full"

    def is_run_again(self, other: Row) -> bool:
        """Return whether `other` is the same run, measured once more."""
        return replace(self, name=other.name, measured=other.measured) == other

    @property
    def model_spec(self) -> ModelSpec:
        return model_of(self.model, self.settings["stages"] if self.is_built_as_stages_say else None)


def read_rows(names: Sequence[str] = ()) -> list[Row]:
    """Return the rows of these sources; none: of all."""
    found = []
    for path in sorted((DATA / "runs").glob("*.json")):
        if names and path.stem not in names:
            continue
        head = json.loads(path.read_text(encoding="utf-8"))
        found += [
            Row(
                source=path.stem,
                host=row.get("host", head["host"]),
                name=row["id"],
                model=row["model"],
                cluster=row["cluster"],
                settings=row.get("settings", {}),
                samples=row.get("samples", {}),
                stated=row.get("stated", {}),
                measured=row["measured"],
                network=row.get("network", {}),
                quality=row.get("quality", "full"),
                left_out=row.get("left_out"),
                is_fitted=row.get("fitted", False),
                is_built_as_stages_say=row.get("built", False),
            )
            for row in head["rows"]
        ]
    return found


# -- a row as a prediction ------------------------------------------------------------------------------------------


def cluster_of(row: Row) -> ClusterSpec:
    """Return the cluster, with what the source says of its network and its devices."""
    number = int(row.cluster.partition("x")[0])
    per_node = min(number, row.network.get("devices_per_node", 8))
    found = parse_cluster(row.cluster, devices_per_node=per_node)
    found = replace(found, device=replace(found.device, **row.network.get("figures", {})))
    if (gbit := row.network.get("node_gbit")) is not None:
        found = replace(found, node_link_bytes_per_s=gbit * 1e9 / 8 / per_node)
    return found


def samples_of(row: Row) -> SampleTable:
    """Return as many samples as a step has, all alike; "draw": of a set's lengths, for as many steps as there are."""
    n, given = row.samples["n"], row.samples
    if "draw" in given:
        return in_patches(draw_lengths(given["draw"], n), row.model_spec)
    tiles = given.get("tiles", 0)
    patches, images = given.get("patches", tiles * _TILE_ROWS), given.get("images", tiles)
    squared = given.get("squares", patches * patches // images if images else 0)
    column = {"num_images": images, "patches_sq": squared, "patches_windowed": given.get("windowed", squared)}
    return SampleTable.of(
        np.full(n, patches), np.full(n, given["tokens"]), **{name: np.full(n, x) for name, x in column.items()}
    )


def predict(row: Row, *, stated: bool) -> Prediction:
    """Return the prediction under the row's settings, with its host's defaults for the others."""
    given = {**row.settings, **(row.stated if stated else {})}
    lora, weights = given.pop("lora", None), given.pop("adapter_weights", None)
    if lora is not None:
        given["lora"] = Lora(**{"weights": weights, **lora})
    given["frozen_towers"] = tuple(given.get("frozen_towers", ()))
    return predict_run(row.model_spec, samples_of(row), cluster_of(row), GivenRun(host=row.host, **given))


@contextmanager
def without(source: str) -> Iterator[None]:
    """Put the constants that came from `source` back to what the others give."""
    others = dict(CONSTANTS.get(source, {}))
    before: Mapping[HostName, Host] = settings.HOSTS
    changed = {name: replace(host, **others) for name, host in before.items() if host.block_s}  # recipes replay graphs
    settings.HOSTS = MappingProxyType({**before, **changed})
    try:
        yield
    finally:
        settings.HOSTS = before


# -- errors -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Found:
    """A row's errors: predicted / measured - 1; None where there is nothing to compare."""

    row: Row
    regime: str | None = None  # as the product names it, and the band that it prints
    band: float | None = None
    defaults: float | None = None
    stated: float | None = None
    left_out: float | None = None
    memory: float | None = None  # with defaults
    memory_stated: float | None = None
    refused: str | None = None

    @property
    def reason(self) -> str | None:
        return self.row.left_out or self.refused


def evaluate(row: Row) -> Found:
    """Predict one row thrice."""
    if row.left_out:
        return Found(row=row)
    try:
        plain, said = predict(row, stated=False), predict(row, stated=True)
        with without(row.source):
            alone = predict(row, stated=False)
    except TrimtabError as problem:
        return Found(row=row, refused=" ".join(str(problem).split())[:160])
    compared = Found(
        row=row,
        regime=plain.regime,
        band=plain.profile.time_error,
        memory=_memory_error(row, plain),
        memory_stated=_memory_error(row, said),
    )
    if row.step_s is None:
        return compared
    seconds = [found.mean_step_s / row.step_s - 1 for found in (plain, said, alone)]
    return replace(compared, defaults=seconds[0], stated=seconds[1], left_out=seconds[2])


def _memory_error(row: Row, found: Prediction) -> float | None:
    """Of the devices that the source names: their mean, the fullest (with the reserve where it says so), the first."""
    if (measured := row.measured.get("memory_gb")) is None:
        return None
    kind = row.measured.get("memory", "peak")
    held = [x.total_bytes if kind == "peak with reserve" else x.counted_bytes for x in found.variant.memory]
    predicted = {"mean": float(np.mean(held)), "rank 0": held[0]}.get(kind, max(held))
    return predicted / 1e9 / float(measured) - 1


def summary(errors: Sequence[float]) -> str:
    """Return the median, what nine of ten are within, and the share inside 30 %."""
    if not errors:
        return "-"
    sizes = np.abs(errors)
    factor = np.maximum(1 + np.array(errors), 1 / (1 + np.array(errors)))
    return (
        f"{np.median(sizes):6.1%} {np.quantile(sizes, 0.9):6.1%} {np.mean(sizes <= 0.3):5.0%} "
        f"{np.mean(factor <= 2):5.0%}"
    )


COLUMNS = ("defaults", "stated", "left_out", "memory", "memory_stated")
HEAD = ("defaults", "stated", "left out", "bytes", "bytes, stated")


def _counted(found: Sequence[Found]) -> list[Found]:
    """Return the rows that were predicted, and that no constant was fitted to."""
    return [x for x in found if not x.row.is_fitted and not x.reason]


def summaries(own: Sequence[Found]) -> list[str]:
    """Return `summary` of each of `COLUMNS`."""
    return [summary([e for x in own if (e := getattr(x, column)) is not None]) for column in COLUMNS]


@dataclass(frozen=True, kw_only=True)
class Band:
    """How many rows of a regime lie inside the band that the product prints."""

    regime: str
    half_width: float
    rows: int
    inside: float
    widest: str  # the source that asks for most: the band that holds 85 % of its rows
    others: int
    inside_others: float  # of the rows of all other sources

    @classmethod
    def of(cls, own: Sequence[Found]) -> Band:
        first, sources = own[0], sorted({x.row.source for x in own})
        assert first.regime is not None
        assert first.band is not None
        errors = {s: [abs(x.defaults or 0.0) for x in own if x.row.source == s] for s in sources}
        asked = {s: float(np.quantile(e, 0.85)) for s, e in errors.items() if len(e) >= 4}
        widest = max(asked or sources, key=lambda s: asked.get(s, 0.0))
        others = [e for s in sources if s != widest for e in errors[s]]
        return cls(
            regime=first.regime,
            half_width=first.band,
            rows=len(own),
            inside=float(np.mean([e <= first.band for x in errors.values() for e in x])),
            widest=widest,
            others=len(others),
            inside_others=float(np.mean(np.array(others) <= first.band)) if others else float("nan"),
        )

    def cells(self) -> list[str]:
        texts = (f"± {self.half_width:.0%}", self.rows, f"{self.inside:.0%}", self.widest, self.others)
        return [self.regime, *map(str, texts), f"{self.inside_others:.0%}"]


def bands(found: Sequence[Found]) -> list[Band]:
    timed = [x for x in _counted(found) if x.defaults is not None]
    return [Band.of([x for x in timed if x.regime == name]) for name in sorted({x.regime or "" for x in timed})]


def groups(found: Sequence[Found]) -> Iterator[tuple[str, dict[str, list[Found]]]]:
    """Yield rows by regime, by source, and all: with all settings or a part, of held-out sources and the rest."""
    own = _counted(found)
    keys: tuple[tuple[str, Callable[[Found], str]], ...] = (
        ("regime", lambda x: x.regime or ""),
        ("source", lambda x: x.row.source),
        ("whole", lambda x: "held out, " * (x.row.source in HELD_OUT) + ("full" if x.row.is_full else "in part")),
    )
    for title, key in keys:
        yield title, {name: [x for x in own if key(x) == name] for name in sorted({key(x) for x in own})}


def alike(found: Sequence[Found]) -> str:
    """Return the sentences in which each source counts alike, whatever the number of its rows."""

    def sentence(what: str, column: str) -> str:
        own = [x for x in _counted(found) if getattr(x, column) is not None]
        sources = sorted({x.row.source for x in own})
        errors = [np.abs([getattr(x, column) for x in own if x.row.source == s]) for s in sources]
        return (
            f"{what} of {len(sources)} sources counting alike: median {np.median([np.median(e) for e in errors]):.0%}, "
            f"{np.mean([np.mean(e <= 0.3) for e in errors]):.0%} inside 30 %"
        )

    return f"{sentence('Seconds by defaults', 'defaults')}. {sentence('Bytes as stated', 'memory_stated')}"


def table(found: Sequence[Found]) -> list[str]:
    """Return the lines that are printed."""
    lines = [alike(found), ""]
    for title, rows in groups(found):
        lines.append(f"{title:38} {'n':>4}  " + " ".join(f"{name:26}" for name in HEAD))
        for name, own in rows.items():
            lines.append(f"{name:38} {len(own):4}  " + " ".join(f"{text:26}" for text in summaries(own)))
        lines.append("")
    lines += ["  ".join(cells) for cells in (_BAND_HEAD, *(x.cells() for x in bands(found)))]
    return lines


_BAND_HEAD = ["regime", "band", "rows", "inside", "widest source", "other rows", "inside"]
_PAGE = (DATA / "published_page.md").read_text(encoding="utf-8")


def page(found: Sequence[Found]) -> str:
    """Return docs/tables/published-runs.md."""

    def lines(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
        return "".join(f"| {' | '.join(cells)} |\n" for cells in (head, ["---"] * len(head), *rows)) + "\n"

    parts = [_PAGE, "## Bands\n\nOf seconds with defaults. The widest source is the one that asks for most.\n\n"]
    parts.append(lines(_BAND_HEAD, (x.cells() for x in bands(found))))
    for title, rows in groups(found):
        parts.append(f"## By {title}\n\n" if title != "whole" else "## All\n\n")
        cells = ([name, str(len(own)), *(", ".join(x.split()) for x in summaries(own))] for name, own in rows.items())
        parts.append(lines(["", "rows", *HEAD], cells))
    parts.append(f"{alike(found)}.\n\n")
    reasons = [x.reason for x in found if x.reason]
    ordered = sorted(set(reasons), key=lambda x: (-reasons.count(x), x))
    parts.append("## Left out\n\n" + lines(["rows", "why"], ([str(reasons.count(why)), why] for why in ordered)))
    return "".join(parts).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--source", nargs="*", default=[], help="names of files in data/runs; default: all but held out"
    )
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--held-out", action="store_true", help="also the sources that gave no constant")
    parser.add_argument("--write", type=Path, help="write the page")
    given = parser.parse_args()
    rows = [x for x in read_rows(given.source) if given.source or given.held_out or x.source not in HELD_OUT]
    found = [evaluate(row) for row in rows]
    if given.rows:
        for x in found:
            figures = ("       -" if (e := getattr(x, name)) is None else f"{e:+8.1%}" for name in COLUMNS)
            print(f"{x.row.source[:20]:20} {x.row.name[:44]:44}", *figures, x.reason or f"{x.regime}; {x.row.quality}")
    if given.write is not None:
        given.write.write_text(page(found), encoding="utf-8")
    print("\n".join(table(found)))
    reasons = [x.reason for x in found if x.reason]
    for reason in sorted(set(reasons)):
        print(f"left out, {reasons.count(reason)} rows: {reason}")


if __name__ == "__main__":
    main()
