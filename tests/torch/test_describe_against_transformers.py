"""Needs torch and Transformers: every layer's parameters equal those of the real model, built on the meta device."""

import json

import pytest
import torch
from PIL import Image
from real_parameters import assert_same_parameters, build, owner_of
from tiny_models import BARE, ODD_CONFIGS, as_saved, describe_here, make_tiny_model, odd_config, preprocessor_of
from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText

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


# -- folders as people have them ------------------------------------------------------------------------------------

QWEN, GEMMA = read_config("Qwen2.5-VL-7B"), read_config("Gemma3-4B")
CUT = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
CUT |= {"size": {"shortest_edge": 3136, "longest_edge": 1003520}}
SMALLER = {**CUT, "size": {"shortest_edge": 3136, "longest_edge": 200704}}
OF_GEMMA = {"image_processor_type": "Gemma3ImageProcessor", "size": {"height": 896, "width": 896}}
HEADS = {"num_attention_heads": 16, "num_key_value_heads": 8, "hidden_size": 1024, "intermediate_size": 3072}
TEXT = {"model_type": "qwen3", **HEADS, "num_hidden_layers": 28, "vocab_size": 151936, "tie_word_embeddings": True}
OLD_TEXT = {**TEXT, **HEADS, "model_type": "qwen2_vl", "rope_scaling": {"type": "mrope", "mrope_section": [8, 12, 12]}}
OLD_TOWER = {"depth": 4, "embed_dim": 1280, "hidden_size": 1024, "num_heads": 16, "patch_size": 14}
RAW = {  # config.json, the other files
    "the first file alone": (QWEN, {"preprocessor": CUT}),
    "the newer file alone": (QWEN, {"processor": {"image_processor": SMALLER}}),
    "both files, and they differ": (QWEN, {"preprocessor": CUT, "processor": {"image_processor": SMALLER}}),
    "the newer file without images": (QWEN, {"preprocessor": SMALLER, "processor": {"size": {"longest_edge": 3136}}}),
    "pixels at the top": (QWEN, {"preprocessor": {**CUT, "min_pixels": 784, "max_pixels": 100352}}),
    "tied outside, not inside": ({**QWEN, "tie_word_embeddings": True}, {"preprocessor": CUT}),
    "tied inside alone": (
        {k: v for k, v in QWEN.items() if k != "tie_word_embeddings"}
        | {"text_config": {**QWEN["text_config"], "tie_word_embeddings": True}},
        {"preprocessor": CUT},
    ),
    "short positions": (
        {**QWEN, "text_config": {**QWEN["text_config"], "max_position_embeddings": 512}},
        {"preprocessor": CUT},
    ),
    "bitsandbytes": ({**QWEN, "quantization_config": {"load_in_4bit": True}}, {"preprocessor": CUT}),
    "AWQ": ({**QWEN, "quantization_config": {"quant_method": "awq", "bits": 4}}, {"preprocessor": CUT}),
    "GPTQ": ({**QWEN, "quantization_config": {"quant_method": "gptq", "bits": 4}}, {"preprocessor": CUT}),
    "FP8": ({**QWEN, "quantization_config": {"quant_method": "fp8"}}, {"preprocessor": CUT}),
    "Gemma, two lengths": ({**GEMMA, "mm_tokens_per_image": 256}, {"preprocessor": OF_GEMMA}),
    "fields of the text model outside": (
        {**OLD_TEXT, "vision_config": {**OLD_TOWER, "spatial_merge_size": 2}},
        {"preprocessor": CUT},
    ),
    "a text model": (TEXT, {}),
    "generation and adapter files": (QWEN, {"preprocessor": CUT, "generation": {"max_length": 9}, "adapter": {"r": 8}}),
}


@pytest.mark.parametrize("case", RAW)
def test_a_folder_as_it_comes_is_what_is_built_and_what_its_processor_makes(case, tmp_path):
    config, files = RAW[case]
    for name, content in {"": config, **files}.items():
        text = json.dumps(content, default=dict)
        (tmp_path / f"{name}_config.json".removeprefix("_")).write_text(text)
    spec = describe(tmp_path)
    real = AutoConfig.from_pretrained(tmp_path)
    kind = AutoModelForImageTextToText if files else AutoModelForCausalLM
    with torch.device("meta"):
        built = kind.from_config(real)
    assert spec.num_params == sum(x.numel() for x in built.parameters())
    assert bool(spec.tied) == (built.get_input_embeddings().weight is built.get_output_embeddings().weight)
    assert (spec.stored_as is None) == ("quantization_config" not in config)
    said = config.get("text_config", config).get("max_position_embeddings")
    assert spec.max_positions == said
    assert said in (None, real.get_text_config().max_position_embeddings)
    if not files:
        return
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for size in ((1920, 1080), (100, 60), (333, 2000)):
        made, counts = processor(images=Image.new("RGB", size), return_tensors="pt"), spec.image_rule.count(*size)
        if "image_grid_thw" in made:
            assert counts.patches == int(made["image_grid_thw"].prod())
            assert counts.tokens == counts.patches // processor.merge_size**2
        else:
            assert (counts.patches, counts.tokens) == (64 * 64, real.mm_tokens_per_image)
            assert made["pixel_values"].shape[-1] == 64 * real.vision_config.patch_size


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
