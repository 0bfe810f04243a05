"""How near products come to the peak, fitted to published kernel benchmarks, and drawn: docs/efficiency.svg.

    python bench/published_curves.py [--draw docs/efficiency.svg]

Seconds of a product of N rows, K columns entering and M leaving: 2 (N M + outputs) (K + depth) / rate + start. That is
linear in four products of sizes, so least absolute relative errors are a few small least squares.
"""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from trimtab.costs.devices import DEVICES
from trimtab.costs.formula.curves import efficiency_of
from trimtab.specs import FloatArray

DATA = Path(__file__).resolve().parent / "data" / "matmul_rates.json"
A100_DEPTH = 127.0
"""Its rows are squares but five, which do not tell depth from outputs: the H100's, by peak / bandwidth."""


@dataclass(frozen=True, kw_only=True, eq=False)
class FittedCurve:
    """One device's products, cold and alone on it."""

    share: float  # of the peak, without end
    outputs: float
    depth: float
    start_s: float
    errors: FloatArray


def read_rates(device: str) -> FloatArray:
    """(R, 4) rows, columns leaving, columns entering, flop/s."""
    rows = np.array(json.loads(DATA.read_text())[device], dtype=float)
    rows[:, 3] *= 1e12
    return rows


def fit_curve(device: str, *, depth: float | None = None) -> FittedCurve:
    N, M, K, rate = read_rates(device).T
    seconds = 2 * N * M * K / rate
    peak = DEVICES[device].peak_flops
    if depth is None:
        columns = [N * M * K, K * 1e6, N * M * 100]
    else:
        columns = [N * M * (K + depth), (K + depth) * 1e6]
    J = np.stack([*(2 * x / peak for x in columns), np.full(len(N), 1e-6)], axis=1) / seconds[:, None]
    weight = np.ones(len(N))
    for _ in range(60):
        found, *_ = np.linalg.lstsq(J * weight[:, None], weight, rcond=None)
        errors = J @ found - 1
        weight = 1 / np.sqrt(np.maximum(np.abs(errors), 0.01))
    return FittedCurve(
        share=float(1 / found[0]),
        outputs=float(found[1] / found[0] * 1e6),
        depth=float(found[2] / found[0] * 100) if depth is None else depth,
        start_s=float(found[-1] * 1e-6),
        errors=np.asarray(errors),
    )


def fitted_curves() -> dict[str, FittedCurve]:
    return {"H100-80GB": fit_curve("H100-80GB"), "A100-80GB": fit_curve("A100-80GB", depth=A100_DEPTH)}


def print_curves() -> None:
    print("products by published kernel benchmarks, cold and alone on the device")
    for name, curve in fitted_curves().items():
        print(
            f"  {name} {len(curve.errors)} products: {curve.share:.3f} of the peak without end, "
            f"{curve.outputs / 1e6:.2f} M outputs, depth {curve.depth:.0f}, start {curve.start_s * 1e6:.1f} us; "
            f"mean |error| {np.mean(np.abs(curve.errors)):.1%}, widest {max(curve.errors, key=abs):+.1%}"
        )
    print(
        "share of the peak in a training step, by rows (weights 4096 x 4096; 3200 x 6400: InternViT-6B's MLP at tp 2)"
    )
    rows = (256, 512, 1025, 2050, 4096, 9225, 32768)
    print("            " + "".join(f"{n:8}" for n in rows))
    for name in ("A100-80GB", "H100-80GB", "H200", "H20", "B200"):
        device = DEVICES[name]
        e = efficiency_of(device)
        for K, M in ((4096, 4096), (3200, 6400)):
            shares = "".join(f"{e.product_share(n, K, M):8.0%}" for n in rows)
            print(f"  {name:10} {K} x {M} {shares}")
    print()


# -- the picture ----------------------------------------------------------------------------------------------------

WIDTH, HEIGHT, LEFT, TOP, RIGHT, BOTTOM = 760, 380, 60, 24, 140, 52
COLOURS = ("#1f6feb", "#d1242f", "#1a7f37", "#8250df", "#9a6700")


def draw(path: Path) -> None:
    """Share of the peak by rows: a line for each device and width."""
    lines = [
        (f"{name}, {width} wide", efficiency_of(DEVICES[name]), width, dash)
        for name in ("A100-80GB", "H100-80GB")
        for width, dash in ((8192, ""), (3200, "6 4"), (800, "2 4"))
    ]
    rows = np.geomspace(64, 32768, 80)
    head = f'viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" font-size="12"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {head}>',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#ffffff"/>',
        f'<text x="{LEFT}" y="15">Share of the bf16 peak that a product reaches in a training step, by its rows</text>',
    ]
    for share in np.arange(0, 1.01, 0.2):
        y = _y(share)
        out.append(f'<line x1="{LEFT}" y1="{y:.1f}" x2="{WIDTH - RIGHT}" y2="{y:.1f}" stroke="#d0d7de"/>')
        out.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{share:.0%}</text>')
    for n in (64, 256, 1024, 4096, 16384):
        out.append(f'<text x="{_x(n):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{n:,}</text>')
    out.append(f'<text x="{(LEFT + WIDTH - RIGHT) / 2:.0f}" y="{HEIGHT - 10}" text-anchor="middle">rows</text>')
    for number, (label, e, width, dash) in enumerate(lines):
        colour = COLOURS[number // 3]
        points = " ".join(f"{_x(n):.1f},{_y(e.product_share(n, width, width)):.1f}" for n in rows)
        out.append(
            f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2" stroke-dasharray="{dash}"/>'
        )
        out.append(f'<text x="{WIDTH - RIGHT + 8}" y="{TOP + 16 + 18 * number}" fill="{colour}">{label}</text>')
    path.write_text("\n".join([*out, "</svg>", ""]), encoding="utf-8")


def _x(rows: float) -> float:
    share = np.log(rows / 64) / np.log(32768 / 64)
    return float(LEFT + share * (WIDTH - LEFT - RIGHT))


def _y(share: float) -> float:
    return HEIGHT - BOTTOM - share * (HEIGHT - TOP - BOTTOM)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--draw", type=Path)
    chosen = parser.parse_args()
    print_curves()
    if chosen.draw is not None:
        draw(chosen.draw)
