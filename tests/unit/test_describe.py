"""A config.json becomes layers and an image rule, without torch."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import zlib
from importlib import resources
from pathlib import Path

import pytest
from described_configs import INTERNVL, QWEN25, describe, edit, qwen3, small_internvl

from trimtab.costs.devices import DEVICES
from trimtab.costs.profile import profile_model
from trimtab.errors import ConfigError
from trimtab.models.describe import read_config
from trimtab.models.families.architecture import Architecture
from trimtab.models.families.family import Family
from trimtab.models.families.known import FAMILIES, family_of
from trimtab.models.images.apply import with_limits
from trimtab.models.shipped import shipped_models
from trimtab.specs import LayerSpec, ModelSpec

ZOO = Path(__file__).parents[2] / "bench" / "data" / "model_zoo.json"


@pytest.fixture
def internvl() -> dict:
    return copy.deepcopy(dict(INTERNVL))


@pytest.fixture
def qwen() -> dict:
    return copy.deepcopy(dict(QWEN25))


# -- published models -----------------------------------------------------------------------------------------------


def test_describing_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from trimtab.models.describe import describe; describe('Qwen2.5-VL-7B'); "
        "print([x for x in ('torch', 'transformers', 'numba', 'pydantic', 'PIL') if x in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


# -- layers ---------------------------------------------------------------------------------------------------------


def test_shipped_internvl_has_remote_code_paths_and_exact_parameters():
    """Counted by hand from the modules of InternVL's remote code (InternViT-6B, mlp1, InternLM2-20B)."""
    spec = describe("InternVL-Chat-V1-5")
    names = [x.name for x in spec.layers]
    assert names[:2] == ["vision_model.embeddings", "vision_model.encoder.layers.0"]
    assert names[45:49] == [
        "vision_model.encoder.layers.44",
        "mlp1",
        "language_model.model.tok_embeddings",
        "language_model.model.layers.0",
    ]
    assert names[-2:] == ["language_model.model.norm", "language_model.output"]
    vit = 4 * 3200**2 + 3200 + 2 * 3200 * 12800 + 12800 + 3200 + 6 * 3200  # 2 norms, 2 layer scales, q and k norms
    assert spec.layers[1].num_params == vit
    assert spec.layers[0].num_params == 588 * 3200 + 3200 + 3200 + 1025 * 3200
    llm = 6144 * (48 + 16) * 128 + 6144 * 6144 + 3 * 6144 * 16384 + 2 * 6144
    assert spec.layers[48].num_params == llm
    assert spec.layers[46].num_params == 2 * 12800 + 12800 * 6144 + 6144 + 6144**2 + 6144
    assert spec.num_tower_params("language") == 48 * llm + 6144 + 2 * 92553 * 6144
    assert spec.layers[46].rows_per_input == 256 / 1025
    assert spec.image_rule.count(448, 448).patches == 1025


def test_shipped_qwen_has_windows_in_all_but_four_vision_blocks():
    spec = describe("Qwen2.5-VL-7B")
    windows = [x.attention.window for x in spec.layers if x.tower == "vision" and x.attention is not None]
    assert [i for i, w in enumerate(windows) if w is None] == [7, 15, 23, 31]
    assert {w for w in windows if w is not None} == {64}
    merger = next(x for x in spec.layers if x.kind == "projector")
    assert (merger.hidden_size, merger.output_size, merger.rows_per_input) == (5120, 3584, 0.25)
    assert spec.num_params == 8_292_166_656  # numParameters of Qwen/Qwen2.5-VL-7B-Instruct on its Hub page


def test_deepstack_forbids_every_cut_that_would_carry_features():
    spec = describe(qwen3())
    names = [x.name for x in spec.layers]
    first = names.index("model.visual.deepstack_merger_list.0")
    assert names[first - 1] == "model.visual.blocks.1"
    last_fed = names.index("model.language_model.layers.1")
    assert spec.forbidden_cuts == set(range(first + 1, last_fed + 1))
    assert first not in spec.forbidden_cuts  # in front of the first tap nothing but hidden states crosses
    assert last_fed + 1 not in spec.forbidden_cuts
    assert "DeepStack" in str(spec.forbidden_cut_reason)


def test_tied_head_owns_nothing_but_still_multiplies():
    spec = describe(qwen3(tie_word_embeddings=True))
    assert spec.tied == (("model.language_model.embed_tokens", "lm_head"),)
    assert (spec.layers[-1].num_params, spec.layers[-1].num_matmul_params) == (0, 6400)
    assert describe(qwen3()).num_params == spec.num_params + 6400


def test_a_family_is_added_by_one_entry(monkeypatch):
    layer = LayerSpec(
        name="all", tower="language", kind="block", hidden_size=8, output_size=8, num_params=64, num_matmul_params=64
    )
    made = Architecture(layers=(layer,), vocab_size=10)
    own = Family(describe=lambda fields: made, image_rule=FAMILIES["qwen3_vl"].image_rule)
    monkeypatch.setitem(FAMILIES, "qwen3_vl", own)
    assert describe(qwen3()).num_params == 64


