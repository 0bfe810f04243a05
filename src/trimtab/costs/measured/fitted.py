"""Logged training runs, read from the user's JSON file, and a profile whose seconds are fitted to them.

Three factors: of the host's seconds, of the language model's on the device, and of the tower's with the projector. With
few logged times the host comes first: one run tells how slowly its host launches, which no formula knows.
Symbols: R logged times T_r, K factors theta, J the (R, K) derivatives of log predicted by log theta.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

from trimtab.costs.bands import TIME_ERROR
from trimtab.costs.profile import chosen_tiers, host_again_s, profile_model
from trimtab.errors import TrimtabError, join_problems
from trimtab.files import read_small
from trimtab.options import ScheduleName, Tower
from trimtab.specs import (
    WORK_TERMS,
    DeviceSpec,
    FloatArray,
    LayerCost,
    ModelSpec,
    ParallelDims,
    Profile,
    RecomputeChoice,
    Stage,
    stages_between,
)
from trimtab.typed_json import parse_json, read_typed

LoggedSchedule = Literal["1F1B", "GPipe"]

FORMAT = "trimtab-runs 1.0"

MAX_COUNT = 2**16  # of micro-batches, or ranks of a dimension: a file must not make us fill the memory

MIN_S, MAX_S = 1e-6, 1e7
"""Of what was logged: no stage takes less, no step more, and squares of larger ratios would overflow."""

_MOST = 1e18  # of what a micro-batch holds

_COUNTED: tuple[Tower, ...] = ("vision", "language")


_RANGES = {
    **dict.fromkeys(("num_microbatches", "tp", "dp"), (1, MAX_COUNT)),
    **dict.fromkeys(("iteration_s", "stage_s"), (MIN_S, MAX_S)),
    "recompute": (0, MAX_COUNT),
    "stages": (0, math.inf),
    "work": (0, _MOST),
}
"""Least and most of the numbers of each key."""


@dataclass(frozen=True, slots=True, kw_only=True)
class _Blocks:
    """How many blocks of each tower a stage holds."""

    vision: int = 0
    language: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class _Work:
    """What a micro-batch holds, named as in WORK_TERMS. Squares not given: rows x rows of one image or sample."""

    patches: float = 0.0
    patches_sq: float | None = None
    patches_windowed: float | None = None
    patches_per_image: float | None = None
    tokens: float = 0.0
    tokens_sq: float | None = None
    tokens_windowed: float | None = None
    tokens_per_sample: float | None = None

    def row(self) -> list[float]:
        """Return it in WORK_TERMS."""
        values = {"microbatches": 1.0, **{name: x for name, x in asdict(self).items() if x is not None}}
        for rows, segment in (("patches", "patches_per_image"), ("tokens", "tokens_per_sample")):
            square = values.setdefault(f"{rows}_sq", values[rows] * values.get(segment, values[rows]))
            values.setdefault(f"{rows}_windowed", square)
        return [values[name] for name in WORK_TERMS]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Entry:
    """One run as the file has it."""

    name: str
    stages: tuple[_Blocks, ...]
    num_microbatches: int
    work: tuple[_Work, ...]  # one: of the mean micro-batch
    tp: int = 1
    dp: int = 1
    schedule: LoggedSchedule = "1F1B"
    iteration_s: float | None = None
    stage_s: tuple[float, ...] | None = None
    recompute: tuple[int, ...] | None = None
    partial: bool = False


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoggedRun:
    """One run: its layers on stages, its micro-batches, and what was logged; one value for each stage where several."""

    name: str
    profile: Profile  # by formula, of the layers that the run built, on its own tp and dp
    stages: tuple[Stage, ...]
    work: FloatArray  # (num_microbatches, len(WORK_TERMS))
    iteration_s: float | None  # one optimizer step
    stage_s: tuple[float, ...] | None = None  # forward + backward of the mean micro-batch, recompute included
    schedule: ScheduleName = "1F1B"


def read_runs(path: Path | str, model: ModelSpec, device: DeviceSpec, **settings: Any) -> tuple[LoggedRun, ...]:
    """The runs that a JSON file lists, priced by formula with the `settings` of `profile_model` (dims aside).

    The file is {"format": "trimtab-runs 1.0", "runs": [...]}. Keys of a run:

    stages: for each stage {"vision": 10, "language": 4}, the blocks of each tower in forward order (what is no block
        goes with the block behind it, what follows the last block with the last stage);
    num_microbatches; tp, dp and schedule where they are not 1, 1 and "1F1B";
    work: what the mean micro-batch holds, {"patches": ..., "tokens": ..., ...} with the names of WORK_TERMS, or a list
        with one such object for each micro-batch. Squares not given follow from patches_per_image, tokens_per_sample;
    iteration_s, or stage_s (forward + backward of the mean micro-batch, a number for each stage), or both;
    recompute: for each stage how many of its blocks, counted from its first, recompute everything;
    partial: true where the run built fewer blocks than the model declares (only with counted blocks).

    Raises `TrimtabError` with every problem at once.
    """
    try:
        data = parse_json(read_small(Path(path)))
    except ValueError as error:
        raise TrimtabError(f"{path} is not JSON ({error}): list the runs as docs/costs.md shows") from None
    found = data.get("format") if isinstance(data, dict) else None
    entries = data.get("runs") if isinstance(data, dict) else None
    if found != FORMAT or not isinstance(entries, list) or not entries:
        seen = "" if found == FORMAT else f" (its format is {found!r})"
        raise TrimtabError(
            f'{path} lists no runs of format {FORMAT!r}{seen}: write {{"format": "{FORMAT}", '
            '"runs": [...]} with one run or more'
        )
    # every run is read before any is refused, so that all problems are named at once
    problems: list[str] = []
    runs = [_read_run(entry, number, model, device, settings, problems) for number, entry in enumerate(entries, 1)]
    names = [run.name for run in runs if run is not None]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{names.count(name)} runs are named {name!r}: give each run a name of its own")
    if problems:
        raise TrimtabError(f"{path} cannot be used (docs/costs.md shows what to write):\n" + join_problems(problems))
    return tuple(run for run in runs if run is not None)


def place_blocks(model: ModelSpec, counts: Sequence[Mapping[str, int]]) -> tuple[ModelSpec, tuple[Stage, ...]]:
    """The model with as many blocks of each tower as are counted (its first ones), on stages that hold so many each.

    A layer that is no block goes with the block behind it, what follows the last block with the last stage; a tower of
    which no block is counted loses all its layers. A first stage without blocks holds what lies in front of them.
    Raises `TrimtabError` where the counts do not fit the forward order.
    """
    totals = {tower: sum(stage.get(tower, 0) for stage in counts) for tower in _COUNTED}
    if any(sum(stage.values()) == 0 for stage in counts[1:-1]) or not sum(totals.values()):
        raise TrimtabError("a stage holds no block: only the first (embedding) and the last (head) may")
    # no more blocks than the model has, and vision in front
    for tower, total in totals.items():
        declared = len(model.indices(tower, "block"))
        if total > declared:
            raise TrimtabError(f"{total} {tower} blocks are placed, and the model has {declared}: place at most those")
    towers = [tower for stage in counts for tower in _COUNTED for _ in range(stage.get(tower, 0))]
    if sorted(towers, key=_COUNTED.index) != towers:
        raise TrimtabError("a stage has vision blocks after a stage with language blocks: the vision tower runs first")
    # keep the first blocks of each tower; a tower without blocks loses all its layers
    kept, left = [], dict(totals)
    for layer in model.layers:
        if layer.kind == "block" and layer.tower in left:
            left[layer.tower] -= 1
            if left[layer.tower] < 0:
                continue
        elif layer.tower != "language" and totals["vision"] == 0:
            continue
        kept.append(layer)
    if len(kept) != len(model.layers):
        model = replace(model, layers=tuple(kept), forbidden_cuts=frozenset(), tied=())
    # cuts lie between blocks
    blocks = [i for i, layer in enumerate(kept) if layer.kind == "block" and layer.tower in _COUNTED]
    ends = np.cumsum([sum(stage.values()) for stage in counts])[:-1]
    # after the previous stage's last block, or in front of the first of all
    return model, stages_between([0, *(blocks[end - 1] + 1 if end else blocks[0] for end in ends.tolist()), len(kept)])


def _read_run(
    entry: Any, number: int, model: ModelSpec, device: DeviceSpec, settings: dict[str, Any], problems: list[str]
) -> LoggedRun | None:
    """Read one entry of the file; append what is wrong with it to `problems`, a sentence each."""
    # a mean micro-batch may stand without its list
    given = dict(entry) if isinstance(entry, dict) else entry
    name, own, run = f"run {number}", list[str](), None
    if isinstance(given, dict):
        name = given["name"] = given.get("name") or name
        if isinstance(given.get("work"), dict):
            given["work"] = [given["work"]]
    read = read_typed(_Entry, given, "", own, read_number=_read_number)
    if read is not None:
        own += _find_problems(read)
    # only a sound entry is priced
    if not own:
        try:
            run = _price(read, model, device, settings)
        except TrimtabError as error:
            own.append(str(error))
    problems += [f"{name}: {problem}" for problem in own]
    return run


def _read_number(place: str, kind: Any, value: Any, problems: list[str]) -> Any:
    low, high = _RANGES[place.partition(".")[0]]
    if low <= value <= high:
        return kind(value)
    problems.append(f"{place} is {str(value)[:60]}: give a number from {low:g} to {high:g}")
    return value


def _find_problems(read: _Entry) -> Iterator[str]:
    """Find what contradicts itself among values that are sound alone."""
    num_stages = len(read.stages)
    if num_stages == 0:
        yield 'stages are empty: give for each stage its blocks, as in {"vision": 10, "language": 4}'
    # one number for each stage
    for key in ("stage_s", "recompute"):
        values = getattr(read, key)
        if values is not None and len(values) != num_stages:
            yield f"{key} has {len(values)} numbers for {num_stages} stages: give one for each stage"
    if read.iteration_s is None and read.stage_s is None:
        yield "neither iteration_s nor stage_s is given: give the seconds of a step, or of each stage"
    # and each micro-batch, or their mean
    if len(read.work) not in (1, read.num_microbatches):
        yield f"work lists {len(read.work)} micro-batches of {read.num_microbatches}: give each, or one mean object"


def _price(read: _Entry, model: ModelSpec, device: DeviceSpec, settings: dict[str, Any]) -> LoggedRun:
    built, stages = place_blocks(model, [asdict(blocks) for blocks in read.stages])
    if len(built.layers) < len(model.layers) and not read.partial:
        placed, declared = (sum(x.kind == "block" for x in m.layers) for m in (built, model))
        raise TrimtabError(f'its stages hold {placed} blocks, not {declared}: place all, or say "partial": true')
    if read.recompute is not None:
        stages = tuple(_recomputed(built, *x) for x in zip(stages, read.recompute, strict=True))
    dims = ParallelDims(tp=read.tp, dp=read.dp, pp=len(stages))
    work = np.array([micro_batch.row() for micro_batch in read.work])
    return LoggedRun(
        name=read.name,
        profile=profile_model(built, device, dims=dims, **settings),
        stages=stages,
        work=np.repeat(work, read.num_microbatches // len(work), axis=0),
        iteration_s=read.iteration_s,
        stage_s=read.stage_s,
        schedule=read.schedule,
    )


def _recomputed(model: ModelSpec, stage: Stage, count: int) -> Stage:
    """The stage with its first `count` blocks recomputed."""
    blocks = [i for i in range(stage.start, stage.stop) if model.layers[i].kind == "block"]
    if count > len(blocks):
        raise TrimtabError(f"stage {stage.index} recomputes {count} of its {len(blocks)} blocks: give at most those")
    choice = RecomputeChoice(tier="full", layers=tuple(blocks[:count]))
    return replace(stage, recompute=(choice,)) if count else stage


# -- a profile fitted to them -----------------------------------------------------------------------------------------


Term = Literal["host", "language", "vision"]
"""In the order in which logged times are spent on them; a tower without its own takes the language model's factor."""

