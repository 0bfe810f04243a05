"""What is wrong with a config.json is named in one sentence, whatever it holds."""

from __future__ import annotations

import pytest
from described_configs import DAMAGE, INTERNVL, QWEN3, QWEN25, describe, edit, qwen3, small_internvl
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import ConfigError, ImageError, UnknownModelError
from trimtab.models.describe import MAX_CONFIG_BYTES, read_config


def test_all_missing_fields_are_named_at_once_with_what_to_do():
    config = qwen3()
    config["text_config"] = {"model_type": "qwen3_vl_text", "vocab_size": 32064}
    del config["tie_word_embeddings"]
    with pytest.raises(ConfigError) as error:
        describe(config)
    message = str(error.value)
    for field in ("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size"):
        assert f"text_config.{field}" in message
    assert "tie_word_embeddings" in message
    assert "AutoConfig.from_pretrained(MODEL).to_dict()" in message


@pytest.mark.parametrize(
    ("config", "path", "value", "words"),
    [
        (QWEN3, "vision_config.depth", -3, ["vision_config.depth is -3", "whole number"]),
        (QWEN3, "vision_config.depth", 10**9, ["vision_config.depth", "4096"]),
        (QWEN3, "vision_config.depth", True, ["vision_config.depth is True"]),
        (QWEN3, "text_config.vocab_size", "100", ["text_config.vocab_size is '100'"]),
        (QWEN3, "text_config.attention_bias", 1, ["text_config.attention_bias is 1", "true or false"]),
        (QWEN3, "text_config", [], ["text_config is []", "JSON object"]),
        (QWEN3, "text_config.model_type", "llama", ["text_config.model_type is 'llama'", "qwen3_vl_text"]),
        (QWEN3, "vision_config.patch_size", [16, 0], ["vision_config.patch_size"]),
        (QWEN3, "vision_config.deepstack_visual_indexes", [1, 1], ["deepstack_visual_indexes", "different"]),
        (QWEN3, "vision_config.deepstack_visual_indexes", [9], ["deepstack_visual_indexes", "vision_config.depth 6"]),
        (QWEN3, "vision_config.out_hidden_size", 48, ["out_hidden_size 48", "text_config.hidden_size 64"]),
        (QWEN3, "vision_config.num_heads", 5, ["vision_config.hidden_size 32", "vision_config.num_heads 5"]),
        (QWEN3, "text_config.num_key_value_heads", 3, ["num_attention_heads 4", "num_key_value_heads 3"]),
        (QWEN3, "text_config.head_dim", ..., ["text_config.head_dim"]),
        (QWEN3, "tie_word_embeddings", ..., ["tie_word_embeddings"]),
        (QWEN3, "preprocess.max_pixels", -1, ["max_pixels"]),
        (QWEN3, "preprocess.max_pixels", 10**12, ["max_pixels"]),
        (INTERNVL, "preprocess.downsample_ratio", 0.3, ["downsample_ratio 0.3"]),
        (INTERNVL, "text_config.head_dim", 64, ["text_config.head_dim is 64", "128"]),
        (INTERNVL, "text_config.attention_bias", ..., ["text_config.bias"]),
        (INTERNVL, "text_config.model_type", "mistral", ["text_config.model_type is 'mistral'", "internlm2"]),
        (INTERNVL, "use_llm_lora", 16, ["use_llm_lora is 16", "merge"]),
        (INTERNVL, "text_config.model_type", "gpt2", ["text_config.model_type is 'gpt2'", "llama"]),
        (INTERNVL, "vision_config.patch_size", 512, ["image_size", "patch_size"]),
        (INTERNVL, "select_layer", [-1, -2], ["select_layer is [-1, -2]", "num_hidden_layers 45"]),
        (INTERNVL, "select_layer", 46, ["select_layer is 46", "num_hidden_layers 45"]),
        (QWEN25, "vision_config.fullatt_block_indexes", [7, 32], ["fullatt_block_indexes", "vision_config.depth 32"]),
        (QWEN25, "vision_config.window_size", 8, ["window_size 8", "patch_size"]),
        (QWEN25, "text_config.attention_bias", False, ["attention_bias is False", "qwen2_5_vl_text"]),
    ],
)
def test_bad_fields_are_named(config, path, value, words):
    with pytest.raises(ConfigError) as error:
        describe(edit(config, path, value))
    for word in words:
        assert word in str(error.value)