def layer(spec: ModelSpec, name: str) -> LayerSpec:
    return next(x for x in spec.layers if x.name.endswith(name))


def test_what_blocks_keep_is_described_as_the_modules_are(internvl, qwen):
    """One qkv matrix (Qwen, InternLM2, Phi-3), layer scale (InternViT), quick GELU (Qwen2-VL), as in the modules."""
    quick = read_config("Qwen2-VL-72B")
    plain = edit(quick, "vision_config.hidden_act", "gelu")
    found = {
        name: (block.attention.fused_qkv, block.layer_scale, block.mlp.quick_gelu, block.norm, block.num_norms)
        for name, block in {
            "InternViT": layer(describe(internvl), "encoder.layers.0"),
            "InternLM2": layer(describe(internvl), "model.layers.0"),
            "Qwen2.5 ViT": layer(describe(qwen), "blocks.0"),
            "Qwen2.5": layer(describe(qwen), "language_model.layers.0"),
            "Qwen3 ViT": layer(describe(qwen3()), "blocks.0"),
            "Qwen2 ViT": layer(describe(quick), "blocks.0"),
            "Qwen2 ViT, plain": layer(describe(plain), "blocks.0"),
            "Llama": layer(describe(small_internvl()), "model.layers.0"),
            "Phi-3": layer(describe(small_internvl(model_type="phi3")), "model.layers.0"),
        }.items()
    }
    assert found == {
        "InternViT": (False, True, False, "rms_norm", 2),  # flash attention reads the one matrix's result as it is
        "InternLM2": (True, False, False, "rms_norm", 2),
        "Qwen2.5 ViT": (True, False, False, "rms_norm", 2),
        "Qwen2.5": (False, False, False, "rms_norm", 2),
        "Qwen3 ViT": (True, False, False, "layer_norm", 2),
        "Qwen2 ViT": (True, False, True, "layer_norm", 2),
        "Qwen2 ViT, plain": (True, False, False, "layer_norm", 2),
        "Llama": (False, False, False, "rms_norm", 2),
        "Phi-3": (True, False, False, "rms_norm", 2),
    }


@pytest.mark.parametrize(("state", "unread"), [(-2, [3]), (-1, []), (4, []), (2, [2, 3])])
def test_layers_behind_the_state_that_is_read_have_forward_work_alone(state, unread):
    spec = describe({**small_internvl(), "select_layer": state})
    assert [x.name for x in spec.layers if x.unread] == [f"vision_model.encoder.layers.{i}" for i in unread]
    assert any("no gradient" in note for note in spec.notes) == bool(unread)
    profile = profile_model(spec, DEVICES["A100-80GB"])
    for described, cost in zip(spec.layers, profile.layers, strict=True):
        assert max(cost.forward_s) > 0
        assert cost.state_bytes > 0
        if described.unread:
            assert cost.backward_s == cost.tiers[0].saved_bytes == cost.transient_bytes == (0.0,) * 7
            assert [tier.name for tier in cost.tiers] == ["none"]
        elif described.kind == "block":
            assert max(cost.backward_s) > max(cost.forward_s)
            assert [tier.name for tier in cost.tiers] == ["none", "selective", "attention", "full"]
    blocks = [x for x in profile.layers if x.kind == "block" and x.tower == "vision"]
    assert len({x.forward_s for x in blocks}) == 1
    assert len({x.group for x in blocks}) == 1 + bool(unread)


# -- images ---------------------------------------------------------------------------------------------------------


def test_without_a_preprocessor_layers_are_described_and_images_refused(tmp_path):
    config = qwen3()
    limits = config.pop("preprocess")
    (tmp_path / "config.json").write_text(json.dumps(config))
    spec = describe(tmp_path)
    assert spec.layers == describe(qwen3()).layers
    assert any("preprocessor_config.json was not given" in note for note in spec.notes)
    message = r"min_pixels.*: pass --set preprocessor=preprocessor_config\.json, or put it beside config\.json"
    with pytest.raises(ConfigError, match=message):
        spec.image_rule.count(640, 480)
    with pytest.raises(ConfigError, match=message):
        describe(tmp_path, max_pixels=10**6)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"max_pixels": limits["max_pixels"]}))
    with pytest.raises(ConfigError, match=r"min_pixels.*: add it to that file"):
        describe(tmp_path)


def test_other_problems_come_with_what_the_image_rule_lacks():
    config = qwen3()
    del config["preprocess"], config["text_config"]["vocab_size"]
    with pytest.raises(ConfigError, match=r"text_config\.vocab_size"):
        describe(config)


def test_a_user_s_own_limits_tighten_the_image_rule(internvl, qwen):
    assert describe(internvl, max_tiles=1).image_rule.count(4000, 3000).tiles == 1
    assert describe(internvl, max_tiles=6).image_rule == with_limits(describe(internvl).image_rule, max_tiles=6)
    tight = describe(qwen, max_pixels=1003520)
    assert tight.image_rule.count(4000, 3000).tokens <= 1003520 // 28**2
    assert tight.layers == describe(qwen).layers
    assert tight.config_blake2b == describe(qwen).config_blake2b
    with pytest.raises(ConfigError, match="cannot set max_tiles 6 on image rule qwen_smart_resize"):
        describe(qwen, max_tiles=6)
    with pytest.raises(ConfigError, match="cannot set max_pixels 5 on image rule fixed"):
        describe("LLaVA-1.5-7B", max_pixels=5)
    with pytest.raises(ConfigError, match="max_tiles is '6', and a limit of images is a whole number"):
        describe(internvl, max_tiles="6")


