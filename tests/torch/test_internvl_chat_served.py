"""`trimtab serve` over a folder of InternVL as first published: the processor made of its config.json, the answers."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from refusals import refused

pytest.importorskip("fastapi", reason="carries the endpoint: pip install 'trimtab[serve]'")
pytest.importorskip("uvicorn", reason="carries the endpoint: pip install 'trimtab[serve]'")
pytest.importorskip("openai", reason="has the types of the answers: pip install 'trimtab[serve]'")

from published_internvl import publish
from tiny_chat import chat_inputs, picture, save_chat_model

from trimtab.errors import ConfigError
from trimtab.runtime.placing.load import load_placed
from trimtab.serve.application import load_processor


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As published: a tokenizer that names no image token, a chat template for texts, no processor."""
    saved = save_chat_model(tmp_path_factory.mktemp("chat") / "own", "internvl")
    model = transformers.InternVLForConditionalGeneration.from_pretrained(saved)
    found = saved.parent / "published"
    found.mkdir()
    for name in ("tokenizer.json", "generation_config.json"):
        (found / name).write_bytes((saved / name).read_bytes())
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "chat_template": "{{ messages[0].content + '!' }}"}
    (found / "tokenizer_config.json").write_text(json.dumps(settings))
    preprocessor = {"feature_extractor_type": "CLIPFeatureExtractor", "size": 448, "image_mean": [0.5, 0.5, 0.5]}
    (found / "preprocessor_config.json").write_text(json.dumps(preprocessor))
    return publish(model, found)


def conversation(*sizes: tuple[int, int]) -> list[dict[str, Any]]:
    images = [{"type": "image", "image": picture(i, *size)} for i, size in enumerate(sizes)]
    return [
        {"role": "system", "content": "be kind"},
        {"role": "user", "content": [*images, {"type": "text", "text": "what is in the picture?"}]},
    ]


def test_turns_tiles_and_pixels_are_those_of_the_config(folder: Path) -> None:
    processor = load_processor(folder)
    wide, small = (112, 56), (56, 56)  # two tiles and a thumbnail; one tile, which needs none
    given = conversation(wide, small)
    made = {"add_generation_prompt": True, "return_dict": True, "return_tensors": "pt"}
    inputs = processor.apply_chat_template(given, **made, tokenize=True)
    rows = "<IMG_CONTEXT>" * 4
    assert processor.tokenizer.decode(inputs["input_ids"][0]) == (
        f"<|im_start|>system\nbe kind<|im_end|>\n<|im_start|>user\n<img>{rows * 3}</img>\n<img>{rows}</img>\n"
        "what is in the picture?<|im_end|>\n<|im_start|>assistant\n"
    )
    mean, std = (torch.tensor(x)[:, None, None] for x in ([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]))
    pixels = [
        (torch.tensor(list(part["image"].get_flattened_data())).view(56, -1, 3).permute(2, 0, 1) / 255 - mean) / std
        for part in given[1]["content"][:2]
    ]
    expected = torch.stack([pixels[0][..., :56], pixels[0][..., 56:], pixels[1]])
    assert torch.allclose(inputs["pixel_values"][[0, 1, 3]], expected, atol=1e-5)
    assert len(inputs["pixel_values"]) == 4


def test_the_processors_inputs_give_the_answer_of_the_own_format(folder: Path) -> None:
    inputs = chat_inputs(load_processor(folder), "what is in the picture?", picture(3))
    own = transformers.InternVLForConditionalGeneration.from_pretrained(folder.parent / "own")
    asked = {**inputs, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(load_placed(folder).generate(**asked), own.generate(**asked))


@pytest.mark.parametrize(
    ("changed", "names"),
    [({"template": "phi3-chat"}, ("template", "phi3-chat")), ({"use_thumbnail": False}, ("thumbnail",))],
)
def test_what_the_processor_would_do_otherwise_is_refused(folder, tmp_path, changed, names):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "config.json").write_text(json.dumps(json.loads((folder / "config.json").read_text()) | changed))
    with refused(ConfigError, names):
        load_processor(tmp_path)


def test_a_tokenizer_with_code_of_its_own_is_refused(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes((folder / "config.json").read_bytes())
    settings = {
        "tokenizer_class": "InternLM2Tokenizer",
        "auto_map": {"AutoTokenizer": ["tokenization_internlm2.InternLM2Tokenizer", None]},
        "added_tokens_decoder": {"300": {"content": "<IMG_CONTEXT>"}},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    with refused(ConfigError):
        load_processor(tmp_path)
