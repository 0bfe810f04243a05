"""docs/tables/on-gpu.md from the lines that `python -m bench.gpu` wrote. Run: python -m bench.gpu.page"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.gpu.record import ROOT, read_records

RESULTS = Path(__file__).parent / "results"
PAGE = ROOT / "docs" / "tables" / "on-gpu.md"
Line = Mapping[str, Any]

HEAD = Path(__file__).with_name("page_head.md").read_text(encoding="utf-8")

TAIL = Path(__file__).with_name("page_tail.md").read_text(encoding="utf-8")


def make_page(lines: Sequence[Line]) -> str:
    if not lines:
        return HEAD + "\nNo device has run it yet: no figure of this project was taken on an accelerator.\n" + TAIL
    parts = [HEAD + TAIL]
    for device in sorted({line["machine"]["device"] for line in lines}):
        here = [line for line in lines if line["machine"]["device"] == device]
        machine = here[-1]["machine"]
        parts.append(f"\n## {device}\n\n" + ", ".join(f"{key} {value}" for key, value in machine.items()) + "\n")
        for suite, rows in SUITES.items():
            found = [line for line in here if line["suite"] == suite and "error" not in line]
            if found:
                parts.append(f"\n### {suite}\n\n" + "\n".join(rows(found)) + "\n")
    return "".join(parts)


def _kernels(lines: Sequence[Line]) -> Iterable[str]:
    """Rates at the fewest, a middle and the most rows of each product."""
    yield "| case | smallest | middle | largest |"
    yield "|---|---|---|---|"
    for case, same in _by_case(lines):
        if same[-1].get("out_of_memory"):
            yield f"| {case} | {_why_not(same[-1])} | | |"
            continue
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
    yield "| model, attention | median error by formula | by a fit |"
    yield "|---|---|---|"
    for case, same in _by_case(lines):
        measured = [line for line in same if "formula_median_error" in line]
        if not measured:
            yield f"| {case} | {_why_not(same[-1])} | |"
            continue
        cells = (
            f"{statistics.median(line[key] for line in measured):.1%}"
            for key in ("formula_median_error", "fitted_median_error")
        )
        yield f"| {case} | " + " | ".join(cells) + " |"


def _gain(lines: Sequence[Line]) -> Iterable[str]:
    yield "| model | scheme | tokens/s | MFU | peak, GiB |"
    yield "|---|---|---|---|---|"
    for case, same in _by_case(lines):
        measured = [line["rows"] for line in same if "rows" in line]
        if not measured:
            yield f"| {case} | {_why_not(same[-1])} | | | |"
            continue
        for number, row in enumerate(measured[-1]):
            own = [rows[number] for rows in measured]
            rate = statistics.median(x["real_tokens"] / x["seconds"] for x in own)
            mfu = statistics.median(x["mfu"] for x in own)
            yield f"| {case} | {row['scheme']} | {rate:,.0f} | {mfu:.1%} | {row['memory_bytes'] / 2**30:.2f} |"


def _memory(lines: Sequence[Line]) -> Iterable[str]:
    yield "| model | recompute | peak, GiB | reserved, GiB | by formula | traced | probed | within its cap |"
    yield "|---|---|---|---|---|---|---|---|"
    for case, name, rows in _rows_of(lines):
        if "peak_bytes" not in rows[-1]:
            yield f"| {case} | {name} | | | | | | |"
            continue
        errors = (
            statistics.median(row[f"{method}_error"] for row in rows) for method in ("formula", "traced", "probed")
        )
        cap = {True: "yes", False: "no", None: ""}[rows[-1].get("within_cap")]
        peak = max(row["peak_bytes"] for row in rows) / 2**30
        reserved = max(row["reserved_bytes"] or 0 for row in rows) / 2**30
        held = f"{reserved:.2f}" if reserved else ""
        yield (
            f"| {case} | {name} | {peak:.2f} | {held} | "
            + " | ".join(f"{error:+.1%}" for error in errors)
            + f" | {cap} |"
        )


def _recompute(lines: Sequence[Line]) -> Iterable[str]:
    yield "| model | choice | step, s | within its cap |"
    yield "|---|---|---|---|"
    for case, name, rows in _rows_of(lines):
        if not rows[-1].get("fits", True):
            yield f"| {case} | {name} | none fits | |"
            continue
        cap = {True: "yes", False: "no", None: ""}[rows[-1].get("within_cap")]
        yield f"| {case} | {name} | {statistics.median(row['step_s'] for row in rows):.4g} | {cap} |"


def _placement(lines: Sequence[Line]) -> Iterable[str]:
    yield "| model | map | load, s | answer, s | GPU peak, GiB | planned, GiB | moved, GiB | planned, GiB |"
    yield "|---|---|---|---|---|---|---|---|"
    keys = ("peak_allocated_bytes", "planned_gpu_bytes", "answer_copied_bytes", "planned_moved_bytes")
    for case, same in _by_case(lines):
        measured = [line for line in same if "weight_bytes" in line]
        if not measured:
            yield f"| {case} | {_why_not(same[-1])} | | | | | | |"
            continue
        for name, found in measured[-1].items():
            if isinstance(found, dict) and "answer_s" in found:
                cells = [f"{statistics.median(x[name][key] for x in measured):.3g}" for key in ("load_s", "answer_s")]
                cells += ["" if found.get(key) is None else f"{found[key] / 2**30:.2f}" for key in keys]
                yield f"| {case} | {name} | " + " | ".join(cells) + " |"


def _vision_dp(lines: Sequence[Line]) -> Iterable[str]:
    yield "| case | own share, ms | whole call, ms | next to encoding, ms | waits | copies: pinned, pageable |"
    yield "|---|---|---|---|---|---|"
    for case, same in _by_case(lines):
        measured = [line for line in same if "overhead_s" in line]
        if not measured:
            yield f"| {case} | {_why_not(same[-1])} | | | | |"
            continue
        cells = [
            f"{1e3 * statistics.median(line[key] for line in measured):.1f}"
            for key in ("own_share_s", "shared_call_s", "overhead_s")
        ]
        waits, copies = measured[-1]["synchronizations"], measured[-1]["copies"]
        told = f"{'' if waits is None else waits} | {copies['pinned']}, {copies['pageable']}"
        yield f"| {case} | " + " | ".join(cells) + f" | {told} |"


def _why_not(line: Line) -> str:
    return "out of memory" if line.get("out_of_memory") else str(line["not_there"])


def _rows_of(lines: Sequence[Line]) -> Iterable[tuple[str, str, list[Line]]]:
    """Case, row and the row in every repetition, of suites whose lines hold rows by name."""
    for case, same in _by_case(lines):
        measured = [line["rows"] for line in same if "rows" in line]
        if not measured:
            yield case, _why_not(same[-1]), [{"fits": False}]
            continue
        for name in measured[-1]:
            yield case, name, [rows[name] for rows in measured if name in rows]


def _by_case(lines: Sequence[Line]) -> Iterable[tuple[str, list[Line]]]:
    for case in dict.fromkeys(line["case"] for line in lines):
        yield case, [line for line in lines if line["case"] == case]


SUITES = {
    "costs": _costs,
    "memory": _memory,
    "gain": _gain,
    "recompute": _recompute,
    "placement": _placement,
    "vision_dp": _vision_dp,
    "kernels": _kernels,
}
"""Every suite in the order it is run in, most valuable first, and what the page says of its lines."""


if __name__ == "__main__":
    PAGE.write_text(make_page(read_records(RESULTS)), encoding="utf-8")
    print(f"{PAGE} is written")
