"""Image rules against published counts, brute force, and every message they can raise."""

from __future__ import annotations

import copy
import itertools
import json
import random
import re
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimtab.errors import ConfigError, ImageError, UnknownModelError
from trimtab.models.families.known import family_of
from trimtab.models.image_rules import image_rule, image_rule_or_reason
from trimtab.models.images.apply import with_limits
from trimtab.models.images.native import SmartResize
from trimtab.models.images.tiles import DynamicTiling, FixedImage
from trimtab.specs import ImageCounts, ImageRule

ZOO = Path(__file__).parents[2] / "bench" / "data" / "model_zoo.json"

INTERNVL_CHAT = {
    "model_type": "internvl_chat",
    "force_image_size": 448,
    "dynamic_image_size": True,
    "min_dynamic_patch": 1,
    "max_dynamic_patch": 12,
    "use_thumbnail": True,
    "downsample_ratio": 0.5,
    "vision_config": {"model_type": "intern_vit_6b", "image_size": 448, "patch_size": 14},
}
INTERNVL = {
    "model_type": "internvl",
    "downsample_ratio": 0.5,
    "image_seq_length": 256,
    "vision_config": {"model_type": "internvl_vision", "image_size": [448, 448], "patch_size": [14, 14]},
}
INTERNVL_FILE = {
    "size": {"height": 448, "width": 448},
    "crop_to_patches": False,
    "min_patches": 1,
    "max_patches": 12,
    "do_resize": True,
}
QWEN25 = {"model_type": "qwen2_5_vl", "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "window_size": 112}}
QWEN_FILE = {"min_pixels": 3136, "max_pixels": 12845056, "patch_size": 14, "merge_size": 2}
QWEN3 = {"model_type": "qwen3_vl", "vision_config": {"patch_size": 16, "spatial_merge_size": 2}}
QWEN3_FILE = {"size": {"shortest_edge": 65536, "longest_edge": 16777216}, "patch_size": 16, "merge_size": 2}
CLIP = {"model_type": "clip_vision_model", "image_size": 336, "patch_size": 14}
SIGLIP = {"model_type": "siglip_vision_model", "image_size": 384, "patch_size": 14}
LLAVA = {"model_type": "llava", "vision_feature_select_strategy": "default", "vision_config": CLIP}
NEXT = LLAVA | {
    "model_type": "llava_next",
    "image_grid_pinpoints": [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]],
}
ONEVISION = {
    "model_type": "llava_onevision",
    "vision_feature_select_strategy": "full",
    "vision_aspect_ratio": "anyres_max_9",
    "image_grid_pinpoints": [[384 * i, 384 * j] for i in range(1, 7) for j in range(1, 7)],
    "vision_config": SIGLIP,
}
GEMMA3 = {
    "model_type": "gemma3",
    "mm_tokens_per_image": 256,
    "vision_config": {"model_type": "siglip_vision_model", "image_size": 896, "patch_size": 14},
}
GEMMA3_CROPS = {
    "do_pan_and_scan": True,
    "pan_and_scan_min_crop_size": 256,
    "pan_and_scan_max_num_crops": 4,
    "pan_and_scan_min_ratio_to_activate": 1.2,
    "size": {"height": 896, "width": 896},
}
GLM = {
    "model_type": "glm4v_moe",
    "vision_config": {"patch_size": 14, "spatial_merge_size": 2, "temporal_patch_size": 2},
}
GLM_FILE = {"size": {"shortest_edge": 12544, "longest_edge": 47040000}, "patch_size": 14, "merge_size": 2}

PUBLISHED = [  # 1920 x 1080: patches and tokens
    (INTERNVL_CHAT, None, 9225, 2304),
    (INTERNVL, INTERNVL_FILE, 9225, 2304),
    (QWEN25, QWEN_FILE, 10764, 2691),
    (QWEN3, QWEN3_FILE, 8160, 2040),
    (LLAVA, None, 577, 576),
    (NEXT, None, 2885, 1948),
    (ONEVISION, None, 11664, 7269),
    (GEMMA3, None, 4096, 256),
    (GEMMA3, GEMMA3_CROPS, 12288, 768),
    (GLM, GLM_FILE, 10764, 2691),
]
RULES = [image_rule(config, file) for config, file, _, _ in PUBLISHED]


