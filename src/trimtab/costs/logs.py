"""Logged training runs: what each ran and how long its steps took, read from the user's JSON file."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np

from trimtab.costs.profile import profile_model
from trimtab.errors import TrimtabError, join_problems
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

LoggedSchedule = Literal["1F1B", "GPipe"]

FORMAT = "trimtab-runs 1.0"

MAX_COUNT = 2**16  # of micro-batches, or ranks of a dimension: a file must not make us fill the memory

MIN_S, MAX_S = 1e-6, 1e7
"""Of what was logged: no stage takes less, no step more, and squares of larger ratios would overflow."""

_MOST = 1e18  # of what a micro-batch holds, and of bytes

_RUN_KEYS = (
    *("name", "stages", "tp", "dp", "num_microbatches", "work", "iteration_s"),
    *("stage_s", "peak_bytes", "recompute", "schedule", "partial"),
)
_WORK_KEYS = (*WORK_TERMS[1:], "patches_per_image", "tokens_per_sample")
_COUNTED: tuple[Tower, ...] = ("vision", "language")
_RANGE = re.compile(r"^(?P<stem>.+)\[(?P<first>\d{1,5})\.\.(?P<last>\d{1,5})\]$")


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
        goes with the block behind it, what follows the last block with the last stage); or for each stage a list of
        module paths and ranges, as the plan file writes them;
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
        data = json.loads(Path(path).read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise TrimtabError(f"{path} is not JSON ({error}): list the runs as docs/published-runs.md shows") from None
    found = data.get("format") if isinstance(data, dict) else None
    entries = data.get("runs") if isinstance(data, dict) else None
    if found != FORMAT or not isinstance(entries, list) or not entries:
        raise TrimtabError(
            f'{path} lists no runs of format {FORMAT!r} (its format is {found!r}): write {{"format": "{FORMAT}", '
            '"runs": [...]} with one run or more'
        )
    problems: list[str] = []
    runs = [
        _RunReader(entry, number, problems).read(model, device, settings) for number, entry in enumerate(entries, 1)
    ]
    names = [run.name for run in runs if run is not None]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(f"{names.count(name)} runs are named {name!r}: give each run a name of its own")
    if problems:
        raise TrimtabError(f"{path} cannot be used:\n" + join_problems(problems))
    return tuple(run for run in runs if run is not None)


def place_blocks(model: ModelSpec, counts: Sequence[Mapping[str, int]]) -> tuple[ModelSpec, tuple[Stage, ...]]:
    """The model with as many blocks of each tower as are counted (its first ones), on stages that hold so many each.

    A layer that is no block goes with the block behind it, what follows the last block with the last stage; a tower of
    which no block is counted loses all its layers. Raises `TrimtabError` where the counts do not fit the forward order.
    """
    totals = {tower: sum(stage.get(tower, 0) for stage in counts) for tower in _COUNTED}
    if any(sum(stage.values()) == 0 for stage in counts) or not counts:
        raise TrimtabError("a stage holds no block: give every stage one block or more")
    for tower, total in totals.items():
        declared = len(model.indices(tower, "block"))
        if total > declared:
            raise TrimtabError(f"{total} {tower} blocks are placed, and the model has {declared}: place at most those")
    towers = [tower for stage in counts for tower in _COUNTED for _ in range(stage.get(tower, 0))]
    if sorted(towers, key=_COUNTED.index) != towers:
        raise TrimtabError("a stage has vision blocks behind a stage with language blocks: the vision tower runs first")
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
    # behind the previous stage's last block
    return model, stages_between([0, *(blocks[end - 1] + 1 for end in ends.tolist()), len(kept)])


class _RunReader:
    """One entry of the file; what is wrong with it is appended to `problems`, a sentence each."""

    def __init__(self, entry: Any, number: int, problems: list[str]) -> None:
        self.entry = entry if isinstance(entry, dict) else {}
        name = self.entry.get("name")
        self.name = name if isinstance(name, str) and name else f"run {number}"
        self.problems = problems
        if not isinstance(entry, dict):
            self.wrong(f"it is {type(entry).__name__}, not an object: write its keys and values")
        for key in sorted(set(self.entry) - set(_RUN_KEYS)):
            self.wrong(f"the key {key!r} is unknown: use {', '.join(_RUN_KEYS)}")

    def wrong(self, sentence: str) -> None:
        self.problems.append(f"{self.name}: {sentence}")

    def read(self, model: ModelSpec, device: DeviceSpec, settings: dict[str, Any]) -> LoggedRun | None:
        before = len(self.problems)
        if not self.entry:
            return None
        M, tp, dp = self.one("num_microbatches", None), self.one("tp", 1), self.one("dp", 1)
        schedule = self.entry.get("schedule", "1F1B")
        if schedule not in get_args(LoggedSchedule):
            self.wrong(f"schedule {schedule!r} cannot be fitted: log runs of {' or '.join(get_args(LoggedSchedule))}")
        placed = self.stages(model)
        num_stages = len(placed[1]) if placed else None
        work = self.work(M)
        has_step, has_stages = (self.entry.get(key) is not None for key in ("iteration_s", "stage_s"))
        iteration_s = self.one("iteration_s", None) if has_step else None
        stage_s, peak_bytes, recomputed = (
            self.per_stage(key, num_stages) for key in ("stage_s", "peak_bytes", "recompute")
        )
        if not has_step and not has_stages:
            self.wrong("neither iteration_s nor stage_s is given: give the seconds of a step, or of each stage")
        if len(self.problems) > before or placed is None or work is None or tp is None or dp is None:
            return None
        built, stages = placed
        if recomputed is not None:
            stages = self.recomputed(built, stages, recomputed)
        try:
            dims = ParallelDims(tp=tp, dp=dp, pp=len(stages))
            profile = profile_model(built, device, dims=dims, **settings)
        except TrimtabError as error:
            self.wrong(str(error))
        if len(self.problems) > before:
            return None
        return LoggedRun(
            name=self.name,
            profile=profile,
            stages=stages,
            work=work,
            iteration_s=None if iteration_s is None else float(iteration_s),
            stage_s=stage_s,
            peak_bytes=peak_bytes,
            schedule=schedule,
        )

    def one(self, key: str, absent: int | None) -> Any:
        """The value of a key, or None and a problem."""
        value = self.entry.get(key, absent)
        is_sound, what = _SOUND[key]
        if is_sound(value):
            return value
        self.wrong(f"{key} is {str(value)[:60]}: give {what}")
        return None

    def per_stage(self, key: str, num_stages: int | None) -> tuple[float, ...] | None:
        values = self.entry.get(key)
        if values is None:
            return None
        is_sound, what = _SOUND[key]
        if not isinstance(values, list) or not values or not all(map(is_sound, values)):
            self.wrong(f"{key} is {str(values)[:60]}: give a list of {what}, one for each stage")
            return None
        if num_stages is not None and len(values) != num_stages:
            self.wrong(f"{key} has {len(values)} numbers for {num_stages} stages: give one for each stage")
            return None
        return tuple(values)

    def stages(self, model: ModelSpec) -> tuple[ModelSpec, tuple[Stage, ...]] | None:
        given = self.entry.get("stages")
        if isinstance(given, list) and given and all(isinstance(x, list) for x in given):
            return self.named_stages(model, given)
        if not isinstance(given, list) or not given or not all(_is_counts(x) for x in given):
            self.wrong(
                'stages cannot be read: give for each stage its blocks, {"vision": 10, "language": 4}, or a list of '
                "its module paths"
            )
            return None
        try:
            built, stages = place_blocks(model, given)
        except TrimtabError as error:
            self.wrong(str(error))
            return None
        if len(built.layers) < len(model.layers) and self.entry.get("partial") is not True:
            placed, declared = (sum(x.kind == "block" for x in m.layers) for m in (built, model))
            self.wrong(
                f"its stages hold {placed} blocks, and the model declares {declared}: place them all, or say "
                '"partial": true if the run built fewer'
            )
            return None
        return built, stages

    def named_stages(self, model: ModelSpec, given: list[list[Any]]) -> tuple[ModelSpec, tuple[Stage, ...]] | None:
        names = [[name for entry in stage for name in _unfold(str(entry))] for stage in given]
        expected = [layer.name for layer in model.layers]
        flat = [name for stage in names for name in stage]
        if flat != expected:
            odd, wanted = next((a, b) for a, b in itertools.zip_longest(flat, expected) if a != b)
            self.wrong(
                f"its stages name {odd or 'nothing more'} where the model continues with {wanted or 'the end'}: name "
                "every layer once, in forward order"
            )
            return None
        if not all(names):
            self.wrong("a stage names no module: give every stage one layer or more")
            return None
        return model, stages_between([0, *np.cumsum([len(stage) for stage in names]).tolist()])

    def recomputed(self, model: ModelSpec, stages: tuple[Stage, ...], counts: Sequence[float]) -> tuple[Stage, ...]:
        changed = []
        for stage, count in zip(stages, counts, strict=True):
            blocks = [i for i in range(stage.start, stage.stop) if model.layers[i].kind == "block"]
            if count > len(blocks):
                self.wrong(f"stage {stage.index} recomputes {count} of its {len(blocks)} blocks: give at most those")
            choice = RecomputeChoice(tier="full", layers=tuple(blocks[: int(count)]))
            changed.append(replace(stage, recompute=(choice,)) if count else stage)
        return tuple(changed)

    def work(self, num_microbatches: int | None) -> FloatArray | None:
        given = self.entry.get("work")
        rows: list[Any] = given if isinstance(given, list) else [given]
        if not rows or not all(isinstance(row, dict) for row in rows):
            self.wrong('work is missing: give what a micro-batch holds, {"patches": 1024, "tokens": 2048, ...}')
            return None
        if num_microbatches is not None and isinstance(given, list) and len(rows) != num_microbatches:
            self.wrong(f"work lists {len(rows)} micro-batches of {num_microbatches}: give each, or one mean object")
        found = []
        for row in rows:
            unknown = sorted(set(row) - set(_WORK_KEYS))
            bad = sorted(key for key, value in row.items() if key in _WORK_KEYS and not _is_amount(value))
            if unknown:
                self.wrong(f"work holds {', '.join(unknown)}: use {', '.join(_WORK_KEYS)}")
            if bad:
                self.wrong(f"work's {', '.join(bad)} cannot be read: give numbers, from 0 to {_MOST:g}")
            if unknown or bad:
                return None
            found.append(_work_row(row))
        matrix = np.array(found)
        return matrix if isinstance(given, list) else np.repeat(matrix, num_microbatches or 1, axis=0)


def _work_row(row: Mapping[str, float]) -> list[float]:
    """One micro-batch in WORK_TERMS. Squares not given: rows x rows of one image or sample, or of all in one."""
    values = {"microbatches": 1.0, **{key: float(value) for key, value in row.items()}}
    for rows, segment in (("patches", "patches_per_image"), ("tokens", "tokens_per_sample")):
        amount = values.setdefault(rows, 0.0)
        square = values.setdefault(f"{rows}_sq", amount * values.get(segment, amount))
        values.setdefault(f"{rows}_windowed", square)
    return [values[name] for name in WORK_TERMS]


def _unfold(entry: str) -> list[str]:
    """ "blocks[0..2]" as blocks.0, blocks.1, blocks.2."""
    match = _RANGE.match(entry)
    if match is None:
        return [entry]
    return [f"{match['stem']}.{i}" for i in range(int(match["first"]), int(match["last"]) + 1)]


def _is_amount(value: Any, least: float = 0, most: float = _MOST) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and least <= value <= most


def _is_count(value: Any, least: int = 0) -> bool:
    return isinstance(value, int) and _is_amount(value, least, MAX_COUNT)


def _is_counts(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and set(value) <= set(_COUNTED)
        and all(isinstance(n, int) and _is_amount(n, most=math.inf) for n in value.values())
    )


_COUNT = (partial(_is_count, least=1), f"a whole number from 1 to {MAX_COUNT}")
_SECONDS = (partial(_is_amount, least=MIN_S, most=MAX_S), f"seconds, from {MIN_S:g} to {MAX_S:g}")
_SOUND: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("num_microbatches", "tp", "dp"), _COUNT),
    **dict.fromkeys(("iteration_s", "stage_s"), _SECONDS),
    "peak_bytes": (partial(_is_amount, least=1), f"bytes, from 1 to {_MOST:g}"),
    "recompute": (_is_count, "numbers of blocks"),
}
"""What a value, or each of a list, must be; and how that is said."""
