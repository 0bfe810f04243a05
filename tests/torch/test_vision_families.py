"""Tests of runtime/vision/ (families, functions, selftest): images apart are encoded as together, with gradients.

Needs torch and Transformers."""

import copy
import functools
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from family_check import check_family

from refusals import refused

pytest.importorskip("transformers", minversion="5", reason="holds the families' models")

from drawn_images import draw_several_images
from shrunk_models import make_shrunk

from trimtab import LinearCost, TrimtabError
from trimtab.runtime.vision.hooks import find_functions
from trimtab.runtime.vision.inputs import BatchFamily, GridFamily, find_family, tower_flops

pytestmark = pytest.mark.filterwarnings("ignore")

CLOSE = 1e-6  # some towers compute positions or a norm in float32, whatever their own type; a neighbour gives 1e-2
FAMILIES = (  # one of each make; `bench/columns/vision_dp.py` tries all
    *("qwen2_5_vl", "qwen3_vl", "glm4v", "ernie4_5_vl_moe", "video_llama_3", "paddleocr_vl", "internvl", "llava_next"),
    *("llava_onevision", "idefics3", "lfm2_vl", "mistral3", "gemma3"),
)


@functools.cache
def make_model(name):
    return make_shrunk(name, attention="eager").double()


def make_arguments(name, model):
    """Three images of different sizes for `get_image_features`."""
    return draw_several_images(model, find_functions(model)[0].original)


def make_clips(model, images):
    """A clip of four frames and one of two, of patches like the images'."""
    side = find_family(model.config).block_side(model.config) or 2
    grids = torch.tensor([[4, 2 * side, 2 * side], [2, 2 * side, 4 * side]])
    pixels = torch.randn(int(grids.prod(1).sum()), *images["pixel_values"].shape[1:]).double()
    others = {name.replace("image", "video"): x[:2] for name, x in images.items() if "image_merge" in name}
    return {"pixel_values_videos": pixels, "video_grid_thw": grids, **others}


@pytest.mark.parametrize("name", FAMILIES)
def test_images_apart_are_encoded_as_together(name):
    model = make_model(name)
    images = make_arguments(name, model)
    check = check_family(model, images, at="features")
    assert check.num_atoms >= 3
    assert max(check.features, check.gradients) <= CLOSE
    family = find_family(model.config)
    if isinstance(family, GridFamily) and hasattr(model, "get_video_features"):
        clips = check_family(model, make_clips(model, images), kind="video", at="features")
        assert clips.num_atoms == (6 if family.frames else 2)
        assert max(clips.features, clips.gradients) <= CLOSE
    elif hasattr(model, "get_video_features"):  # (videos, frames, ...): a video stays whole
        videos = torch.randn(3, 2, *images["pixel_values"].shape[-3:]).double()
        clips = check_family(model, {"pixel_values_videos": videos}, kind="video", at="features")
        assert clips.num_atoms == 3
        assert max(clips.features, clips.gradients) <= CLOSE


def test_arguments_of_the_function_that_encodes_say_how_it_divides():
    def of_grids(pixel_values, image_grid_thw, image_merge_sizes, cu_seqlens=None): ...

    def of_samples(pixel_values, pixel_attention_mask=None, vision_feature_layer=-1): ...

    def of_tiles(pixel_values, image_sizes, batch_num_images=None): ...

    def of_words(input_ids): ...

    config = copy.deepcopy(make_model("llava_next").config)
    config.model_type = "nobody_knows"
    assert find_family(config, of_grids).more["image"] == ("image_merge_sizes",)
    assert find_family(config, of_samples) == BatchFamily(more=("pixel_attention_mask",), padded=True)
    tiles = find_family(config, of_tiles)
    assert tiles.tiles(torch.tensor([[112, 56]]), config).tolist() == [3]
    assert tiles.more == ("image_sizes",)
    with refused(TrimtabError, "nobody_knows"):
        find_family(config, of_words)