NOISE = 0.01
"""Relative error taken for one logged time, for want of repeated runs."""
UNSETTLED = 0.25
"""A factor that such noise moves by more than this is called unsettled."""
MIN_TIME_ERROR = 0.02

_STARTS = (1.0, 4.0)
_MAX_ROUNDS, _LEAST_MOVE, _MOST_MOVE = 30, 1e-6, 1.0
_RIDGE = 1e-4  # holds what the runs leave open where it is


SimulateStep: TypeAlias = Callable[[LoggedRun, FloatArray, FloatArray], float]
"""Seconds of a step of this run whose stages take these (stages, micro-batches) forward and backward times."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TermFit:
    """One factor of the fit."""

    name: Term
    value: float
    error: float | None  # relative, for `NOISE` in every logged time; None: the runs do not settle it


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFit:
    """A logged run and what the fit makes of it."""

    name: str
    logged_s: float  # of all that was logged: an iteration, its stages, or both
    fitted_s: float

    @property
    def error(self) -> float:
        return self.fitted_s / self.logged_s - 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What a set of runs says of a profile."""

    profile: Profile  # method "logged"
    terms: tuple[TermFit, ...]
    runs: tuple[RunFit, ...]
    warnings: tuple[str, ...]  # what these runs cannot tell, in sentences


