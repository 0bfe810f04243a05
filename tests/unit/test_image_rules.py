"""Image rules out of a model's own files, and every message that reading them can raise: `models/describe.py`."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
from described_configs import edit
from image_configs import (
    CLIP,
    GEMMA3,
    GEMMA3_CROPS,
    INTERNVL,
    INTERNVL_CHAT,
    INTERNVL_FILE,
    LLAVA,
    NEXT,
    ONEVISION,
    QWEN25,
    QWEN_FILE,
)

from refusals import refused
from trimtab.errors import ConfigError
from trimtab.models.describe import describe, image_rule, image_rule_or_reason
from trimtab.models.images.limits import tell_apart, with_limits, write_rule
from trimtab.models.images.rules import AnyRes, FixedImage

HUGE = 10**9


def test_spellings_of_one_setting_agree():
    assert image_rule(QWEN25, QWEN_FILE) == image_rule(
        QWEN25, {"size": {"shortest_edge": 3136, "longest_edge": 12845056}}
    )
    # at the top level they override `size`, as in Qwen2VLImageProcessor
    both = QWEN_FILE | {"size": {"shortest_edge": 1, "longest_edge": 2}}
    assert image_rule(QWEN25, both) == image_rule(QWEN25, QWEN_FILE)
    assert image_rule(QWEN25, {"image_processor": QWEN_FILE, "processor_class": "x"}) == image_rule(QWEN25, QWEN_FILE)
    assert image_rule(
        LLAVA, {"crop_size": {"height": 336, "width": 336}, "size": {"shortest_edge": 336}}
    ) == FixedImage(rows=577, tokens=576)
    assert image_rule(LLAVA, {"crop_size": 336, "size": 336}) == image_rule(LLAVA)
    assert image_rule(NEXT, {"image_grid_pinpoints": NEXT["image_grid_pinpoints"]}) == image_rule(NEXT)
    assert image_rule(INTERNVL_CHAT | {"force_image_size": None}) == image_rule(INTERNVL_CHAT)


@pytest.mark.parametrize("file", [None, {}, {"do_pan_and_scan": None}, {"do_pan_and_scan": False}])
def test_gemma_crops_only_when_asked(file):
    assert image_rule(GEMMA3, file) == FixedImage(rows=4096, tokens=256, name="gemma3")


def without(data: dict, paths: list[str]) -> dict:
    return functools.reduce(lambda left, path: edit(left, path, ...), paths, data)


@pytest.mark.parametrize(
    ("config", "missing"),
    [
        (INTERNVL_CHAT, ["dynamic_image_size"]),
        (INTERNVL_CHAT, ["min_dynamic_patch", "max_dynamic_patch", "use_thumbnail", "vision_config.patch_size"]),
        (INTERNVL, ["downsample_ratio"]),
        (QWEN25, ["vision_config.window_size"]),
        (LLAVA, ["vision_feature_select_strategy", "vision_config.patch_size", "vision_config.model_type"]),
        (NEXT, ["image_grid_pinpoints"]),
        (ONEVISION, ["vision_aspect_ratio"]),
        (GEMMA3, ["mm_tokens_per_image", "vision_config.patch_size"]),
    ],
)
def test_fields_missing_from_config_are_named(config, missing):
    files = {"internvl": INTERNVL_FILE, "qwen2_5_vl": QWEN_FILE}
    with refused(ConfigError) as caught:
        image_rule(without(config, missing), files.get(config["model_type"]))
    assert all(path in str(caught.value) for path in missing)


def test_all_problems_of_one_model_come_at_once():
    with pytest.raises(ConfigError) as caught:
        image_rule({"model_type": "qwen2_5_vl"}, {"do_resize": False, "max_pixels": "many"})
    text = str(caught.value)
    for part in ("vision_config.patch_size", "spatial_merge_size", "min_pixels", "max_pixels is 'many'", "window_size"):
        assert part in text


@pytest.mark.parametrize(
    ("config", "file", "field"),
    [
        (INTERNVL_CHAT | {"max_dynamic_patch": HUGE}, None, "max_dynamic_patch"),
        (INTERNVL_CHAT | {"min_dynamic_patch": HUGE, "max_dynamic_patch": HUGE}, None, "min_dynamic_patch"),
        (INTERNVL_CHAT | {"force_image_size": HUGE}, None, "image_size"),
        (INTERNVL_CHAT | {"downsample_ratio": 1e300}, None, "downsample_ratio"),
        (INTERNVL_CHAT | {"downsample_ratio": 10**400}, None, "downsample_ratio"),
        (INTERNVL, INTERNVL_FILE | {"max_patches": HUGE}, "max_patches"),
        (INTERNVL, INTERNVL_FILE | {"max_patches": 4097}, "max_patches"),
        (QWEN25, QWEN_FILE | {"max_pixels": 10**400}, "max_pixels"),
        (QWEN25 | {"vision_config": {"patch_size": HUGE, "spatial_merge_size": HUGE}}, None, "patch_size"),
        (QWEN25 | {"vision_config": {"patch_size": 14, "spatial_merge_size": HUGE}}, None, "spatial_merge_size"),
        (LLAVA | {"vision_config": CLIP | {"image_size": HUGE}}, None, "image_size"),
        (NEXT | {"image_grid_pinpoints": [[336, 672]] * 10**6}, None, "image_grid_pinpoints"),
        (NEXT | {"image_grid_pinpoints": [[336 * 10**6, 336]]}, None, "image_grid_pinpoints"),
        (NEXT | {"image_grid_pinpoints": [[10**400, 336]]}, None, "image_grid_pinpoints"),
        (ONEVISION | {"vision_aspect_ratio": "anyres_max_" + "9" * 5000}, None, "vision_aspect_ratio"),
        (GEMMA3 | {"mm_tokens_per_image": 10**400}, None, "mm_tokens_per_image"),
        (GEMMA3, GEMMA3_CROPS | {"pan_and_scan_max_num_crops": HUGE}, "pan_and_scan_max_num_crops"),
    ],
)
def test_huge_numbers_are_refused_at_once_by_name(config, file, field):
    with refused(ConfigError, field) as caught:  # a hang is a failure by CI's time limit
        image_rule(config, file)
    assert len(str(caught.value)) < 1500


def test_the_largest_rules_are_built_at_once_and_their_counts_fit_63_bits():
    largest = [
        image_rule(
            INTERNVL_CHAT | {"max_dynamic_patch": 4096, "force_image_size": 4096, "vision_config": {"patch_size": 1}}
        ),
        image_rule(QWEN25, QWEN_FILE | {"min_pixels": 2**30, "max_pixels": 2**30}),
        image_rule(NEXT | {"image_grid_pinpoints": [[336 * 4096, 336], [336 * 64, 336 * 64]] * 512}),
    ]
    for rule in largest:
        assert min(rule.count(*size).patches_sq for size in ((2**31 - 1, 2**31 - 1), (99999, 55555), (7, 7))) > 0
    assert largest[0].count(2**20, 2**20).patches_sq == 4097 * (4096**2 + 1) ** 2 < 2**63


@pytest.mark.parametrize(("config", "file"), [(QWEN25, QWEN_FILE), (INTERNVL, INTERNVL_FILE)])
def test_a_file_that_was_not_given_leaves_the_rule_unsettled_until_it_counts(config, file):
    assert image_rule_or_reason(config, file) == image_rule(config, file)
    rule = image_rule_or_reason(config, None)
    with refused(ConfigError, "--set", "preprocessor=preprocessor_config.json", "config.json"):
        rule.count(5, 5)
    with refused(ConfigError, "--set"):
        with_limits(rule, max_pixels=10**6)
    with refused(ConfigError):
        image_rule_or_reason(config, {})  # the file that was given lacks it


def test_rules_are_told_apart_by_the_settings_that_differ() -> None:
    """Also where a setting is a list of pairs."""
    any_res = describe("LLaVA-OneVision-7B").image_rule
    assert isinstance(any_res, AnyRes)
    fewer = replace(any_res, pinpoints=any_res.pinpoints[:2])
    assert write_rule(any_res) == write_rule(replace(any_res))
    first, second = tell_apart(write_rule(fewer), write_rule(any_res))
    assert first == f"pinpoints {[list(pair) for pair in fewer.pinpoints]}"
    assert second.startswith("pinpoints [[")
    names = tell_apart(write_rule(any_res), write_rule(describe("Qwen2.5-VL-7B").image_rule))
    assert names == (f"the rule {any_res.name}", "the rule qwen_smart_resize")
    assert tell_apart("SmartResize(max_pixels=3)", write_rule(any_res))[0] == "an earlier version of trimtab"
