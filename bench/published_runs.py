"""Published runs predicted, beside their published figures, in one table.

    python bench/published_runs.py [--write docs/predictions.md]

1. Training runs of text models, dense, bf16, FP8 and MXFP8 (published_text.py).
2. Vision-language models: OmniBal's Tables 9, 15 and 16 (published_omnibal.py).
3. Text models with experts (moe_runs.py).
4. Vision-language models: logs of Qwen2-VL-7B with uneven pipeline stages (published_h20.py).
Figures as printed are in bench/data. The page is written by this command alone.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import moe_runs
from published_h20 import held_out
from published_omnibal import elsewhere, omnibal, unfitted
from published_text import Fit, Run, fits, groups
from trimtab.costs.host import HOSTS
from trimtab.costs.profile import TIME_ERROR


@dataclass(frozen=True, kw_only=True)
class Row:
    """A published run beside what is predicted of it."""

    what: str
    devices: str
    setting: str
    published: str
    predicted: str
    error: float  # of the seconds: predicted / published - 1
    is_blind: bool


@dataclass(frozen=True, kw_only=True)
class Group:
    """Rows of one source."""

    name: str
    kind: str
    source: str
    url: str
    fitted: str
    note: str
    figure: str
    setting: str = "degrees"
    rows: tuple[Row, ...]

    @property
    def blind(self) -> list[float]:
        return [row.error for row in self.rows if row.is_blind]


def all_groups() -> list[Group]:
    return [*_text_groups(), _experts_group(), _omnibal_group(), _h20_group()]


def _text_groups() -> Iterable[Group]:
    found = fits()
    for group in groups():
        fit = found[group["name"]]
        shares = "nothing" if "shares_of" not in group else f"nothing; shares of {group['shares_of']}"
        yield Group(
            name=group["name"],
            kind="text",
            source=group["source"],
            url=group["url"],
            fitted=_fitted(group.get("fitted", shares), fit),
            note=group["note"],
            figure="tokens/s of a device",
            setting="degrees; sequences x tokens x micro-batches; how",
            rows=tuple(_text_row(run, float(x)) for run, x in zip(fit.runs, fit.errors, strict=True)),
        )


def _fitted(text: str, fit: Fit) -> str:
    shares = [f"{value:.2f}" for value in (fit.matmul, fit.attention) if value is not None]
    return f"{text} ({', '.join(shares)} of the peak)" if shares else text


def _text_row(run: Run, error: float) -> Row:
    counts = {"dp": run.dp, "tp": run.tp, "pp": run.pp, "cp": run.cp, "ep": run.ep, "chunks": run.num_chunks}
    degrees = [f"{name} {count}" for name, count in counts.items() if count > 1]
    how = [run.dtype, f"ZeRO {run.zero_stage}"]
    if run.recompute != "none":
        how.append(f"recompute {run.recompute}")
    if run.ep > 1:
        how.append(f"{run.dispatcher}{' beside products' if run.ep_overlap else ''}")
    return Row(
        what=run.model,
        devices=f"{run.gpus} {run.device}",
        setting=f"{', '.join(degrees)}; {run.batch} x {run.sequence:,} x {run.num_microbatches}; {', '.join(how)}",
        published=f"{run.tokens_per_s:,.0f}",
        predicted=f"{run.tokens_per_s / (1 + error):,.0f}",
        error=error,
        is_blind=not run.is_fitted,
    )


def _experts_group() -> Group:
    rows = moe_runs.runs()
    return Group(
        name="Models with experts, H100 and Blackwell",
        kind="text, experts",
        source="; ".join(moe_runs.DATA["sources"].values()),
        url="https://github.com/NVIDIA-NeMo/Megatron-Bridge/blob/main/docs/performance-summary-archive.md",
        fitted=(
            f"the host's time to launch an expert's kernel ({1e6 * HOSTS['recipe'].expert_s:.0f} us), to the three "
            "rows so marked"
        ),
        note=(
            "Routing was forced to be balanced, and is priced so. Missed: GPT-OSS where its experts lie on 64 devices "
            "of B300 and GB200 (the former no faster than B200 with half the network), and B300 with four chunks, "
            "which its own recipe of that release does not have. Qwen3-30B-A3B at pp 2 printed 5,113 tokens/s in the "
            "release before. Left out: releases from 26.06 on, whose recipes capture the whole step in one CUDA graph, "
            "fuse an expert's products with its gate and run attention in FP8: 1.3 to 1.6 times as fast."
        ),
        figure="tokens/s of a device",
        setting="degrees; sequences x tokens x micro-batches; how",
        rows=tuple(_text_row(run, error) for run, error in zip(rows, moe_runs.errors(rows), strict=True)),
    )


def _omnibal_group() -> Group:
    found = unfitted(omnibal(fused_kernels=False))
    rows = []
    for setting, error in zip(found.rows, found.errors(), strict=True):
        dims, days = setting.profile.dims, setting.row["gpu_days"][1]
        degrees = f"dp {dims.dp}, tp {dims.tp}, pp {dims.pp}"
        rows.append(_days(f"{setting.model.name} (Table 9)", f"{setting.num_gpus} A100-80GB", degrees, days, error))
    for x in elsewhere(found, fused_kernels=False):
        if not x.is_in_table_9:
            blind = x.what != "6+20B, A100, 2x200G"
            rows.append(_days(x.what, f"{x.num_gpus} {x.device}", x.table, x.published, x.error, blind=blind))
    return Group(
        name="OmniBal, A100 and H100",
        kind="vision-language",
        source="arXiv 2407.20761, Tables 4, 9, 15 and 16: GPU-days of 1.2 M samples with its own splits and recompute",
        url="https://arxiv.org/abs/2407.20761",
        fitted=f"micro-batches of a pipeline ({found.num_microbatches}), from Table 4's ratio of two splits",
        note=(
            "PyTorch's own kernels, no factor on any second. The row with half the network chose between two "
            "readings of where gradients are exchanged, so it is not blind. Missed: 8B, and 6+20B on H100, which "
            "the paper trains 1.75 times as fast as on A100, where text models gain 2.3; a node reads as many "
            "tiles a second as with 70B (82 and 70), so that loading may bound both. That is a guess, and not in "
            "the formulas."
        ),
        figure="GPU-days",
        rows=tuple(rows),
    )


def _days(what: str, devices: str, setting: str, published: float, error: float, *, blind: bool = True) -> Row:
    return Row(
        what=what,
        devices=devices,
        setting=setting,
        published=f"{published:.1f}",
        predicted=f"{published * (1 + error):.1f}",
        error=error,
        is_blind=blind,
    )


def _h20_group() -> Group:
    return Group(
        name="Qwen2-VL-7B with uneven stages, H20",
        kind="vision-language",
        source="searobbersduck/Pai-Megatron-Patch, examples/qwen2_vl/h20_uneven_pp_log, median of iterations 20 to 100",
        url="https://github.com/searobbersduck/Pai-Megatron-Patch",
        fitted="for each row, on the others of its tp: factors of both towers or one time a block; the first stage's",
        note=(
            "The number of images of a sample is not logged, so seconds need a fit. At tp 2 the towers' factors "
            "come out six times apart, and one time for every block, 26 ms whatever it computes, holds the runs "
            "as well: launches from the host decide them. That time is taken, and the run of width 1,280, a tower"
            " of a tenth of the work, is predicted by it from those of width 4,096 (the factors miss it by -26 "
            "%); it is what made us look, so it is not blind. Width 1,280 at tp 1: no model of stage times holds "
            "these five runs, and every fit of them warns."
        ),
        figure="s a step",
        rows=tuple(
            Row(
                what=f"vision width {x.run.group[0]:,}, blocks {x.run.run.name}",
                devices=f"{x.run.group[1] * x.run.run.profile.dims.pp} H20",
                setting=f"tp {x.run.group[1]}, pp {x.run.run.profile.dims.pp}",
                published=f"{x.logged_s:.2f}",
                predicted=f"{x.logged_s * (1 + x.error):.2f}",
                error=x.error,
                is_blind=x.run.group != (1280, 2),
            )
            for x in held_out()
        ),
    )


# -- the page -------------------------------------------------------------------------------------------------------

_HEAD = """# Published runs, predicted