def fit_runs(target: Profile, runs: Sequence[LoggedRun], simulate_step: SimulateStep) -> Calibration:
    """Return `target` with its seconds calibrated on `runs`.

    Minimises the sum of (log predicted - log T_r)^2 by Gauss-Newton steps from several starts: a heuristic, for which
    stage is the slowest decides the piece. Of the factors that there are times for, those that explain the runs within
    `NOISE` are taken in the order of `Term`, else those of least misfit. `Calibration.profile.time_error` is the
    largest of: the error at each run when the others alone are fitted, the misfit, 2 %; with warnings at least the
    formulas'.
    Not modelled: sends between stages (they hide behind compute, or end up in the factors), data-parallel waits.
    """
    if not runs:
        raise TrimtabError("no run was given to fit: log one step or more")
    # the factors, and how sure each is
    terms, theta = _choose_terms(runs, simulate_step)
    errors = _term_errors(runs, terms, theta, simulate_step)
    found = tuple(
        TermFit(name=name, value=float(value), error=error)
        for name, value, error in zip(terms, theta, errors, strict=True)
    )
    # what the fit says of each run
    fitted = tuple(
        RunFit(
            name=run.name,
            logged_s=float(logged_times(run).sum()),
            fitted_s=float(_predict(run, found, simulate_step).sum()),
        )
        for run in runs
    )
    # a profile with these factors, and what they do not settle
    warnings = (*_unsettled(found), *_unexplained(fitted))
    others = [x for x in target.assumptions if not x.startswith("Seconds come from formulas")]
    calibrated = replace(
        apply_terms(target, found),
        method="logged",
        time_error=_time_error(runs, fitted, warnings, simulate_step),
        assumptions=(*_sentences(found, fitted), *warnings, *others),
    )
    return Calibration(profile=calibrated, terms=found, runs=fitted, warnings=warnings)