def test_decoders_that_slide_are_asked_of_transformers_or_refused():
    with pytest.raises(ConfigError, match=r"llm_config\.use_sliding_window is true: decoders whose layers see all"):
        describe(small_internvl(model_type="qwen2", use_sliding_window=True))
    assert describe(small_internvl(model_type="phi3", sliding_window=64)).token_window == 64


def test_experts_must_be_enough_and_dense_layers_exist():
    text = {**qwen3()["text_config"], "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 8}
    config = qwen3(model_type="qwen3_vl_moe", text_config={**text, "num_experts": 2, "num_experts_per_tok": 3})
    with pytest.raises(ConfigError, match="num_experts_per_tok 3 is more than the 2 experts"):
        describe(config)


@pytest.mark.parametrize("model_type", [None, 3, "gpt2", "x" * 1000])
def test_unknown_families_are_refused_with_the_known_ones(model_type):
    with pytest.raises(UnknownModelError, match="qwen2_5_vl") as error:
        describe({"model_type": model_type})
    assert len(str(error.value)) < 600


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"{", "is not JSON"),
        (b"[1]", "a JSON object with a `model_type` is needed"),
        (b'{"a": NaN}', "NaN is not a number in JSON"),
        (b"[" * 100_000, "nested too deeply"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b" " * (MAX_CONFIG_BYTES + 1), "has more than 1 MiB"),
    ],
)
def test_unreadable_files_are_refused(tmp_path, content, words):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words):
        describe(path)


def test_missing_paths_name_the_shipped_descriptions(tmp_path):
    for source in (tmp_path / "no.json", "no-such-model", tmp_path):
        with pytest.raises(ConfigError, match=r"Qwen2\.5-VL-7B"):
            describe(source)
    with pytest.raises(ConfigError, match="holds a null character"):
        describe("a\0b")
    with pytest.raises(ConfigError, match=r"preprocessor .* cannot be read"):
        describe(qwen3(), preprocessor=tmp_path / "no.json")
    with pytest.raises(ConfigError, match="does not describe a model"):
        describe(3)


def test_content_that_is_not_json_is_refused():
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        describe(qwen3(extra=float("nan")))
    with pytest.raises(ConfigError, match="cannot be written as JSON"):
        describe(qwen3(extra=object()))


# -- damage ---------------------------------------------------------------------------------------------------------


def paths(config: dict, prefix: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        if key != "preprocess":  # the image rules have their own tests
            found.append(prefix + key)
            if isinstance(value, dict):
                found += paths(value, f"{prefix}{key}.")
    return found


HUGE = [4096, 4097, 10**6, 2**30, 2**31 - 1, 10**9, 10**18, 10**400, 1e300, 5e-324, [10**9], [[10**9, 10**9]] * 30_000]
CONFIGS = [qwen3(), small_internvl(), *(dict(read_config(x)) for x in ("InternVL-Chat-V1-5", "Qwen2.5-VL-7B"))]


@pytest.mark.parametrize("values", [st.sampled_from(DAMAGE), st.sampled_from(HUGE)], ids=["damage", "huge"])
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_ends_at_once_in_a_model_or_an_error_that_is_short(values, data):
    config = data.draw(st.sampled_from(CONFIGS))
    for _ in range(data.draw(st.integers(1, 4))):
        fields = [*paths(config), *(f"preprocess.{key}" for key in config.get("preprocess", {}))]
        config = edit(config, data.draw(st.sampled_from(fields)), data.draw(values))
        config = {k: v for k, v in config.items() if k != "preprocess" or isinstance(v, dict)}
        if not paths(config):
            break
    message = ""
    try:
        spec = describe(config)
        assert len(spec.layers) < 3 * 4096
        for size in ((1, 1), (1920, 1080), (2**31 - 1, 2**31 - 1)):
            spec.image_rule.count(*size)
    except (ConfigError, ImageError) as error:
        message = str(error)
    assert len(message) < 5000
