"""Needs torch and Transformers: every layer's parameters equal those of the real model, built on the meta device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import transformers
from real_parameters import assert_same_parameters, build, owner_of
from tiny_models import BARE, ODD_CONFIGS, as_saved, describe_here, make_tiny_model, odd_config, preprocessor_of

from trimtab.models.describe import describe
from trimtab.models.families.known import FAMILIES

ZOO = Path(__file__).parents[2] / "bench" / "data" / "model_zoo.json"


@pytest.mark.parametrize("case", ODD_CONFIGS)
def test_odd_small_configs_have_the_parameters_of_the_real_model(case):
    config = odd_config(case)
    spec = describe_here(config, preprocessor=preprocessor_of(config.model_type, ODD_CONFIGS[case][1]))
    assert_same_parameters(spec, build(config))


def test_every_family_by_hand_that_transformers_has_is_among_the_odd_configs():
    known = set(transformers.CONFIG_MAPPING)
    by_hand = {x for x, family in FAMILIES.items() if x in known and family.describe is not None}
    assert by_hand <= {case[0] for case in ODD_CONFIGS.values()}


ZOO_MODELS = [
    "Qwen2-VL-72B",
    "Qwen2.5-VL-7B",
    "Qwen3-VL-2B",
    "Qwen3-VL-235B-A22B",
]


@pytest.mark.parametrize("name", ZOO_MODELS)
def test_published_models_have_the_parameters_of_the_real_model(name):
    entry = json.loads(ZOO.read_text())["models"][name]
    tied = entry["text_config"]["tie_word_embeddings"]
    config = transformers.AutoConfig.for_model(
        entry["model_type"],
        vision_config=dict(entry["vision_config"]),
        text_config={k: v for k, v in entry["text_config"].items() if k not in ("qk_norm", "n_shared_experts")},
        tie_word_embeddings=tied,
    )
    assert_same_parameters(describe(entry, ask=False), build(config))


# -- what the layers do: order, rows, windows -----------------------------------------------------------------------

RUN_CASES = [
    "llava llama",
    "llava_next",
    "llava_onevision",
    "internvl qwen2",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl tied, biased, taps out of order",
    "gemma3",
    "glm4v_moe",
    "mllama",
]


@pytest.mark.parametrize("case", RUN_CASES)
def test_layers_run_in_the_described_order_on_the_described_rows(case):
    """Real forward pass on the CPU: each layer is entered when its turn comes, and its matrices see its rows."""
    tiny = make_tiny_model(case)
    spec, model, patches, tokens = tiny.spec, tiny.model.eval(), tiny.num_patches, tiny.num_tokens

    entered: list[str] = []
    multiplied = {layer.name: 0 for layer in spec.layers}  # multiply-adds with weights
    dense = {layer.name: True for layer in spec.layers}

    def count(owner: str):
        def hook(module, args, output):
            features_in = module.weight[0].numel()
            multiplied[owner] += output.numel() * features_in

        return hook

    for layer in spec.layers:
        if layer.name in BARE:
            continue
        module = model.get_submodule(layer.name)
        module.register_forward_pre_hook(lambda m, a, name=layer.name: entered.append(name))
        dense[layer.name] = layer.mlp is None or layer.mlp.num_experts is None
    for name, module in model.named_modules():
        if isinstance(module, torch.nn.Linear | torch.nn.Conv2d | torch.nn.Conv3d):
            module.register_forward_hook(count(owner_of(name, multiplied)))
    with torch.no_grad():
        model(**tiny.inputs)

    embed = "model.language_model.embed_tokens"
    described = [x.name for x in spec.layers if x.name not in (embed, *BARE)]
    assert [x for x in entered if x != embed] == described  # text is embedded before or beside the images
    for layer in spec.layers:
        if dense[layer.name] and not (spec.family == "gemma3" and layer.kind == "projector"):  # a bare matrix
            inputs_of = tokens if layer.tower == "language" else patches
            expected = layer.num_matmul_params * layer.rows_per_input * inputs_of
            a = layer.attention
            if a is not None and a.cross:  # whose keys and values are made of the projected image rows
                made = layer.hidden_size * a.num_kv_heads * (a.head_dim + a.value_head_dim)
                (projector,) = spec.indices("projector")
                expected += made * (patches * spec.layers[projector].rows_out_per_input - tokens)
            assert multiplied[layer.name] == pytest.approx(expected), layer.name


def test_expert_layers_count_the_active_experts_only():
    config = odd_config("qwen3_vl_moe")
    spec = describe(as_saved(config), preprocessor=preprocessor_of("qwen3_vl_moe", ODD_CONFIGS["qwen3_vl_moe"][1]))
    layer = next(x for x in spec.layers if x.name == "model.language_model.layers.1")
    attention = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64
    assert layer.num_matmul_params == attention + 6 * 64 + 2 * 3 * 64 * 24
    assert layer.num_params == attention + 6 * 64 + 6 * 3 * 64 * 24 + 2 * 64 + 2 * 16


def test_windows_are_those_of_the_real_vision_tower():
    """Qwen2.5-VL's own window index: no window holds more rows than described, and the largest holds them all."""
    config = odd_config("qwen2_5_vl")
    spec = describe(as_saved(config), preprocessor=preprocessor_of("qwen2_5_vl", ODD_CONFIGS["qwen2_5_vl"][1]))
    windows = [x.attention.window for x in spec.layers if x.tower == "vision" and x.attention is not None]
    assert windows == [64, None, 64, None]
    assert windows[0] == (config.vision_config.window_size // config.vision_config.patch_size) ** 2
    visual = build(config).model.visual
    assert list(visual.fullatt_block_indexes) == [i for i, w in enumerate(windows) if w is None]
