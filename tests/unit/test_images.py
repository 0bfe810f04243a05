"""Image rules at work against published counts and brute force: `models/images`."""

import itertools
import random
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from image_configs import (
    GLM,
    GLM_FILE,
    INTERNVL_CHAT,
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
from trimtab.errors import ImageError
from trimtab.models.describe import image_rule
from trimtab.models.images.rules import DynamicTiling, SmartResize, with_limits
from trimtab.specs import ImageCounts, ImageRule

HUGE = 10**9


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


def remote_internvl_tiles(width: int, height: int, low: int, high: int, tile: int) -> int:
    """The rule as the model card's code has it, on exact sets: nearest float ratio, ties by area, in order of i*j."""
    ratio = width / height
    grids = [(i, j) for i, j in itertools.product(range(1, high + 1), repeat=2) if low <= i * j <= high]
    nearest = min(abs(ratio - i / j) for i, j in grids)
    tied = sorted(i * j for i, j in grids if abs(ratio - i / j) == nearest)
    chosen = tied[0]
    for n in tied[1:]:
        if Fraction(width * height) > Fraction(tile * tile * n, 2):
            chosen = n
    return chosen + (chosen > 1)


@pytest.mark.parametrize(("low", "high"), [(1, 12), (1, 1), (1, 6), (2, 12), (12, 12), (4, 40)])
def test_dynamic_tiling_equals_brute_force(low, high):
    rule = DynamicTiling(
        min_tiles=low, max_tiles=high, tile_size=448, thumbnail=True, rows_per_tile=1025, tokens_per_tile=256
    )
    rng = random.Random(high)
    sizes = [(rng.randint(1, 4000), rng.randint(1, 4000)) for _ in range(300)]
    sizes += [(i * k, j * k) for i in range(1, 8) for j in range(1, 8) for k in (1, 100, 317, 448, 449, 2000)]
    sizes += [(13 * k, 2 * k) for k in (1, 50, 200)] + [(1, 2**31 - 1), (2**31 - 1, 1)]  # 6.5 ties 6 and 7
    for width, height in sizes:
        n = remote_internvl_tiles(width, height, low, high, 448)
        assert rule.count(width, height) == ImageCounts(
            patches=1025 * n, tokens=256 * n, tiles=n, patches_sq=1025**2 * n, patches_windowed=1025**2 * n
        )


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
