"""Published runs predicted, beside their published figures. Run: python bench/published_runs.py

1. Training logs of Qwen2-VL-7B with uneven pipeline stages on H20: parameters of every rank, memory of middle stages,
   and step times of the runs that three others calibrate.
2. OmniBal (arXiv 2407.20761): two efficiencies from its Table 4, then the GPU-days of Table 9, and our split and
   recompute beside the paper's in the same simulator.
The published figures are in bench/data.
"""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from trimtab.costs.devices import DEVICES
from trimtab.costs.fit import Calibration, TermFit, apply_terms, predict_step
from trimtab.costs.logs import LoggedRun, place_blocks
from trimtab.costs.profile import profile_model
from trimtab.models.describe import describe
from trimtab.partition.assess import SplitProblem, SplitResult
from trimtab.partition.evaluate import Evaluator
from trimtab.partition.search import search_makespan
from trimtab.partition.simulate import simulate, stage_times
from trimtab.plan.measured.calibrate import calibrate_profile, simulate_logged
from trimtab.specs import ModelSpec, ParallelDims, Profile, RecomputeChoice, Stage, evaluate
from trimtab.units import MIB

REFERENCE = Path(__file__).resolve().parent / "data"


def load(name: str) -> Any:
    return json.loads((REFERENCE / name).read_text())


# -- Qwen2-VL-7B on H20 ---------------------------------------------------------------------------------------------

ASSUMED_PATCHES = 256.0
"""One 224 x 224 image, 14 px patches. How many images a sample holds is not logged: the vision factor takes it up."""

DRIFTING = ("1280", 1, "14/14")
"""Its iterations take 13.4 s until the 40th and 17 to 19 s later: no time to calibrate on or to predict."""


@dataclass(frozen=True, kw_only=True, eq=False)
class H20Run:
    """One log: the run as it was built, and what was logged."""

    logged: dict[str, Any]
    model: ModelSpec
    run: LoggedRun

    @property
    def group(self) -> tuple[int, int]:
        return self.logged["vision_hidden_size"], self.logged["tp"]

    @property
    def has_steady_time(self) -> bool:
        return (str(self.group[0]), self.group[1], self.run.name) != DRIFTING


def h20_runs() -> list[H20Run]:
    """Megatron-Core with fused kernels, no distributed optimizer, the vision tower as deep as it was built."""
    config = copy.deepcopy(load("model_zoo.json")["models"]["Qwen2-VL-7B"])
    del config["projector"]
    work = np.array([1.0, ASSUMED_PATCHES, *[ASSUMED_PATCHES * 256] * 2, 2048, 2048**2, 2048**2])
    found = []
    for row in load("h20_uneven_pp_runs.json")["rows"]:
        config["vision_config"]["embed_dim"] = row["vision_hidden_size"]
        counts = [{"language": n} for n in row["decoder_layers_per_stage"]]
        counts[0]["vision"] = row["vision_layers_built_on_stage_0"]
        model, stages = place_blocks(describe(config, name="Qwen2-VL-7B"), counts)
        dims = ParallelDims(tp=row["tp"], pp=row["pp"])
        run = LoggedRun(
            name="/".join(map(str, row["decoder_layers_per_stage"])),
            profile=profile_model(model, DEVICES["H20"], dims=dims, zero_stage=0, fused_kernels=True),
            stages=stages,
            work=np.tile(work, (row["num_microbatches"], 1)),
            iteration_s=row["iteration_ms_median_20_to_100"] / 1e3,
        )
        found.append(H20Run(logged=row, model=model, run=run))
    return found


def stage_params(run: H20Run) -> list[float]:
    """Parameters of one rank of each stage."""
    return [sum(layer.num_params for layer in run.run.profile.layers[s.start : s.stop]) for s in run.run.stages]


@dataclass(frozen=True, kw_only=True)
class MiddleStage:
    """Peak memory of a stage that holds language blocks alone; activations are peak less what is held all the time."""

    pp: int
    stage: int
    num_layers: int
    in_flight: int
    kept_bytes: float
    workspace_bytes: float
    state_bytes: float
    planned_bytes: float  # activations as `SplitProblem.assess` counts them: a whole block instead of the workspace
    logged_peak_bytes: float
    logged_state_bytes: float

    @property
    def activation_bytes(self) -> float:
        return self.kept_bytes + self.workspace_bytes

    @property
    def activation_error(self) -> float:
        return self.activation_bytes / self.logged_activation_bytes - 1

    @property
    def logged_activation_bytes(self) -> float:
        return self.logged_peak_bytes - self.logged_state_bytes

    @property
    def peak_error(self) -> float:
        return (self.state_bytes + self.activation_bytes) / self.logged_peak_bytes - 1


