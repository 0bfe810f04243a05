"""Image rules out of a model's own files, and every message that reading them can raise: `models/describe.py`."""

import functools
from dataclasses import replace

import pytest
from described_configs import edit
from image_configs import GEMMA3, INTERNVL, INTERNVL_CHAT, INTERNVL_FILE, LLAVA, NEXT, QWEN25, QWEN_FILE

from refusals import refused
from trimtab.errors import ConfigError
from trimtab.models.describe import describe, image_rule, image_rule_or_reason
from trimtab.models.images.rules import AnyRes, FixedImage, tell_apart, with_limits, write_rule

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
    with refused(ConfigError, "--set", "preprocessor=", "config.json"):
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
