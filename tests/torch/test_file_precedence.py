"""Needs torch and Transformers: of several files in a folder, images are counted by the one that the library reads."""

import json
from pathlib import Path

import pytest
from PIL import Image
from tokenizers import AddedToken, Tokenizer
from tokenizers.models import WordLevel
from transformers import AutoImageProcessor, LlavaProcessor, PreTrainedTokenizerFast

from trimtab.models.describe import describe, read_config
from trimtab.runtime.placing.folder import check_folder

OLD = {"image_processor_type": "Qwen2VLImageProcessor", "patch_size": 14, "merge_size": 2, "temporal_patch_size": 2}
LARGE = {**OLD, "size": {"shortest_edge": 3136, "longest_edge": 1003520}}
SMALL = {**OLD, "size": {"shortest_edge": 3136, "longest_edge": 200704}}
FILES = {
    "preprocessor_config.json": {"preprocessor_config.json": LARGE},
    "processor_config.json": {"processor_config.json": {"image_processor": SMALL}},
    "both, the newer nested": {
        "preprocessor_config.json": LARGE,
        "processor_config.json": {"image_processor": SMALL},
    },
    "both, the newer not nested": {
        "preprocessor_config.json": SMALL,
        "processor_config.json": {"processor_class": "Qwen2_5_VLProcessor", "size": {"longest_edge": 3136}},
    },
    "pixels at the top and in size": {"preprocessor_config.json": {**LARGE, "min_pixels": 784, "max_pixels": 100352}},
    "pixels at the top of the newer": {
        "preprocessor_config.json": {**LARGE, "max_pixels": 100352},
        "processor_config.json": {"image_processor": {**SMALL, "max_pixels": 50176}},
    },
    "a video file too": {"preprocessor_config.json": SMALL, "video_preprocessor_config.json": LARGE},
}


@pytest.mark.parametrize("case", FILES)
def test_the_file_that_counts_is_the_one_that_transformers_reads(case, tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(dict(read_config("Qwen2.5-VL-7B"))))
    for name, content in FILES[case].items():
        (tmp_path / name).write_text(json.dumps(content))
    rule = describe(tmp_path, ask=False).image_rule
    processor = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    for size in ((1920, 1080), (100, 60), (333, 2000)):
        grid = processor(images=Image.new("RGB", size), return_tensors="pt")["image_grid_thw"][0]
        assert rule.count(*size).patches == int(grid[1] * grid[2])


# -- LLaVA, whose processor has numbers of the model too --------------------------------------------------------------

LLAVA = {
    "model_type": "llava",
    "image_token_index": 32000,
    "vision_feature_select_strategy": "default",
    "text_config": {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4},
    "vision_config": {"model_type": "clip_vision_model", "hidden_size": 32, "num_hidden_layers": 2, "image_size": 336}
    | {"patch_size": 14, "intermediate_size": 64, "num_attention_heads": 4, "projection_dim": 32},
}
COUNTS = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
CROPPED = {"image_processor_type": "CLIPImageProcessor", "do_resize": True, "do_center_crop": True}
LLAVAS = {  # what is another in config.json, preprocessor_config.json and processor_config.json
    "as published": ({"image_seq_length": 576}, 336, {}),
    "a length of another": ({"image_seq_length": 144}, 336, {}),
    "no length": ({}, 336, {}),
    "a length in the processor's file": ({"image_seq_length": 576}, 336, {"image_seq_length": 144}),
    "another crop": ({"image_seq_length": 576}, 224, {}),
    "another patch": ({"image_seq_length": 576}, 336, {"patch_size": 28}),
    "another choice of rows": ({"image_seq_length": 576}, 336, {"vision_feature_select_strategy": "full"}),
}


@pytest.mark.parametrize("case", LLAVAS)
def test_files_of_llava_that_contradict_each_other_count_as_its_processor_does(case: str, tmp_path: Path) -> None:
    config, side, counts = LLAVAS[case]
    (tmp_path / "config.json").write_text(json.dumps({**LLAVA, **config}))
    size = {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**CROPPED, **size}))
    written = {"processor_class": "LlavaProcessor", "image_token": "<image>", **COUNTS, **counts}
    (tmp_path / "processor_config.json").write_text(json.dumps(written))
    words = Tokenizer(WordLevel({"a": 0, "<unk>": 1}, unk_token="<unk>"))
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words)
    tokenizer.add_tokens([AddedToken("<image>", special=True)])
    images = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    processor = LlavaProcessor(images, tokenizer, **{name: written[name] for name in COUNTS})
    rule = describe(tmp_path).image_rule
    for width, height in ((640, 480), (100, 900)):
        ids = processor(images=Image.new("RGB", (width, height)), text="<image>")["input_ids"][0]
        assert rule.count(width, height).tokens == len(ids)


# -- a config.json from outside: what never reaches a loader ----------------------------------------------------------


def test_a_config_of_a_large_model_is_taken(tmp_path: Path) -> None:
    large = {"hidden_size": 16384, "vocab_size": 262_208, "max_position_embeddings": 10_485_760}
    text = {**large, "dtype": "float8_e4m3fn", "_attn_implementation": "sdpa"}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "text_config": text, "torch_dtype": None}))
    check_folder(tmp_path)