@pytest.mark.parametrize(("config", "file", "patches", "tokens"), PUBLISHED)
def test_full_hd_counts(config, file, patches, tokens):
    counts = image_rule(config, file).count(1920, 1080)
    assert (counts.patches, counts.tokens) == (patches, tokens)


def test_every_zoo_entry_builds_or_names_the_missing_figure():
    models = {k: v for k, v in json.loads(ZOO.read_text())["models"].items() if family_of(v["model_type"]).image_rule}
    assert len(models) == 50
    unsettled = {}
    for name, config in models.items():
        try:
            image_rule(config).count(1920, 1080)
        except ConfigError as error:
            unsettled[name] = str(error)
    # this entry carries a factor and no pixel limits
    assert list(unsettled) == ["GLM-4.5V (106B-A12B)"]
    assert "preprocessor_config.json lacks min_pixels, max_pixels" in unsettled["GLM-4.5V (106B-A12B)"]
    glm = image_rule(models["GLM-4.5V (106B-A12B)"], GLM_FILE)
    assert glm == image_rule(GLM, GLM_FILE)


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
    with pytest.raises(ImageError, match=r"cannot count an image of .* whole numbers from 1 to 2147483647: check"):
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
    from trimtab.samples.read import read_lengths
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
    with pytest.raises(ImageError, match=r"1401 x 7 pixels: one side is more than 200 times the other.*: crop"):
        rule.count(1401, 7)


def test_glm_asks_for_the_ratio_after_it_enlarged_the_short_side():
    rule = image_rule(GLM, GLM_FILE)
    assert rule.count(200, 1).tokens == 200
    with pytest.raises(ImageError, match="more than 200 times"):
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


@pytest.mark.parametrize(
    ("rule", "limits", "message"),
    [
        (image_rule(LLAVA), {"max_pixels": 5}, "cannot set max_pixels 5 on image rule fixed: .*: leave max_pixels out"),
        (image_rule(NEXT), {"max_tiles": 5}, "cannot set max_tiles 5 on image rule llava_anyres: .*: leave max_tiles"),
        (
            image_rule(QWEN25, QWEN_FILE),
            {"max_pixels": 0},
            "between 0 and 0 pixels: .*: change min_pixels or max_pixels",
        ),
        (image_rule(INTERNVL_CHAT), {"max_tiles": 0}, "into 0 to 0 tiles: .*: change the least or the largest"),
    ],
)
def test_limits_that_a_rule_cannot_take_are_refused(rule, limits, message):
    with pytest.raises(ConfigError, match=message):
        with_limits(rule, **limits)


# -- reading the files ----------------------------------------------------------------------------------------------


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


def test_the_file_overrides_a_zoo_entry():
    zoo = QWEN25 | {"preprocess": {"rule": "qwen_smart_resize", "factor": 28, "min_pixels": 1, "max_pixels": 2}}
    assert image_rule(zoo) == SmartResize(patch_size=14, merge_size=2, min_pixels=1, max_pixels=2, window_size=112)
    assert image_rule(zoo, QWEN_FILE) == image_rule(QWEN25, QWEN_FILE)


@pytest.mark.parametrize("file", [None, {}, {"do_pan_and_scan": None}, {"do_pan_and_scan": False}])
def test_gemma_crops_only_when_asked(file):
    assert image_rule(GEMMA3, file) == FixedImage(rows=4096, tokens=256, name="gemma3")


def without(config: dict, path: str) -> dict:
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    inner = config
    for key in parents:
        inner = inner[key]
    del inner[last]
    return config


