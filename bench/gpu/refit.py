"""The defaults that measured lines move, each now and as measured. Run: python -m bench.gpu.refit [--results FOLDER]

From the lines of the suite `costs`: the curves of `Efficiency` that explain the fitted sizes best, and the error of the
formulas on the sizes held out, before and after, under each implementation of attention. From `memory`: the error of
the counted bytes, and what the allocator reserved beside the peak. From `kernels`: a kernel's start. What it prints
names the place of each default in src/trimtab; `efficiency` can also be given to `profile_model` at once.
"""

import argparse
import dataclasses
import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT / folder) for folder in ("src", "bench")]

import numpy as np  # noqa: E402
from bench.gpu.costs import Formula, model_named  # noqa: E402
from bench.gpu.record import read_records  # noqa: E402

from trimtab.costs.bands import (  # noqa: E402
    COUNTED_ERROR,
    FORMULAS_ERROR,
    SLACK,
    TIME_ERROR,
)
from trimtab.costs.formula.curves import Efficiency, efficiency_of  # noqa: E402
from trimtab.costs.formula.layers import KERNEL_S, find_gradients  # noqa: E402
from trimtab.costs.formula.settings import CostSettings  # noqa: E402
from trimtab.specs import DeviceSpec, FloatArray, ParallelDims, evaluate  # noqa: E402

RESULTS = Path(__file__).parent / "results"
FITTED = {
    "matmul": "costs/formula/curves.py, the device's row",
    "outputs": "costs/formula/curves.py, outputs_per_flop_s of the row, times the peak",
    "depth": "costs/formula/curves.py, _DEPTH_PER_FLOP_A_BYTE times peak / bandwidth",
    "product_s": "costs/formula/curves.py, Efficiency",
    "attention": "costs/formula/curves.py, the device's row",
    "memory": "costs/formula/curves.py, Efficiency",
}
SHARES = ("matmul", "attention", "memory")
ROUNDS = 40


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Layer:
    """Measured points of one layer as one rank has it."""

    formula: Formula
    attention: str
    work: FloatArray  # (points, WORK_TERMS)
    measured_s: FloatArray  # (points, 2): forward, backward
    held_out: np.ndarray

    def predict(self, efficiency: Efficiency | None) -> FloatArray:
        """(points, 2) seconds."""
        return np.stack([evaluate(terms, self.work) for terms in self.formula.seconds(efficiency)], axis=1)

    def errors(self, efficiency: Efficiency | None) -> FloatArray:
        """(points,) predicted / measured - 1, both directions together."""
        return np.asarray(self.predict(efficiency).sum(axis=1) / self.measured_s.sum(axis=1) - 1)


def read_layers(lines: Sequence[Mapping[str, Any]]) -> list[Layer]:
    """Of all repetitions of the lines of one device's suite `costs`."""
    found = []
    for line in lines:
        if line["suite"] != "costs" or "points" not in line:
            continue
        name, attention = line["case"].split(", ")
        _, model = model_named(name)
        gradients = find_gradients(model.layers, frozenset())
        device = DeviceSpec(**line["device_spec"])
        points: dict[tuple[int, int], list[Any]] = {}
        for point in line["points"]:
            points.setdefault((point["number"], point["tp"]), []).append(point)
        for (number, tp), own in points.items():
            settings = CostSettings(dtype=line["dtype"], attention=attention, dims=ParallelDims(tp=tp))
            found.append(
                Layer(
                    formula=Formula(
                        layer=model.layers[number], gradients=gradients[number], settings=settings, device=device
                    ),
                    attention=attention,
                    work=np.array([point["work"] for point in own]),
                    measured_s=np.array([point["measured_s"] for point in own]),
                    held_out=np.array([point["held_out"] for point in own]),
                )
            )
    return found


def refit(layers: Sequence[Layer], start: Efficiency) -> Efficiency:
    """The curves of least squares of log(predicted / measured) on the fitted sizes.

    Levenberg-Marquardt on the logarithms of the six, shares at most 1: a local minimum, no bound. What the points do
    not tell stays at `start`.
    """
    x = np.log([getattr(start, name) for name in FITTED])
    most = np.array([0.0 if name in SHARES else np.inf for name in FITTED])
    damping, misses = 1e-3, _misses(layers, x)
    for _ in range(ROUNDS):
        J = np.stack([(_misses(layers, x + step) - misses) / 1e-4 for step in 1e-4 * np.eye(len(x))], axis=1)
        moved = np.linalg.solve(J.T @ J + damping * len(misses) * np.eye(len(x)), -J.T @ misses)
        candidate = np.minimum(x + np.clip(moved, -0.5, 0.5), most)
        closer = _misses(layers, candidate)
        if closer @ closer < misses @ misses:
            small = np.abs(candidate - x).max() < 1e-4
            x, misses, damping = candidate, closer, damping / 4
            if small:
                break
        else:
            damping *= 8
    return _efficiency(x)


