"""OmniBal (arXiv 2407.20761) predicted: three constants from its Table 4, then Tables 7, 9, 15 and 16.

Our split and recompute stand beside the paper's in the same simulator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from published_h20 import load
from published_models import composed_model
from trimtab.costs.devices import DEVICES
from trimtab.costs.fit import TermFit, apply_terms
from trimtab.costs.logs import place_blocks
from trimtab.costs.profile import profile_model
from trimtab.partition.assess import SplitProblem, SplitResult
from trimtab.partition.evaluate import Evaluator
from trimtab.partition.search import search_makespan
from trimtab.partition.simulate import simulate, stage_times
from trimtab.specs import ModelSpec, ParallelDims, Profile, RecomputeChoice, Stage, evaluate

PACK = np.array([1, 9 * 1025, 9 * 1025**2, 9 * 1025**2, 4096, 4 * 1024**2, 4 * 1024**2], dtype=float)
"""A full pack: 9 tiles of 1025 ViT rows, 4096 tokens, taken as 4 samples."""

SAMPLES, SAMPLES_PER_PACK = 1.2e6, 4.6
NODE_LINK = 4 * 25e9 / 8
"""Bytes/s of a GPU to other nodes: the 8 GPUs of a node share 4 x 200 Gbit/s (Table 15)."""

TABLE_4_SPLITS = {
    "parameter_based": [46, 16, 16, 15],
    "layer_based": [23, 22, 24, 24],
    "profile_based": [24, 24, 23, 22],
    "searched": [22, 23, 24, 24],
}
"""Searched: printed in Table 9. The others follow from the table's spread of layers and parameters (our inference)."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """A row of Table 9 as a model with its profile."""

    row: dict[str, Any]
    model: ModelSpec
    profile: Profile
    node_link: float = NODE_LINK

    @property
    def num_gpus(self) -> int:
        dims = self.profile.dims
        return dims.dp * dims.pp * dims.tp

    def stages(self, counts: Sequence[int], recompute: Sequence[int] | None = None) -> tuple[Stage, ...]:
        """Stages of so many blocks, of which the first `recompute` of each recompute everything; None: all."""
        left, placed = len(self.model.indices("vision", "block")), []
        for count in counts:
            vision = min(left, count)
            left -= vision
            placed.append({"vision": vision, "language": count - vision})
        _, stages = place_blocks(self.model, placed)
        found = []
        for stage, wanted in zip(stages, recompute or counts, strict=True):
            blocks = [i for i in range(stage.start, stage.stop) if self.model.layers[i].kind == "block"][:wanted]
            choice = (RecomputeChoice(tier="full", layers=tuple(blocks)),) if blocks else ()
            found.append(replace(stage, recompute=choice))
        return tuple(found)

    def microbatches(self, pipelines_of_4: int) -> int:
        """As many a step over all pipelines as 4 pipelines of `pipelines_of_4` micro-batches run."""
        return max(1, int(4 * pipelines_of_4 / self.profile.dims.dp + 0.5))

    def makespan(self, stages: Sequence[Stage], num_microbatches: int) -> float:
        work = np.tile(PACK, (num_microbatches, 1))
        times = stage_times(self.profile, stages, work, link_bytes_per_s=self.node_link, latency_s=10e-6)
        return simulate(times).makespan_s

    def gpu_days(self, stages: Sequence[Stage], num_microbatches: int) -> float:
        """1.2 M samples, 4.6 a pack, every pack full; gradient exchange and optimizer once a step."""
        once = max(sum(layer.step_s for layer in self.profile.layers[s.start : s.stop]) for s in stages)
        steps = SAMPLES / SAMPLES_PER_PACK / (num_microbatches * self.profile.dims.dp)
        return steps * (self.makespan(stages, num_microbatches) + once) * self.num_gpus / 86400


def omnibal_setting(
    row: dict[str, Any],
    *,
    fused_kernels: bool = True,
    device: str = "A100-80GB",
    dp: int | None = None,
    node_link: float = NODE_LINK,
    exchange_in_node: bool = False,
) -> Setting:
    """exchange_in_node: gradients go over NVLink, as tp x dp fill a node in every row; else over the network."""
    model = composed_model(row["vision"], row["language"])
    dims = ParallelDims(tp=row["tp"], pp=row["pp"], dp=dp or row["dp"])
    profile = profile_model(
        model,
        DEVICES[device],
        dims=dims,
        fused_kernels=fused_kernels,
        dp_bytes_per_s=None if exchange_in_node else node_link,
    )
    return Setting(row=row, model=model, profile=profile, node_link=node_link)


