"""Image rules of InternVL, LLaVA, Gemma 3 and Mllama against the processors of Transformers 5.23. Needs torch."""

import functools
import random

import numpy as np
import pytest
import torch
from image_configs import GEMMA3, GEMMA3_CROPS, INTERNVL, LLAVA, NEXT, ONEVISION
from processor_cases import (
    DRAWN,
    SIZES,
    WORDS,
    assert_full_run,
    assert_same_counts,
    draw,
    make_processor,
    make_tokenizer,
)
from transformers import MllamaVisionConfig, MllamaVisionModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.internvl.processing_internvl import InternVLProcessor
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.modeling_llava_next import image_size_to_num_patches
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.mllama.processing_mllama import MllamaProcessor

from trimtab.models.describe import image_rule
from trimtab.models.images.rules import rule_in_sample
from trimtab.specs import ImageRule

ONEVISION_PINPOINTS, NEXT_PINPOINTS = ONEVISION["image_grid_pinpoints"], NEXT["image_grid_pinpoints"]
UNEVEN_PINPOINTS = [[1344, 336], [336, 336], [672, 1008], [1008, 672], [336, 1344], [2016, 1680]]  # as a user's


def internvl_processor(file: dict):
    tokenizer = make_tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    return make_processor(InternVLProcessor, GotOcr2ImageProcessorPil(**file), tokenizer, image_seq_length=256)


@pytest.mark.parametrize("limits", [(1, 12), (1, 6), (1, 1), (3, 24)])
def test_internvl_equals_the_processor_everywhere(limits):
    file = {"size": {"height": 448, "width": 448}, "min_patches": limits[0], "max_patches": limits[1]}
    file["crop_to_patches"] = False  # as published; the processor switches it on
    merged = internvl_processor(file)._get_num_multimodal_tokens(image_sizes=[(h, w) for w, h in SIZES])
    official = dict(zip(SIZES, zip(merged.num_image_patches, merged.num_image_tokens, strict=True), strict=True))

    def count(width: int, height: int) -> tuple[int, int]:
        tiles, tokens = official[width, height]
        return tiles * 1025, tokens - 2  # start and end markers

    rule = image_rule(INTERNVL, file)
    assert_same_counts(rule, count)
    chat = INTERNVL | {
        "model_type": "internvl_chat", "dynamic_image_size": True, "use_thumbnail": True,
        "min_dynamic_patch": limits[0], "max_dynamic_patch": limits[1],
    }  # fmt: skip
    assert image_rule(chat) == rule


def test_internvl_equals_tensors_and_placeholders_of_a_full_run():
    file = {"size": {"height": 448, "width": 448}, "min_patches": 1, "max_patches": 12, "crop_to_patches": False}
    processor, rule = internvl_processor(file), image_rule(INTERNVL, file)
    assert_full_run(processor, rule, "<IMG_CONTEXT>", lambda out: out["pixel_values"].shape[0])


