"""Training logs of Qwen2-VL-7B with uneven pipeline stages on H20, predicted.

Parameters of every rank, memory of middle stages, and step times of the runs that three others calibrate.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from published_models import part
from trimtab.costs.devices import DEVICES
from trimtab.costs.fit import Calibration, predict_step
from trimtab.costs.logs import LoggedRun, place_blocks
from trimtab.costs.minima import NOISE, find_minima
from trimtab.costs.observed import FORWARD_SHARE, Observed
from trimtab.costs.profile import profile_model
from trimtab.models.describe import describe
from trimtab.partition.assess import SplitProblem
from trimtab.plan.runs import calibrate_profile, default_terms, simulate_logged
from trimtab.specs import ModelSpec, ParallelDims, evaluate
from trimtab.units import MIB

REFERENCE = Path(__file__).resolve().parent / "data"


def load(name: str) -> Any:
    return json.loads((REFERENCE / name).read_text())


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
    shipped = describe("Qwen2-VL-7B")
    text = tuple(x for x in shipped.layers if x.tower == "language")
    work = np.array([1.0, ASSUMED_PATCHES, *[ASSUMED_PATCHES * 256] * 2, 2048, 2048**2, 2048**2])
    found = []
    for row in load("h20_uneven_pp_runs.json")["rows"]:
        is_wide = row["vision_hidden_size"] == 4096  # else as published, 1280
        tower = part("towers", "Qwen2-VL, 4096 wide") if is_wide else shipped.layers[: -len(text)]
        counts = [{"language": n} for n in row["decoder_layers_per_stage"]]
        counts[0]["vision"] = row["vision_layers_built_on_stage_0"]
        model, stages = place_blocks(replace(shipped, layers=(*tower, *text)), counts)
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


@dataclass(frozen=True, kw_only=True)
class StagePeak:
    """One stage's peak beside what was logged on the fullest of its tp ranks."""

    group: tuple[int, int]
    run: str
    stage: int
    place: str  # first, middle or last
    counted_bytes: float  # state, kept activations, one layer's backward
    allocated_bytes: float  # the peak of torch's tensors
    reserved_bytes: float  # of what its allocator took from the device

    @property
    def error(self) -> float:
        return self.counted_bytes * (1 + UNSEEN) / self.allocated_bytes - 1

    @property
    def slack(self) -> float:
        """Reserved over counted, which a device must have beside what is counted."""
        return self.reserved_bytes / self.counted_bytes - 1


@dataclass(frozen=True, kw_only=True)
class ImageFit:
    """Images on the first stage at its worst moment: so many a micro-batch in flight, and one heavy one's more."""

    images: float
    heavy: float

    def in_flight(self, num: int) -> float:
        return self.images * num + self.heavy


UNSEEN = 0.005
"""Of peaks: buffers that are in no tensor we count, by the logs' middle and last stages (0.3 to 0.8 %)."""


def fit_images(runs: Sequence[H20Run]) -> ImageFit:
    """The two unknowns of all first stages, from their peaks: least squares of relative errors.

    How many images a sample holds is not logged. Peaks are linear in the images in flight, so two assessments each do.
    """
    rows, wanted = [], []
    for x in runs:
        logged = _logged_peaks(x, 0)[0] / (1 + UNSEEN)
        none, one = (_assessed(x, images)[0] for images in (0.0, 1.0))
        num = len(x.run.stages)  # all of a pipeline's micro-batches are in flight on its first stage
        rows.append([(one - none) / logged, (one - none) / num / logged])
        wanted.append(1 - none / logged)
    (images, heavy), *_ = np.linalg.lstsq(np.array(rows), np.array(wanted), rcond=None)
    return ImageFit(images=float(images), heavy=float(heavy))


def stage_peaks(runs: Sequence[H20Run], fit: ImageFit) -> list[StagePeak]:
    """Every stage of these runs; the first one's images are those of `fit`."""
    found = []
    for x in runs:
        num = len(x.run.stages)
        for stage, counted in enumerate(_assessed(x, fit.in_flight(num) / num)):
            allocated, reserved = _logged_peaks(x, stage)
            found.append(
                StagePeak(
                    group=x.group,
                    run=x.run.name,
                    stage=stage,
                    place="first" if stage == 0 else "last" if stage == num - 1 else "middle",
                    counted_bytes=counted,
                    allocated_bytes=allocated,
                    reserved_bytes=reserved,
                )
            )
    return found


def blind_first_peaks(runs: Sequence[H20Run]) -> list[StagePeak]:
    """Every first stage, its images fitted to all other runs' peaks."""
    return [
        next(peak for peak in stage_peaks([x], fit_images([y for y in runs if y is not x])) if peak.stage == 0)
        for x in runs
    ]


