"""Image rules against the processors of Transformers 5.23; needs torch and transformers, no weights, no network.

The processors are the PIL ones (`*ImageProcessorPil`, what `AutoImageProcessor` picks without torchvision), inside
the real processor classes with a word-level tokenizer. Each rule is compared on more than 20,000 sizes with the
processor's own arithmetic, and on a few dozen drawn images with the tensors and placeholders of a full run.
"""

# ruff: noqa: E402 - what may be absent is asked for first, so that the file is skipped with a reason

from __future__ import annotations

import itertools
import random
import re

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")
pytest.importorskip("PIL", reason="pillow is not installed")

from PIL import Image
from tokenizers import Tokenizer, models
from transformers import MllamaVisionConfig, MllamaVisionModel, PreTrainedTokenizerFast, Qwen2_5_VLConfig
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma3.processing_gemma3 import Gemma3Processor
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.glm4v.processing_glm4v import Glm4vProcessor
from transformers.models.glm46v.image_processing_pil_glm46v import Glm46VImageProcessorPil
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
from transformers.models.qwen2_5_vl import modeling_qwen2_5_vl
from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor

from trimtab.errors import ImageError
from trimtab.models.image_rules import image_rule
from trimtab.models.images.apply import rule_in_sample
from trimtab.models.images.native import SmartResize
from trimtab.specs import ImageRule

pytestmark = pytest.mark.torch

WORDS = [
    "<unk>", "<image>", "<video>", "<|image_pad|>", "<|video_pad|>",
    "<IMG_CONTEXT>", "<img>", "</img>", "<image_soft_token>", "<start_of_image>",
    "<end_of_image>", "<|image|>", "<|video|>", "<|vision_start|>", "<|vision_end|>",
    "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>", "<|end_of_video|>",
]  # fmt: skip
ONEVISION_PINPOINTS = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]
NEXT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
UNEVEN_PINPOINTS = [[1344, 336], [336, 336], [672, 1008], [1008, 672], [336, 1344], [2016, 1680]]  # as a user's


def make_sizes() -> list[tuple[int, int]]:
    """More than 20,000 (width, height): photographs, slivers, ties of every rule, one pixel, gigapixels."""
    rng = random.Random(20)
    sizes = [(rng.randint(1, 5000), rng.randint(1, 5000)) for _ in range(8000)]
    sizes += [(round(10 ** rng.uniform(0, 5)), round(10 ** rng.uniform(0, 5))) for _ in range(6000)]
    edges = sorted({f * k + d for f in (14, 28, 32, 336, 384, 448) for k in (1, 2, 3, 5) for d in (-1, 0, 1)})
    sizes += list(itertools.product(edges, edges))
    # half of a factor (rounding half to even) and whole multiples
    halves = [f * k // 2 for f in (28, 32) for k in range(1, 25)]
    sizes += list(itertools.product(halves, halves))
    # aspect ratios of tilings and the midpoints between them, in several scales
    ratios = [(i, j) for i in range(1, 14) for j in range(1, 14)]
    sizes += [(i * k, j * k) for i, j in ratios for k in (1, 37, 100, 224, 317, 448)]
    sizes += [(i * k + d, 2 * j * k) for i, j in ratios for k in (50, 200) for d in (-1, 0, 1)]
    # around the ratio of 200 that smart_resize refuses
    for short in (1, 2, 3, 5, 7, 10, 27, 28, 29, 50, 101):
        for long in (199 * short, 200 * short - 1, 200 * short, 200 * short + 1, 201 * short, 1000 * short):
            sizes += [(long, short), (short, long)]
    # float products a hair below a whole number, which LLaVA's round(x, 7) lifts
    hair = [(47, 1128), (55, 88), (110, 352), (396, 704), (423, 752), (47, 423), (98, 1323), (294, 1323)]
    sizes += hair + [(height, width) for width, height in hair]
    huge = [1, 2, 27, 28, 99_999, 2**20, 10**7, 2**31 - 1]
    sizes += list(itertools.product(huge, huge))
    return sizes


SIZES = make_sizes()
DRAWN = [(random.Random(i).randint(1, 900), random.Random(-i).randint(1, 900)) for i in range(1, 22)] + [
    (1920, 1080), (1, 1), (1, 150), (150, 1), (448, 448), (28, 5600), (1400, 7), (640, 480), (635, 635), (300, 2700)
]  # fmt: skip


def test_there_are_enough_sizes():
    assert len(set(SIZES)) > 20_000
    assert min(SIZES)[0] == 1
    assert max(SIZES)[0] == 2**31 - 1


def make_tokenizer(**special: str) -> PreTrainedTokenizerFast:
    words = models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<unk>")
    return PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(words), unk_token="<unk>", pad_token="<unk>", extra_special_tokens=special
    )


