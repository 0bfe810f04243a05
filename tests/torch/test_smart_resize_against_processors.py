"""Image rules of Qwen and GLM against the processors of Transformers 5.23: on 20,000 sizes, and on drawn images."""

import itertools

import pytest
import torch
from image_configs import GLM, GLM_FILE, QWEN3, QWEN3_FILE, QWEN25, QWEN_FILE
from processor_cases import assert_full_run, assert_same_counts, draw, make_processor, make_tokenizer
from transformers import Qwen2_5_VLConfig
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from refusals import refused
from trimtab.errors import ImageError
from trimtab.models.describe import image_rule
from trimtab.models.images.rules import SmartResize

QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}


def smart_resize_processor(config: dict, file: dict):
    if config["model_type"].startswith("glm"):
        tokenizer = make_tokenizer(image_token="<|image|>", video_token="<|video|>")
        images = Glm46VImageProcessorPil if config["model_type"] == "glm46v" else Glm4vImageProcessorPil
        return make_processor(Glm4vProcessor, images(**file), tokenizer)
    cls = Qwen3VLProcessor if config["model_type"] == "qwen3_vl" else Qwen2_5_VLProcessor
    return make_processor(cls, Qwen2VLImageProcessorPil(**file), make_tokenizer(**QWEN_TOKENS))


SMART = {
    "qwen2.5": (QWEN25, QWEN_FILE),
    "qwen2-trained": (
        QWEN25 | {"model_type": "qwen2_vl"},
        {"min_pixels": 3136, "max_pixels": 1003520, "patch_size": 14},
    ),
    "qwen2.5-narrow": (QWEN25, {"size": {"shortest_edge": 200704, "longest_edge": 401408}, "merge_size": 2}),
    "qwen2.5-tiny": (QWEN25, {"min_pixels": 784, "max_pixels": 3136}),
    "qwen3": (QWEN3, QWEN3_FILE),
    "glm4.5v": (GLM, {"size": {"shortest_edge": 12544, "longest_edge": 47040000}, "patch_size": 14}),
    "glm4.6v": (GLM | {"model_type": "glm46v"}, GLM_FILE),
    "glm-tiny": (GLM, {"size": {"shortest_edge": 1568, "longest_edge": 6272}}),
    "glm-narrow": (GLM, {"size": {"shortest_edge": 200704, "longest_edge": 802816}, "temporal_patch_size": 2}),
}


@pytest.mark.parametrize("name", SMART)
def test_smart_resize_equals_the_processor_everywhere(name):
    config, file = SMART[name]
    image_processor = smart_resize_processor(config, file).image_processor

    def official(width: int, height: int) -> tuple[int, int]:
        patches = image_processor.get_number_of_image_patches(height, width)
        return patches, patches // image_processor.merge_size**2

    assert_same_counts(image_rule(config, file), official)


@pytest.mark.parametrize("name", SMART)
def test_smart_resize_equals_tensors_and_placeholders_of_a_full_run(name):
    config, file = SMART[name]
    processor = smart_resize_processor(config, file)
    rule = image_rule(config, file)
    text = "<|image|>" if name.startswith("glm") else "<|image_pad|>"
    assert_full_run(processor, rule, text, lambda out: out["pixel_values"].shape[0], of="patches")
    for width, height in [(201 * 30, 30), (30, 201 * 30)]:
        with refused(ValueError):
            processor(images=draw(width, height), text=text, return_tensors="np")
        with pytest.raises(ImageError):
            rule.count(width, height)


def test_window_sums_equal_the_vision_model_on_2500_grids():
    config = Qwen2_5_VLConfig(
        vision_config={
            "depth": 2, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "out_hidden_size": 16,
            "patch_size": 14, "spatial_merge_size": 2, "window_size": 112, "fullatt_block_indexes": [1],
        }
    ).vision_config  # fmt: skip
    model = modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel(config)
    free = SmartResize(patch_size=14, merge_size=2, min_pixels=1, max_pixels=10**9, window_size=112)

    def window_rows(rows: int, columns: int) -> torch.Tensor:
        _, ends = modeling_qwen2_5_vl.get_vision_window_index(
            torch.tensor([[1, 2 * rows, 2 * columns]]),
            spatial_merge_size=model.spatial_merge_size,
            window_size=model.window_size,
            patch_size=model.patch_size,
        )
        return ends.diff()

    for rows, columns in itertools.product(range(1, 51), repeat=2):
        counts = free.count(columns * 28, rows * 28)
        sizes = window_rows(rows, columns).long()
        assert counts.patches == int(sizes.sum())
        assert counts.patches_windowed == int((sizes**2).sum()), (rows, columns)

    # and those are the segments that its blocks attend over: block 0 in windows, block 1 in full
    seen = []
    for block in model.blocks:
        block.register_forward_pre_hook(lambda _, __, kwargs: seen.append(kwargs["cu_seqlens"]), with_kwargs=True)
    with torch.no_grad():
        model(torch.zeros(4 * 6 * 5, 3 * 2 * 14 * 14), grid_thw=torch.tensor([[1, 12, 10]]))
    counts = free.count(5 * 28, 6 * 28)
    windowed, full = (int((ends.diff().long() ** 2).sum()) for ends in seen)
    assert (windowed, full) == (counts.patches_windowed, counts.patches_sq)