def calibrate_on_table_4(setting: Setting, spread_ms: dict[str, float]) -> tuple[TermFit, TermFit]:
    """Factors of vision and language seconds that give the published spreads of two splits' forward times, exactly.

    The table's VAR(fwd_time) are standard deviations over the stages in ms: read as variances no split of 93 layers has
    them. With stage seconds v + r l, r = language / vision factor, the two spreads' ratio k gives a quadratic in r:
    Var(v1 + r l1) = k^2 Var(v2 + r l2). Of its two roots the one that asks no more than a device's peak.
    """
    parts = []
    for name in ("parameter_based", "searched"):
        seconds = evaluate(setting.profile.matrix("forward_s"), PACK)
        vision = np.array([layer.tower != "language" for layer in setting.profile.layers])
        own = [slice(s.start, s.stop) for s in setting.stages(TABLE_4_SPLITS[name])]
        v, la = (np.array([(seconds * mask)[x].sum() for x in own]) for mask in (vision, ~vision))
        parts.append(np.cov(np.array([v, la]), bias=True))
    k = spread_ms["parameter_based"] / spread_ms["searched"]
    a, b, c = ((parts[0] - k**2 * parts[1])[i, j] for i, j in ((1, 1), (0, 1), (0, 0)))
    found = []
    for r in np.roots([a, 2 * b, c]).real:
        v_factor = spread_ms["parameter_based"] / 1e3 / np.sqrt(np.array([1, r]) @ parts[0] @ np.array([1, r]))
        found.append((float(v_factor), float(v_factor * r)))
    # the other root asks one tower for more than the peak
    vision_factor, language_factor = max(found, key=lambda pair: min(pair))
    return (
        TermFit(name="vision", value=vision_factor, error=None),
        TermFit(name="language", value=language_factor, error=None),
    )


def fit_microbatches(setting: Setting, published: dict[str, float]) -> int:
    """Micro-batches of a pipeline, unpublished: the number that gives Table 4's parameter-based / searched GPU-days."""
    wanted = published["parameter_based"] / published["searched"]

    def ratio(m: int) -> float:
        days = [setting.gpu_days(setting.stages(TABLE_4_SPLITS[x]), m) for x in ("parameter_based", "searched")]
        return days[0] / days[1]

    return min(range(4, 33), key=lambda m: abs(ratio(m) - wanted))


@dataclass(frozen=True, kw_only=True, eq=False)
class OmniBal:
    """Table 4 calibrated, and the rows of Table 9 with the same two factors and number of micro-batches."""

    base: Setting
    terms: tuple[TermFit, TermFit]
    num_microbatches: int
    rows: tuple[Setting, ...]

    def days(self, setting: Setting) -> float:
        stages = setting.stages(setting.row["stages"], setting.row["recompute"])
        return setting.gpu_days(stages, setting.microbatches(self.num_microbatches))

    def errors(self) -> list[float]:
        return [self.days(x) / x.row["gpu_days"][1] - 1 for x in self.rows]


def omnibal(*, fused_kernels: bool = True, exchange_in_node: bool = False) -> OmniBal:
    tables = load("omnibal_tables.json")
    rows = [
        omnibal_setting(row, fused_kernels=fused_kernels, exchange_in_node=exchange_in_node)
        for row in tables["table_9_model_sizes"]
    ]
    base = next(x for x in rows if x.row["gpu_days"] == [61.8, 21.3])
    table_4 = {row["method"]: row for row in tables["table_4_model_balance"]}
    terms = calibrate_on_table_4(base, {name: row["var_forward_time"] for name, row in table_4.items()})
    scaled = [replace(x, profile=apply_terms(x.profile, terms)) for x in rows]
    base = scaled[rows.index(base)]
    m = fit_microbatches(base, {name: row["gpu_days"] for name, row in table_4.items()})
    return OmniBal(base=base, terms=terms, num_microbatches=m, rows=tuple(scaled))


def unfitted(found: OmniBal) -> OmniBal:
    """Without the two factors; the number of micro-batches, fitted to a ratio, stays."""
    terms = (replace(found.terms[0], value=1.0), replace(found.terms[1], value=1.0))
    inverse = tuple(replace(term, value=1 / term.value) for term in found.terms)
    rows = tuple(replace(x, profile=apply_terms(x.profile, inverse)) for x in found.rows)
    return replace(found, terms=terms, rows=rows)


@dataclass(frozen=True, kw_only=True)
class Elsewhere:
    """A row of Tables 15 and 16: the paper's plan on other hardware, or on more of it."""

    what: str
    table: str
    device: str
    num_gpus: int
    days: float
    published: float

    @property
    def is_in_table_9(self) -> bool:
        return self.what == "6+20B, A100, 4x200G"

    @property
    def error(self) -> float:
        return self.days / self.published - 1


