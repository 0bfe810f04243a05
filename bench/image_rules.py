"""Calls per second of every image rule, beside the arithmetic of the Transformers processor it equals.

Run: python bench/image_rules.py. Sizes are distinct, so nothing is answered from a cache (the peers' `lru_cache`
holds 100 sizes); both sides count the same 20,000 images of 64 to 4,000 pixels a side, best of three rounds, one core.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable

import numpy as np
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_next.processing_llava_next import LlavaNextProcessor
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.llava_onevision.processing_llava_onevision import LlavaOnevisionProcessor
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from trimtab.models.images.rules import AnyRes, DynamicTiling, FixedImage, GlmSmartResize, PanAndScan, SmartResize
from trimtab.specs import ImageRule

Count = Callable[[int, int], object]
NEXT_PINPOINTS = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
ONEVISION_PINPOINTS = [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)]


def as_pairs(pinpoints: list[list[int]]) -> tuple[tuple[int, int], ...]:
    return tuple((height, width) for height, width in pinpoints)


def feature_counter(cls: type, image_processor: object, size: int, **attributes: object) -> Count:
    """The processor's own token arithmetic, without a tokenizer."""
    processor = cls.__new__(cls)
    processor.image_processor = image_processor
    for name, value in attributes.items():
        setattr(processor, name, value)
    return lambda w, h: processor._get_number_of_features(h, w, size, size)


def rules() -> list[tuple[str, ImageRule, Count | None]]:
    qwen = Qwen2VLImageProcessorPil(size={"shortest_edge": 3136, "longest_edge": 12845056})
    qwen3 = Qwen2VLImageProcessorPil(size={"shortest_edge": 65536, "longest_edge": 16777216}, patch_size=16)
    glm = Glm4vImageProcessorPil(size={"shortest_edge": 12544, "longest_edge": 47040000})
    internvl = GotOcr2ImageProcessorPil(size={"height": 448, "width": 448}, crop_to_patches=True)
    gemma = Gemma3ImageProcessorPil(size={"height": 896, "width": 896})
    pixel = np.zeros((1, 1, 1), np.uint8)
    next_count = feature_counter(
        LlavaNextProcessor, LlavaNextImageProcessorPil(image_grid_pinpoints=NEXT_PINPOINTS), 336,
        patch_size=14, num_additional_image_tokens=1,
    )  # fmt: skip
    onevision_count = feature_counter(
        LlavaOnevisionProcessor, LlavaOnevisionImageProcessorPil(image_grid_pinpoints=ONEVISION_PINPOINTS), 384,
        num_image_tokens=729, vision_aspect_ratio="anyres_max_9",
    )  # fmt: skip
    return [
        (
            "InternVL, 12 tiles",
            DynamicTiling(
                min_tiles=1, max_tiles=12, tile_size=448, thumbnail=True, rows_per_tile=1025, tokens_per_tile=256
            ),
            lambda w, h: internvl.get_number_of_image_patches(h, w),
        ),
        (
            "Qwen2.5-VL",
            SmartResize(patch_size=14, merge_size=2, min_pixels=3136, max_pixels=12845056, window_size=112),
            lambda w, h: qwen.get_number_of_image_patches(h, w),
        ),
        (
            "Qwen3-VL",
            SmartResize(patch_size=16, merge_size=2, min_pixels=65536, max_pixels=16777216),
            lambda w, h: qwen3.get_number_of_image_patches(h, w),
        ),
        (
            "GLM-4.5V",
            GlmSmartResize(patch_size=14, merge_size=2, temporal_patch_size=2, min_pixels=12544, max_pixels=47040000),
            lambda w, h: glm.get_number_of_image_patches(h, w),
        ),
        ("LLaVA-1.5", FixedImage(rows=577, tokens=576), None),
        (
            "LLaVA-NeXT",
            AnyRes(tile_size=336, pinpoints=as_pairs(NEXT_PINPOINTS), grid_size=24, rows_per_tile=577),
            next_count,
        ),
        (
            "LLaVA-OneVision",
            AnyRes(
                tile_size=384,
                pinpoints=as_pairs(ONEVISION_PINPOINTS),
                grid_size=27,
                rows_per_tile=729,
                max_feature_tiles=9,
            ),
            onevision_count,
        ),
        (
            "Gemma 3, pan and scan",
            PanAndScan(rows_per_crop=4096, tokens_per_crop=256, min_crop_size=256, max_num_crops=4, min_ratio=1.2),
            lambda w, h: gemma.pan_and_scan(np.broadcast_to(pixel, (3, h, w)), 256, 4, 1.2),
        ),
    ]


def best_seconds(count: Count, sizes: list[tuple[int, int]]) -> float:
    best = float("inf")
    for _ in range(3):
        start = time.perf_counter()
        for width, height in sizes:
            count(width, height)
        best = min(best, time.perf_counter() - start)
    return best


def main() -> None:
    rng = random.Random(0)
    sizes: set[tuple[int, int]] = set()
    while len(sizes) < 20_000:
        sizes.add((rng.randint(64, 4000), rng.randint(64, 4000)))
    ordered = sorted(sizes)
    rng.shuffle(ordered)

    print(f"{'rule':24}{'ours':>12}{'':>10}{'Transformers':>16}{'':>10}{'ratio':>8}")
    for name, rule, official in rules():
        ours = best_seconds(rule.count, ordered) / len(ordered)
        theirs = f"{'-':>16}{'':>10}{'-':>8}"
        if official is not None:
            peer = best_seconds(official, ordered) / len(ordered)
            theirs = f"{1 / peer:>12,.0f} /s{peer * 1e6:>8.2f} us{peer / ours:>7.1f}x"
        print(f"{name:24}{1 / ours:>10,.0f} /s{ours * 1e6:>6.2f} us{theirs}")


if __name__ == "__main__":
    main()