def apply_terms(profile: Profile, terms: Sequence[TermFit]) -> Profile:
    """Return the profile with its seconds times the factors; gradient exchange and optimizer stay the formulas'."""
    own, host = _factors(terms)
    layers = (_scaled(x, own["language" if x.tower == "language" else "vision"], host) for x in profile.layers)
    return replace(profile, layers=tuple(layers))


def predict_step(run: LoggedRun, terms: Sequence[TermFit], simulate_step: SimulateStep) -> float:
    """Return the seconds of one iteration of `run` under these factors."""
    forward, backward = _times_under(run, terms)
    layers = run.profile.layers
    once = max(sum(layer.step_s for layer in layers[x.start : x.stop]) for x in run.stages)
    return simulate_step(run, forward, backward) + once


class _Part(NamedTuple):
    """Layers of one kind on one stage: seconds for each micro-batch, without the host, and the host's own."""

    number: int
    tower: str
    forward: FloatArray
    backward: FloatArray  # with what is computed again
    host_forward_s: float
    host_backward_s: float


@lru_cache(maxsize=256)
def _parts_of(run: LoggedRun) -> tuple[tuple[_Part, ...], ...]:
    """Return the parts of each stage: a fit asks for the same layers a thousand times."""
    stages = []
    for stage in run.stages:
        parts = dict[tuple[object, ...], _Part]()
        layers = run.profile.layers[stage.start : stage.stop]
        for layer, tier in zip(layers, chosen_tiers(run.profile, stage), strict=True):
            again_s = host_again_s(layer, tier)
            seconds = (layer.forward_s, layer.backward_s, tier.extra_backward_s)
            # layers alike are counted once, with their number
            key = (layer.tower, *map(id, seconds), layer.host_forward_s, layer.host_backward_s, again_s)
            if key in parts:
                parts[key] = parts[key]._replace(number=parts[key].number + 1)
                continue
            forward, backward, extra = (run.work @ np.array(terms, np.float64) for terms in seconds)
            own = (layer.host_forward_s, layer.host_backward_s + again_s)
            parts[key] = _Part(1, layer.tower, forward, backward + extra, *own)
        stages.append(tuple(parts.values()))
    return tuple(stages)