def _efficiency(x: FloatArray) -> Efficiency:
    """From logarithms; a share a hair above 1, where a slope is taken, is 1."""
    values = dict(zip(FITTED, np.exp(x).tolist(), strict=True))
    return Efficiency(**{name: min(value, 1.0) if name in SHARES else value for name, value in values.items()})


def _misses(layers: Sequence[Layer], x: FloatArray) -> FloatArray:
    efficiency, found = _efficiency(x), []
    for layer in layers:
        known = ~layer.held_out & (layer.measured_s > 0).any(axis=1)
        ratio = layer.predict(efficiency)[known].sum(axis=1) / layer.measured_s[known].sum(axis=1)
        found.append(np.log(np.maximum(ratio, 1e-9)))
    return np.concatenate(found)


def report(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Lines of text for one device."""
    layers = read_layers(lines)
    yield "| default | in src/trimtab | now | measured |"
    yield "|---|---|---|---|"
    if layers:
        device = layers[0].formula.device
        before = efficiency_of(device)
        after = refit(layers, before)
        for name, place in FITTED.items():
            yield f"| {name} | {place} | {getattr(before, name):.3g} | {getattr(after, name):.3g} |"
        band = float(np.quantile(np.abs(np.concatenate([x.errors(after)[x.held_out] for x in layers])), 0.9))
        yield f"| band of seconds | costs/bands.py, TIME_ERROR | {TIME_ERROR:.0%} | {band:.0%} |"
    yield from _rows_of_memory(lines)
    starts = [line["device_s"] for line in lines if line["suite"] == "kernels" and "device_s" in line]
    if starts:
        found = statistics.median(starts)
        yield f"| start of a kernel | costs/formula/layers.py, KERNEL_S | {KERNEL_S:.2g} | {found:.2g} |"
    if layers:
        yield ""
        for attention in sorted({x.attention for x in layers}):
            old, new = (_median(layers, attention, efficiency) for efficiency in (None, after))
            yield f"{attention}: median error on held-out sizes {old:.1%} before, {new:.1%} after"
        values = ", ".join(f"{name}={getattr(after, name):.4g}" for name in FITTED)
        yield f"efficiency = Efficiency({values})"


def _rows_of_memory(lines: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = [row for line in lines if line["suite"] == "memory" for row in line.get("rows", {}).values()]
    for method, name, now in (
        ("formula", "FORMULAS_ERROR", FORMULAS_ERROR),
        ("traced", "COUNTED_ERROR", COUNTED_ERROR),
    ):
        if rows:
            widest = float(np.quantile([abs(row[f"{method}_error"]) for row in rows], 0.9))
            yield f"| band of bytes, {method} | costs/bands.py, {name} | {now:.1%} | {widest:.1%} |"
    reserved = [row["reserved_bytes"] / row["peak_bytes"] - 1 for row in rows if row.get("reserved_bytes")]
    if reserved:
        measured = statistics.mean(reserved)
        yield f"| reserved beside the peak | costs/bands.py, SLACK | {SLACK:.1%} | {measured:.1%} |"


def _median(layers: Sequence[Layer], attention: str, efficiency: Efficiency | None) -> float:
    errors = [x.errors(efficiency)[x.held_out] for x in layers if x.attention == attention]
    return float(np.median(np.abs(np.concatenate(errors))))


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.gpu.refit", description=__doc__.splitlines()[0])
    parser.add_argument("--results", type=Path, default=RESULTS, help="the folder given to bench.gpu as --out")
    folder = parser.parse_args().results
    lines = read_records(folder)
    if not lines:
        print(f"defaults were to be fitted to lines in {folder}, and it holds none: run `python -m bench.gpu` first")
        return 2
    for device in sorted({line["machine"]["device"] for line in lines}):
        here = [line for line in lines if line["machine"]["device"] == device and "error" not in line]
        print(f"{device}: {len(here)} lines\n", *report(here), sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