def test_the_cost_of_a_tower_and_of_its_windows_by_hand():
    gated = SimpleNamespace(hidden_size=10, intermediate_size=30, depth=4, hidden_act="silu", fullatt_block_indexes=[1])
    # 2 x 4 layers x (4 x 10 x 10 + 3 x 10 x 30); 4 x 10 a pair of patches in the one whole layer, and in the others
    assert tower_flops(gated) == LinearCost(patches=10400.0, patches_sq=40.0, patches_windowed=120.0)
    plain = SimpleNamespace(embed_dim=8, mlp_ratio=4, hidden_size=99, num_hidden_layers=2)
    assert tower_flops(plain) == LinearCost(patches=3072.0, patches_sq=64.0, patches_windowed=0.0)
    config = SimpleNamespace(**vars(gated), window_size=56, patch_size=14, spatial_merge_size=2)
    given = {"pixel_values": torch.zeros(120, 1), "image_grid_thw": torch.tensor([[2, 10, 6]])}
    inputs = GridFamily().read("image", dict(given), config)
    # sides of 4 patches: 10 = 4 + 4 + 2, 6 = 4 + 2
    assert (inputs.patches.tolist(), inputs.windowed.tolist()) == ([60, 60], [36 * 20, 36 * 20])
    whole = GridFamily(frames=False).read("image", dict(given), config)
    assert (whole.patches.tolist(), whole.windowed.tolist(), whole.entries.tolist()) == ([120], [2 * 36 * 20], [1])
    # where patches of frames become one, the smallest image is a real one
    assert GridFamily(frames=False).smallest(whole, config).patches.tolist() == [120]
    smallest = GridFamily().smallest(inputs, config)
    assert (smallest.patches.tolist(), smallest.windowed.tolist()) == ([4], [16])
    images = BatchFamily().read("image", {"pixel_values": torch.zeros(3, 3, 28, 42)}, config)
    assert images.patches.tolist() == [6, 6, 6]
    sizes = [[28, 42], [14, 42], [28, 28]]  # a list, as some processors give it
    given = {"pixel_values": torch.zeros(3, 3, 28, 42), "image_sizes": sizes}
    beside = BatchFamily(more=("image_sizes",)).read("image", given, config).take(np.array([2, 0])).arguments()
    assert beside["image_sizes"].tolist() == [[28, 28], [28, 42]]


def test_a_declaration_that_does_not_hold_is_found():
    """Ernie's resampler joins two frames: frames are not atoms."""
    model = make_model("ernie4_5_vl_moe")
    clips = make_clips(model, make_arguments("ernie4_5_vl_moe", model))
    with pytest.raises((AssertionError, RuntimeError)):
        assert check_family(model, clips, kind="video", family=GridFamily(frames=True)).features <= CLOSE


def test_the_towers_own_forward_can_be_replaced_too():
    for name in ("qwen2_5_vl", "qwen3_vl"):
        model = make_model(name)
        arguments = make_arguments(name, model)
        given = {"hidden_states": arguments["pixel_values"], "grid_thw": arguments["image_grid_thw"]}
        for part in (model, model.model.visual):
            check = check_family(part, given, kind="tower", at="tower")
            assert max(check.features, check.gradients) <= CLOSE


def read(name: str, **changes: object) -> None:
    model = make_model(name)
    function = find_functions(model)[0]
    given = function.bind((), {**make_arguments(name, model), **changes})
    find_family(model.config).read("image", {k: v for k, v in given.items() if v is not None}, model.config)


def test_black_images_alone_leave_one():
    family = find_family(make_model("idefics3").config)
    pixels = torch.zeros(2, 3, 3, 56, 56)
    inputs = family.read("image", {"pixel_values": pixels}, make_model("idefics3").config)
    assert (len(inputs), inputs.entries.tolist()) == (1, [1, 0])
    pixels[1, 2, 0, 0, 0] = 1.0  # one pixel that is not black: an image, and the first is padding like the others
    inputs = family.read("image", {"pixel_values": pixels}, make_model("idefics3").config)
    assert (len(inputs), inputs.entries.tolist()) == (1, [0, 1])


def test_what_belongs_to_the_text_is_left_out():
    read("qwen2_5_vl", cu_seq_lens_q=torch.zeros(2), video_position_ids=torch.zeros(2))