def _times_under(run: LoggedRun, terms: Sequence[TermFit]) -> tuple[FloatArray, FloatArray]:
    """Price (stages, micro-batches) forward and backward, as those of the profile that `apply_terms` returns."""
    own, host = _factors(terms)
    total = np.zeros((2, len(run.stages), len(run.work)))
    for seconds, parts in zip(total.transpose(1, 0, 2), _parts_of(run), strict=True):
        for part in parts:
            factor = own["language" if part.tower == "language" else "vision"]
            forward, backward = factor * part.forward, factor * part.backward
            # as `pass_seconds`: the slower of device and host
            if part.host_forward_s > 0:
                forward = np.maximum(forward, host * part.host_forward_s)
                backward = np.maximum(backward, host * part.host_backward_s)
            seconds[0] += part.number * forward
            seconds[1] += part.number * backward
    return total[0], total[1]


def _factors(terms: Sequence[TermFit]) -> tuple[dict[str, float], float]:
    """Return factors of the towers (vision takes the language model's unless it has its own) and of the host."""
    value = {term.name: term.value for term in terms}
    language = value.get("language", 1.0)
    return {"language": language, "vision": value.get("vision", language)}, value.get("host", 1.0)


def logged_times(run: LoggedRun) -> FloatArray:
    """Return what was logged: the step, then the stages."""
    return np.array([*([] if run.iteration_s is None else [run.iteration_s]), *(run.stage_s or ())])


# -- the fit ----------------------------------------------------------------------------------------------------------


def _predict(run: LoggedRun, terms: Sequence[TermFit], simulate_step: SimulateStep) -> FloatArray:
    """Return predicted times in the order of `logged_times`."""
    step = [] if run.iteration_s is None else [predict_step(run, terms, simulate_step)]
    if run.stage_s is None:
        return np.array(step)
    forward, backward = _times_under(run, terms)
    return np.array([*step, *(forward + backward).mean(axis=1).tolist()])


def _misses(
    runs: Sequence[LoggedRun], names: Sequence[Term], theta: FloatArray, simulate_step: SimulateStep
) -> FloatArray:
    """Return (R,) log predicted - log logged."""
    terms = [TermFit(name=name, value=float(x), error=None) for name, x in zip(names, theta, strict=True)]
    return np.concatenate([np.log(_predict(run, terms, simulate_step) / logged_times(run)) for run in runs])


def _choose_terms(runs: Sequence[LoggedRun], simulate_step: SimulateStep) -> tuple[tuple[Term, ...], FloatArray]:
    """The factors that the runs hold and are enough for, and their values."""
    num_logged = sum(len(logged_times(run)) for run in runs)
    layers = [layer for run in runs for layer in run.profile.layers]
    held: dict[Term, bool] = {
        "host": any(layer.host_forward_s > 0 for layer in layers),
        "language": any(layer.tower == "language" for layer in layers),
        "vision": any(layer.tower != "language" for layer in layers),
    }
    # sets of at most as many factors as there are times, the smaller ones first
    names = [name for name in held if held[name]]
    sets = [s for k in range(1, min(num_logged, len(names)) + 1) for s in itertools.combinations(names, k)]
    sets = [s for s in sets if s != ("vision",) or len(names) == 1]  # the language model's factor covers both
    # the first set that explains the runs; where none does, the one that misses least
    found = [(_minimum(runs, own, simulate_step), own) for own in sets]
    good = [entry for entry in found if entry[0][0] <= NOISE]
    (_, theta), own = good[0] if good else min(found, key=lambda entry: entry[0][0])
    return own, theta


def _minimum(runs: Sequence[LoggedRun], names: Sequence[Term], simulate_step: SimulateStep) -> tuple[float, FloatArray]:
    """Return the least misfit (root of the mean square) found, and the factors there."""
    best, where = np.inf, np.ones(len(names))
    for start in itertools.product(_STARTS, repeat=len(names)):
        # Gauss-Newton on the logarithms, from several starts: the slowest stage changes from place to place
        u = np.log(start)
        missed = _misses(runs, names, np.exp(u), simulate_step)
        for _ in range(_MAX_ROUNDS):
            J = _derivatives(runs, names, u, missed, simulate_step)
            move = np.linalg.solve(J.T @ J + _RIDGE * np.eye(len(u)), -J.T @ missed).clip(-_MOST_MOVE, _MOST_MOVE)
            there = _misses(runs, names, np.exp(u + move), simulate_step)
            # halve a step that makes it worse
            while np.square(there).sum() > np.square(missed).sum() and np.abs(move).max() > _LEAST_MOVE:
                move = move / 2
                there = _misses(runs, names, np.exp(u + move), simulate_step)
            if np.square(there).sum() >= np.square(missed).sum() * (1 - 1e-9):
                break
            u, missed = u + move, there
        if (misfit := float(np.sqrt(np.square(missed).mean()))) < best * (1 - 1e-6):
            best, where = misfit, np.exp(u)
    return best, where