Written by `python bench/published_runs.py --write docs/predictions.md`; the figures as printed are in `bench/data`. No
device of ours ran any of this. Predictions are those of the planner's own costs and simulator, with as many blocks on
every stage where no split is printed. *Blind* rows are in no fit; what a fit took is said with each source. Errors are
of seconds: predicted / published - 1.
"""


def page(found: Sequence[Group]) -> str:
    """docs/predictions.md."""
    blind = np.abs([x for group in found for x in group.blind])
    inside = float(np.mean(blind <= TIME_ERROR))
    out = [
        _HEAD,
        f"**{len(blind)} blind rows: median |error| {_percent(np.median(blind), 1)}, nine of ten within "
        f"{_percent(np.quantile(blind, 0.9))}, widest {_percent(blind.max())}. The band that formulas state, "
        f"± {_percent(TIME_ERROR)}, holds {_percent(inside)} of them.**",
        "",
        _about_left_out(found),
        "",
        "| source | | blind rows | median | 90 % within | widest | inside the band |",
        "|---|---|---|---|---|---|---|",
    ]
    for group in found:
        errors = np.abs(group.blind)
        out.append(
            f"| {group.name} | {group.kind} | {len(errors)} | {_percent(np.median(errors), 1)} | "
            f"{_percent(np.quantile(errors, 0.9))} | {_percent(max(group.blind, key=abs), sign='+')} | "
            f"{_percent(np.mean(errors <= TIME_ERROR))} |"
        )
    out += ["", _FAMILIES.format(**_families(found)), *(line for group in found for line in _section(group))]
    return "\n".join(out) + "\n"


@dataclass(frozen=True, kw_only=True)
class LeftOut:
    """A source, and the band that nine of ten blind rows of all others lie in; each of the others counts alike."""

    name: str
    band: float
    num_inside: int
    num_rows: int


def left_out(found: Sequence[Group]) -> list[LeftOut]:
    """Every source in turn as one that no fit of the band has seen."""
    result = []
    for group in found:
        others = [np.abs(x.blind) for x in found if x is not group]
        errors = np.concatenate(others)
        weight = np.concatenate([np.full(len(x), 1 / len(x)) for x in others])
        order = np.argsort(errors)
        held = np.cumsum(weight[order]) / weight.sum()
        band = float(errors[order][np.searchsorted(held, 0.9)])
        own = np.abs(group.blind)
        result.append(LeftOut(name=group.name, band=band, num_inside=int(np.sum(own <= band)), num_rows=len(own)))
    return result


def _about_left_out(found: Sequence[Group]) -> str:
    each = left_out(found)
    inside = sum(x.num_inside for x in each) / sum(x.num_rows for x in each)
    within = sum(np.mean(np.abs(group.blind) <= TIME_ERROR) >= 0.9 for group in found)
    low, high = min(x.band for x in each), max(x.band for x in each)
    return (
        "Out of sample: the band of nine of ten rows of all other sources, each source counting alike, is "
        f"± {_percent(low)} to {_percent(high)}; it holds {_percent(inside)} of the rows of the source left out. "
        f"± {_percent(TIME_ERROR)} holds nine of ten rows in {within} of {len(found)} sources."
    )


_FAMILIES = """What they say of devices and of parts:

