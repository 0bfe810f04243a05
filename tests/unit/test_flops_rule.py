"""Tests of partition/flops_rule.py: the published figures to the printed digit, and our optimum in the same model."""

from __future__ import annotations

import itertools
import json
from dataclasses import replace
from pathlib import Path

import pytest

from trimtab.errors import PartitionError
from trimtab.partition.flops_rule import (
    UnevenModel,
    best_split,
    first_stage_memory,
    flops_split,
)

REFERENCE = Path(__file__).parents[2] / "bench" / "data" / "uneven_pp_cases.json"
NOTEBOOK = UnevenModel(
    image_width=224,
    image_height=224,
    image_channels=3,
    patch_size=14,
    vision_layers=28,
    vision_hidden=1280,
    vision_ffn=4 * 1280,
    llm_layers=28,
    llm_hidden=3584,
    llm_ffn=18944,
    decoder_tokens=1024,
)


def with_vision(hidden):
    return replace(NOTEBOOK, vision_hidden=hidden, vision_ffn=4 * hidden)


@pytest.mark.parametrize(
    ("hidden", "counts", "imbalance", "best", "best_imbalance"),
    [
        (1280, (13, 15), 0.0439, (14, 14), 0.0257),
        (4096, (10, 18), 0.0186, (10, 18), 0.0186),
        (8000, (0, 28), 0.0031, (0, 28), 0.0031),
    ],
)
def test_the_three_worked_cases(hidden, counts, imbalance, best, best_imbalance):
    rule, ours = flops_split(with_vision(hidden), pp=2), best_split(with_vision(hidden), pp=2)
    assert (rule.counts, round(rule.imbalance, 4)) == (counts, imbalance)
    assert (ours.counts, round(ours.imbalance, 4)) == (best, best_imbalance)


def test_flops_of_the_first_case():
    assert round(with_vision(1280).vision_flops / 1e12, 4) == 0.8749
    assert round(NOTEBOOK.llm_layer_flops / 1e12, 5) == 1.19507


@pytest.mark.parametrize(("tp", "vision", "llm", "total"), [(1, 91.255, 31.392, 122.647), (2, 45.653, 15.698, 61.350)])
def test_the_memory_estimate_to_the_printed_digit(tp, vision, llm, total):
    memory = first_stage_memory(with_vision(4096), first=10, tp=tp)
    printed = [round(x / 1e9, 3) for x in (memory.vision_bytes, memory.llm_bytes, memory.total_bytes)]
    assert printed == [vision, llm, total]


def test_the_reference_file_agrees():
    reference = json.loads(REFERENCE.read_text())
    for case in reference["cases"]:
        assert flops_split(with_vision(case["vision_hidden"]), pp=2).counts == (case["first"], case["last"])
    memory = reference["memory"]
    for row in memory["printed_gb"]:
        estimate = first_stage_memory(
            with_vision(memory["vision_hidden"]),
            first=memory["first_stage_llm_layers"],
            tp=row["tp"],
            batch=memory["batch"],
        )
        assert round(estimate.vision_bytes / 1e9, 3) == row["vision"]
        assert round(estimate.llm_bytes / 1e9, 3) == row["llm_first_stage"]
        assert round(estimate.total_bytes / 1e9, 3) == row["first_stage"]


def test_best_split_is_the_best_of_all_counts():
    for hidden, pp in itertools.product((1280, 4096, 8000), (2, 3, 4)):
        model = replace(with_vision(hidden), llm_layers=9)
        vision, layer = model.vision_flops + model.projector_flops, model.llm_layer_flops
        every = [c for c in itertools.product(range(10), repeat=pp) if sum(c) == 9]
        least = min(max(vision + c[0] * layer, *(x * layer for x in c[1:])) for c in every)
        mean = (vision + 9 * layer) / pp
        assert best_split(model, pp=pp).imbalance == pytest.approx(least / mean - 1)


def test_more_stages_follow_the_rule():
    assert flops_split(with_vision(1280), pp=4).counts == (4, 8, 8, 8)
    # a vision tower over its share: the first stage gets no language layer
    assert flops_split(with_vision(8000), pp=3).counts[0] == 0


def test_messages():
    with pytest.raises(PartitionError, match=r"splits into 2 to 28 stages, .* 1 were asked for: choose such a pp"):
        flops_split(NOTEBOOK, pp=1)
    with pytest.raises(
        PartitionError, match=r"cannot deal 28 language layers to 20 stages: its rounding up leaves -\d+"
    ):
        flops_split(NOTEBOOK, pp=20)