def _derivatives(
    runs: Sequence[LoggedRun], names: Sequence[Term], u: FloatArray, missed: FloatArray, simulate_step: SimulateStep
) -> FloatArray:
    """Return (R, K) by differences: exact but for rounding, within a piece."""
    moved = (u + 1e-5 * np.eye(len(u))[k] for k in range(len(u)))
    return np.array([(_misses(runs, names, np.exp(x), simulate_step) - missed) / 1e-5 for x in moved]).T


def _term_errors(
    runs: Sequence[LoggedRun], names: Sequence[Term], theta: FloatArray, simulate_step: SimulateStep
) -> list[float | None]:
    """Return how far errors in the logged times move each factor: noise^2 (J^T J)^-1, or the misfit if larger."""
    missed = _misses(runs, names, theta, simulate_step)
    J = _derivatives(runs, names, np.log(theta), missed, simulate_step)
    spare = len(missed) - len(theta)
    noise = max(NOISE, float(np.sqrt(np.square(missed).sum() / spare)) if spare > 0 else 0.0)
    _, strength, rows = np.linalg.svd(J, full_matrices=True)
    weak = rows[np.append(strength, np.zeros(len(theta)))[: len(theta)] < 1e-6 * max(1.0, strength.max())]
    covariance = noise**2 * np.linalg.pinv(J.T @ J, rcond=1e-10)
    is_open = (np.abs(weak) > 1e-3).any(axis=0) if len(weak) else np.zeros(len(theta), bool)
    return [None if is_open[k] else float(np.sqrt(covariance[k, k])) for k in range(len(theta))]


def _time_error(
    runs: Sequence[LoggedRun], fitted: Sequence[RunFit], warnings: Sequence[str], simulate_step: SimulateStep
) -> float:
    bands = [MIN_TIME_ERROR, *(abs(run.error) for run in fitted), TIME_ERROR if warnings else 0.0]
    for i, left in enumerate(runs):
        others = [x for j, x in enumerate(runs) if j != i]
        if left.iteration_s is None or not others:
            continue
        names, theta = _choose_terms(others, simulate_step)
        bands.append(float(np.abs(_misses([left], names, theta, simulate_step)).max()))
    return min(1.0, max(bands))


def _scaled(layer: LayerCost, factor: float, host: float) -> LayerCost:
    def times(terms: tuple[float, ...]) -> tuple[float, ...]:
        return tuple(factor * x for x in terms)

    return replace(
        layer,
        forward_s=times(layer.forward_s),
        backward_s=times(layer.backward_s),
        weight_s=times(layer.weight_s),
        tiers=tuple(replace(tier, extra_backward_s=times(tier.extra_backward_s)) for tier in layer.tiers),
        host_forward_s=host * layer.host_forward_s,
        host_backward_s=host * layer.host_backward_s,
    )


# -- what is said -----------------------------------------------------------------------------------------------------


def _unsettled(terms: Sequence[TermFit]) -> tuple[str, ...]:
    return tuple(
        f"The logged runs do not settle {term.name!r}: errors in their times move it by "
        f"{'more than its own size' if term.error is None else format(term.error, '.0%')}; add runs of other splits."
        for term in terms
        if term.error is None or term.error > UNSETTLED
    )


def _unexplained(runs: Sequence[RunFit]) -> tuple[str, ...]:
    worst = max(runs, key=lambda run: abs(run.error))
    if abs(worst.error) <= MIN_TIME_ERROR:
        return ()
    return (f"Stage times do not explain run {worst.name!r}: the fit is {worst.error:+.1%} off. Look for slow links.",)


def _sentences(terms: Sequence[TermFit], runs: Sequence[RunFit]) -> tuple[str, ...]:
    bands = {term.name: "" if term.error is None else f" (+-{term.error:.0%})" for term in terms}
    parts = [f"{term.name} x {term.value:.3g}{bands[term.name]}" for term in terms]
    worst = max(abs(run.error) for run in runs)
    fitted = f"Seconds come from formulas fitted to {len(runs)} logged run{'s' * (len(runs) > 1)}: {', '.join(parts)}"
    return (f"{fitted}; the fit is within {worst:.1%} of them. Sends between stages are not modelled.",)
