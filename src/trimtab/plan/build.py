"""From a model, sample sizes and a cluster to a plan: start reading here, `make_plan` is the whole program."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from trimtab.errors import PartitionError, PlanError, join_problems, refuse_type
from trimtab.files import write_atomically, written_together
from trimtab.options import VisionGroup
from trimtab.partition.assess import SplitResult
from trimtab.plan.decide.advice import (
    describe_tie,
    explain_misfit,
    find_tips,
    form_estimates,
    tied_settings,
    vision_sentences,
)
from trimtab.plan.decide.case import MemoryBudget, pack_case, pair_sentences
from trimtab.plan.decide.compare import compare_variants, explain_losses
from trimtab.plan.decide.epoch import Epoch, open_epoch
from trimtab.plan.decide.groups import GROUPS, group_degree
from trimtab.plan.decide.members import default_global_batch
from trimtab.plan.decide.search import Tiers, choose_setting
from trimtab.plan.decide.setting import EQUAL, ChosenSetting, Priced
from trimtab.plan.decide.stages import ABOUT_SPLIT, Expressible, SplitChoice, best_expressible, choose_split, epoch_s
from trimtab.plan.decide.towers import (
    MUST_GAIN,
    SharedSplit,
    VisionChosen,
    choose_vision,
    least_epoch_s,
    rank_work,
    settings_apart,
    settings_own,
    split_own,
    whole_tower,
)
from trimtab.plan.decide.work import band_sentence, host_sentences
from trimtab.plan.file.figures import PlanDetails, assemble_plan
from trimtab.plan.file.yaml import plan_to_yaml
from trimtab.plan.options import PlanOptions, PlanOrigin, VisionChoice
from trimtab.specs import ClusterSpec, FloatArray, ModelSpec, SampleTable

Progress = Callable[[str, int, int], None]
"""Called with a step's name, what is done of it, and how much there is."""

Within = Callable[[ModelSpec, int], Expressible]
"""What may be decided of a model at a pipeline degree."""

_NARROWED = f"{ABOUT_SPLIT[1]}with the same packs, within what the framework of --for can run."


_MOST_SHARED, _SHARING_GAINS = 4, 1.3  # settings that are tried with shared images, and what that may gain
_SEARCH_GAINS = 1.05  # what the search on the epoch's own steps may gain for a pipeline, over its price at mean packs
_MOST_OPEN = 1  # other settings at which forms of sharing are simulated, where the form is left open
_ALIKE = 0.9  # of what a setting's own price is above its bound, with its images shared
_OF_THE_DECODER = ("dp", "pp", "tp", "cp", "num_microbatches", "max_patches", "max_tokens")  # if its grid is its own
_MOST_DEVICES_A_SAMPLE = 128  # a replica of the model is no larger: tp 8 x pp 16