# -- sources --------------------------------------------------------------------------------------------------------


def test_file_folder_content_and_name_give_the_same_model(tmp_path, qwen):
    folder = tmp_path / "my-model"
    folder.mkdir()
    limits = qwen.pop("preprocess")
    (folder / "config.json").write_text(json.dumps(qwen, indent=4))
    (folder / "preprocessor_config.json").write_text(
        json.dumps({"min_pixels": limits["min_pixels"], "max_pixels": limits["max_pixels"]})
    )
    by_folder = describe(folder)
    assert by_folder == describe(str(folder / "config.json"))
    assert by_folder.name == "my-model"
    assert by_folder.layers == describe("Qwen2.5-VL-7B").layers
    given = describe(qwen, preprocessor=folder / "preprocessor_config.json", name="my-model")
    assert given == by_folder


def test_processor_config_of_transformers_5_is_found(tmp_path):
    config = qwen3()
    limits = config.pop("preprocess")
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": limits}))
    assert describe(tmp_path).image_rule == describe(qwen3()).image_rule


def test_flat_text_fields_are_read_from_the_top():
    """Files of Qwen2-VL and Qwen2.5-VL as first published: no `text_config`."""
    nested = copy.deepcopy(dict(read_config("Qwen2.5-VL-7B")))
    flat = copy.deepcopy(nested)
    text = flat.pop("text_config")
    text.pop("model_type")
    assert describe({**flat, **text}).layers == describe(nested).layers


def test_digest_is_of_the_content_alone(qwen):
    backwards = dict(reversed(list(qwen.items())))
    assert (
        describe(qwen).config_blake2b == describe(backwards).config_blake2b == describe("Qwen2.5-VL-7B").config_blake2b
    )
    qwen["text_config"]["vocab_size"] += 1
    assert describe(qwen).config_blake2b != describe(backwards | {"extra": 1}).config_blake2b


def test_shipped_models_are_descriptions_of_named_sources():
    assert len(shipped_models()) >= 20
    for name in shipped_models():
        assert read_config(name)["source"], name
        model = describe(name)
        if family_of(model.family).describe is not None:
            again = describe(read_config(name), name=name)
            assert (model.layers, model.image_rule, model.tied) == (again.layers, again.image_rule, again.tied)
            assert model.config_blake2b == again.config_blake2b
        assert model.image_rule.count(1024, 768).tokens > 0
    files = resources.files("trimtab.models").joinpath("zoo").iterdir()
    assert sum(len(zlib.compress(x.read_bytes())) for x in files) < 20_000  # as a wheel stores them, one by one


def test_shipped_models_have_the_published_parameters():
    """The zoo counts matrices alone; norms and biases, positions and Gemma's second norms are the difference."""
    published = {k.partition(" (")[0]: v for k, v in json.loads(ZOO.read_text())["models"].items()}
    for name in shipped_models():
        model = describe(name)
        counted = published[name]["computed_params_b"]["total"]
        assert model.num_params / 1e9 == pytest.approx(counted, rel=0.01, abs=0.006), name
        if "vision" in published[name]["size_label_b"]:  # a table of towers; elsewhere the size in a name
            table = published[name]["size_label_b"]["total"]
            assert round(model.num_params / 1e9, 1) == pytest.approx(table, abs=0.051), name


@pytest.mark.parametrize(
    ("name", "shipped"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-7B"),
        ("qwen2.5-vl-7b", "Qwen2.5-VL-7B"),
        ("google/gemma-3-27b-it", "Gemma3-27B"),
        ("llava-hf/llava-1.5-7b-hf", "LLaVA-1.5-7B"),
        ("llava-hf/llava-onevision-qwen2-7b-ov-hf", "LLaVA-OneVision-7B"),
        ("OpenGVLab/InternVL3_5-8B", "InternVL3_5-8B"),
        ("Qwen3-VL-235B-A22B-Thinking", "Qwen3-VL-235B-A22B"),
    ],
)
def test_shipped_models_are_found_by_the_names_in_use(name, shipped):
    assert describe(name) == describe(shipped)


def test_a_wrong_name_is_answered_with_the_nearest(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match=r"nor a shipped description \(did you mean Qwen2\.5-VL-7B\?\): give a path"):
        describe("Qwen/Qwen2.5-VL-7")
    with pytest.raises(ConfigError, match=r"nor a shipped description: give a path"):
        describe("my-own-model")
    monkeypatch.chdir(tmp_path)  # a folder of that name is the user's own
    (tmp_path / "qwen2.5-vl-7b").mkdir()
    with pytest.raises(ConfigError, match=r"config\.json"):
        describe("qwen2.5-vl-7b")
