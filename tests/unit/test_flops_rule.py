"""Tests of partition/published.py: the published figures to the printed digit, and our optimum in the same model."""

import itertools
import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest

from refusals import refused
from trimtab.errors import PartitionError
from trimtab.models.describe import describe
from trimtab.partition import pai_notebook
from trimtab.partition.published import UnevenModel, best_split, flops_split, stage_memory, uneven_model

REFERENCE = Path(__file__).parents[2] / "bench" / "data" / "uneven_pp_cases.json"
NOTEBOOK = UnevenModel(
    vision_tokens=16 * 16,  # 224 x 224 in patches of 14 x 14
    patch_values=3 * 14 * 14,
    vision_layers=28,
    vision_hidden=1280,
    vision_ffn=4 * 1280,
    llm_layers=28,
    llm_hidden=3584,
    llm_ffn=18944,
    decoder_tokens=1024,
    vocab_size=152064,
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


def test_fp8_halves_what_products_read():
    first, _last = stage_memory(with_vision(4096), (10, 18), tp=2, fp8=True)
    assert (round(first.vision_bytes / 1e9, 3), round(first.llm_bytes / 1e9, 3)) == (45.550, 15.546)


def test_projector_and_last_stage_by_the_formulas_of_the_text():
    model, b, tp = with_vision(4096), 2, 4
    first, middle, last = stage_memory(model, (8, 10, 10), tp=tp, batch=b)
    assert first.projector_bytes == 16 * 4096 * 3584 + 2 * b * 256 * 4096
    assert last.head_bytes == 16 * 3584 * 152064 / tp + 8 * b * 1024 * 3584 / tp
    assert middle.total_bytes == middle.llm_bytes == last.llm_bytes
    # f = 4 h: 16 (6 h + 12 h^2/tp + 7 h/tp) + 34 b s h/tp of the text
    square = replace(model, llm_ffn=4 * 3584)
    h = 3584
    layer = 16 * (6 * h + 12 * h * h / tp + 7 * h / tp) + 34 * b * 1024 * h / tp
    assert stage_memory(square, (0, 1), tp=tp, batch=b)[1].llm_bytes == pytest.approx(layer, rel=1e-12)


def test_the_case_between_nodes():
    """1792 x 1792 pixels, a ViT of 24 layers, 32 language layers: the notebook prints 5 and 27."""
    model = UnevenModel(
        vision_tokens=128 * 128,
        patch_values=588,
        vision_layers=24,
        vision_hidden=4096,
        vision_ffn=4 * 4096,
        llm_layers=32,
        llm_hidden=4096,
        llm_ffn=14336,
        decoder_tokens=128 * 128 + 2048,
    )
    assert flops_split(model, pp=2).counts == (5, 27)


def test_a_described_model_is_counted_by_its_own_layers_and_patches():
    counted = uneven_model(describe("Qwen2-VL-7B"), image=(224, 224), decoder_tokens=1024)
    own = {**asdict(NOTEBOOK), "patch_values": 2 * 588, "vision_layers": 32}  # two frames a patch; the real depth
    assert asdict(counted) == own
    assert flops_split(counted, pp=2).counts == (13, 15)
    with refused(PartitionError):
        uneven_model(describe("Qwen3-VL-30B-A3B"), image=(224, 224), decoder_tokens=1024)


def test_the_projector_counts_with_the_vision_tower():
    model = replace(NOTEBOOK, vision_layers=0, vision_tokens=2**17)
    layer = model.llm_layer_flops
    assert model.projector_flops > 2 * layer
    middle = math.ceil((model.vision_flops + model.projector_flops + 28 * layer) / 2 / layer)
    assert flops_split(model, pp=2).counts == (28 - middle, middle)


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


def test_the_notebooks_own_names_give_its_printed_figures(capsys):
    reference = json.loads(REFERENCE.read_text())
    sizes = (224, 224, 3, 14, 28)
    decoder = (1024, 28, 3584, 18944)
    for case in reference["cases"]:
        hidden = case["vision_hidden"]
        found = pai_notebook.uneven_pp_parameters_generator(*sizes, hidden, 4 * hidden, *decoder, 2)
        assert found == (case["first"], case["last"])
        tower, patches = pai_notebook.vit_encoder_tflops_calculator(224, 224, 14, 3, 28, hidden)
        assert (tower, patches) == (pytest.approx(with_vision(hidden).vision_flops / 1e12), 256)
    assert pai_notebook.adaptor_tflops_calculator(256, 1280, 3584) * 1e12 == pytest.approx(NOTEBOOK.projector_flops)
    whole, one = pai_notebook.llm_encoder_tflops_calculator(3584, 28, 1024, 18944)
    assert (round(one, 5), whole) == (1.19507, 28 * one)
    memory = reference["memory"]
    hidden, first = memory["vision_hidden"], memory["first_stage_llm_layers"]
    for row in memory["printed_gb"]:
        tower_bytes = pai_notebook.memory_vit_encoder_calculator(*sizes, hidden, 4 * hidden, 1, row["tp"])
        assert round(tower_bytes / 1e9, 3) == row["vision"]
        given = (*sizes, hidden, 4 * hidden, *decoder, first, 1, row["tp"])
        decoder_bytes = pai_notebook.memory_first_pp_rank_calculator(*given)
        assert round(decoder_bytes / 1e9, 3) == row["llm_first_stage"]
        one = pai_notebook.memory_per_transformer_layer_calculator_with_tp(3584, 18944, 1, 1024, row["tp"])
        assert decoder_bytes == first * one
        assert f"memory on first pp rank:{row['first_stage']:.3f} GB" in capsys.readouterr().out
    samples = [pai_notebook.memory_vit_encoder_calculator(*sizes, hidden, 4 * hidden, bs) for bs in (1, 2, 3)]
    assert samples[2] - samples[1] == samples[1] - samples[0] > 16 * 588 * hidden  # the embedding once a sample