def make_plan(
    model: ModelSpec,
    samples: SampleTable,
    cluster: ClusterSpec,
    options: PlanOptions | None = None,
    *,
    origin: PlanOrigin | None = None,
    progress: Progress | None = None,
    within: Within | None = None,
) -> PlanDetails:
    """Decide packs, stages and recompute; say what they are expected to cost next to the unbalanced baseline.

    Use this for the whole decision, as `trimtab plan` does; `write_plan` saves what it returns.

    The same inputs and options give the same plan, byte for byte. Raises `PackingError` for samples over the limits,
    `PartitionError` when no split fits the memory, `PlanError` for options that contradict the cluster or the data.

    `within`: what may be decided, as `find_target(name).can` says of a framework; the fastest degrees are taken at
    which something of that fits.

    >>> import numpy as np
    >>> from trimtab import PlanOptions, SampleTable, describe, make_plan, parse_cluster
    >>> patches, tokens = np.full(64, 1025), np.full(64, 400)
    >>> samples = SampleTable.of(patches, tokens)
    >>> model, cluster = describe("InternVL-Chat-V1-5"), parse_cluster("8xA100-80GB")
    >>> made = make_plan(model, samples, cluster, PlanOptions(pp=4, tp=2))
    >>> made.plan.decisions.parallel.dp, made.variants[-1].fits
    (1, True)
    """
    options, origin = options or PlanOptions(), origin or PlanOrigin()
    refuse_type("model", model, ModelSpec, "describe(name or folder)")
    refuse_type("samples", samples, SampleTable, "size_samples(...).table")
    refuse_type("cluster", cluster, ClusterSpec, 'parse_cluster("32xA100-80GB")')
    refuse_type("options", options, PlanOptions, "PlanOptions(pp=4)")
    tiers = None
    if within is not None:
        can = within(model, options.pp or 1)
        model, tiers = replace(model, forbidden_cuts=model.forbidden_cuts | can.forbidden_cuts), can.tiers
    epoch = open_epoch(model, samples, options)
    samples, rows, budget, asked = epoch.samples, epoch.rows, MemoryBudget.of(cluster, options), options
    if cluster.num_devices > _MOST_DEVICES_A_SAMPLE * len(rows):
        raise PlanError(f"{cluster.num_devices} devices have {len(rows)} samples: give more data, or fewer devices")
    options, chosen = _choose(model, epoch, cluster, asked, budget, tiers, _step(progress, "settings"))
    settled = _settle(model, epoch, cluster, options, budget, chosen, within)
    tried, case, found, split = settled.tried, settled.vision.best.case, settled.vision.best.found, settled.split
    setting, options_of_search, options = case.setting, options, case.options
    variants = compare_variants(
        case, split.stages, without=settled.without, elsewhere=tried.listed, progress=_step(progress, "simulation")
    )
    tied = () if asked.vision.group == "own" else tied_settings(tried)
    tips = find_tips(model, epoch.drawn, cluster, options_of_search, tied) if len(tied) > 1 else ()
    return assemble_plan(
        case,
        split,
        variants,
        origin=origin,
        mixture=epoch.sources,
        searched=found.searched,
        settings=tried.listed,
        setting_error=tried.error,
        tips=tips,
        forms=form_estimates(settled.vision),
        assumptions=(
            *epoch.notes,
            *batch_assumption(cluster, asked, options, len(rows)),
            *tried.sentences(),
            *describe_tie(tied, tips),
            *(found.sentences() if within is None else (_NARROWED,)),
            *vision_sentences(settled.vision),
            *explain_losses(variants),
            *model.notes,
            band_sentence(setting.profile, model, case.problem.work_mean, cluster),
            *host_sentences(setting.profile, case.problem.work_mean),
            *pair_sentences(case),
            *setting.profile.assumptions,
        ),
    )


