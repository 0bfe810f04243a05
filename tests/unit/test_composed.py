"""Towers and language models put together by bench/published_models.py."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from trimtab import describe

sys.path.append(str(Path(__file__).parents[2] / "bench"))

from published_models import composed_model, parts

TOWERS = parts()["towers"]
PUBLISHED_BILLIONS = {  # EVA-CLIP: arXiv 2402.04252; language models: their model cards
    "EVA-CLIP-1B": 1.0,
    "EVA-CLIP-4B": 4.4,
    "EVA-CLIP-8B": 7.5,
    "EVA-CLIP-18B": 17.5,
    "InternLM2-20B": 19.86,
    "Qwen1.5-14B": 14.17,
    "Qwen1.5-32B": 32.5,
    "Qwen1.5-72B": 72.3,
    "Qwen1.5-110B": 111,
    "Llama3-8B": 8.03,
    "Llama3-70B": 70.6,
    "Yi-6B": 6.06,
    "Yi-34B": 34.4,
}


@pytest.mark.parametrize("name", PUBLISHED_BILLIONS)
def test_parts_have_the_parameters_that_were_published(name):
    tower, language = (name, "Llama3-8B") if name in TOWERS else ("EVA-CLIP-1B", name)
    model = composed_model(tower, language)
    params = model.num_tower_params("vision" if name in TOWERS else "language")
    assert params == pytest.approx(PUBLISHED_BILLIONS[name] * 1e9, rel=0.015)


def test_a_combination_is_a_model_with_a_name_and_tiles():
    model = composed_model("EVA-CLIP-18B", "Qwen1.5-110B")
    assert model.name == "EVA-CLIP-18B + Qwen1.5-110B"
    assert model.image_rule.count(1792, 896).tokens == 9 * 256


def test_the_papers_model_is_the_shipped_one_layer_by_layer():
    composed, shipped = composed_model("InternVL-6B", "InternLM2-20B"), describe("InternVL-Chat-V1-5")
    assert composed.layers == shipped.layers
    assert composed.image_rule == shipped.image_rule