@pytest.mark.parametrize(
    ("config", "file", "path"),
    [
        (INTERNVL_CHAT, None, "dynamic_image_size"),
        (INTERNVL_CHAT, None, "min_dynamic_patch"),
        (INTERNVL_CHAT, None, "max_dynamic_patch"),
        (INTERNVL_CHAT, None, "use_thumbnail"),
        (INTERNVL_CHAT, None, "downsample_ratio"),
        (INTERNVL_CHAT, None, "vision_config.patch_size"),
        (INTERNVL, INTERNVL_FILE, "downsample_ratio"),
        (QWEN25, QWEN_FILE, "vision_config.window_size"),
        (LLAVA, None, "vision_feature_select_strategy"),
        (LLAVA, None, "vision_config.patch_size"),
        (LLAVA, None, "vision_config.model_type"),
        (NEXT, None, "image_grid_pinpoints"),
        (ONEVISION, None, "vision_aspect_ratio"),
        (GEMMA3, None, "mm_tokens_per_image"),
        (GEMMA3, None, "vision_config.patch_size"),
    ],
)
def test_a_field_missing_from_config_is_named(config, file, path):
    with pytest.raises(ConfigError, match=rf"the configuration lacks {path}: class defaults are never assumed"):
        image_rule(without(config, path), file)


@pytest.mark.parametrize(
    ("config", "file", "key", "named"),
    [
        (INTERNVL, INTERNVL_FILE, "min_patches", "min_patches"),
        (INTERNVL, INTERNVL_FILE, "max_patches", "max_patches"),
        (QWEN25, QWEN_FILE, "min_pixels", "min_pixels"),
        (QWEN25, QWEN_FILE, "max_pixels", "max_pixels"),
        (GEMMA3, GEMMA3_CROPS, "pan_and_scan_min_crop_size", "pan_and_scan_min_crop_size"),
        (GEMMA3, GEMMA3_CROPS, "pan_and_scan_max_num_crops", "pan_and_scan_max_num_crops"),
        (GEMMA3, GEMMA3_CROPS, "pan_and_scan_min_ratio_to_activate", "pan_and_scan_min_ratio_to_activate"),
    ],
)
def test_a_field_missing_from_the_file_is_named(config, file, key, named):
    with pytest.raises(ConfigError, match=rf"preprocessor_config\.json lacks {named}, .*: add it to that file"):
        image_rule(config, without(file, key))


@pytest.mark.parametrize("config", [QWEN25, QWEN3, GLM, INTERNVL])
def test_without_the_file_the_message_says_how_to_pass_it(config):
    with pytest.raises(ConfigError, match=r"lacks .*, and no default is assumed: pass --preprocessor pre"):
        image_rule(config, None)


def test_all_problems_of_one_model_come_at_once():
    with pytest.raises(ConfigError) as caught:
        image_rule({"model_type": "qwen2_5_vl"}, {"do_resize": False, "max_pixels": "many"})
    text = str(caught.value)
    for part in ("vision_config.patch_size", "spatial_merge_size", "min_pixels", "max_pixels is 'many'", "window_size"):
        assert part in text