def _choose(
    model: ModelSpec,
    epoch: Epoch,
    cluster: ClusterSpec,
    asked: PlanOptions,
    budget: MemoryBudget,
    tiers: Tiers | None,
    progress: Callable[[int, int], None] | None,
) -> tuple[PlanOptions, ChosenSetting]:
    """Choose the global batch, where none was asked for, and the settings that fit with it.

    Degrees asked for are the decoder's, where the tower has devices of its own: the single grid's are left open.
    """
    names = _OF_THE_DECODER if asked.vision.group == "own" else ()
    decoder: dict[str, Any] = {name: getattr(asked, name) for name in names}
    left_open: dict[str, Any] = dict.fromkeys(decoder)
    options = asked = replace(asked, **left_open)
    if not asked.fills_packs:
        options = replace(asked, global_batch=default_global_batch(cluster, asked, len(epoch.rows)))
    while True:
        try:
            found = choose_setting(model, epoch.drawn, cluster, options, budget, tiers=tiers, progress=progress)
            return replace(options, **decoder), found
        except PartitionError as error:
            # GPipe holds all packs of a step: fewer samples a step may fit, where nobody asked for so many
            if asked.global_batch is not None or options.schedule != "GPipe" or (options.global_batch or 1) == 1:
                advice = explain_misfit(model, epoch.drawn, cluster, options, budget)
                raise PartitionError(f"{error}\n{advice}".rstrip()) from None
            options = replace(options, global_batch=(options.global_batch or 1) // 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Settled:
    """The setting that is taken, and the stages at it."""

    tried: ChosenSetting  # those before it left out
    without: SplitChoice | None  # where no image is shared; None: the tower has devices of its own
    vision: VisionChosen
    split: SplitResult


def _settle(
    model: ModelSpec,
    epoch: Epoch,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    chosen: ChosenSetting,
    within: Within | None,
) -> _Settled:
    """The best setting; with `within` the best at which something of that fits.

    Where images may be shared, settings that are slower without that are tried too, and the shortest epoch wins. So is
    the best pipeline where the best setting has none: it is searched on the epoch's own steps, which its price at mean
    packs does not hold.
    """
    group = chosen.best.options.vision.group
    if group == "own":
        if within is not None:
            raise PlanError("towers=own is planned without --for: leave it out, then export to megatron-bridge")
        grid = _settle(model, epoch, cluster, options, budget, _on_one_grid(chosen), None).vision.best
        return _settle_own(model, epoch, cluster, options, budget, chosen, grid)
    if group == "auto" or group == "shared":
        return _settle_open(model, epoch, cluster, options, budget, chosen, within)
    left, most = list(chosen.by_preference), 1
    if group != "one-grid":
        # of one rank there is nothing to share
        left = [x for x in left if group_degree(group, x.setting.dims) > 1] or left
        left, most = [x for x in left if x.samples_per_s * _SHARING_GAINS >= left[0].samples_per_s], _MOST_SHARED
    elif left[0].setting.dims.pp == 1:
        near = [
            x for x in left[1:] if x.setting.dims.pp > 1 and x.samples_per_s * _SEARCH_GAINS >= left[0].samples_per_s
        ]
        if near:
            rival = max(near, key=lambda x: x.samples_per_s)
            left, most = [left[0], rival, *(x for x in left[1:] if x is not rival)], 2
    settled = list[_Settled]()
    for priced in left:
        if (found := _settle_one(model, epoch, cluster, budget, chosen, priced, within)) is not None:
            settled.append(found)
        if len(settled) == most:
            break
    if group == "replica" and within is None:
        asked = replace(options, vision=replace(options.vision, pooling=None))
        known = {(x.tried.best.setting.dims, x.tried.best.options.sharding) for x in settled}
        for _, priced in settings_apart(model, epoch.drawn, cluster, asked, budget, below_s=math.inf):
            if (priced.setting.dims, priced.options.sharding) in known:
                continue
            try:
                one = _settle_one(model, epoch, cluster, budget, chosen, priced, None)
            except (PartitionError, PlanError):  # its packs do not fit, on one grid or with features
                continue
            settled += [] if one is None else [one]
    if not settled:
        divisions = {x.setting.dims for x in chosen.considered}
        raise PartitionError(
            f"none of {len(divisions)} divisions runs so: plan with other degrees, ZeRO or packs, or without --for"
        )
    shortest = min(x.vision.best.epoch_s for x in settled)
    alike = (1 + EQUAL) * shortest if group == "one-grid" else shortest
    return next(x for x in settled if x.vision.best.epoch_s <= alike)  # of those alike the first by preference


def _settle_open(
    model: ModelSpec,
    epoch: Epoch,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    chosen: ChosenSetting,
    within: Within | None,
) -> _Settled:
    """The best single grid, or a form of sharing that gains 2 % over it, at its own setting or at another.

    Forms at other settings are tried where their bound gains that, the least bound first.
    """
    replica = within is None and chosen.best.options.vision.group == "auto"
    # 1. the best single grid, as without any sharing, and what forms do at its setting
    grid = _settle(model, epoch, cluster, options, budget, _on_one_grid(chosen), within)
    vision = chosen.best.options.vision
    case = replace(grid.vision.best.case, options=replace(grid.vision.best.case.options, vision=vision))
    assert grid.without is not None, "its tower is on the decoder's grid"
    shared = choose_vision(case, grid.without, replica=within is None)
    settled = [replace(grid, vision=shared)]
    if shared.best.case.vision is not None:
        here = replace(settled[0], split=shared.best.found.split)
        hosted = here if within is None else _within_host(here, model, within)
        settled = [grid if hosted is None else hosted]
    limit_s = grid.vision.best.epoch_s / MUST_GAIN
    # 2. other settings, the least expected first; those of a decoder alone come with their own packs
    whole, dims = whole_tower(model, cluster, options), case.setting.dims
    decoder = replace(options, ep=options.ep or dims.ep, etp=options.etp or dims.etp)  # experts are divided as there
    expected = [(_expected_s(model, epoch, x, whole, replica=within is None), x) for x in chosen.considered]
    if replica:
        num, below_s = len(epoch.rows), limit_s / len(epoch.rows)
        slow = {x.setting.dims for seconds, x in expected if seconds > limit_s}
        apart = settings_apart(model, epoch.drawn, cluster, decoder, budget, below_s=below_s, without=slow)
        expected += [(num * seconds, priced) for seconds, priced in apart]
    known = {(case.setting.dims, case.options.sharding)}
    for seconds, priced in sorted(expected, key=lambda pair: pair[0]):
        name = priced.setting.dims, priced.options.sharding
        if seconds > limit_s or len(known) > _MOST_OPEN:
            break
        if name in known:
            continue
        known.add(name)
        try:
            one = _settle_one(model, epoch, cluster, budget, chosen, priced, within, one_grid_s=limit_s * MUST_GAIN)
        except (PartitionError, PlanError):  # its packs do not fit, on one grid or with features
            continue
        settled += [] if one is None else [one]
    # 3. devices of the tower's own
    if replica:
        try:
            below_s = limit_s / len(epoch.rows)
            own = _settle_own(model, epoch, cluster, decoder, budget, chosen, grid.vision.best, below_s=below_s)
            settled.append(own)
        except (PartitionError, PlanError):  # nothing gains so much by its bound, or runs so
            pass
    gaining = [x for x in settled[1:] if x.vision.best.case.vision is not None and x.vision.best.epoch_s <= limit_s]
    best = min([settled[0], *gaining], key=lambda x: x.vision.best.epoch_s)
    every = tuple(split for x in (grid, *settled) for split in x.vision.tried)
    return replace(best, vision=replace(best.vision, elsewhere=every))


def _on_one_grid(chosen: ChosenSetting) -> ChosenSetting:
    """The same settings, no image shared."""
    plain = (replace(x, options=replace(x.options, vision=VisionChoice())) for x in chosen.considered)
    return replace(chosen, considered=tuple(plain))


def _settle_own(
    model: ModelSpec,
    epoch: Epoch,
    cluster: ClusterSpec,
    options: PlanOptions,
    budget: MemoryBudget,
    chosen: ChosenSetting,
    grid: SharedSplit,
    *,
    below_s: float | None = None,
) -> _Settled:
    """The fastest with the tower on devices of its own; the best single grid is what it is compared with.

    `below_s`: seconds a sample that it has to take less. Raises `PartitionError` where nothing does by its bound.
    """
    # each setting of the decoder, its tower's activations kept or not
    tried, misfits = list[tuple[Priced, SharedSplit]](), list[str]()
    for seconds, priced, num in settings_own(model, epoch.drawn, cluster, options, budget, below_s=below_s):
        if below_s is not None and seconds > below_s:
            continue
        try:
            case = pack_case(model, epoch, cluster, budget, priced.setting, priced.options)
            tried += [(priced, found) for found in split_own(case, num)]
        except (PartitionError, PlanError) as error:
            misfits.append(str(error))
    if not tried:
        raise PartitionError(join_problems(misfits or ["no part of the devices holds the decoder alone: use more"]))
    priced, best = min(tried, key=lambda x: x[1].epoch_s)
    # the search on the epoch's own steps, where it may still be taken
    most_s = math.inf if below_s is None else below_s * len(epoch.rows) * _SEARCH_GAINS
    found = choose_split(best.case, search=best.epoch_s <= most_s)
    best = replace(best, found=found, epoch_s=epoch_s(best.case, found.split.stages))
    rate, steps = len(best.case.packing.indices) / best.epoch_s, best.case.schedule.num_steps
    priced = replace(priced, step_s=best.epoch_s / steps, samples_per_s=rate, peak_bytes=found.split.peak_bytes)
    vision = VisionChosen(best=best, tried=(grid, best))
    return _Settled(tried=chosen.taking(priced), without=None, vision=vision, split=found.split)


def _expected_s(model: ModelSpec, epoch: Epoch, priced: Priced, whole: FloatArray, *, replica: bool) -> float:
    """The least that any form may take at a setting; infinite where it has none.

    That is its bound, which is taken to be missed by nearly as much as the setting's own price misses its bound.
    """
    work, dims = rank_work(model, epoch.drawn, priced), priced.setting.dims

    def least_s(group: VisionGroup | None) -> float:
        return least_epoch_s(priced.setting, priced.options, group, work, whole)

    groups = [x for x in GROUPS if group_degree(x, dims) > 1 and (replica or x != "replica")]
    missed = _ALIKE * len(epoch.rows) / priced.samples_per_s / least_s(None)
    return max(1.0, missed) * min(map(least_s, groups), default=math.inf)


def _settle_one(
    model: ModelSpec,
    epoch: Epoch,
    cluster: ClusterSpec,
    budget: MemoryBudget,
    chosen: ChosenSetting,
    priced: Priced,
    within: Within | None,
    *,
    one_grid_s: float = math.inf,
) -> _Settled | None:
    """The setting with its packs, grids and stages; None where a framework can run none of them.

    `one_grid_s`: the epoch of the best single grid, where this setting is only tried for its forms.
    """
    case = pack_case(model, epoch, cluster, budget, priced.setting, priced.options)
    without = choose_split(case, search=one_grid_s == math.inf)
    vision = choose_vision(case, without, replica=within is None, one_grid_s=one_grid_s)
    found = _Settled(tried=chosen.taking(priced), without=without, vision=vision, split=vision.best.found.split)
    return found if within is None else _within_host(found, model, within)


def _within_host(found: _Settled, model: ModelSpec, within: Within) -> _Settled | None:
    """The same on the fastest stages that a framework can run; None where it can run none."""
    case = found.vision.best.case
    stages = best_expressible(case, within(model, case.setting.dims.pp))
    return None if stages is None else replace(found, split=case.problem.assess(stages))


def batch_assumption(
    cluster: ClusterSpec, asked: PlanOptions, options: PlanOptions, num_samples: int
) -> tuple[str, ...]:
    """Return a sentence, where the planner chose the global batch."""
    if asked.global_batch is not None or asked.num_microbatches is not None:
        return ()
    chosen = options.global_batch or default_global_batch(cluster, asked, num_samples)
    if options.fills_packs:
        return (f"No global batch was given: about {chosen} samples a step were aimed at.",)
    if chosen == num_samples < default_global_batch(cluster, asked, 2**62):
        return (f"No global batch was given, and the data holds {chosen} samples: a step takes all of them.",)
    return (f"No global batch was given: every step takes {chosen} samples.",)


def write_plan(details: PlanDetails, folder: Path | str) -> Path:
    """Write plan.yaml and the tables it names into `folder`; the plan last, so that it never names a missing table.

    Use it after `make_plan`: `trimtab train`, `check`, `report` and `export` take the folder.

    >>> import tempfile
    >>> import numpy as np
    >>> from trimtab import SampleTable, check_plan, describe, load_plan, parse_cluster
    >>> tiles = np.arange(200) % 5
    >>> samples = SampleTable.of(1024 * tiles, 256 * tiles + 90, patches_sq=1024**2 * tiles)
    >>> model, cluster = describe("InternVL-Chat-V1-5"), parse_cluster("4xH200")
    >>> details = make_plan(model, samples, cluster, PlanOptions(dp=1, pp=2, tp=2, num_microbatches=8))
    >>> folder = tempfile.mkdtemp()
    >>> path = write_plan(details, folder)
    >>> load_plan(folder) == details.plan, check_plan(folder)
    (True, [])
    """
    refuse_type("details", details, PlanDetails, "make_plan(...)")
    folder = Path(folder)
    path = folder / "plan.yaml"
    with written_together():
        for name, content in details.tables.items():
            write_atomically(folder / name, content)
        write_atomically(path, plan_to_yaml(details.plan))
    return path


def _step(progress: Progress | None, name: str) -> Callable[[int, int], None] | None:
    return None if progress is None else lambda done, total: progress(name, done, total)