def next_processor(pinpoints: list[list[int]]):
    images = LlavaNextImageProcessorPil(
        size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336}, image_grid_pinpoints=pinpoints
    )
    return LlavaNextProcessor(
        images, make_tokenizer(image_token="<image>"), patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip


def onevision_processor(pinpoints: list[list[int]], limit: int):
    images = LlavaOnevisionImageProcessorPil(size={"height": 384, "width": 384}, image_grid_pinpoints=pinpoints)
    return make_processor(
        LlavaOnevisionProcessor, images, make_tokenizer(image_token="<image>", video_token="<video>"),
        num_image_tokens=729, vision_feature_select_strategy="full", vision_aspect_ratio=f"anyres_max_{limit}",
    )  # fmt: skip


def next_rule(pinpoints: list[list[int]]) -> ImageRule:
    return image_rule(NEXT | {"image_grid_pinpoints": pinpoints})


def onevision_rule(pinpoints: list[list[int]], limit: int) -> ImageRule:
    return image_rule(ONEVISION | {"image_grid_pinpoints": pinpoints, "vision_aspect_ratio": f"anyres_max_{limit}"})


def assert_anyres_equals(rule: ImageRule, processor, pinpoints: list[list[int]], tile: int, rows: int) -> None:
    tokens = processor._get_num_multimodal_tokens(image_sizes=[(h, w) for w, h in SIZES]).num_image_tokens
    official = dict(zip(SIZES, tokens, strict=True))

    def count(width: int, height: int) -> tuple[int, int]:
        tiles = image_size_to_num_patches((height, width), pinpoints, tile)  # the model's own; +1 base included
        return tiles * rows, official[width, height]

    assert_same_counts(rule, count)


@pytest.mark.parametrize("pinpoints", [NEXT_PINPOINTS, UNEVEN_PINPOINTS], ids=["published", "uneven"])
def test_llava_next_equals_the_processor_everywhere(pinpoints):
    assert_anyres_equals(next_rule(pinpoints), next_processor(pinpoints), pinpoints, 336, 577)


@pytest.mark.parametrize("limit", [9, 4])
def test_llava_onevision_equals_the_processor_everywhere(limit):
    rule, processor = onevision_rule(ONEVISION_PINPOINTS, limit), onevision_processor(ONEVISION_PINPOINTS, limit)
    assert_anyres_equals(rule, processor, ONEVISION_PINPOINTS, 384, 729)


def test_ties_between_canvases_fall_as_the_pinpoints_are_listed():
    rng = random.Random(4)
    for _ in range(20):
        pinpoints = [[336 * rng.randint(1, 6), 336 * rng.randint(1, 6)] for _ in range(rng.randint(1, 12))]
        rule, processor = next_rule(pinpoints), next_processor(pinpoints)
        sizes = rng.sample(SIZES, 200) + [(n, n) for n in range(1, 300, 7)]
        tokens = processor._get_num_multimodal_tokens(image_sizes=[(h, w) for w, h in sizes]).num_image_tokens
        assert [rule.count(*size).tokens for size in sizes] == tokens, pinpoints


def num_tiles(out) -> int:
    """(images, channels, height, width) is a tile each, (images, tiles, ...) what it says."""
    return 1 if out["pixel_values"].dim() == 4 else out["pixel_values"].shape[1]


def test_llava_equals_tensors_and_placeholders_of_a_full_run():
    images = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    fixed = LlavaProcessor(
        images, make_tokenizer(image_token="<image>"), patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    pairs = [
        (fixed, image_rule(LLAVA)),
        (next_processor(NEXT_PINPOINTS), next_rule(NEXT_PINPOINTS)),
        (onevision_processor(ONEVISION_PINPOINTS, 9), onevision_rule(ONEVISION_PINPOINTS, 9)),
    ]
    assert set(fixed._get_num_multimodal_tokens(image_sizes=[(h, w) for w, h in SIZES]).num_image_tokens) == {576}
    for processor, rule in pairs:
        assert_full_run(processor, rule, "<image>", num_tiles)


def test_llava_onevision_does_not_tile_images_that_share_a_sample():
    processor = onevision_processor(ONEVISION_PINPOINTS, 9)
    rule = rule_in_sample(onevision_rule(ONEVISION_PINPOINTS, 9), 2)
    out = processor(images=[[draw(700, 400), draw(30, 900)]], text=["<image><image>"], return_tensors="pt")
    assert out["pixel_values"].shape[:2] == (2, 1)
    tokens = rule.count(700, 400).tokens + rule.count(30, 900).tokens
    assert int((out["input_ids"] == WORDS.index("<image>")).sum()) == tokens


CROPS = {key: value for key, value in GEMMA3_CROPS.items() if key != "size"}


@pytest.mark.parametrize("change", [{}, {"pan_and_scan_min_crop_size": 100, "pan_and_scan_max_num_crops": 7}])
def test_gemma3_crops_equal_the_processor_everywhere(change):
    figures = CROPS | change
    images = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    arguments = {key: value for key, value in figures.items() if key != "do_pan_and_scan"}
    pixel = np.zeros((1, 1, 1), np.uint8)

    def official(width: int, height: int) -> tuple[int, int]:
        # the real method on a view that holds one byte, whatever its size
        height, width = min(height, 2**30), min(width, 2**30)
        n = 1 + len(images.pan_and_scan(np.broadcast_to(pixel, (3, height, width)), **arguments))
        return n * 4096, n * 256

    assert_same_counts(image_rule(GEMMA3, figures), official)


def test_gemma3_equals_tensors_and_placeholders_of_a_full_run():
    tokenizer = make_tokenizer(
        image_token="<image_soft_token>", boi_token="<start_of_image>", eoi_token="<end_of_image>"
    )
    processor = Gemma3Processor(Gemma3ImageProcessorPil(size={"height": 896, "width": 896}), tokenizer)
    plain, cropped = image_rule(GEMMA3), image_rule(GEMMA3, CROPS)
    sizes = [(1920, 1080), (300, 2700), (640, 480), (1, 1), (500, 1300), (257, 600)]
    for rule, asked in ((plain, {}), (cropped, CROPS)):
        asks = functools.partial(processor, **asked)
        assert_full_run(asks, rule, "<start_of_image>", lambda out: out["pixel_values"].shape[0], sizes=sizes)


MLLAMA = {
    "model_type": "mllama",
    "vision_config": {"image_size": 56, "patch_size": 14, "max_num_tiles": 4, "num_hidden_layers": 1},
}


def test_mllama_equals_tensors_and_placeholders_of_a_full_run():
    """Tiles and placeholders of the processor, and the rows that the real tower's blocks see of them."""
    images = MllamaImageProcessorPil(size={"height": 56, "width": 56}, max_image_tiles=4)
    tokenizer = make_tokenizer(image_token="<|image|>", bos_token="<unk>")
    processor = MllamaProcessor(images, tokenizer)
    rule = image_rule(MLLAMA, {"size": {"height": 56, "width": 56}, "max_image_tiles": 4, "do_resize": True})
    more = {"hidden_size": 8, "intermediate_size": 8, "attention_heads": 1, "num_global_layers": 1}
    read = {"intermediate_layers_indices": [0], "vision_output_dim": 16}
    tower = MllamaVisionModel(MllamaVisionConfig(**{**MLLAMA["vision_config"], **more, **read})).eval()
    seen: list[torch.Size] = []
    tower.transformer.layers[0].register_forward_pre_hook(
        lambda module, args, given: seen.append(given["hidden_states"].shape), with_kwargs=True
    )
    cut = set()
    for width, height in [*DRAWN, (112, 56)]:
        out = processor(images=draw(width, height), text="<|image|>", return_tensors="pt")
        counts = rule.count(width, height)
        assert out["pixel_values"].shape[2] == counts.tiles, (width, height)
        assert int((out["input_ids"] == WORDS.index("<|image|>")).sum()) == counts.tokens, (width, height)
        cut.add(int(out["aspect_ratio_mask"].sum()))
        with torch.no_grad():
            tower(out["pixel_values"], out["aspect_ratio_ids"], out["aspect_ratio_mask"])
        assert seen[-1][:2] == (1, counts.patches), (width, height)
        assert counts.patches_sq == counts.patches**2
    assert cut == {1, 2, 3, 4}  # tiles that hold a part of the image differ, the cost does not
