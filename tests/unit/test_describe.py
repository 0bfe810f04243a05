"""A name, a description file, or a configuration that says what a shipped one says, becomes a model without torch."""

import json
import subprocess
import sys
import zlib
from dataclasses import replace
from importlib import resources

import numpy as np
import pytest
from described_configs import DAMAGE, describe, edit, small
from hypothesis import given, settings
from hypothesis import strategies as st

from refusals import refused
from trimtab import Lora, PlanOptions, make_plan, profile_model
from trimtab.costs.devices import DEVICES, parse_cluster
from trimtab.errors import ConfigError
from trimtab.models.describe import read_config, stored_format
from trimtab.models.description import find_same, read_shipped, shipped_models
from trimtab.models.images.rules import with_limits
from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import Workload
from trimtab.specs import SampleTable
from trimtab.units import GIB
from yaml_tables import read_table

LIMITS = {"min_pixels": 3136, "max_pixels": 1003520, "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
QWEN25 = dict(read_config("Qwen2.5-VL-7B"))
INTERNVL = dict(read_config("InternVL-Chat-V1-5"))


# -- shipped models ---------------------------------------------------------------------------------------------------


def test_describing_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from trimtab.models.describe import describe; describe('Qwen2.5-VL-7B'); "
        "print([x for x in ('torch', 'transformers', 'numba', 'pydantic', 'PIL') if x in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"


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


def test_deepstack_forbids_every_cut_that_would_carry_features():
    spec = describe("Qwen3-VL-8B")
    names = [x.name for x in spec.layers]
    first = names.index("model.visual.deepstack_merger_list.0")
    last_fed = names.index("model.language_model.layers.2")
    assert names[first - 1] == "model.visual.blocks.8"
    assert spec.forbidden_cuts == set(range(first + 1, last_fed + 1))
    assert "DeepStack" in str(spec.forbidden_cut_reason)


def test_tied_head_owns_nothing_but_still_multiplies():
    spec = describe("Qwen2.5-VL-3B")
    assert spec.tied == (("model.language_model.embed_tokens", "lm_head"),)
    assert (spec.layers[-1].num_params, spec.layers[-1].num_matmul_params) == (0, 2048 * 151936)


def test_layers_behind_the_state_that_is_read_have_forward_work_alone():
    spec = describe("LLaVA-1.5-7B")  # reads the state before the last block
    unread = [x.name for x in spec.layers if x.unread]
    assert unread == ["model.vision_tower.encoder.layers.23", "model.vision_tower.post_layernorm"]
    assert any("nothing reads them" in note for note in spec.notes)
    profile = profile_model(spec, DEVICES["A100-80GB"])
    for described, cost in zip(spec.layers, profile.layers, strict=True):
        if described.unread:
            assert cost.state_bytes > 0
            assert cost.backward_s == cost.tiers[0].saved_bytes == cost.transient_bytes == (0.0,) * 7
            assert [tier.name for tier in cost.tiers] == ["none"]
        elif described.kind == "block":
            assert max(cost.backward_s) > max(cost.forward_s)
    blocks = [x for x in profile.layers if x.kind == "block" and x.tower == "vision"]
    assert len({x.forward_s for x in blocks}) == 1
    assert len({x.group for x in blocks}) == 2


def test_shipped_models_are_descriptions_of_named_sources():
    assert len(shipped_models()) >= 60
    for name in shipped_models():
        assert read_shipped(name)["sources"], name
        model = describe(name)
        assert not model.indices("vision") or model.image_rule.count(1024, 768).tokens > 0
    files = resources.files("trimtab.models").joinpath("zoo").iterdir()
    assert sum(len(zlib.compress(x.read_bytes())) for x in files) < 200_000  # as a wheel stores them, one by one


@pytest.mark.parametrize(("name", "billions"), read_table("published", "billions").items())
def test_shipped_models_have_the_published_parameters(name, billions):
    assert describe(name).num_params / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(
    ("name", "shipped"),
    [
        ("Qwen/Qwen2.5-VL-7B-Instruct", "Qwen2.5-VL-7B"),
        ("qwen2.5-vl-7b", "Qwen2.5-VL-7B"),
        ("google/gemma-3-27b-it", "Gemma3-27B"),
        ("llava-hf/llava-1.5-7b-hf", "LLaVA-1.5-7B"),
        ("llava-hf/llava-onevision-qwen2-7b-ov-hf", "LLaVA-OneVision-7B"),
        ("OpenGVLab/InternVL3_5-8B", "InternVL3_5-8B"),
        ("OpenGVLab/InternVL3_5-8B-HF", "InternVL3_5-8B-HF"),
        ("Qwen3-VL-235B-A22B-Thinking", "Qwen3-VL-235B-A22B"),
    ],
)
def test_shipped_models_are_found_by_the_names_in_use(name, shipped):
    assert describe(name) == describe(shipped)


def test_a_wrong_name_is_answered_with_the_nearest(tmp_path, monkeypatch):
    with refused(ConfigError, "Qwen2.5-VL-7B?"):
        describe("Qwen/Qwen2.5-VL-7")
    with refused(ConfigError, "Qwen2.5-VL-7B"):
        describe("my-own-model")
    monkeypatch.chdir(tmp_path)  # a folder of that name is the user's own
    (tmp_path / "qwen2.5-vl-7b").mkdir()
    with refused(ConfigError, "config.json"):
        describe("qwen2.5-vl-7b")


# -- configurations that say the same ---------------------------------------------------------------------------------


def test_a_folder_that_says_what_a_shipped_model_says_is_described_with_its_own_limits(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(QWEN25, indent=4))
    (folder / "preprocessor_config.json").write_text(json.dumps(LIMITS))
    by_folder = describe(folder)
    assert by_folder == describe(str(folder / "config.json"))
    given = describe(QWEN25, preprocessor=folder / "preprocessor_config.json", name="my-model")
    assert (given.layers, given.image_rule, given.config_blake2b) == (
        by_folder.layers,
        by_folder.image_rule,
        by_folder.config_blake2b,
    )
    assert by_folder.name == "my-model"
    assert by_folder.layers == describe("Qwen2.5-VL-7B").layers
    assert by_folder.image_rule.max_pixels == 1003520
    (folder / "preprocessor_config.json").unlink()
    assert describe(folder).image_rule == describe("Qwen2.5-VL-7B").image_rule


def test_flat_silent_and_harmless_fields_say_the_same():
    """Files as first published have no `text_config`; those that `save_pretrained` writes leave defaults out."""
    flat = {k: v for k, v in QWEN25.items() if k != "text_config"}
    text = {k: v for k, v in QWEN25["text_config"].items() if k != "model_type"}
    shipped = read_shipped("Qwen2.5-VL-7B")
    silent = {k: v for k, v in QWEN25["text_config"].items() if f"text_config.{k}" not in shipped["assumed"]}
    more = {"torch_dtype": "bfloat16", "eos_token_id": 5, "rope_scaling": {"type": "mrope"}, "use_cache": False}
    said = {"vision_config": {**QWEN25["vision_config"], "tokens_per_second": 2, "window_size": 112}}
    for config in ({**flat, **text}, {**QWEN25, "text_config": silent}, {**QWEN25, **more}, {**QWEN25, **said}):
        assert find_same(config)["name"] == "Qwen2.5-VL-7B"


def test_both_forms_of_one_checkpoint_have_one_answer():
    for name in ("InternVL2-8B", "InternVL3_5-8B", "InternVL3_5-241B-A28B"):
        own, port = describe(name), describe(f"{name}-HF")
        assert [x.num_params for x in own.layers] == [x.num_params for x in port.layers]
        assert (own.tied, own.vocab_size, own.image_rule) == (port.tied, port.vocab_size, port.image_rule)
        assert port.layers[0].name == "model.vision_tower.embeddings"
    assert describe(read_config("InternVL3_5-8B-HF")).num_params == 8_528_318_464


def test_a_user_s_own_limits_tighten_the_image_rule():
    internvl, qwen = describe("InternVL-Chat-V1-5"), describe("Qwen2.5-VL-7B")
    assert describe(INTERNVL, max_tiles=1).image_rule.count(4000, 3000).tiles == 1
    assert describe(INTERNVL, max_tiles=6).image_rule == with_limits(internvl.image_rule, max_tiles=6)
    tight = describe(QWEN25, max_pixels=1003520)
    assert tight.image_rule.count(4000, 3000).tokens <= 1003520 // 28**2
    assert tight.layers == qwen.layers
    for source, limits in (
        ("Qwen2.5-VL-7B", {"max_tiles": 6}),
        ("LLaVA-1.5-7B", {"max_pixels": 5}),
        (INTERNVL, {"max_tiles": "6"}),
    ):
        with pytest.raises(ConfigError, match=next(iter(limits))):
            describe(source, **limits)


def test_digest_is_of_the_content_alone():
    backwards = dict(reversed(list(QWEN25.items())))
    assert describe(QWEN25).config_blake2b == describe(backwards).config_blake2b
    assert describe(QWEN25).config_blake2b != describe(QWEN25 | {"extra": 1}).config_blake2b


# -- what is wrong ----------------------------------------------------------------------------------------------------


def paths(config: dict, prefix: str = "") -> list[str]:
    found = []
    for key, value in config.items():
        found.append(prefix + key)
        if isinstance(value, dict):
            found += paths(value, f"{prefix}{key}.")
    return found


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_damage_ends_in_the_shipped_model_or_an_error_that_is_short(data):
    config, file = data.draw(st.sampled_from([QWEN25, INTERNVL])), dict(LIMITS)
    for _ in range(data.draw(st.integers(1, 4))):
        path = data.draw(st.sampled_from(paths(config) or ["model_type"]))
        config = edit(config, path, data.draw(st.sampled_from(DAMAGE))) if paths(config) else config
    if data.draw(st.booleans()):
        file = edit(file, data.draw(st.sampled_from(list(LIMITS))), data.draw(st.sampled_from(DAMAGE)))
    message = ""
    try:
        assert describe(config, preprocessor=file).image_rule.count(1920, 1080).tokens > 0
    except ConfigError as error:
        message = str(error)
    assert len(message) < 5000


def test_small_models_of_the_tests_are_whole():
    for name in ("qwen3", "qwen2.5", "internvl"):
        profile_model(small(name), DEVICES["A100-80GB"])


# -- what weights on disk say ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "name"), read_table("published", "formats"))
def test_every_quantization_config_has_a_name(said, name):
    assert stored_format(said) == name
    assert describe({**QWEN25, "quantization_config": said}).stored_as == name


@pytest.mark.parametrize(("name", "gib"), [("bnb-nf4-double", 5.5), ("awq", 6.45), (None, 15.45)])
def test_a_map_counts_weights_as_they_are_stored(name, gib):
    model = replace(describe("Qwen2.5-VL-7B"), stored_as=name)
    found = inference_table(model, Workload()).weights.sum() / GIB
    assert found == pytest.approx(gib, rel=0.01)
    assert inference_table(model, Workload(quant="bnb-int8")).weights.sum() / GIB == pytest.approx(8.7, rel=0.05)


def table(tokens: int = 700) -> SampleTable:
    patches, num_tokens = np.full(64, 400), np.full(64, tokens)
    squares = {"patches_sq": patches**2, "patches_windowed": patches * 64}
    return SampleTable(
        num_images=np.ones(64, np.int64),
        num_patches=patches,
        num_tokens=num_tokens,
        source=np.zeros(64, np.int32),
        **squares,
    )


def test_samples_longer_than_the_positions_are_said():
    text = {**QWEN25["text_config"], "max_position_embeddings": 600}
    model = describe({**QWEN25, "text_config": text})
    assert model.max_positions == 600
    details = make_plan(model, table(), parse_cluster("8xA100-80GB"), PlanOptions(pp=1, tp=1, num_microbatches=4))
    assert any("64 samples" in x and "600" in x for x in details.plan.assumptions)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_head_that_lies_in_the_files_is_not_tied(tmp_path, sharded):
    (tmp_path / "config.json").write_text(json.dumps(dict(read_config("Qwen2.5-VL-3B"))))
    tied = describe(tmp_path)
    assert tied.tied
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    if sharded:
        index = {"weight_map": dict.fromkeys(names, "model-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        header = json.dumps({name: {} for name in names}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    apart = describe(tmp_path)
    assert not apart.tied
    assert apart.num_params == tied.num_params + 2048 * 151936
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    assert describe(tmp_path) == tied


def test_4_bit_weights_are_trained_under_adapters_of_4_bits():
    model = replace(describe("Qwen2.5-VL-3B"), stored_as="bnb-nf4-double")
    options = PlanOptions(pp=1, tp=1, num_microbatches=4, lora=Lora(r=8, bits=4))
    assert make_plan(model, table(), parse_cluster("1xA100-80GB"), options).plan
