"""Needs torch and Transformers: every layer's parameters equal those of the real model, built on the meta device."""

import pytest
import torch
from real_parameters import assert_same_parameters, build, owner_of
from tiny_models import BARE, ODD_CONFIGS, as_saved, describe_here, make_tiny_model, odd_config, preprocessor_of

from trimtab.models.asking.model import describe_fields
from trimtab.models.describe import describe, read_config
from trimtab.models.description import shipped_models

HANDFUL = ("InternVL2-8B", "InternVL3_5-8B-HF", "Qwen2.5-VL-3B", "Qwen3-VL-30B-A3B", "LLaVA-OneVision-7B", "Gemma3-4B")


@pytest.mark.parametrize("case", ODD_CONFIGS)
def test_odd_small_configs_have_the_parameters_of_the_real_model(case):
    config = odd_config(case)
    spec = describe_here(config, preprocessor=preprocessor_of(config.model_type, ODD_CONFIGS[case][1]))
    assert_same_parameters(spec, build(config))


# -- shipped models -------------------------------------------------------------------------------------------------


def published(name: str) -> dict:
    """Its configuration; of a port the one without its gap, which leaves to the weights that nothing is tied."""
    is_port = name.endswith("-HF")
    return {**read_config(name), **({"tie_word_embeddings": False} if is_port else {})}


@pytest.mark.parametrize(
    "name", [pytest.param(x, marks=() if x in HANDFUL else pytest.mark.integration) for x in shipped_models()]
)
def test_what_is_shipped_is_what_transformers_answers(name):
    shipped, asked = describe(name), describe_fields(published(name))
    assert asked.layers == shipped.layers
    for part in ("tied", "vocab_size", "forbidden_cuts", "forbidden_cut_reason", "joined_cuts"):
        assert getattr(asked, part) == getattr(shipped, part), part
    assert set(asked.notes[1:]) <= set(shipped.notes)


# -- what the layers do: order, rows, windows -----------------------------------------------------------------------

RUN_CASES = [
    *("llava llama", "llava_next", "llava_onevision", "internvl qwen2", "qwen2_vl"),
    *("qwen2_5_vl", "qwen3_vl tied, biased, taps out of order", "gemma3", "glm4v_moe", "mllama"),
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
    spec = describe_fields(as_saved(config))
    layer = next(x for x in spec.layers if x.name == "model.language_model.layers.1")
    attention = 64 * (4 + 2 + 2) * 16 + 4 * 16 * 64
    assert layer.num_matmul_params == attention + 6 * 64 + 2 * 3 * 64 * 24
    assert layer.num_params == attention + 6 * 64 + 6 * 3 * 64 * 24 + 2 * 64 + 2 * 16


def test_windows_are_those_of_the_real_vision_tower():
    """Qwen2.5-VL's own window index: no window holds more rows than described, and the largest holds them all."""
    config = odd_config("qwen2_5_vl")
    spec = describe_fields(as_saved(config))
    windows = [x.attention.window for x in spec.layers if x.tower == "vision" and x.attention is not None]
    assert windows == [64, None, 64, None]
    assert windows[0] == (config.vision_config.window_size // config.vision_config.patch_size) ** 2
    visual = build(config).model.visual
    assert list(visual.fullatt_block_indexes) == [i for i, w in enumerate(windows) if w is None]