def make_processor(cls: type, image_processor: object, tokenizer: object, **settings: object):
    """A real processor without its video half, which cannot be built without torchvision."""
    without_video = type(
        cls.__name__, (cls,), {"get_attributes": classmethod(lambda _: ["image_processor", "tokenizer"])}
    )
    return without_video(image_processor=image_processor, tokenizer=tokenizer, **settings)


def draw(width: int, height: int) -> Image.Image:
    pixels = np.random.default_rng(width * 7919 + height).integers(0, 256, (height, width, 3), np.uint8)
    return Image.fromarray(pixels)


def assert_same_counts(rule: ImageRule, official) -> None:
    """`official(width, height)` gives (patches, tokens) or raises ValueError; the rule does the same everywhere."""
    refused, wrong = 0, []
    for width, height in SIZES:
        try:
            expected = official(width, height)
        except ValueError:
            refused += 1
            with pytest.raises(ImageError):
                rule.count(width, height)
            continue
        counts = rule.count(width, height)
        if (counts.patches, counts.tokens) != expected:
            wrong.append((width, height, counts, expected))
    assert not wrong, (len(wrong), wrong[:5])
    assert len(SIZES) - refused > 20_000


# -- smart_resize: Qwen, GLM ----------------------------------------------------------------------------------------

