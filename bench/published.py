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
from collections.abc import Callable, Iterator, Mapping, Sequence
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
from trimtab.plan.given import GivenRun
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
    regime: str
    network: Mapping[str, Any]
    quality: str
    left_out: str | None
    is_fitted: bool
    is_built_as_stages_say: bool

    @property
    def step_s(self) -> float | None:
        return self.measured.get("step_s")

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
                regime=row.get("regime", head["regime"]),
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
    column = {
        "num_images": images,
        "patches_sq": squared,
        "patches_windowed": given.get("windowed", squared),
    }
    return SampleTable.of(
        np.full(n, patches), np.full(n, given["tokens"]), **{name: np.full(n, x) for name, x in column.items()}
    )


def predict(row: Row, *, stated: bool) -> Prediction:
    """Return the prediction under the row's settings, with its host's defaults for the others."""
    given = {**row.settings, **(row.stated if stated else {})}
    lora = given.pop("lora", None)
    weights = given.pop("adapter_weights", None)
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
    """A row's errors: predicted / measured - 1."""

    row: Row
    defaults: float | None
    stated: float | None
    left_out: float | None
    memory: float | None  # with defaults
    refused: str | None = None

    @property
    def reason(self) -> str | None:
        return self.row.left_out or self.refused


def evaluate(row: Row) -> Found:
    """Predict one row thrice."""
    nothing = Found(row=row, defaults=None, stated=None, left_out=None, memory=None)
    if row.left_out:
        return nothing
    try:
        plain, said = predict(row, stated=False), predict(row, stated=True)
        with without(row.source):
            alone = predict(row, stated=False)
    except TrimtabError as problem:
        return replace(nothing, refused=" ".join(str(problem).split())[:160])
    if row.step_s is None:
        return replace(nothing, memory=_memory_error(row, plain))
    seconds = [found.mean_step_s / row.step_s - 1 for found in (plain, said, alone)]
    return Found(row=row, defaults=seconds[0], stated=seconds[1], left_out=seconds[2], memory=_memory_error(row, plain))


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


def table(found: Sequence[Found]) -> list[str]:
    """Return the lines of the table: one for each source, then one for each regime."""
    head = "median |error|, nine of ten within, inside 30 %, within a factor of 2"
    lines = [f"{'':44} {'n':>3}  {'defaults':26} {'stated':26} {'left out':26} bytes   ({head})"]
    keys: tuple[Callable[[Found], str], ...] = (lambda x: x.row.source, lambda x: "= " + x.row.regime)
    for key in keys:
        for name in sorted({key(x) for x in found}):
            own = [x for x in found if key(x) == name and not x.row.is_fitted]
            timed = [x for x in own if x.defaults is not None]
            columns = (summary([getattr(x, column) for x in timed]) for column in ("defaults", "stated", "left_out"))
            held = summary([x.memory for x in own if x.memory is not None])
            lines.append(f"{name:44} {len(own):3}  " + " ".join(f"{text:26}" for text in columns) + f" {held}")
        lines.append("")
    return lines


_PAGE = """<!-- generated by bench/published.py -->
# Published runs, predicted

Written by `python bench/published.py --held-out --write docs/tables/published-runs.md`. Rows lie in `bench/data/runs`,
one file a source: settings as printed, what was measured, and which host ran it. A row's settings were committed before
it was predicted. Nothing here was run on a device of ours.

*Defaults*: degrees, batch, recompute, ZeRO, precision, adapters and frozen towers are given; all else is what the host
does by itself ([costs](../costs.md)). *Stated*: also what the source says of kernels, overlap, dispatcher, routing.
*Left out*: as defaults, every constant that was taken from the source put back to what the others give. Four figures
each: median |error| of a step's seconds, nine of ten within, inside 30 %, within a factor of 2; bytes with defaults.
Rows that a constant was fitted to are not counted.

"""


def page(found: Sequence[Found]) -> str:
    """Return docs/tables/published-runs.md."""
    head = "| | rows | defaults | stated | left out | bytes |\n|---|---|---|---|---|---|\n"
    parts = [_PAGE]
    keys: tuple[tuple[str, Callable[[Found], str]], ...] = (
        ("regime", lambda x: x.row.regime),
        ("source", lambda x: x.row.source),
    )
    for title, key in keys:
        parts.append(f"## By {title}\n\n{head}")
        for name in sorted({key(x) for x in found}):
            own = [x for x in found if key(x) == name and not x.row.is_fitted and not x.reason]
            if own:
                parts.append(f"| {name} | {len(own)} | {' | '.join(_cells(own))} |\n")
        parts.append("\n")
    reasons = [x.reason for x in found if x.reason]
    parts.append("## Left out\n\n| rows | why |\n|---|---|\n")
    parts += [f"| {reasons.count(why)} | {why} |\n" for why in sorted(set(reasons), key=lambda x: -reasons.count(x))]
    return "".join(parts)


def _cells(own: Sequence[Found]) -> list[str]:
    timed = [x for x in own if x.defaults is not None]
    errors = [[getattr(x, name) for x in timed] for name in ("defaults", "stated", "left_out")]
    errors.append([x.memory for x in own if x.memory is not None])
    return [", ".join(summary(column).split()) for column in errors]


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
            figures = ("       -" if e is None else f"{e:+8.1%}" for e in (x.defaults, x.stated, x.left_out, x.memory))
            print(f"{x.row.source[:20]:20} {x.row.name[:44]:44}", *figures, x.reason or x.row.quality)
    if given.write is not None:
        given.write.write_text(page(found), encoding="utf-8")
    print("\n".join(table(found)))
    reasons = [x.reason for x in found if x.reason]
    for reason in sorted(set(reasons)):
        print(f"left out, {reasons.count(reason)} rows: {reason}")


if __name__ == "__main__":
    main()
