"""Images apart are encoded as together, features and gradients, in many families. Needs torch and Transformers."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch", reason="runs tiny vision towers")
pytest.importorskip("transformers", minversion="5", reason="holds the families' models")

from vision_families import NAMES, make_arguments, make_model  # noqa: E402

from trimtab.errors import TrimtabError  # noqa: E402
from trimtab.runtime.vision import BatchFamily, GridFamily, check_family  # noqa: E402
from trimtab.runtime.vision.families import find_family  # noqa: E402
from trimtab.runtime.vision.seams import find_seams  # noqa: E402

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]

EXACT = 1e-12
IN_FLOAT32 = {  # towers that compute positions, or a norm, in float32 whatever their own type
    "cosmos3_edge": 1e-8,
    "gemma3": 1e-7,
    "glm46v": 1e-8,
    "glm4v": 1e-8,
    "glm4v_moe": 1e-8,
    "lfm2_vl": 1e-8,
    "mistral3": 1e-7,
    "ovis2": 1e-6,
}


@pytest.mark.parametrize("name", sorted(NAMES))
def test_images_apart_are_encoded_as_together(name):
    model = make_model(name)
    check = check_family(model, make_arguments(name, model), at="features")
    assert check.num_atoms >= 3
    assert check.features <= IN_FLOAT32.get(name, EXACT)
    assert check.gradients <= IN_FLOAT32.get(name, EXACT)
    family = find_family(model.config)
    if isinstance(family, GridFamily) and hasattr(model, "get_video_features"):
        clips = check_family(model, make_arguments(name, model, video=True), kind="video", at="features")
        assert clips.num_atoms == (6 if family.frames else 2)
        assert clips.features <= IN_FLOAT32.get(name, EXACT)
        assert clips.gradients <= IN_FLOAT32.get(name, EXACT)


def test_arguments_of_the_function_that_encodes_say_how_it_divides():
    def of_grids(pixel_values, image_grid_thw, image_merge_sizes, cu_seqlens=None): ...

    def of_samples(pixel_values, pixel_attention_mask=None, vision_feature_layer=-1): ...

    def of_tiles(pixel_values, image_sizes, batch_num_images=None): ...

    def of_words(input_ids): ...

    config = make_model("llava_next").config
    config.model_type = "nobody_knows"
    assert find_family(config, of_grids).beside["image"] == ("image_merge_sizes",)
    assert find_family(config, of_samples) == BatchFamily(beside=("pixel_attention_mask",), padded=True)
    tiles = find_family(config, of_tiles)
    assert tiles.tiles(torch.tensor([[112, 56]]), config).tolist() == [3]
    assert tiles.beside == ("image_sizes",)
    with pytest.raises(
        TrimtabError, match=r"nothing says how a call of the 'nobody_knows' vision tower divides .*neither"
    ):
        find_family(config, of_words)


def test_a_declaration_that_does_not_hold_is_found():
    """Ernie's resampler joins two frames: frames are not atoms."""
    model = make_model("ernie4_5_vl_moe")
    arguments = make_arguments("ernie4_5_vl_moe", model, video=True)
    with pytest.raises((AssertionError, RuntimeError)):
        assert check_family(model, arguments, kind="video", family=GridFamily(frames=True)).features <= EXACT


def test_the_tower_itself_is_a_seam_too():
    for name in ("qwen2_5_vl", "qwen3_vl"):
        model = make_model(name)
        arguments = make_arguments(name, model)
        given = {"hidden_states": arguments["pixel_values"], "grid_thw": arguments["image_grid_thw"]}
        for part in (model, model.visual):
            check = check_family(part, given, kind="tower", at="tower")
            assert max(check.features, check.gradients) <= EXACT


def read(name: str, **changes: object) -> None:
    model = make_model(name)
    seam = find_seams(model)[0]
    given = seam.bind((), {**make_arguments(name, model), **changes})
    find_family(model.config).read("image", {k: v for k, v in given.items() if v is not None}, model.config)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen2_5_vl", {"cu_seqlens": torch.zeros(2)}, "cu_seqlens describes all images of the batch, and each rank"),
        (
            "qwen2_5_vl",
            {"window_index": torch.zeros(2), "position_ids": torch.zeros(1)},
            "position_ids, window_index des",
        ),
        (
            "qwen3_vl",
            {"output_hidden_states": True},
            "output_hidden_states asks the vision tower for the states of all",
        ),
        (
            "internvl",
            {"output_attentions": True},
            "output_attentions asks the vision tower for the states of all images",
        ),
        ("qwen3_vl", {"image_grid_thw": None}, "called without image_grid_thw: it says which patches belong to which"),
        ("qwen3_vl", {"image_grid_thw": torch.tensor([[1, 2, 2]])}, r"counts 4 patches and pixel_values has \d+: pass"),
        ("internvl", {"pixel_values": [1]}, "pixel_values is list, not one tensor: only tensors can be shared among"),
        ("llava_onevision", {"batch_num_images": [1, 2]}, "batch_num_images has samples of several images, which"),
    ],
)
def test_what_cannot_be_divided_is_refused(name, changes, message):
    with pytest.raises(TrimtabError, match=message):
        read(name, **changes)


def test_black_images_alone_leave_one():
    family = find_family(make_model("idefics3").config)
    pixels = torch.zeros(2, 3, 3, 56, 56)
    inputs = family.read("image", {"pixel_values": pixels}, make_model("idefics3").config)
    assert (len(inputs), inputs.entries.tolist()) == (1, [1, 0])


def test_what_belongs_to_the_text_is_left_out():
    read("qwen2_5_vl", cu_seq_lens_q=torch.zeros(2), video_position_ids=torch.zeros(2))


def test_a_module_without_a_seam_is_refused():
    with pytest.raises(
        TrimtabError, match="Linear has 0 modules with get_image_features, and exactly one can be shared"
    ):
        find_seams(torch.nn.Linear(1, 1), "features")
    with pytest.raises(TrimtabError, match="Linear has 0 vision towers whose forward takes grid_thw, and exactly one"):
        find_seams(torch.nn.Linear(1, 1))
