"""Families that are described by asking are mapped and loaded as the others are. Needs torch and Transformers."""

import pytest
import torch
from rounding import assert_close
from shrunk_models import make_shrunk
from simulated_devices import simulated

from trimtab.models.asking.model import build, describe_model
from trimtab.models.description import description_bytes, read_description
from trimtab.placement.bytes import inference_table, modules_of, parts_of
from trimtab.placement.machine import Gpu, Machine, Workload
from trimtab.placement.place import place
from trimtab.runtime.data.packing import text_ids
from trimtab.runtime.placing.load import load_placed
from trimtab.specs import CacheSpec

GENERATE = {"max_new_tokens": 3, "min_new_tokens": 3, "do_sample": False}


def described(model):
    return describe_model(build(model.config))


# gated delta layers; an encoder and a decoder that share tables; latent attention; states that layers share
@pytest.mark.parametrize("family", ["qwen3_5", "florence2", "mistral_large4", "smolvlm", "blip"])
@torch.no_grad()
def test_a_described_family_is_loaded_by_its_map_and_answers_as_before(family, tmp_path):
    model = make_shrunk(family)
    model.save_pretrained(tmp_path)
    spec = described(model)
    ids = text_ids(model)[5:17][None]
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if family == "blip":
        inputs["pixel_values"] = torch.randn(1, 3, 56, 56)
    tokens = model.generate(**{k: v.clone() for k, v in inputs.items()}, **GENERATE)
    more = {"decoder_input_ids": ids[:, :4]} if family == "florence2" else {}
    logits = model(**inputs, **more).logits
    parts, homes = parts_of(spec), (0, "cpu", 1, "disk", 2)
    ends = [parts.embed + parts.head] if parts.tied else [parts.embed, parts.head]
    units = [*parts.vision, *ends, *parts.blocks]
    placed = {
        name: 0 if spec.layers[layer].bare else homes[i % len(homes)]
        for i, unit in enumerate(units)
        for layer in unit.layers
        for name in modules_of(spec, layer)
    }
    with simulated():
        spread = load_placed(tmp_path, placed, offload_folder=tmp_path / "offload")
        assert_close(spread(**inputs, **more).logits.cpu(), logits, family)
        assert torch.equal(spread.generate(**{k: v.clone() for k, v in inputs.items()}, **GENERATE).cpu(), tokens)


@pytest.mark.parametrize("family", ["qwen3_5", "mistral4", "gemma4"])
def test_the_cache_of_every_layer_is_the_one_that_its_own_code_makes(family):
    """States of linear attention, compressed keys and values, sliding windows: against the cache of a real forward."""
    model = make_shrunk(family, changes={"text_config.sliding_window": 64} if family == "gemma4" else None)
    spec = described(model)
    assert read_description(_parsed(description_bytes(spec)), source="it") == spec
    ids = text_ids(model)[5:29][None]
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    counted = sum(_bytes(x) for layer in cache.layers for x in vars(layer).values())
    table = inference_table(spec, Workload(seq_len=ids.shape[1], dtype="fp32"))
    in_half = sum(
        x.cache.bytes_per_sequence for x in spec.layers if x.cache
    )  # states of 16 bits are twice as wide here
    assert table.kv_prompt.sum() <= counted <= table.kv_prompt.sum() + in_half
    assert (counted == table.kv_prompt.sum()) == (not in_half)
    if family == "qwen3_5":
        assert any(x.cache and not x.cache.values_per_token and x.cache.bytes_per_sequence for x in spec.layers)
    if family == "mistral4":
        assert CacheSpec(values_per_token=24.0) in [x.cache for x in spec.layers]  # 16 of the low rank, 8 turned


def test_buffers_lie_with_a_layer_and_are_counted():
    model = make_shrunk("kosmos-2")
    spec = described(model)
    held = sum(x.numel() * x.element_size() for x in (*model.parameters(), *model.buffers()))
    found = inference_table(spec, Workload(dtype="fp32")).weights.sum()
    positions = next(x for x in spec.layers if "text_model.model.embed_positions" in x.companions)
    assert positions.extra_bytes > 0
    tables = sum(x.numel() * 2 for n, x in model.named_buffers() if n.endswith("weights"))  # made in the model's dtype
    assert found == held - tables
    machine = Machine(gpus=tuple(Gpu(index=i, free_bytes=2**22) for i in range(2)), context_bytes=0)
    assert "text_model.model.embed_positions" in place(spec, machine, Workload(seq_len=8, dtype="fp32")).device_map


def _bytes(value):
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size() if value.dim() else 0  # a count of tokens is no state
    parts = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return sum(_bytes(x) for x in parts)


def _parsed(content):
    import json

    return json.loads(content)
