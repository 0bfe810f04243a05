"""Logged training runs: what each ran and how long its steps took, read from the user's JSON file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from trimtab.costs.profile import profile_model
from trimtab.errors import TrimtabError, join_problems
from trimtab.files import read_small
from trimtab.options import Tower
from trimtab.specs import (
    WORK_TERMS,
    DeviceSpec,
    FloatArray,
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

_MOST = 1e18  # of what a micro-batch holds, and of bytes

_COUNTED: tuple[Tower, ...] = ("vision", "language")


_RANGES = {
    **dict.fromkeys(("num_microbatches", "tp", "dp"), (1, MAX_COUNT)),
    **dict.fromkeys(("iteration_s", "stage_s"), (MIN_S, MAX_S)),
    "peak_bytes": (1, _MOST),
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
        """In WORK_TERMS."""
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
    peak_bytes: tuple[float, ...] | None = None
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
    peak_bytes: tuple[float, ...] | None = None
    schedule: LoggedSchedule = "1F1B"


def read_runs(path: Path | str, model: ModelSpec, device: DeviceSpec, **settings: Any) -> tuple[LoggedRun, ...]:
    """The runs that a JSON file lists, priced by formula with the `settings` of `profile_model` (dims aside).

    The file is {"format": "trimtab-runs 1.0", "runs": [...]}. Keys of a run:

    stages: for each stage {"vision": 10, "language": 4}, the blocks of each tower in forward order (what is no block
        goes with the block behind it, what follows the last block with the last stage);
    num_microbatches; tp, dp and schedule where they are not 1, 1 and "1F1B";
    work: what the mean micro-batch holds, {"patches": ..., "tokens": ..., ...} with the names of WORK_TERMS, or a list
        with one such object for each micro-batch. Squares not given follow from patches_per_image, tokens_per_sample;
    iteration_s, or stage_s (forward + backward of the mean micro-batch), or both; peak_bytes if known. stage_s and
        peak_bytes have one number for each stage;
    recompute: for each stage how many of its blocks, counted from its first, recompute everything;
    partial: true where the run built fewer blocks than the model declares (only with counted blocks).

    Raises `TrimtabError` with every problem at once.
    """
    try:
        data = parse_json(read_small(Path(path)))
    except ValueError as error:
        raise TrimtabError(f"{path} is not JSON ({error}): list the runs as docs/calibrate.md shows") from None
    found = data.get("format") if isinstance(data, dict) else None
    entries = data.get("runs") if isinstance(data, dict) else None
    if found != FORMAT or not isinstance(entries, list) or not entries:
        told = "" if found == FORMAT else f" (its format is {found!r})"
        raise TrimtabError(
            f'{path} lists no runs of format {FORMAT!r}{told}: write {{"format": "{FORMAT}", '
            '"runs": [...]} with one run or more'
        )
    problems: list[str] = []
    runs = [_read_run(entry, number, model, device, settings, problems) for number, entry in enumerate(entries, 1)]
    names = [run.name for run in runs if run is not None]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{names.count(name)} runs are named {name!r}: give each run a name of its own")
    if problems:
        raise TrimtabError(
            f"{path} cannot be used (docs/calibrate.md shows what to write):\n" + join_problems(problems)
        )
    return tuple(run for run in runs if run is not None)


def place_blocks(model: ModelSpec, counts: Sequence[Mapping[str, int]]) -> tuple[ModelSpec, tuple[Stage, ...]]:
    """The model with as many blocks of each tower as are counted (its first ones), on stages that hold so many each.

    A layer that is no block goes with the block behind it, what follows the last block with the last stage; a tower of
    which no block is counted loses all its layers. Raises `TrimtabError` where the counts do not fit the forward order.
    """
    totals = {tower: sum(stage.get(tower, 0) for stage in counts) for tower in _COUNTED}
    if any(sum(stage.values()) == 0 for stage in counts[:-1]) or not counts:
        raise TrimtabError("a stage holds no block: give every stage but the last, which has the head, one or more")
    for tower, total in totals.items():
        declared = len(model.indices(tower, "block"))
        if total > declared:
            raise TrimtabError(f"{total} {tower} blocks are placed, and the model has {declared}: place at most those")
    towers = [tower for stage in counts for tower in _COUNTED for _ in range(stage.get(tower, 0))]
    if sorted(towers, key=_COUNTED.index) != towers:
        raise TrimtabError("a stage has vision blocks after a stage with language blocks: the vision tower runs first")
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
    blocks = [i for i, layer in enumerate(kept) if layer.kind == "block" and layer.tower in _COUNTED]
    ends = np.cumsum([sum(stage.values()) for stage in counts])[:-1]
    # after the previous stage's last block
    return model, stages_between([0, *(blocks[end - 1] + 1 for end in ends.tolist()), len(kept)])


def _read_run(
    entry: Any, number: int, model: ModelSpec, device: DeviceSpec, settings: dict[str, Any], problems: list[str]
) -> LoggedRun | None:
    """One entry of the file; what is wrong with it is appended to `problems`, a sentence each."""
    given = dict(entry) if isinstance(entry, dict) else entry
    name, own, run = f"run {number}", list[str](), None
    if isinstance(given, dict):
        name = given["name"] = given.get("name") or name
        if isinstance(given.get("work"), dict):
            given["work"] = [given["work"]]
    read = read_typed(_Entry, given, "", own, read_number=_read_number)
    if read is not None:
        own += _find_problems(read)
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
    """Of values that are sound by themselves."""
    num_stages = len(read.stages)
    if num_stages == 0:
        yield 'stages are empty: give for each stage its blocks, as in {"vision": 10, "language": 4}'
    for key in ("stage_s", "peak_bytes", "recompute"):
        values = getattr(read, key)
        if values is not None and len(values) != num_stages:
            yield f"{key} has {len(values)} numbers for {num_stages} stages: give one for each stage"
    if read.iteration_s is None and read.stage_s is None:
        yield "neither iteration_s nor stage_s is given: give the seconds of a step, or of each stage"
    if len(read.work) not in (1, read.num_microbatches):
        yield f"work lists {len(read.work)} micro-batches of {read.num_microbatches}: give each, or one mean object"


def _price(read: _Entry, model: ModelSpec, device: DeviceSpec, settings: dict[str, Any]) -> LoggedRun:
    built, stages = _place(read, model)
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
        peak_bytes=read.peak_bytes,
        schedule=read.schedule,
    )


def _place(read: _Entry, model: ModelSpec) -> tuple[ModelSpec, tuple[Stage, ...]]:
    built, stages = place_blocks(model, [asdict(blocks) for blocks in read.stages])
    if len(built.layers) < len(model.layers) and not read.partial:
        placed, declared = (sum(x.kind == "block" for x in m.layers) for m in (built, model))
        raise TrimtabError(
            f"its stages hold {placed} blocks, and the model declares {declared}: place them all, or say "
            '"partial": true if the run built fewer'
        )
    return built, stages


def _recomputed(model: ModelSpec, stage: Stage, count: int) -> Stage:
    """The stage with its first `count` blocks recomputed."""
    blocks = [i for i in range(stage.start, stage.stop) if model.layers[i].kind == "block"]
    if count > len(blocks):
        raise TrimtabError(f"stage {stage.index} recomputes {count} of its {len(blocks)} blocks: give at most those")
    choice = RecomputeChoice(tier="full", layers=tuple(blocks[:count]))
    return replace(stage, recompute=(choice,)) if count else stage
