"""Needs torch and Transformers: of several files in a folder, images are counted by the one that the library reads."""

import json
from pathlib import Path

import pytest
from PIL import Image
from transformers import AutoImageProcessor

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


# -- a config.json from outside: what never reaches a loader ----------------------------------------------------------


def test_a_config_of_a_large_model_is_taken(tmp_path: Path) -> None:
    large = {"hidden_size": 16384, "vocab_size": 262_208, "max_position_embeddings": 10_485_760}
    text = {**large, "dtype": "float8_e4m3fn", "_attn_implementation": "sdpa"}
    (tmp_path / "config.json").write_text(json.dumps({"dtype": "bfloat16", "text_config": text, "torch_dtype": None}))
    check_folder(tmp_path)