def elsewhere(found: OmniBal, *, exchange_in_node: bool = False, fused_kernels: bool = True) -> list[Elsewhere]:
    """Factors and micro-batches are those of the A100 rows: of the H100's nothing is fitted.

    Table 16 trains the plan of 64 GPUs with more data-parallel ranks. Were the global batch the same, 512 GPUs would
    take 1.8 times the GPU-days of 64 for want of micro-batches; it prints 1.05: a pipeline's micro-batches stay.
    """
    tables = load("omnibal_tables.json")
    paper = {(row["vision"], row["language"]): row for row in tables["table_9_model_sizes"]}
    small, large = paper["InternVL-6B", "InternLM2-20B"], paper["InternVL-6B", "Llama3-70B"]
    wanted: list[tuple[str, dict[str, Any], int, str, float, float]] = []
    for row in tables["table_15_hardware"]:
        links, gbit = row["ib"].removesuffix("G").split("x")
        link = int(links) * int(gbit) * 1e9 / 8 / 8
        wanted.append(
            (f"6+20B, {row['hardware']}, {row['ib']}", small, small["dp"], row["hardware"], link, row["gpu_days"][1])
        )
    for row in tables["table_16_scale_6_70B_H100"]:
        dp = row["gpus"] // (large["tp"] * large["pp"])
        wanted.append(
            (f"6+70B, H100, 8x400G, {row['gpus']} GPUs", large, dp, "H100", 8 * 400e9 / 8 / 8, row["gpu_days"][1])
        )
    rows = []
    for what, row, dp, hardware, link, published in wanted:
        setting = omnibal_setting(
            row,
            fused_kernels=fused_kernels,
            device=f"{hardware}-80GB",
            dp=dp,
            node_link=link,
            exchange_in_node=exchange_in_node,
        )
        setting = replace(setting, profile=apply_terms(setting.profile, found.terms))
        stages = setting.stages(row["stages"], row["recompute"])
        m = round(4 * found.num_microbatches / row["dp"])
        rows.append(
            Elsewhere(
                what=what,
                table="Table 15" if row is small else "Table 16",
                device=setting.profile.device.name,
                num_gpus=setting.num_gpus,
                days=setting.gpu_days(stages, m),
                published=published,
            )
        )
    return rows


@dataclass(frozen=True, kw_only=True, eq=False)
class Comparison:
    """A row of Table 9: the paper's split and ours, in one simulator and within the same bytes."""

    setting: Setting
    paper_s: float
    paper: SplitResult
    ours_s: float
    ours: SplitResult

    @property
    def gain(self) -> float:
        return self.paper_s / self.ours_s


def compare_splits(found: OmniBal, setting: Setting, *, selective: bool) -> Comparison:
    """Ours may fill a device as far as the paper's plan fills its fullest, by our count of bytes, and no further.

    selective False: layers recompute everything or nothing, as in the paper.
    """
    if not selective:
        layers = tuple(
            replace(layer, tiers=tuple(t for t in layer.tiers if t.name != "selective"))
            for layer in setting.profile.layers
        )
        setting = replace(setting, profile=replace(setting.profile, layers=layers))
    m = setting.microbatches(found.num_microbatches)
    problem = SplitProblem(
        profile=setting.profile,
        num_stages=setting.profile.dims.pp,
        work_mean=PACK,
        work_max=PACK,
        memory_bytes=1e15,
        num_microbatches=m,
    )
    paper = problem.assess(setting.stages(setting.row["stages"], setting.row["recompute"]))
    problem = replace(problem, memory_bytes=max(device.total_bytes for device in paper.memory))
    work = np.tile(PACK, (1, m, 1))
    result = search_makespan(Evaluator(problem, work, link_bytes_per_s=setting.node_link, latency_s=10e-6))
    return Comparison(
        setting=setting,
        paper_s=setting.makespan(paper.stages, m),
        paper=paper,
        ours_s=setting.makespan(result.split.stages, m),
        ours=result.split,
    )