def _assessed(x: H20Run, images: float) -> list[float]:
    """Counted bytes of each stage with so many images a micro-batch."""
    patches = ASSUMED_PATCHES * images
    work = np.array([1.0, patches, *[patches * 256] * 2, 2048, 2048**2, 2048**2])
    problem = SplitProblem(
        profile=x.run.profile,
        num_stages=len(x.run.stages),
        work_mean=work,
        work_max=work,
        num_microbatches=len(x.run.work),
    )
    return [held.counted_bytes for held in problem.assess(x.run.stages).memory]


def _logged_peaks(x: H20Run, stage: int) -> tuple[float, float]:
    """Allocated and reserved bytes of the fullest tp rank."""
    tp, logged = x.run.profile.dims.tp, x.logged["memory_mib_by_global_rank"]
    ranks = [logged[str(stage * tp + i)] for i in range(tp)]
    return max(x["max_allocated"] for x in ranks) * MIB, max(x["max_reserved"] for x in ranks) * MIB


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


@dataclass(frozen=True, kw_only=True, eq=False)
class HeldOut:
    """A run that others calibrate."""

    run: H20Run
    logged_s: float
    error: float


_UNLIKE = 3.0
"""Towers whose factors are further apart than this are not what the formulas miss in kernels."""


def predict_held_out(run: LoggedRun, others: Sequence[LoggedRun]) -> float:
    """Seconds of a step, from runs that do not include it.

    Where the towers' factors are far apart and one time for every block, whatever it computes, explains the runs too
    (launches from the host decide), that is taken instead of the factors.
    """
    terms = default_terms(others)
    seen = [Observed.of(x, terms) for x in others]
    theta = find_minima(seen, terms, simulate_logged)[0]
    factors = [value for name, value in zip(terms, theta, strict=True) if name in ("vision", "language")]
    if min(factors) > 0 and max(factors) > _UNLIKE * min(factors):
        alike = [_alike_blocks(x) for x in others]
        constants = find_minima(alike, ("block", "first stage"), simulate_logged)[0]
        missed = [x.step(constants, simulate_logged) / x.logged[0] - 1 for x in alike]
        if max(map(abs, missed)) <= 2 * NOISE:
            return _alike_blocks(run).step(constants, simulate_logged)
    return Observed.of(run, terms).step(theta, simulate_logged)


def _alike_blocks(run: LoggedRun) -> Observed:
    """Every block takes one time; what is no block, what the formulas say."""
    plain = Observed.of(run, ("first stage",))
    forward, backward = (np.concatenate([np.zeros_like(x[:1]), x]) for x in (plain.forward, plain.backward))
    for stage in run.stages:
        for layer in run.profile.layers[stage.start : stage.stop]:
            if layer.kind == "block":
                forward[0, stage.index] += FORWARD_SHARE
                backward[0, stage.index] += 1 - FORWARD_SHARE
                forward[2, stage.index] -= run.work @ np.array(layer.forward_s)
                backward[2, stage.index] -= run.work @ np.array(layer.backward_s)
    return replace(plain, forward=forward, backward=backward)


def held_out() -> list[HeldOut]:
    """Each run from the others of its vision width and tp; one that is alone there from those of width 4,096."""
    found = []
    steady = [x for x in h20_runs() if x.has_steady_time]
    for left in steady:
        others = [x for x in steady if x.group == left.group and x is not left]
        if len(others) < 3:
            others = [x for x in steady if x.group == (4096, left.group[1])]
        logged = left.run.iteration_s
        assert logged is not None, "every log has its times"
        seconds = predict_held_out(left.run, [x.run for x in others])
        found.append(HeldOut(run=left, logged_s=logged, error=seconds / logged - 1))
    return sorted(found, key=lambda x: (-x.run.group[0], x.run.group[1]))


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
    fit = fit_images(runs)
    print(
        f"\nall stages, {UNSEEN:.1%} of buffers included; images fitted to the first stages' peaks: {fit.images:.2f} a "
        f"micro-batch and {fit.heavy:.2f} more in one"
    )
    peaks = stage_peaks(runs, fit)
    for place in ("first", "middle", "last"):
        errors = [100 * p.error for p in peaks if p.place == place]
        print(f"  {place:6} {len(errors):2} peaks: {min(errors):+.2f} to {max(errors):+.2f} %")
    blind = [100 * p.error for p in blind_first_peaks(runs)]
    print(f"  first, images fitted to the other runs: {min(blind):+.2f} to {max(blind):+.2f} %")
    slack = [100 * p.slack for p in peaks]
    print(f"  reserved over counted: {min(slack):+.2f} to {max(slack):+.2f} %, mean {np.mean(slack):+.2f} %")
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
            missed = ", ".join(f"{name} {error:+.1%}" for name, error in triple.errors.items())
            print(f"  {' '.join(triple.names)}: {terms}")
            print(f"    predicted {missed}; band {triple.calibration.profile.time_error:.0%}")
            for warning in triple.calibration.warnings:
                print(f"    warned: {warning}")
    print()


if __name__ == "__main__":
    print_h20()