@pytest.mark.parametrize(
    ("config", "file", "message"),
    [
        (QWEN25, QWEN_FILE | {"patch_size": 16}, "config.patch_size is 16, but vision_config.patch_size makes it 14"),
        (QWEN25 | {"preprocess": {"factor": 32}}, QWEN_FILE, "preprocess.factor is 32, but .* makes it 28: take"),
        (QWEN25, QWEN_FILE | {"min_pixels": 10**9}, "between 1000000000 and 12845056 pixels"),
        (QWEN25, QWEN_FILE | {"do_resize": False}, "do_resize is false: .*: set it to true"),
        (QWEN25, QWEN_FILE | {"max_pixels": True}, "max_pixels is True: a whole number from 1 to 107"),
        (QWEN25 | {"vision_config": {"patch_size": 14, "spatial_merge_size": 2, "window_size": 20}}, QWEN_FILE,
         "window_size 20 holds not one merged patch of 28 pixels: correct vision_config"),
        (INTERNVL | {"image_seq_length": 64}, INTERNVL_FILE, "image_seq_length is 64, but .* makes it 256"),
        (INTERNVL, INTERNVL_FILE | {"size": {"height": 336, "width": 336}}, "preprocessor_config.size is .*336"),
        (INTERNVL, INTERNVL_FILE | {"size": {"height": 336, "width": 448}}, "size is .* makes it 448"),
        (INTERNVL_CHAT | {"min_dynamic_patch": 13}, None, "cannot cut an image into 13 to 12 tiles"),
        (INTERNVL_CHAT | {"use_thumbnail": 1}, None, "use_thumbnail is 1: true or false is needed"),
        (INTERNVL_CHAT | {"downsample_ratio": "x"}, None, "downsample_ratio is 'x': a number above 0"),
        (LLAVA | {"vision_config": CLIP | {"model_type": "pixtral"}}, None, "one of clip_vision_model, siglip_"),
        (LLAVA | {"vision_feature_select_strategy": "cls"}, None, "is 'cls': one of default, full is needed"),
        (LLAVA | {"vision_feature_select_strategy": 3}, None, "is 3: one of default, full"),
        (LLAVA | {"image_seq_length": 577}, None, "image_seq_length is 577, but a tile of 336 pixels"),
        (LLAVA, {"crop_size": {"height": 224, "width": 224}}, "crop_size is .*224.*makes it 336"),
        (NEXT | {"vision_feature_select_strategy": "full"}, None, 'not leave a square .*: use "default" with CLIP'),
        (NEXT | {"image_grid_pinpoints": [[336, 500]]}, None, r"image_grid_pinpoints \[\[336, 500\]\]: each pair"),
        (NEXT | {"image_grid_pinpoints": [[336]]}, None, "is .*: a list of at most 1024 .height, width. pairs"),
        (NEXT | {"image_grid_pinpoints": [[336, 0]]}, None, "a list of at most"),
        (NEXT | {"image_grid_pinpoints": "all"}, None, "is 'all': a list of at most"),
        (NEXT | {"image_grid_pinpoints": [7]}, None, "a list of at most"),
        (NEXT | {"image_grid_pinpoints": []}, None, "a list of at most"),
        (NEXT, {"image_grid_pinpoints": [[672, 672]]}, "config.image_grid_pinpoints and image_grid_pinpoints differ"),
        (ONEVISION | {"vision_aspect_ratio": "pad"}, None, "is 'pad', and not of the form anyres_max_N with N up"),
        (GEMMA3, {"image_seq_length": 64}, "preprocessor_config.image_seq_length is 64, but .* makes it 256"),
        (GEMMA3, {"do_pan_and_scan": "yes"}, "do_pan_and_scan is 'yes': true or false is needed"),
    ],
)  # fmt: skip
def test_contradictions_and_wrong_types_are_named(config, file, message):
    with pytest.raises(ConfigError, match=message):
        image_rule(config, file)


@pytest.mark.parametrize("model_type", ["llama", None, ["qwen2_vl"]])
def test_an_unknown_model_is_named(model_type):
    with pytest.raises(
        UnknownModelError, match=rf"no image rule for model_type {re.escape(repr(model_type))}: known are intern"
    ):
        image_rule({"model_type": model_type})


HUGE = 10**9


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
    with pytest.raises(ConfigError, match=field) as caught:  # a hang is a failure by CI's time limit
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


@pytest.mark.parametrize("limits", [{"max_pixels": 10**30}, {"max_pixels": 2.5}, {"max_pixels": True}])
def test_limits_of_no_image_are_refused(limits):
    with pytest.raises(ConfigError, match="max_pixels"):
        with_limits(image_rule(QWEN25, QWEN_FILE), **limits)
    with pytest.raises(ConfigError, match=r"into 1 to 1000000000 tiles: .* at most 4096: change"):
        with_limits(image_rule(INTERNVL_CHAT), max_tiles=HUGE)


@pytest.mark.parametrize(("config", "file"), [(QWEN25, QWEN_FILE), (INTERNVL, INTERNVL_FILE)])
def test_a_file_that_was_not_given_leaves_the_rule_unsettled_until_it_counts(config, file):
    assert image_rule_or_reason(config, file) == image_rule(config, file)
    rule = image_rule_or_reason(config, None)
    with pytest.raises(
        ConfigError, match=r"pass --preprocessor preprocessor_config\.json, or put it beside config\.json"
    ):
        rule.count(5, 5)
    with pytest.raises(ConfigError, match="pass --preprocessor"):
        with_limits(rule, max_pixels=10**6)
    with pytest.raises(ConfigError, match="add it to that file"):
        image_rule_or_reason(config, {})  # the file that was given lacks it


def test_what_is_wrong_is_not_put_off():
    with pytest.raises(ConfigError, match=r"(?s)window_size.*min_pixels"):
        image_rule_or_reason(QWEN25 | {"vision_config": {"patch_size": 14, "spatial_merge_size": 2}}, None)