def print_omnibal() -> None:
    tables = load("omnibal_tables.json")
    found = omnibal()
    base, m = found.base, found.num_microbatches
    forward = evaluate(base.profile.matrix("forward_s"), PACK) * 1e3
    per_layer = {t: forward[base.model.indices(t, "block")[0]] for t in ("vision", "language")}
    print("OmniBal, InternViT-6B + InternLM2-20B on 32 A100, fitted to Table 4 alone:")
    for term in found.terms:
        print(
            f"  {term.name:8} x {term.value:.3f} of our formulas, one layer's forward of a full pack "
            f"{per_layer[term.name]:.2f} ms"
        )
    print(f"  micro-batches of a pipeline: {m}\n")
    print("Table 4     split               spread of forward ms    GPU-days, full recompute")
    print("                                  ours   published          ours   published")
    for row in tables["table_4_model_balance"]:
        counts = TABLE_4_SPLITS[row["method"]]
        stages = base.stages(counts)
        times = stage_times(base.profile, stages, PACK[None]).forward_s[:, 0]
        fitted = row["method"] in ("parameter_based", "searched")
        print(
            f"  {row['method']:16} {counts!s:18} {np.std(times) * 1e3:6.1f} {row['var_forward_time']:10.1f} "
            f"{'(fit)' if fitted else '     '} {base.gpu_days(stages, m):8.1f} {row['gpu_days']:10.1f}"
        )
    published = {row["method"]: row["gpu_days"] for row in tables["table_4_model_balance"]}
    searched = base.gpu_days(base.stages(TABLE_4_SPLITS["searched"]), m)
    print("GPU-days over those of the searched split")
    for name, counts, paper in (
        *((name, TABLE_4_SPLITS[name], published[name]) for name in published),
        ("whole ViT first", [57, 12, 12, 12], tables["table_7_ablation_gpu_days"]["data"]),
    ):
        days = base.gpu_days(base.stages(counts), m)
        print(f"  {name:16} ours {days / searched:.3f}   published {paper / published['searched']:.3f}")
    off = base.gpu_days(base.stages(TABLE_4_SPLITS["searched"], [0] * 4), m)
    print(f"  {'recompute off':16} ours {off / searched:.3f}   published {21.3 / 29.0:.3f}")
    print()
    print("Table 9: GPU-days, and seconds of a step on the paper's split and on ours (same simulator, same bytes)")
    print(
        "                               tp pp dp  m |  ours paper   error | paper's   ours, full  ours, selective too"
    )
    for setting in found.rows:
        dims, row = setting.profile.dims, setting.row
        full, any_tier = (compare_splits(found, setting, selective=x) for x in (False, True))
        days = found.days(setting)
        print(
            f"{setting.model.name:30} {dims.tp:2} {dims.pp:2} {dims.dp:2} {setting.microbatches(m):2} | {days:5.1f} "
            f"{row['gpu_days'][1]:5.1f} {days / row['gpu_days'][1] - 1:+7.1%} | "
            f"{full.paper_s:7.2f}  {full.ours_s:6.2f} "
            f"({full.gain:.3f}x) {any_tier.ours_s:6.2f} ({any_tier.gain:.3f}x)"
        )
        blocks = [_num_blocks(setting, stage) for stage in full.ours.stages]
        print(
            f"    paper {row['stages']} recompute {row['recompute']}, fullest device "
            f"{max(x.total_bytes for x in full.paper.memory) / 1e9:.1f} GB; ours {blocks} recompute "
            f"{[stage.num_recomputed() for stage in full.ours.stages]}"
        )
    errors = found.errors()
    print(
        f"  GPU-days: mean error {np.mean(np.abs(errors)):.1%}, mean {np.mean(errors):+.1%}, "
        f"widest {max(errors, key=abs):+.1%}"
    )
    for title, other in (
        ("PyTorch's own kernels", omnibal(fused_kernels=False)),
        ("gradients exchanged within a node", omnibal(exchange_in_node=True)),
        *_other_numbers(found),
    ):
        print(f"  the same with {title}: mean error {np.mean(np.abs(other.errors())):.1%}")
    print_elsewhere(found)
    print(
        "Speed-ups over the paper's baselines are not predicted: it does not say how each row's baseline was split.\n"
    )


def print_elsewhere(found: OmniBal) -> None:
    """As fitted to Table 4; with gradients exchanged within a node; with PyTorch's own kernels and no factors."""
    plain = unfitted(omnibal(fused_kernels=False))
    columns = (
        elsewhere(found),
        elsewhere(omnibal(exchange_in_node=True), exchange_in_node=True),
        elsewhere(plain, fused_kernels=False),
    )
    print("Tables 15 and 16, GPU-days; of H100 nothing is fitted")
    print(
        "                                   published |    as Table 4 |  within a node | no factors, PyTorch's kernels"
    )
    for rows in zip(*columns, strict=True):
        found_here = " | ".join(f"{x.days:5.1f} {x.error:+7.1%}" for x in rows)
        print(f"  {rows[0].what:34} {rows[0].published:7.1f} | {found_here}")
    print()


def _other_numbers(found: OmniBal) -> list[tuple[str, OmniBal]]:
    return [(f"{m} micro-batches", replace(found, num_microbatches=m)) for m in (8, 10, 12, 14, 16)]


def _num_blocks(setting: Setting, stage: Stage) -> int:
    return sum(setting.model.layers[i].kind == "block" for i in range(stage.start, stage.stop))


if __name__ == "__main__":
    print_omnibal()