- FSDP over several nodes: {fsdp}. FP8 and MXFP8: {fp8}.
- A100, H100 and H20 have curves that runs were fitted to. The H200 has the H100's with its own memory; B200, B300,
  GB200 and GB300 have their best published product, reduced as the H100's is: {blackwell}.
- MI300X: {mi300x}; no other row of an AMD device was found with all of its settings (ROCm/cvs prints thresholds of
  tests). Ascend 910B and every device without a curve of its own take the H100's ([devices](devices.md)).
- Left out: NVFP4, sparse attention, and rows whose batch or degrees are not printed; and, because no formula prices
  it, rows whose host decides: four of MindSpeed-MM on Ascend 910B, one sample of 563 tokens a micro-batch, came out 1.9
  to 3.6 times too fast (`python bench/published_small.py`). Blocks of dense text rows here take 2.5 ms a pass or more;
  plans and predictions of shorter ones say so.
- Looked for and not found in any row: latency of hops, trees against rings, oversubscribed networks. What these rows
  ask of a network is its bandwidth, so only that is priced.
"""


def _families(found: Sequence[Group]) -> dict[str, str]:
    rows = [(group, row) for group in found for row in group.rows if row.is_blind and group.kind == "text"]
    fsdp = [x for _, x in rows if "ZeRO 3" in x.setting and int(x.devices.split()[0]) > 8]
    low = [x for _, x in rows if "fp8" in x.setting]
    blackwell = [x for _, x in rows if "B200" in x.devices or "B300" in x.devices]
    amd = [x for _, x in rows if "MI300X" in x.devices]
    return {"fsdp": _words(fsdp), "fp8": _words(low), "blackwell": _words(blackwell), "mi300x": _words(amd)}


def _words(rows: Sequence[Row]) -> str:
    errors = np.abs([row.error for row in rows])
    widest = max((row.error for row in rows), key=abs)
    return f"{len(rows)} blind rows, median {_percent(np.median(errors), 1)}, widest {_percent(widest, sign='+')}"


def _percent(share: float | np.floating[Any], digits: int = 0, *, sign: str = "") -> str:
    return f"{100 * float(share):{sign}.{digits}f} %"


def _section(group: Group) -> list[str]:
    lines = [
        f"## {group.name}",
        "",
        f"[{group.source}]({group.url}). Fitted: {group.fitted}.",
        "",
        group.note,
        "",
        f"| run | devices | {group.setting} | {group.figure}: published | predicted | error | |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in group.rows:
        lines.append(
            f"| {row.what} | {row.devices} | {row.setting} | {row.published} | {row.predicted} | "
            f"{_percent(row.error, 1, sign='+')} | {'blind' if row.is_blind else 'not blind'} |"
        )
    return [*lines, ""]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--write", type=Path)
    chosen = parser.parse_args()
    text = page(all_groups())
    if chosen.write is None:
        print(text)
    else:
        chosen.write.write_text(text, encoding="utf-8")
