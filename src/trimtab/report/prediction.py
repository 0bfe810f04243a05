"""What a given run is expected to take, in a terminal: sentences, and a row for every stage."""

from __future__ import annotations

from dataclasses import replace

from rich.console import Console
from rich.text import Text

from trimtab.plan.predict import Prediction
from trimtab.report.plan_tables import variant_stages
from trimtab.report.table import print_table
from trimtab.report.text import MAX_STAGE_ROWS
from trimtab.report.words import clean, idle_sentence
from trimtab.units import format_bytes, format_degrees, format_number, format_seconds


def prediction_sentences(found: Prediction) -> tuple[str, ...]:
    """Shape, time, memory, waiting and how far to trust them, a sentence or two each."""
    ran = found.variant
    time_band, memory = found.profile.time_error, found.budget
    peak = max(held.total_bytes for held in ran.memory)
    steps = len(ran.step_s)
    return (
        f"{found.cluster.num_devices} {found.cluster.device.name} as {format_degrees(found.dims)}, "
        f"{found.num_microbatches} micro-batches a rank and step ({ran.packs}).",
        f"A step takes {format_seconds(found.mean_step_s)} in the mean, {format_seconds(found.expected_step_s)} with "
        f"jitter of {100 * found.cluster.jitter:g} % a device, {format_seconds(found.p95_step_s)} or more in one of "
        f"20: {format_number(found.samples_per_s)} samples/s, {format_seconds(ran.epoch_s)} for the "
        f"{found.num_samples:,} samples in {steps:,} steps.",
        f"The fullest device is expected to hold {format_bytes(peak)} of {format_bytes(memory.total_bytes)}: "
        f"{memory.band.verdict(peak / memory.total_bytes)}.",
        idle_sentence(ran),
        f"Seconds are within {time_band:.0%}, bytes within {memory.band.half_width:.0%} of measured runs, as far as "
        "is known (docs/published-runs.md).",
        *found.notes,
    )


def print_prediction(found: Prediction, console: Console) -> None:
    """Sentences, then the stages."""
    for sentence in prediction_sentences(found):
        console.print(Text(clean(sentence)))
    console.print()
    stages = variant_stages(found.model, found.variant, most=MAX_STAGE_ROWS)
    print_table(replace(stages, title="Stages, at the mean micro-batch; memory at the largest"), console)
