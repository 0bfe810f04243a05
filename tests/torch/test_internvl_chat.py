"""Folders of InternVL as first published (`internvl_chat`): loaded by Transformers' classes, the same answers."""

import json

import pytest
import torch
import transformers
from published_internvl import publish
from simulated_devices import simulated
from tiny_models import INTERNVIT, TEXT

import trimtab
import trimtab.placement
from refusals import refused
from trimtab.errors import ConfigError, PartitionError
from trimtab.runtime.placing.load import load_placed

IMAGE = 200
ROWS = 4
SIXTH = {"use_qk_norm": True, "norm_type": "rms_norm", "attention_bias": False}  # as InternViT-6B
THIRD = {"attention_bias": True}  # as InternViT-300M
CASES = {"qwen2": ("qwen2", THIRD), "internlm2": ("llama", SIXTH)}


def tiny(text, vision):
    config = transformers.InternVLConfig(
        vision_config={**INTERNVIT, **vision},
        text_config={**TEXT, "model_type": text},
        image_token_id=IMAGE,
        tie_word_embeddings=False,
    )
    torch.manual_seed(0)
    model = transformers.InternVLForConditionalGeneration(config).eval()
    for weight in model.parameters():  # biases, norms and class tokens too: none may be left out unseen
        torch.nn.init.normal_(weight, std=0.2)
    return model


def inputs():
    torch.manual_seed(1)
    ids = torch.cat([torch.arange(3, 9), torch.full((2 * ROWS,), IMAGE), torch.arange(20, 25)])[None]
    return {"input_ids": ids, "pixel_values": torch.randn(2, 3, 56, 56), "attention_mask": torch.ones_like(ids)}


@pytest.fixture(scope="module", params=CASES)
def case(request, tmp_path_factory):
    text, vision = CASES[request.param]
    model = tiny(text, vision)
    return model, publish(model, tmp_path_factory.mktemp(request.param), internlm2=request.param == "internlm2")


def written_map(folder):
    """As trimtab map and people write it: the published modules, over two GPUs, host memory and disk."""
    internlm2 = "internlm2" in (folder / "config.json").read_text()
    llm, head = "language_model.model", "output" if internlm2 else "lm_head"
    return {
        "vision_model.embeddings": 0,
        **{f"vision_model.encoder.layers.{i}": ("cpu", "disk", 1)[i] for i in range(3)},
        "mlp1": "disk",
        f"{llm}.{'tok_embeddings' if internlm2 else 'embed_tokens'}": "cpu",
        **{f"{llm}.layers.{i}": i % 2 for i in range(3)},
        f"{llm}.norm": 1,
        f"{llm}.rotary_emb": 0,
        f"language_model.{head}": 1,
    }


@pytest.mark.parametrize("kind", ["whole", "split_model", "written"])
def test_a_published_folder_answers_as_transformers_model(case, kind, tmp_path):
    model, folder = case
    placed = {
        "whole": {"": "cpu"},
        "split_model": trimtab.placement.split_model(3, world_size=2),
        "written": written_map(folder),
    }[kind]
    given = inputs()
    with simulated(), torch.no_grad():
        loaded = load_placed(folder, placed, offload_folder=tmp_path / "offload")
        assert type(loaded) is transformers.InternVLForConditionalGeneration
        assert torch.equal(loaded(**given).logits.cpu(), model(**given).logits)


@pytest.mark.parametrize("text", ["llama", "phi3", "qwen3"])
def test_other_language_models_keep_their_names(text, tmp_path):
    model = tiny(text, THIRD)
    with torch.no_grad():
        found = load_placed(publish(model, tmp_path), {"": "cpu"})(**inputs()).logits
        assert torch.equal(found, model(**inputs()).logits)


def test_what_is_split_cannot_stay_in_the_folders_files_and_the_rest_can(case):
    model, folder = case
    given = inputs()
    with simulated(), torch.no_grad():
        loaded = load_placed(folder, {**written_map(folder), "vision_model.encoder.layers.1": 0})
        assert torch.equal(loaded(**given).logits.cpu(), model(**given).logits)
        with refused(PartitionError, "layer.1.attention"):
            load_placed(folder, written_map(folder))


@pytest.mark.filterwarnings("ignore:Attempting to save a model with offloaded")
def test_what_was_loaded_is_saved_in_transformers_own_format(case, tmp_path):
    model, folder = case
    load_placed(folder, {"": "cpu"}).save_pretrained(tmp_path)
    again = transformers.InternVLForConditionalGeneration.from_pretrained(tmp_path)
    with torch.no_grad():
        assert torch.equal(again(**inputs()).logits, model(**inputs()).logits)


@pytest.mark.parametrize(
    ("changed", "names"),
    [
        ({"ps_version": "v1"}, ("ps_version", "InternVL", "1.5")),
        ({"use_llm_lora": 16}, ("use_llm_lora", "16", "0")),
        ({"quantization_config": {"quant_method": "awq"}}, ()),
        ({"llm_config": {"model_type": "internlm"}}, ("internlm",)),
    ],
)
def test_what_transformers_classes_would_compute_otherwise_is_refused(case, tmp_path, changed, names):
    config = json.loads((case[1] / "config.json").read_text()) | changed
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").write_bytes((case[1] / "model.safetensors").read_bytes())
    with refused(ConfigError, names):
        load_placed(tmp_path)


def test_images_need_a_token(case, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((case[1] / name).read_bytes())
    with refused(ConfigError, "IMG_CONTEXT"):
        load_placed(tmp_path)
    (tmp_path / "added_tokens.json").write_text(json.dumps({"<IMG_CONTEXT>": IMAGE}))
    assert load_placed(tmp_path).config.image_token_id == IMAGE
