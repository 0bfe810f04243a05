"""Needs torch and Transformers: what the library says of its own models becomes a description, to the parameter."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from real_parameters import assert_same_parameters, build, layer
from tiny_models import ODD_CONFIGS, as_saved, odd_config, preprocessor_of
from widget_model import Widget, WidgetConfig

from refusals import refused
from trimtab import PlanOptions, ask, describe, make_plan, profile_model
from trimtab.costs.devices import DEVICES, parse_cluster
from trimtab.errors import ConfigError, PartitionError
from trimtab.models import asking
from trimtab.models.asking import model
from trimtab.models.asking.model import complete, describe_fields, describe_model
from trimtab.models.description import description_bytes
from trimtab.specs import WORK_TERMS, ParallelDims, SampleTable

# -- folders as save_pretrained writes them ---------------------------------------------------------------------------

ASKED = ("qwen3_5", "gemma4", "idefics3", "mistral3", "aria", "smolvlm", "llama4", "lfm2_vl")


@pytest.mark.parametrize("model_type", ASKED)
def test_families_without_a_line_here_are_described_by_their_folder(model_type, tmp_path, in_process):
    config = transformers.AutoConfig.for_model(model_type)
    config.save_pretrained(tmp_path)
    spec = describe(tmp_path)
    real = build(config)
    assert_same_parameters(spec, real)
    blocks = [x for x in spec.layers if x.tower == "language" and x.kind == "block" and x.name[-1].isdigit()]
    assert len(blocks) == config.get_text_config().num_hidden_layers
    assert all(x.attention is not None or x.measured is not None for x in blocks)
    assert spec.layers[-1].kind == "head"
    profile_model(spec, DEVICES["H200"])  # every layer has a price


GAPS = ("llava llama", "llava_next", "llava_onevision", "internvl qwen2", "internvl qwen3_moe, some dense")
GAPS += ("qwen2_5_vl", "qwen3_vl_moe", "gemma3", "llava mistral, window, three taps, siglip with head")


@pytest.mark.parametrize("case", GAPS)
def test_what_a_folder_leaves_out_is_what_stood_there(case, tmp_path, in_process):
    config = odd_config(case)
    config.save_pretrained(tmp_path)
    settings = preprocessor_of(config.model_type, ODD_CONFIGS[case][1])
    whole = describe(as_saved(config), preprocessor=settings)
    gaps = json.loads((tmp_path / "config.json").read_text())
    gaps.pop("image_seq_length", None)  # as `as_saved`: the class's, for an image of its own size
    (tmp_path / "config.json").write_text(json.dumps(gaps))
    by_folder = describe(tmp_path, preprocessor=settings)
    for name in ("layers", "tied", "vocab_size", "forbidden_cuts", "image_rule"):
        assert getattr(by_folder, name) == getattr(whole, name), name


def test_published_internvl_is_asked_under_its_own_names(in_process):
    """Any size, with a decoder of any kind that Transformers has; LoRA inside the folder is refused."""
    vision = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4}
    text = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    text |= {"intermediate_size": 96, "vocab_size": 100, "tie_word_embeddings": False}
    fields = {"model_type": "internvl_chat", "vision_config": {**vision, "image_size": 448, "patch_size": 14}}
    fields |= {"llm_config": {**text, "model_type": "internlm2"}, "downsample_ratio": 0.5, "select_layer": -2}
    tiles = {"dynamic_image_size": True, "min_dynamic_patch": 1, "max_dynamic_patch": 12, "use_thumbnail": True}
    spec = describe({**fields, **tiles})
    names = [x.name for x in spec.layers]
    assert names[1] == "vision_model.encoder.layers.0"
    assert names[5:8] == ["mlp1", "language_model.model.tok_embeddings", "language_model.model.layers.0"]
    assert [x.name for x in spec.layers if x.unread] == ["vision_model.encoder.layers.3"]
    assert spec.joined_cuts == set(range(1, 6))
    assert spec.image_rule.count(448, 448).tokens == 256
    llama = describe({**fields, **tiles, "llm_config": {**text, "model_type": "llama"}})
    assert [x.num_params for x in llama.layers] == [x.num_params for x in spec.layers]
    assert not llama.layers[-3].attention.fused_qkv
    with refused(ConfigError, "use_llm_lora", "16"):
        describe({**fields, "use_llm_lora": 16})
    with refused(ConfigError):
        describe({**fields, "llm_config": {**text, "model_type": "mistral9"}})


def test_a_class_s_own_token_count_does_not_contradict_another_image_size(in_process):
    vision = {"model_type": "clip_vision_model", "image_size": 56, "patch_size": 14, "num_hidden_layers": 2}
    config = {"model_type": "llava", "vision_config": vision, "text_config": {"num_hidden_layers": 2}}
    assert describe(config).image_rule.count(100, 100).tokens == 16
    with refused(ConfigError, "image_seq_length"):
        describe({**config, "image_seq_length": 576}).image_rule.count(100, 100)


def test_old_files_with_text_fields_at_the_top_are_described(in_process):
    text = {"num_hidden_layers": 2, "hidden_size": 512, "num_attention_heads": 8, "num_key_value_heads": 2}
    flat = {"model_type": "qwen2_5_vl", **text, "vision_config": {"depth": 2}}
    flat["vision_config"] |= {"out_hidden_size": 512, "fullatt_block_indexes": [1]}
    spec = describe(flat)
    assert spec.layers == describe_fields(complete(flat).to_dict()).layers
    assert [layer(spec, "language_model.layers.1").attention.num_kv_heads, spec.layers[-1].hidden_size] == [2, 512]


@pytest.mark.parametrize(
    ("case", "first", "behind"),
    [
        ("llava mistral, window, three taps, siglip with head", "encoder.layers.0", "multi_modal_projector"),
        ("llava_next", "multi_modal_projector", "image_newline"),
    ],
)
def test_states_that_are_joined_and_bare_parameters_forbid_cuts(case, first, behind):
    spec = describe_fields(as_saved(odd_config(case)))
    names = [x.name for x in spec.layers]
    start, stop = (next(i for i, x in enumerate(names) if x.endswith(end)) for end in (first, behind))
    # state 0 enters block 0, and must then cross every cut behind it
    assert spec.forbidden_cuts == set(range(start + 1, stop + 1)) == spec.joined_cuts
    assert spec.forbidden_cut_reason


def test_every_cut_in_front_of_cross_attention_is_forbidden():
    spec = describe_fields(as_saved(odd_config("mllama")))
    last = max(i for i, x in enumerate(spec.layers) if x.attention is not None and x.attention.cross)
    start = spec.indices("language")[0]
    assert set(range(start, last + 1)) <= spec.forbidden_cuts
    assert last + 1 not in spec.forbidden_cuts


# -- kinds of layers --------------------------------------------------------------------------------------------------


def test_gated_delta_attention_is_priced_by_what_runs(monkeypatch):
    text = {"hidden_size": 256, "num_hidden_layers": 4, "intermediate_size": 512, "vocab_size": 1000}
    fields = {"model_type": "qwen3_5", "text_config": text, "vision_config": {"depth": 1, "out_hidden_size": 256}}
    spec = describe_fields(fields)
    block, plain = layer(spec, "layers.0"), layer(spec, "layers.3")
    assert (block.attention, plain.measured) == (None, None)
    assert plain.attention.num_kv_heads < plain.attention.num_heads
    tokens, squares = (block.measured.forward_flops[WORK_TERMS.index(x)] for x in ("tokens", "tokens_sq"))
    assert squares == 0  # linear attention
    assert 2.0 * block.num_matmul_params < tokens < 4.0 * block.num_matmul_params
    assert block.measured.kept_bytes[WORK_TERMS.index("tokens")] > 2 * 10 * 256
    monkeypatch.setattr(model, "NUM_TOKENS", 1024)  # the coefficients are those of any length
    again = layer(describe_fields(fields), "layers.0").measured
    assert again.forward_flops == pytest.approx(block.measured.forward_flops, rel=1e-4)  # edges of a convolution


def test_experts_count_as_those_that_run():
    block = layer(
        describe_fields({"model_type": "aria", "text_config": {"num_hidden_layers": 1}}), "language_model.layers.0"
    )
    m, h = block.mlp, block.hidden_size
    assert block.measured is None
    assert (m.num_experts, m.gated) == (8, True)
    attention = h * h * 4 if block.attention.num_kv_heads == block.attention.num_heads else None
    experts = 3 * h * (m.experts_per_token * m.intermediate_size + m.shared_intermediate_size) + h * m.num_experts
    assert block.num_matmul_params == attention + experts
    assert block.num_params > 3 * h * m.num_experts * m.intermediate_size


def test_per_layer_embeddings_are_layers_and_their_share_is_counted():
    spec = describe_fields({"model_type": "gemma4", "text_config": {"num_hidden_layers": 6}})
    table = layer(spec, "embed_tokens_per_layer")
    assert (table.tower, table.kind) == ("language", "embed")
    assert table.num_params > sum(x.num_params for x in spec.layers if x.name.endswith(("layers.0", "layers.1")))
    assert {x.attention.window for x in spec.layers if x.attention is not None} == {512, None}


def test_latent_attention_has_its_cache_and_a_measured_price():
    text = {"num_hidden_layers": 2, "hidden_size": 512, "vocab_size": 1000}
    spec = describe_fields({"model_type": "kimi_k25", "text_config": text})
    block = layer(spec, "language_model.layers.1")
    assert block.measured is not None
    a = block.attention
    assert (a.head_dim, a.value_head_dim, a.num_kv_heads) == (192, 128, a.num_heads)
    pairs = block.measured.forward_flops[WORK_TERMS.index("tokens_sq")]
    assert pairs == a.num_heads * (a.head_dim + a.value_head_dim)  # half of 2 per pair: masked ones left out
    priced = [profile_model(spec, DEVICES["H200"], dims=ParallelDims(tp=tp)).layers for tp in (1, 2)]
    whole, half = (next(x for x in layers if x.name == block.name).forward_s for layers in priced)
    assert half[WORK_TERMS.index("tokens_sq")] < whole[WORK_TERMS.index("tokens_sq")]


def test_audio_towers_take_their_weights_and_no_time():
    text = {"num_hidden_layers": 1, "vocab_size": 1000}
    spec = describe_fields(
        {"model_type": "qwen2_5_omni_thinker", "text_config": text, "audio_config": {"encoder_layers": 1}}
    )
    costs = [x for x in profile_model(spec, DEVICES["H200"]).layers if x.tower == "audio"]
    assert len(costs) >= 4
    assert sum(x.num_params for x in costs) == spec.num_tower_params("audio") > 0
    assert all(x.state_bytes > 0 and not any(x.forward_s) and not any(x.backward_s) for x in costs)


def test_layers_that_cannot_be_run_or_explained_have_no_price():
    spec = describe_fields({"model_type": "blip-2", "qformer_config": {"num_hidden_layers": 2}})
    assert any("they have no price" in note for note in spec.notes)
    with refused(PartitionError, "1", "qformer.encoder.layer.0"):
        profile_model(spec, DEVICES["H200"])


@pytest.mark.parametrize("model_type", ["qwen2", "gemma3_text", "qwen3_moe"])
def test_text_models_are_described_and_planned(model_type, in_process):
    spec = describe({"model_type": model_type, "num_hidden_layers": 2})
    assert {x.tower for x in spec.layers} == {"language"}
    with refused(ConfigError):
        spec.image_rule.count(100, 100)
    none, tokens = np.zeros(64, np.int64), np.full(64, 700)
    pixels = dict.fromkeys(("num_images", "num_patches", "patches_sq", "patches_windowed"), none)
    samples = SampleTable(num_tokens=tokens, source=none.astype(np.int32), **pixels)
    details = make_plan(spec, samples, parse_cluster("4xA100-80GB"), PlanOptions(pp=2))
    assert sum(len(stage.modules) for stage in details.plan.decisions.stages) > 0


# -- the child process ------------------------------------------------------------------------------------------------


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("TRIMTAB_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


HOSTILE = {
    "auto_map": {"AutoConfig": "evil.Config", "AutoModelForImageTextToText": "evil.Model"},
    "dtype": "os.system",
    "_attn_implementation": "evil/kernel",
    "trust_remote_code": True,
    "quantization_config": {"quant_method": "evil"},
}


def test_a_child_answers_once_and_code_of_the_folder_is_never_run(tmp_path, cache, monkeypatch):
    """A small model, by a real child process; its folder holds a module that would leave a trace."""
    text = {"hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 100, "torch_dtype": "os.system"}
    fields = {"model_type": "smolvlm", "text_config": {"model_type": "llama", **text}, "vision_config": HOSTILE}
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    (tmp_path / "config.json").write_text(json.dumps({**fields, **HOSTILE}))
    monkeypatch.chdir(tmp_path)
    first = describe(tmp_path)
    assert not (tmp_path / "ran").exists()
    assert first.layers == describe_fields({**fields, "vision_config": {}}).layers
    assert dict(first.asked_of) == {"torch": torch.__version__, "transformers": transformers.__version__}
    monkeypatch.setattr(ask, "_run_child", lambda *_: pytest.fail("the answer was remembered"))
    assert describe(tmp_path) == first
    (remembered,) = cache.iterdir()
    assert "layers" in json.loads(remembered.read_bytes())


def test_sizes_of_no_model_end_in_one_sentence(cache):
    huge = {"model_type": "smolvlm", "text_config": {"model_type": "llama", "hidden_size": 10**9}}
    with refused(ConfigError, "e+20"):
        describe_fields(huge)
    huge["text_config"] = {"model_type": "llama", "num_hidden_layers": 10**8}
    with refused(ConfigError, "text_config.num_hidden_layers", "100000000", "4096"):
        complete(huge)


def test_a_child_that_does_not_end_is_ended(cache, monkeypatch):
    monkeypatch.setattr(ask, "MAX_CPU_S", 1)
    with refused(ConfigError, "1", "8"):
        describe({"model_type": "smolvlm"})
    assert not cache.exists()


@pytest.mark.parametrize("event", ["subprocess.Popen", "os.fork", "pickle.find_class"])
def test_the_child_refuses_what_describing_does_not_need(event):
    with refused(PermissionError, event):
        asking._watch(event, ())
    asking._watch("open", ())


@pytest.mark.parametrize(
    ("fields", "names"),
    [
        ({"model_type": "nonsense"}, ("model_type",)),
        ({"model_type": "nonsense", "auto_map": {}}, ("nonsense",)),
        ({"model_type": "clip"}, ("clip",)),
        ({"model_type": "smolvlm", "text_config": 3}, ("config.json",)),
        ({"model_type": "aya_vision"}, ("config.json", "aya_vision", "num_heads")),
    ],
)
def test_what_transformers_does_not_have_is_refused_in_one_sentence(fields, names):
    with refused(ConfigError, names) as error:
        describe_fields(fields)
    assert len(str(error.value)) < 600
    assert "\n" not in str(error.value)
    with refused(type(error.value), str(error.value)):
        asking.find_work("describe")(fields)


# -- a model of one's own ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module", autouse=True)
def widget():
    transformers.AutoConfig.register("trimtab_widget", WidgetConfig)
    transformers.AutoModelForImageTextToText.register(WidgetConfig, Widget)


def test_a_model_type_registered_here_is_described_without_a_line_in_trimtab(tmp_path, in_process):
    WidgetConfig(num_hidden_layers=5).save_pretrained(tmp_path)
    spec = describe(tmp_path)
    assert_same_parameters(spec, build(WidgetConfig(num_hidden_layers=5)))
    assert [x.name for x in spec.layers] == [
        "vision_tower.patch",
        *(f"vision_tower.blocks.{i}" for i in range(2)),
        "projector",
        "scale",
        "language_model.embed_tokens",
        *(f"language_model.layers.{i}" for i in range(5)),
        "language_model.norm",
        "lm_head",
    ]
    assert [x.name for x in spec.layers].index("scale") in spec.forbidden_cuts
    assert "scale is a bare parameter" in spec.forbidden_cut_reason
    block, projector = layer(spec, "language_model.layers.0"), layer(spec, "projector")
    assert (block.attention.num_heads, block.attention.causal, block.mlp.intermediate_size) == (4, True, 96)
    assert block.measured is None
    assert not layer(spec, "blocks.0").attention.causal
    assert (projector.tower, projector.rows_per_input) == ("projector", 0.25)
    assert description_bytes(describe_model(build(WidgetConfig(num_hidden_layers=5)))) == description_bytes(
        describe_fields(json.loads((tmp_path / "config.json").read_text()))
    )


def test_a_model_with_weights_is_not_used_up():
    with refused(ConfigError, "torch.device"):
        describe_model(Widget(WidgetConfig()))


def test_layers_come_in_module_order_and_say_so_where_nothing_can_be_run(monkeypatch):
    monkeypatch.setattr(model, "text_calls", lambda module, size: iter(()))
    monkeypatch.setattr(model, "image_calls", lambda module, units, encode: iter(()))
    spec = describe_model(build(WidgetConfig()))
    assert any("no forward pass could be made" in note for note in spec.notes)
    assert any("No image could be passed" in note for note in spec.notes)
    names = [x.name for x in spec.layers]
    assert names.index("language_model.norm") < names.index("language_model.layers.0")
    assert layer(spec, "layers.0").measured is None  # every weight is explained
