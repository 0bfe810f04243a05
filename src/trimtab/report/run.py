"""A run against its plan, as a section of the page and as lines of text."""

import math
from collections.abc import Sequence

import numpy as np

from trimtab.plan.file.figures import PlanDetails
from trimtab.plan.runs import RunLog, StepRecord, compare_times
from trimtab.report.table import clean, count_scale, esc, memory_scale, percent, section, tile, time_scale
from trimtab.units import format_ratio


def run_section(details: PlanDetails, log: RunLog) -> str:
    """Return the tiles, and what was compared; memory where the devices are the plan's."""
    tiles = "".join(tile(*figure) for figure in run_figures(details, log))
    said = [*run_sentences(details, log), *_memory_sentence(log)]
    return section("Training run", " ".join(esc(x, 600) for x in said), f'<dl class="tiles">{tiles}</dl>')


def run_sentences(details: PlanDetails, log: RunLog) -> list[str]:
    """Say where the run was, and what may be compared."""
    header, planned = log.header, details.plan.decisions
    where = (
        f"{_count(len(log.own), 'step')} on {clean(header.device, limit=80)} as dp {header.dp} x pp {header.pp}, "
        f"{header.dtype}, {clean(header.attention, limit=40)} attention."
    )
    sentences = [where]
    if log.others:
        sentences.append(
            f"{_count(len(log.others), 'other step')} of this run, on other devices or settings, count only in the "
            "loss."
        )
    lost = sum(not math.isfinite(record.loss) for record in log.steps)
    if lost:
        sentences.append(f"{_count(lost, 'step')} had a loss that is no finite number.")
    num_fillers = sum(record.num_fillers for record in log.steps)
    if num_fillers:
        steps = sum(record.num_fillers > 0 for record in log.steps)
        sentences.append(
            f"{_count(num_fillers, 'filler')} in {_count(steps, 'step')} stood for samples that could not be read."
        )
    if shared := [record for record in log.own if record.patches_encoded]:
        sentences.append(_image_load(shared, over_replica=header.vision_dp == "replica"))
    if not log.comparable:
        sentences.append(f"The plan's times are for {clean(header.planned_device, limit=80)}, so nothing is compared.")
        return sentences
    if header.dp != planned.parallel.dp:
        sentences.append(f"The plan's times are for dp {planned.parallel.dp}, the run had dp {header.dp}.")
    training = details.plan.inputs.training
    if training.dtype != {"float32": "fp32", "bfloat16": "bf16"}.get(header.dtype):
        sentences.append(f"The plan's times are for {clean(training.dtype, limit=20)}, the run was in {header.dtype}.")
    if training.dtype != "fp32" or (training.zero_stage and planned.parallel.dp > 1):
        sentences.append(
            f"The plan's memory is for {clean(training.dtype, limit=20)} weights and ZeRO {training.zero_stage}; the "
            "run held weights, gradients and optimizer state in float32, whole on every data-parallel rank."
        )
    return sentences


def _image_load(steps: Sequence[StepRecord], *, over_replica: bool) -> str:
    """Write the load of the rank that each step waits for, over the mean; patches by rank."""
    over_mean = []
    for counts in ([r.patches_encoded for r in steps], [r.patches_held for r in steps]):
        table = np.array(counts, np.float64)  # (steps, dp)
        over_mean.append(float(table.max(1).sum() / max(table.mean(1).sum(), 1.0)))
    by_rank = ", ".join(f"{n:,}" for n in np.array([r.patches_encoded for r in steps]).sum(0).tolist())
    if over_replica:
        return (
            f"Every rank of a pipeline encoded its share of the images before the stages ran: the most loaded of a "
            f"step {over_mean[0]:.2f} of the mean's ViT patches; by rank of the first pipeline {by_rank}."
        )
    return (
        f"Data-parallel ranks shared their images: the most loaded of a step encoded {over_mean[0]:.2f} of the mean's "
        f"ViT patches, and would have encoded {over_mean[1]:.2f} alone; by rank {by_rank}."
    )


def run_lines(details: PlanDetails, log: RunLog) -> list[str]:
    """The same for a terminal, one fact a line."""
    return [
        *run_sentences(details, log),
        *(f"  {name}: {figure}; {meaning}" for name, figure, meaning in run_figures(details, log)),
        *(f"  {sentence}" for sentence in _memory_sentence(log)),
    ]


def _memory_sentence(log: RunLog) -> list[str]:
    """Compare memory; nothing where the plan is for other devices."""
    if not log.comparable:
        return []
    measured, planned = log.warm[-1].peak_memory_bytes, log.header.planned_memory_bytes
    memory = memory_scale([*planned, *measured])
    pairs = enumerate(zip(measured, planned, strict=True))
    devices = (f"rank {i} {memory.number(own)} of {memory.text(plan)}" for i, (own, plan) in pairs)
    return [f"Peak memory against the plan's: {'; '.join(devices)}."]


def run_figures(details: PlanDetails, log: RunLog) -> list[tuple[str, str, str]]:
    """Name, figure, and what it is compared with or means; the most wanted first."""
    median = log.median_step_s()
    step, tokens = time_scale([median]), count_scale([_tokens_per_s(log)])
    against = "median; another device than the plan's"
    figures = []
    if log.comparable:
        found = compare_times(log, band=details.plan.estimates.time_error)
        inside, band = percent(found.share_inside, digits=0), percent(found.band, digits=0)
        against = f"planned {step.text(found.planned_s)}; {inside} of steps within ± {band}"
        figures.append(("Measured against planned", format_ratio(found.ratio), "median of the steps' ratios"))
    waiting = f"{percent(_waiting(log))} of the time waiting for samples"
    last, first = log.steps[-1], log.steps[0]
    return [
        ("Step time, measured", step.text(median), against),
        *figures,
        ("Tokens per second", tokens.number(_tokens_per_s(log)), waiting),
        ("Loss", f"{last.loss:.4f}", f"step {last.step}; {first.loss:.4f} at step {first.step}"),
    ]


def _tokens_per_s(log: RunLog) -> float:
    return sum(record.num_tokens for record in log.warm) / sum(record.step_s for record in log.warm)


def _waiting(log: RunLog) -> float:
    return sum(record.data_s for record in log.warm) / sum(record.step_s for record in log.warm)


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}" if number == 1 else f"{number:,} {what}s"
