"""Needs torch and Transformers: modelled bytes against bytes counted on the real modules, storage by storage."""

from typing import Any

import pytest
import torch
import transformers
from live_bytes import LiveBytes
from tiny_models import ODD_CONFIGS, describe_here, make_config, make_inputs, preprocessor_of

from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import Workload, batch_of

TEXT_TOKENS = 400
TOLERANCE = 0.10
CASES = [
    *("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe", "internvl qwen2", "llava llama"),
    *("llava phi3", "llava_next", "llava_onevision", "gemma3", "glm4v_moe", "mllama"),
]


class Served:
    """A model wide enough for its tensors to outweigh odds and ends, and one batch of prompts with an image each."""

    def __init__(self, case: str, *, dtype: str = "bf16", attention: str = "sdpa", batch: int = 1) -> None:
        model_type, own, own_text, _ = ODD_CONFIGS[case]
        vision = {"embed_dim": 128, "hidden_size": 256} if model_type == "qwen2_vl" else {"hidden_size": 128}
        if model_type != "qwen2_vl":
            vision["intermediate_size"] = 288
        if model_type == "mllama":
            vision["vision_output_dim"] = 128 * (1 + len(own["intermediate_layers_indices"]))
        if "out_hidden_size" in own:
            vision["out_hidden_size"] = 256
        text = {"hidden_size": 256, "intermediate_size": 448}
        if "moe_intermediate_size" in own_text:
            text["moe_intermediate_size"] = 96
        if model_type in ("qwen2_vl", "qwen2_5_vl"):
            text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 12, 12]}
        config, vision = make_config(case, vision=vision, text=text), {**own, **vision}
        self.spec = describe_here(config, preprocessor=preprocessor_of(model_type, vision))
        numbers = torch.bfloat16 if dtype == "bf16" else torch.float32
        torch.manual_seed(0)
        self.model = transformers.AutoModelForImageTextToText.from_config(
            config, dtype=numbers, attn_implementation=attention
        ).eval()
        made = make_inputs(model_type, vision, self.spec, large=True, batch=batch, behind=TEXT_TOKENS)
        self.inputs = made.inputs
        self.workload = Workload(
            batch=batch,
            seq_len=TEXT_TOKENS + 5,
            max_new_tokens=4,
            dtype=dtype,
            attention=attention,
            padded=False,  # prompts of one length
        )
        self.table = inference_table(self.spec, self.workload, batch_of(self.workload, made.images))

    def run(self) -> tuple[LiveBytes, Any]:
        """The prefill of the prompts: what was alive in it, and the cache that it leaves."""
        cache = transformers.DynamicCache(config=self.model.config.get_text_config())
        with torch.no_grad(), LiveBytes(self.model, [x.name for x in self.spec.layers]) as live:
            live.hold(*self.inputs.values())
            self.model(**self.inputs, use_cache=True, past_key_values=cache, logits_to_keep=1)
        return live, cache

    @property
    def weight_bytes(self) -> int:
        held = (*self.model.parameters(), *self.model.buffers())
        return sum(x.numel() * x.element_size() for x in held)


@pytest.mark.parametrize(
    ("case", "settings"),
    [
        *((case, {}) for case in CASES),
        # on a CPU softmax casts lower precision in a step of its own, which GPUs spare
        *((case, {"attention": "eager", "dtype": "fp32"}) for case in ("qwen2_5_vl", "internvl qwen2")),
        ("qwen2_5_vl", {"dtype": "fp32"}),
        ("qwen3_vl", {"batch": 2}),
        ("mllama", {"batch": 2}),
        ("mllama", {"attention": "eager", "dtype": "fp32"}),
    ],
    ids=str,
)
def test_a_devices_bytes_are_those_counted_on_the_real_modules(case, settings):
    """Weights, the prompts' cache and the largest peak of the prefill: the whole model on one device."""
    served = Served(case, **settings)
    live, cache = served.run()
    table = served.table
    assert table.weights.sum() == served.weight_bytes
    counted_cache = sum(x.untyped_storage().nbytes() for layer in cache.layers for x in (layer.keys, layer.values))
    assert table.kv_prompt.sum() == counted_cache
    peaks = table.prefill + table.cached * table.kv_prompt.sum()  # tower and projector are through before the cache
    live_bytes = int(table.held.sum() + peaks.max())
    counted = served.weight_bytes + live.peak
    assert counted / (1 + TOLERANCE) < served.weight_bytes + live_bytes < counted * (1 + TOLERANCE)


@pytest.mark.parametrize("case", CASES)
def test_every_kind_of_layer_peaks_where_it_is_said_to(case):
    """Layer by layer, and without the weights: ViT blocks of every family, decoder blocks, norms and head."""
    served = Served(case)
    live, _ = served.run()
    table, checked = served.table, 0
    for i, layer in enumerate(served.spec.layers):
        if layer.kind != "block" or layer.name.endswith(".head"):
            continue
        said = int(table.prefill[i] + table.held.sum() + table.kv_prompt[: i + 1].sum())
        assert live.peaks[layer.name] / 1.15 < said < live.peaks[layer.name] * 1.15, layer.name
        checked += 1
    assert checked == len(served.spec.indices("vision", "block")) + len(served.spec.indices("language", "block"))


@pytest.mark.parametrize("case", ["qwen2_5_vl", "gemma3", "llava llama", "mllama"])
def test_the_cache_at_the_end_is_counted_to_the_byte(case):
    served = Served(case)
    cache = transformers.DynamicCache(config=served.model.config.get_text_config())
    with torch.no_grad():
        served.model.generate(
            **served.inputs, past_key_values=cache, max_new_tokens=4, min_new_tokens=4, do_sample=False
        )
    held = sum(x.numel() * x.element_size() for layer in cache.layers for x in (layer.keys, layer.values))
    window = sum(
        int(served.table.kv_full[i])
        for i, layer in enumerate(served.spec.layers)
        if layer.attention is not None and layer.attention.window is not None and layer.tower == "language"
    )
    # a sliding layer keeps one token less than its window, for the next one
    assert served.table.kv_full.sum() * 0.85 < held <= served.table.kv_full.sum()
    if not window:
        assert held == served.table.kv_full.sum()