def middle_stages(runs: Sequence[H20Run]) -> list[MiddleStage]:
    """Nothing is fitted: kept bytes by formula x micro-batches in flight, and the workspace of one block's backward."""
    found = []
    for x in runs:
        dims, profile = x.run.profile.dims, x.run.profile
        work = x.run.work[0]
        problem = SplitProblem(
            profile=profile,
            num_stages=len(x.run.stages),
            work_mean=work,
            work_max=work,
            num_microbatches=len(x.run.work),
        )
        planned = problem.assess(x.run.stages).memory
        for stage in x.run.stages[1:-1]:
            block, num = profile.layers[stage.start], stage.stop - stage.start
            memory = x.logged["memory_mib_by_global_rank"][str(stage.index * dims.tp)]
            in_flight = dims.pp - stage.index
            found.append(
                MiddleStage(
                    pp=dims.pp,
                    stage=stage.index,
                    num_layers=num,
                    in_flight=in_flight,
                    kept_bytes=in_flight * num * float(evaluate(block.tiers[0].saved_bytes, work)),
                    workspace_bytes=float(profile.transients(work)[stage.start]),
                    state_bytes=num * block.state_bytes,
                    planned_bytes=planned[stage.index].saved_bytes + planned[stage.index].transient_bytes,
                    logged_peak_bytes=memory["max_allocated"] * MIB,
                    logged_state_bytes=memory["allocated"] * MIB,
                )
            )
    return found


@dataclass(frozen=True, kw_only=True, eq=False)
class Triple:
    """Three runs that calibrate, and the errors at the other runs of the same vision width and tp."""

    names: tuple[str, ...]
    calibration: Calibration
    errors: dict[str, float]


def triples(runs: Sequence[H20Run]) -> list[Triple]:
    steady = [x.run for x in runs if x.has_steady_time]
    found = []
    for chosen in itertools.combinations(steady, 3):
        calibration = calibrate_profile(chosen[0].profile, chosen)
        errors = {
            run.name: predict_step(run, calibration.terms, simulate_logged) / run.iteration_s - 1
            for run in steady
            if run not in chosen and run.iteration_s is not None
        }
        found.append(Triple(names=tuple(run.name for run in chosen), calibration=calibration, errors=errors))
    return found


def print_h20() -> None:
    runs = h20_runs()
    wrong = [
        abs(ours - logged)
        for x in runs
        for ours, logged in zip(stage_params(x), x.logged["params_per_rank_by_pp_stage"], strict=True)
    ]
    print(f"Qwen2-VL-7B on H20, {len(runs)} published logs\n")
    print(f"parameters of a rank, {len(wrong)} stages of all kinds: largest difference {max(wrong):.0f}\n")
    print("middle stages, MiB; activations = peak - held all the time; nothing is fitted")
    print("  pp stage layers in flight |   kept + workspace   logged  error |   peak   logged  error")
    points = middle_stages(runs)
    for p in points:
        logged = p.logged_activation_bytes / MIB
        print(
            f"  {p.pp:2} {p.stage:5} {p.num_layers:6} {p.in_flight:9} | {p.kept_bytes / MIB:6.0f} + "
            f"{p.workspace_bytes / MIB:9.1f} {logged:8.1f} {p.activation_error:6.2%} | "
            f"{(p.state_bytes + p.activation_bytes) / MIB:6.0f} {p.logged_peak_bytes / MIB:8.1f} {p.peak_error:6.2%}"
        )
    for what, errors in (
        ("activations", [p.activation_error for p in points]),
        ("activations without the workspace", [p.kept_bytes / p.logged_activation_bytes - 1 for p in points]),
        ("activations as the planner counts", [p.planned_bytes / p.logged_activation_bytes - 1 for p in points]),
        ("peak", [p.peak_error for p in points]),
        ("peak as the planner counts", [(p.state_bytes + p.planned_bytes) / p.logged_peak_bytes - 1 for p in points]),
    ):
        print(f"  {what}: mean {np.mean(errors):+.2%}, widest {max(errors, key=abs):+.2%}")
    for group in sorted({x.group for x in runs}, reverse=True):
        members = [x for x in runs if x.group == group and x.has_steady_time]
        if len(members) < 4:
            print(f"\nvision width {group[0]}, tp {group[1]}: {len(members)} run, nothing to calibrate on and predict")
            continue
        print(
            f"\nstep time, vision width {group[0]}, tp {group[1]}: every three runs calibrate, the others are predicted"
        )
        for triple in triples(members):
            terms = ", ".join(
                f"{t.name} {t.value:.3g}{'' if t.error is None else f' +-{t.error:.0%}'}"
                for t in triple.calibration.terms
            )
            errors = ", ".join(f"{name} {error:+.1%}" for name, error in triple.errors.items())
            print(f"  {' '.join(triple.names)}: {terms}")
            print(f"    predicted {errors}; band {triple.calibration.profile.time_error:.0%}")
            for warning in triple.calibration.warnings:
                print(f"    warned: {warning}")
    print()


# -- OmniBal --------------------------------------------------------------------------------------------------------

PACK = np.array([1, 9 * 1025, 9 * 1025**2, 9 * 1025**2, 4096, 4 * 1024**2, 4 * 1024**2], dtype=float)
"""A full pack: 9 tiles of 1025 ViT rows, 4096 tokens, taken as 4 samples."""

SAMPLES, SAMPLES_PER_PACK = 1.2e6, 4.6
NODE_LINK = 4 * 25e9 / 8
"""Stages on different nodes: tp x dp is 8 in every row, one node, whose 8 GPUs share 4 x 200 Gbit/s (Table 15)."""

