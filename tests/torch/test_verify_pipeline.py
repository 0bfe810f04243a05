"""Models of families without a line here, cut into stages that run in one process. Needs torch and Transformers."""

from typing import Any

import pytest
import torch

from refusals import refused

pytest.importorskip("transformers", minversion="5", reason="holds the models that are cut")

import shrunk_models
from cut_models import blocks_of, cut_at, draw_batches
from rounding import BOUNDS
from shrunk_models import make_shrunk

from trimtab.errors import UnsupportedPlanError
from trimtab.runtime.pipeline.build import layers_of, verify_pipeline
from trimtab.runtime.pipeline.cuts import Way

pytestmark = pytest.mark.filterwarnings("ignore")

EXACT = BOUNDS[torch.float32]


@pytest.mark.parametrize(
    "family", ["glm4v", "smolvlm", "qwen3_5", "lfm2_vl", "paligemma", "ernie4_5_vl_moe", "idefics2", "llava_onevision"]
)
def test_stages_that_cut_tower_and_decoder_have_the_models_loss_and_gradients(family):
    model = make_shrunk(family)
    before = {name: p.clone() for name, p in model.named_parameters()}
    batches, with_images = draw_batches(model)
    assert with_images
    layers = layers_of(model, batches[0])
    firsts = [blocks_of(model, "vision", layers)[-1], blocks_of(model, "language", layers)[1], layers[-1]]
    for cuts in (firsts[1:2], firsts[::2], firsts):
        assert verify_pipeline(model, cut_at(layers, cuts), batches).largest <= EXACT
    assert all(torch.equal(p, before[name]) and p.grad is None for name, p in model.named_parameters())


def made(family: str) -> tuple[Any, list[Any], tuple[str, ...]]:
    """A small model, micro-batches of it, and its layers in forward order."""
    model = make_shrunk(family)
    batches, _ = draw_batches(model)
    return model, batches, layers_of(model, batches[0])


def test_a_wire_that_is_left_out_is_noticed(monkeypatch):
    model, batches, layers = made("qwen3_vl")
    stages = cut_at(layers, [blocks_of(model, "language", layers)[1]])
    assert verify_pipeline(model, stages, batches).largest <= EXACT
    alive = Way.alive
    monkeypatch.setattr(Way, "alive", lambda way, cut: tuple(x for x in alive(way, cut) if "features" not in x))
    with refused(UnsupportedPlanError, "layers.1"):
        verify_pipeline(model, stages, batches)


def test_per_layer_embeddings_travel_with_the_hidden_states():
    model, batches, layers = made("gemma4")
    stages = cut_at(layers, [blocks_of(model, "language", layers)[1]])
    assert verify_pipeline(model, stages, batches).largest <= EXACT


def test_shared_keys_and_values_are_not_cut_from_the_layer_that_made_them(monkeypatch):
    kinds = ["full_attention", "full_attention", "full_attention"]
    text = {**shrunk_models.GIVEN["gemma4"]["text_config"], "layer_types": kinds, "num_kv_shared_layers": 1}
    text |= {"num_hidden_layers": len(kinds)}
    monkeypatch.setitem(shrunk_models.GIVEN, "gemma4", {"text_config": text})
    monkeypatch.setattr(shrunk_models, "_cut_layers", lambda config, num: None)
    model, batches, layers = made("gemma4")
    blocks = blocks_of(model, "language", layers)
    assert verify_pipeline(model, cut_at(layers, blocks[1:2]), batches).largest <= EXACT
    with refused(UnsupportedPlanError, "layers.2", "layers.1"):
        verify_pipeline(model, cut_at(layers, blocks[2:]), batches)


def test_a_tower_behind_the_text_that_reads_it_is_refused():
    model, batches, layers = made("internvl")
    text = layers.index("model.language_model.layers.1")
    swapped = [layers[text:-1], (*layers[:text], layers[-1])]
    with refused(UnsupportedPlanError, "model.language_model.layers.1"):
        verify_pipeline(model, swapped, batches)


def test_micro_batches_that_the_model_does_not_take_are_one_sentence():
    model = make_shrunk("internvl")
    batches, _ = draw_batches(model)
    with refused(UnsupportedPlanError):
        layers_of(model, {**batches[0], "pixel_values": torch.zeros(3, 5, 7)})