QWEN25 = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112}}
QWEN3 = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
GLM = {
    "model_type": "glm4v_moe",
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
QWEN_TOKENS = {"image_token": "<|image_pad|>", "video_token": "<|video_pad|>"}


def smart_resize_processor(config: dict, file: dict):
    if config["model_type"].startswith("glm"):
        tokenizer = make_tokenizer(image_token="<|image|>", video_token="<|video|>")
        return make_processor(Glm4vProcessor, Glm4vImageProcessorPil(**file), tokenizer)
    cls = Qwen3VLProcessor if config["model_type"] == "qwen3_vl" else Qwen2_5_VLProcessor
    return make_processor(cls, Qwen2VLImageProcessorPil(**file), make_tokenizer(**QWEN_TOKENS))


SMART = {
    "qwen2.5": (QWEN25, {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}),
    "qwen2-trained": (
        QWEN25 | {"model_type": "qwen2_vl"},
        {"min_pixels": 3136, "max_pixels": 1003520, "patch_size": 14},
    ),
    "qwen2.5-narrow": (QWEN25, {"size": {"shortest_edge": 200704, "longest_edge": 401408}, "merge_size": 2}),
    "qwen2.5-tiny": (QWEN25, {"min_pixels": 784, "max_pixels": 3136}),
    "qwen3": (QWEN3, {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "merge_size": 2}),
    "glm4.5v": (GLM, {"size": {"shortest_edge": 12544, "longest_edge": 47040000}, "patch_size": 14}),
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


def test_glm46v_resizes_as_glm4v():
    file = SMART["glm4.5v"][1]
    image_processor = Glm46VImageProcessorPil(**file)
    rule = image_rule(GLM | {"model_type": "glm46v"}, file)
    for width, height in SIZES[::40]:
        try:
            expected = image_processor.get_number_of_image_patches(height, width)
        except ValueError:
            continue
        assert rule.count(width, height).patches == expected


@pytest.mark.parametrize("name", SMART)
def test_smart_resize_equals_tensors_and_placeholders_of_a_full_run(name):
    config, file = SMART[name]
    processor = smart_resize_processor(config, file)
    rule = image_rule(config, file)
    text = "<|image|>" if name.startswith("glm") else "<|image_pad|>"
    for width, height in DRAWN:
        counts = rule.count(width, height)
        if counts.patches > 12_000:
            continue  # a second of drawing each
        out = processor(images=draw(width, height), text=text, return_tensors="np")
        assert out["pixel_values"].shape[0] == counts.patches, (width, height)
        assert int((out["input_ids"] == WORDS.index(text)).sum()) == counts.tokens, (width, height)
    for width, height in [(201 * 30, 30), (30, 201 * 30)]:
        with pytest.raises(ValueError, match="aspect ratio"):
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


# -- tiles: InternVL, LLaVA, Gemma ----------------------------------------------------------------------------------

INTERNVL = {
    "model_type": "internvl",
    "downsample_ratio": 0.5,
    "vision_config": {"image_size": [448, 448], "patch_size": [14, 14]},
}


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
    for width, height in DRAWN:
        out = processor(images=draw(width, height), text="<IMG_CONTEXT>", return_tensors="pt")
        counts = rule.count(width, height)
        assert out["pixel_values"].shape[0] == counts.tiles, (width, height)
        assert int((out["input_ids"] == WORDS.index("<IMG_CONTEXT>")).sum()) == counts.tokens


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
    config = {
        "model_type": "llava_next", "vision_feature_select_strategy": "default", "image_grid_pinpoints": pinpoints,
        "vision_config": {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14},
    }  # fmt: skip
    return image_rule(config)


def onevision_rule(pinpoints: list[list[int]], limit: int) -> ImageRule:
    config = {
        "model_type": "llava_onevision", "vision_feature_select_strategy": "full", "image_grid_pinpoints": pinpoints,
        "vision_aspect_ratio": f"anyres_max_{limit}",
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14},
    }  # fmt: skip
    return image_rule(config)


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


def test_llava_equals_tensors_and_placeholders_of_a_full_run():
    images = CLIPImageProcessorPil(size={"shortest_edge": 336}, crop_size={"height": 336, "width": 336})
    fixed = LlavaProcessor(
        images, make_tokenizer(image_token="<image>"), patch_size=14,
        vision_feature_select_strategy="default", num_additional_image_tokens=1,
    )  # fmt: skip
    clip = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
    fixed_rule = image_rule({"model_type": "llava", "vision_feature_select_strategy": "default", "vision_config": clip})
    pairs = [
        (fixed, fixed_rule),
        (next_processor(NEXT_PINPOINTS), next_rule(NEXT_PINPOINTS)),
        (onevision_processor(ONEVISION_PINPOINTS, 9), onevision_rule(ONEVISION_PINPOINTS, 9)),
    ]
    assert set(fixed._get_num_multimodal_tokens(image_sizes=[(h, w) for w, h in SIZES]).num_image_tokens) == {576}
    for processor, rule in pairs:
        for width, height in DRAWN:
            out = processor(images=draw(width, height), text="<image>", return_tensors="pt")
            counts = rule.count(width, height)
            tiles = 1 if processor is fixed else out["pixel_values"].shape[1]
            assert tiles == counts.tiles, (rule.name, width, height)
            assert int((out["input_ids"] == WORDS.index("<image>")).sum()) == counts.tokens, (rule.name, width, height)


def test_llava_onevision_does_not_tile_images_that_share_a_sample():
    processor = onevision_processor(ONEVISION_PINPOINTS, 9)
    rule = rule_in_sample(onevision_rule(ONEVISION_PINPOINTS, 9), 2)
    out = processor(images=[[draw(700, 400), draw(30, 900)]], text=["<image><image>"], return_tensors="pt")
    assert out["pixel_values"].shape[:2] == (2, 1)
    tokens = rule.count(700, 400).tokens + rule.count(30, 900).tokens
    assert int((out["input_ids"] == WORDS.index("<image>")).sum()) == tokens


GEMMA3 = {"model_type": "gemma3", "mm_tokens_per_image": 256, "vision_config": {"image_size": 896, "patch_size": 14}}
CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
}


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
    for width, height in [(1920, 1080), (300, 2700), (640, 480), (1, 1), (500, 1300), (257, 600)]:
        for rule, asked in ((plain, {}), (cropped, CROPS)):
            out = processor(images=draw(width, height), text="<start_of_image>", return_tensors="pt", **asked)
            counts = rule.count(width, height)
            assert out["pixel_values"].shape[0] == counts.tiles, (rule.name, width, height)
            assert int((out["input_ids"] == WORDS.index("<image_soft_token>")).sum()) == counts.tokens


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


def test_messages_of_the_processor_are_the_reason_for_ours():
    with pytest.raises(ValueError, match=re.escape("must be smaller than 200")):
        Qwen2VLImageProcessorPil().get_number_of_image_patches(1, 201)