TABLE_4_SPLITS = {
    "parameter_based": [46, 16, 16, 15],
    "layer_based": [23, 22, 24, 24],
    "profile_based": [24, 24, 23, 22],
    "searched": [22, 23, 24, 24],
}
"""Searched: printed in Table 9. The others follow from the table's spread of layers and parameters (our inference)."""

EVA = {"norm_type": "layer_norm", "qkv_bias": True, "qk_normalization": False}
VISION: dict[str, dict[str, Any]] = {
    "InternVL-6B": {},
    "EVA-CLIP-1B": {
        **EVA,
        "hidden_size": 1408,
        "num_hidden_layers": 40,
        "num_attention_heads": 16,
        "intermediate_size": 6144,
    },
    "EVA-CLIP-8B": {
        **EVA,
        "hidden_size": 4096,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 20480,
    },
}
LLAMA = {"model_type": "llama", "num_key_value_heads": 8, "head_dim": 128, "hidden_act": "silu"} | dict.fromkeys(
    ("tie_word_embeddings", "attention_bias", "mlp_bias"), False
)
LANGUAGE: dict[str, dict[str, Any]] = {
    name: LLAMA
    | {"hidden_size": h, "num_hidden_layers": n, "num_attention_heads": a, "intermediate_size": f, "vocab_size": v}
    for name, (h, n, a, f, v) in {
        "Llama3-8B": (4096, 32, 32, 14336, 128256),
        "Yi-34B": (7168, 60, 56, 20480, 64000),
        "Llama3-70B": (8192, 80, 64, 28672, 128256),
    }.items()
}
"""As their model cards give them; InternViT-6B and InternLM2-20B from the model table."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Setting:
    """A row of Table 9 as a model with its profile."""

    row: dict[str, Any]
    model: ModelSpec
    profile: Profile

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
        times = stage_times(self.profile, stages, work, link_bytes_per_s=NODE_LINK, latency_s=10e-6)
        return simulate(times).makespan_s

    def gpu_days(self, stages: Sequence[Stage], num_microbatches: int) -> float:
        """1.2 M samples, 4.6 a pack, every pack full; gradient exchange and optimizer once a step."""
        once = max(sum(layer.step_s for layer in self.profile.layers[s.start : s.stop]) for s in stages)
        steps = SAMPLES / SAMPLES_PER_PACK / (num_microbatches * self.profile.dims.dp)
        return steps * (self.makespan(stages, num_microbatches) + once) * self.num_gpus / 86400


def omnibal_setting(row: dict[str, Any], *, fused_kernels: bool = True) -> Setting:
    config = copy.deepcopy(load("model_zoo.json")["models"]["InternVL-Chat-V1-5 (26B)"])
    del config["projector"]
    config["vision_config"].update(VISION[row["vision"]])
    if row["language"] in LANGUAGE:
        config["text_config"] = LANGUAGE[row["language"]]
    model = describe(config, name=f"{row['vision']} + {row['language']}")
    dims = ParallelDims(tp=row["tp"], pp=row["pp"], dp=row["dp"])
    profile = profile_model(model, DEVICES["A100-80GB"], dims=dims, fused_kernels=fused_kernels)
    return Setting(row=row, model=model, profile=profile)


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
    # matrix products are priced at 0.70 of the peak: a factor below 0.70 asks for more than the peak
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


def omnibal(*, fused_kernels: bool = True) -> OmniBal:
    tables = load("omnibal_tables.json")
    rows = [omnibal_setting(row, fused_kernels=fused_kernels) for row in tables["table_9_model_sizes"]]
    base = next(x for x in rows if x.model.name == "InternVL-6B + InternLM2-20B")
    table_4 = {row["method"]: row for row in tables["table_4_model_balance"]}
    terms = calibrate_on_table_4(base, {name: row["var_forward_time"] for name, row in table_4.items()})
    scaled = [replace(x, profile=apply_terms(x.profile, terms)) for x in rows]
    base = scaled[rows.index(base)]
    m = fit_microbatches(base, {name: row["gpu_days"] for name, row in table_4.items()})
    return OmniBal(base=base, terms=terms, num_microbatches=m, rows=tuple(scaled))


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
    result = search_makespan(Evaluator(problem, work, link_bytes_per_s=NODE_LINK, latency_s=10e-6))
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
    for title, other in (("PyTorch's own kernels", omnibal(fused_kernels=False)), *_other_numbers(found)):
        print(f"  the same with {title}: mean error {np.mean(np.abs(other.errors())):.1%}")
    print(
        "Speed-ups over the paper's baselines are not predicted: it does not say how each row's baseline was split.\n"
    )


def _other_numbers(found: OmniBal) -> list[tuple[str, OmniBal]]:
    return [(f"{m} micro-batches", replace(found, num_microbatches=m)) for m in (8, 10, 12, 14, 16)]


def _num_blocks(setting: Setting, stage: Stage) -> int:
    return sum(setting.model.layers[i].kind == "block" for i in range(stage.start, stage.stop))


if __name__ == "__main__":
    print_h20()
    print_omnibal()
