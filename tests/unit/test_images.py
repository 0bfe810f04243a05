"""Image rules at work against published counts and brute force: `models/images`."""

import functools
from dataclasses import replace

import numpy as np
import pytest
from described_configs import edit
from hypothesis import given, settings
from hypothesis import strategies as st
from image_configs import (
    GEMMA3,
    GLM,
    GLM_FILE,
    INTERNVL,
    INTERNVL_CHAT,
    INTERNVL_FILE,
    LLAVA,
    NEXT,
    ONEVISION,
    PUBLISHED,
    QWEN3,
    QWEN3_FILE,
    QWEN25,
    QWEN_FILE,
    RULES,
)

from refusals import refused
from trimtab.errors import ConfigError, ImageError
from trimtab.models.describe import describe, image_rule, image_rule_or_reason
from trimtab.models.images.rules import AnyRes, FixedImage, SmartResize, tell_apart, with_limits, write_rule
from trimtab.specs import ImageRule

HUGE = 10**9  # of refusals.yaml, as `without`


@pytest.mark.parametrize(("config", "file", "patches", "tokens"), PUBLISHED)
def test_full_hd_counts(config, file, patches, tokens):
    counts = image_rule(config, file).count(1920, 1080)
    assert (counts.patches, counts.tokens) == (patches, tokens)


# -- invariants -----------------------------------------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(RULES), st.integers(1, 6000), st.integers(1, 6000))
def test_squares_are_between_an_even_split_and_one_segment(rule: ImageRule, width: int, height: int):
    try:
        c = rule.count(width, height)
    except ImageError:
        assert max(width, height) > 200 * min(width, height) or max(width, height) > 5000
        return
    assert 1 <= c.tiles <= c.patches
    assert c.patches**2 / c.tiles <= c.patches_sq <= c.patches**2
    assert c.patches <= c.patches_windowed <= c.patches_sq
    assert 1 <= c.tokens < 1.05 * c.patches  # newlines can take the tokens a little above
    assert rule.count(width, height) == c


@pytest.mark.parametrize(
    "size", [(0, 5), (5, -1), (2.0, 5), (True, 5), ("5", 5), (None, 5), (2**31, 5), (np.int64(5), 5)]
)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_bad_sizes_are_refused(rule, size):
    with refused(ImageError, "1", "2147483647"):
        rule.count(*size)


# -- tiles ----------------------------------------------------------------------------------------------------------


def test_internvl_without_thumbnail_or_tiling():
    assert image_rule(INTERNVL_CHAT | {"use_thumbnail": False}).count(1920, 1080).tiles == 8
    assert image_rule(INTERNVL_CHAT | {"dynamic_image_size": False}).count(1920, 1080).tiles == 1


def test_internvl_chat_does_not_read_its_preprocessor_file():
    assert image_rule(INTERNVL_CHAT, {"crop_size": 336, "do_resize": False}) == image_rule(INTERNVL_CHAT)


def test_sizing_asks_the_rule_about_the_sample_by_itself(tmp_path):
    from trimtab.samples.lengths import read_lengths
    from trimtab.samples.size import size_samples

    path = tmp_path / "lengths.jsonl"
    first, second = '{"length": 9, "image_wh": [[1920, 1080]]}', '{"length": 9, "image_wh": [[1920, 1080], [640, 480]]}'
    path.write_text(f"{first}\n{second}\n")
    for kind, patches in ((ONEVISION, [image_rule(ONEVISION).count(1920, 1080).patches, 2 * 729]), (NEXT, None)):
        rule = image_rule(kind)
        table = size_samples(path, image_rule=rule, tokenizer=None).table
        expected = patches or [rule.count(1920, 1080).patches, sum(rule.count(*s).patches for s in SIZES)]
        assert table.num_patches.tolist() == read_lengths(path, image_rule=rule).num_patches.tolist() == expected


SIZES = ((1920, 1080), (640, 480))


# -- native resolution ----------------------------------------------------------------------------------------------


def test_windows_keep_the_rest_at_the_borders():
    rule = SmartResize(patch_size=14, merge_size=2, min_pixels=1, max_pixels=10**8, window_size=112)
    # 6 x 5 merged patches in windows of 4 x 4: 4 and 2 rows, 4 and 1 columns, 4 patches in each
    counts = rule.count(5 * 28, 6 * 28)
    assert counts.patches_windowed == sum((4 * h * w) ** 2 for h in (4, 2) for w in (4, 1))
    assert counts.patches_sq == (4 * 30) ** 2


@pytest.mark.parametrize("rule", [image_rule(QWEN25, QWEN_FILE), image_rule(QWEN3, QWEN3_FILE)])
def test_smart_resize_refuses_slivers_beyond_200(rule):
    assert rule.count(200 * 7, 7).patches > 0
    with refused(ImageError, "1401", "7", "200"):
        rule.count(1401, 7)


def test_glm_asks_for_the_ratio_after_it_enlarged_the_short_side():
    rule = image_rule(GLM, GLM_FILE)
    assert rule.count(200, 1).tokens == 200
    with refused(ImageError, "200"):
        rule.count(201, 1)


# -- limits --------------------------------------------------------------------------------------------


def test_limits_tighten_a_rule():
    qwen = with_limits(image_rule(QWEN25, QWEN_FILE), max_pixels=1003520)
    assert qwen.count(1920, 1080).tokens == 26 * 47  # 1080 and 1920 / sqrt(2073600 / 1003520), down to multiples of 28
    assert with_limits(image_rule(QWEN3, QWEN3_FILE), max_pixels=4096) == SmartResize(
        patch_size=16, merge_size=2, min_pixels=4096, max_pixels=4096
    )
    assert with_limits(image_rule(INTERNVL_CHAT), max_tiles=6).count(1920, 1080).tiles == 3
    assert with_limits(image_rule(LLAVA)) == image_rule(LLAVA)


# -- rules out of a model's own files ----------------------------------------------------------------------------------


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
