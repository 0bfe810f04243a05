"""docs/on-gpu.md from the lines that `python -m bench.gpu` wrote. Run: python -m bench.gpu.page"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.record import ROOT, read_records

RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "on-gpu.md"
Line = Mapping[str, Any]

HEAD = """# On a GPU

Figures that only a device can give, written by `python -m bench.gpu.page` from the lines under `bench/gpu/results`. Any
owner of a CUDA device can add theirs: in a clone, with trimtab, torch, Transformers and accelerate installed,

<!-- not run: it needs a GPU -->
```sh
python -m bench.gpu --minutes 30        # kernels, costs, gain: as far as they get
python -m bench.gpu                     # goes on where it was cut off
python -m bench.gpu --tiny --device cpu # the same code on tiny models, on any machine
```

Every repetition of every case is a line on the disk as soon as it is known; it says which device, driver, versions and
commit it was measured with. A case that needs more memory than the device has says so in its line.

| suite | what it measures |
|---|---|
| `kernels` | rates of products, attention and norms over rows, widths, tensor-parallel degrees; the time of a launch |
| `costs` | layers of eight models: seconds by formula and by a fit against measured ones, at sizes no fit has seen |
| `gain` | tokens a second of padded random, length-grouped, ISF and balanced micro-batches of the same samples |
"""


def make_page(lines: Sequence[Line]) -> str:
    if not lines:
        return HEAD + "\nNo device has run it yet: no figure of this project was taken on an accelerator.\n"
    parts = [HEAD]
    for device in sorted({line["machine"]["device"] for line in lines}):
        here = [line for line in lines if line["machine"]["device"] == device]
        machine = here[-1]["machine"]
        parts.append(f"\n## {device}\n\n" + ", ".join(f"{key} {value}" for key, value in machine.items()) + "\n")
        for suite, rows in (("kernels", _kernels), ("costs", _costs), ("gain", _gain)):
            found = [line for line in here if line["suite"] == suite and "error" not in line]
            if found:
                parts.append(f"\n### {suite}\n\n" + "\n".join(rows(found)) + "\n")
    return "".join(parts)


def _kernels(lines: Sequence[Line]) -> Iterable[str]:
    """Rates at the fewest, a middle and the most rows of each product."""
    yield "| case | smallest | middle | largest |"
    yield "|---|---|---|---|"
    for case, same in _by_case(lines):
        if "points" not in same[0]:
            yield f"| {case} | device {same[0]['device_s'] * 1e6:.1f} us | host {same[0]['host_s'] * 1e6:.1f} us | |"
            continue
        points = same[-1]["points"]
        key = next(name for name in ("forward_flops_s", "bytes_s") if name in points[0])
        unit, factor = ("Tflop/s", 1e12) if key == "forward_flops_s" else ("GB/s", 1e9)
        cells = []
        for number in (0, len(points) // 2, len(points) - 1):
            rate = statistics.median(line["points"][number][key] for line in same)
            size = points[number].get("rows", points[number].get("length"))
            cells.append(f"{rate / factor:.3g} {unit} at {size}")
        yield f"| {case} | " + " | ".join(cells) + " |"


def _costs(lines: Sequence[Line]) -> Iterable[str]:
    yield "| model | median error by formula | by a fit | the fit's band |"
    yield "|---|---|---|---|"
    for case, same in _by_case(lines):
        if same[-1].get("out_of_memory"):
            yield f"| {case} | out of memory | | |"
            continue
        figures = [
            statistics.median(line[key] for line in same if key in line)
            for key in ("formula_median_error", "fitted_median_error", "band")
        ]
        yield f"| {case} | " + " | ".join(f"{figure:.1%}" for figure in figures) + " |"


def _gain(lines: Sequence[Line]) -> Iterable[str]:
    yield "| model | scheme | tokens/s | peak, GiB |"
    yield "|---|---|---|---|"
    for case, same in _by_case(lines):
        if same[-1].get("out_of_memory"):
            yield f"| {case} | out of memory | | |"
            continue
        for number, row in enumerate(same[-1]["rows"]):
            rate = statistics.median(
                line["rows"][number]["real_tokens"] / line["rows"][number]["seconds"] for line in same if "rows" in line
            )
            yield f"| {case} | {row['scheme']} | {rate:,.0f} | {row['memory_bytes'] / 2**30:.2f} |"


def _by_case(lines: Sequence[Line]) -> Iterable[tuple[str, list[Line]]]:
    for case in dict.fromkeys(line["case"] for line in lines):
        yield case, [line for line in lines if line["case"] == case]


if __name__ == "__main__":
    PAGE.write_text(make_page(read_records(RESULTS)), encoding="utf-8")
    print(f"{PAGE} is written")
