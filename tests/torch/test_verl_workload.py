"""The workload function for verl and ROLL, against the cost table and the image rule. Needs torch."""

from types import ModuleType

import numpy as np
import pytest

from refusals import refused

torch = pytest.importorskip("torch", reason="the verl adapter takes and gives tensors: pip install 'trimtab[torch]'")

from trimtab.adapters.verl import (  # noqa: E402
    TOKEN_UNITS,
    PatchCounts,
    VlmWorkload,
    count_grids,
    stand_in_for,
    vlm_workload,
)
from trimtab.costs.devices import DEVICES  # noqa: E402
from trimtab.costs.profile import profile_model  # noqa: E402
from trimtab.errors import ConfigError, ImageError, PackingError  # noqa: E402
from trimtab.models.describe import describe  # noqa: E402
from trimtab.plan.decide.work import price_samples  # noqa: E402
from trimtab.specs import NUM_WORK_TERMS, Profile, SampleTable  # noqa: E402

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def profile() -> Profile:
    return profile_model(describe("Qwen2.5-VL-7B"), DEVICES["A100-80GB"])


def table(sizes: list[list[tuple[int, int]]], tokens: list[int]) -> SampleTable:
    rule = describe("Qwen2.5-VL-7B").image_rule
    counts = [[rule.count(w, h) for w, h in images] for images in sizes]
    return SampleTable(
        num_images=np.array([len(c) for c in counts]),
        num_patches=np.array([sum(i.patches for i in c) for c in counts]),
        num_tokens=np.array(tokens),
        patches_sq=np.array([sum(i.patches_sq for i in c) for c in counts]),
        patches_windowed=np.array([sum(i.patches_windowed for i in c) for c in counts]),
        source=np.zeros(len(tokens), np.int32),
    )


def test_workload_is_the_plans_own_price(profile: Profile) -> None:
    sizes = [[], [(1920, 1080)], [(640, 480), (300, 900)], [(28, 28)]]
    samples = table(sizes, [812, 4100, 9000, 40])
    vision = PatchCounts(
        num_patches=torch.tensor(samples.num_patches),
        patches_sq=torch.tensor(samples.patches_sq),
        patches_windowed=torch.tensor(samples.patches_windowed),
    )
    workload = vlm_workload(profile)(torch.tensor(samples.num_tokens), vision)
    assert workload.dtype == torch.int64
    seconds = price_samples(profile, samples.work())
    np.testing.assert_allclose(workload.numpy() / workload[0].item(), seconds / seconds[0], rtol=1e-6)


def test_a_text_only_batch_keeps_verls_scale_and_shape(profile: Profile) -> None:
    lengths = torch.tensor([1, 1000, 32_000])
    ours = vlm_workload(profile)(lengths)
    assert abs(ours[0].item() - TOKEN_UNITS) <= 1
    assert ours.shape == lengths.shape
    # a 7B model of width 3584 and 28 layers: its attention weighs less than in the fixed formula of width 4096
    fixed = TOKEN_UNITS * lengths + lengths**2
    assert 0.3 < (ours[2] / fixed[2]).item() < 1.1
    assert int(vlm_workload(profile)(5)) == vlm_workload(profile)([5]).item()  # ROLL asks one at a time
    assert vlm_workload(profile)([5, 7]).tolist() == vlm_workload(profile)(torch.tensor([5, 7])).tolist()


def test_an_image_is_priced_beside_its_tokens(profile: Profile) -> None:
    grids = [None, torch.tensor([[1, 76, 136]])]
    vision = count_grids(describe("Qwen2.5-VL-7B").image_rule, grids)
    workload = vlm_workload(profile).with_vision(vision)(torch.tensor([3000, 3000]))
    assert vision.num_patches.tolist() == [0, 76 * 136]
    assert 1.2 < (workload[1] / workload[0]).item() < 3


def test_grids_count_as_the_images_they_were_made_of() -> None:
    rule = describe("Qwen2.5-VL-7B").image_rule
    counts = [rule.count(w, h) for w, h in ((1920, 1080), (333, 777))]
    grids = torch.tensor([[1, 78, 138], [1, 56, 24]])
    assert [c.patches for c in counts] == [78 * 138, 56 * 24]
    vision = count_grids(rule, [grids, grids[:1].repeat(2, 1), torch.tensor([[2, 78, 138]])])
    both = sum(c.patches_windowed for c in counts)
    assert vision.patches_windowed.tolist() == [both, 2 * counts[0].patches_windowed, 2 * counts[0].patches_windowed]
    assert vision.patches_sq[0].item() == sum(c.patches_sq for c in counts)


def test_a_sliding_window_is_cheaper_than_full_attention() -> None:
    coefficients = [0.0] * NUM_WORK_TERMS
    coefficients[4], coefficients[6] = 1.0, 1.0  # tokens, tokens_windowed
    sliding = VlmWorkload(coefficients=tuple(coefficients), token_window=100)
    full = VlmWorkload(coefficients=tuple(coefficients))
    lengths = torch.tensor([50, 100, 1000])
    expected = [50 + 50**2, 100 + 100**2, 1000 + 2 * 1000 * 100 - 100**2]
    assert sliding(lengths).tolist() == [TOKEN_UNITS * x for x in expected]
    assert full(lengths)[2] > sliding(lengths)[2]


def test_bad_input_is_named(profile: Profile) -> None:
    counts = torch.zeros(2, dtype=torch.int64)
    vision = PatchCounts(num_patches=counts, patches_sq=counts, patches_windowed=counts)
    with refused(PackingError, "3", "2"):
        vlm_workload(profile)(torch.tensor([1, 2, 3]), vision)
    rule = describe("Qwen2.5-VL-7B").image_rule
    with refused(ImageError, "1", "5"):
        count_grids(rule, [None, torch.tensor([[1, 5, 5]])])
    with refused(ConfigError, "PatchCounts"):
        count_grids(describe("InternVL-Chat-V1-5").image_rule, [None])


def test_it_stands_in_for_a_function_that_others_have_imported_by_name(profile: Profile) -> None:
    balancing, trainer = ModuleType("seqlen_balancing"), ModuleType("trainer_base")
    exec("def calculate_workload(seqlen_list):\n    return 24576 * seqlen_list + seqlen_list**2\n", vars(balancing))
    vars(balancing)["micro_batches"] = eval("lambda lengths: calculate_workload(lengths)", vars(balancing))
    by_name = vars(trainer)["calculate_workload"] = balancing.calculate_workload
    workload, lengths = vlm_workload(profile), torch.tensor([1000, 32_000])
    stand_in_for(balancing.calculate_workload, workload)
    assert by_name(lengths).tolist() == balancing.micro_batches(lengths).tolist() == workload(lengths).tolist()
    vision = count_grids(describe("Qwen2.5-VL-7B").image_rule, [None, torch.tensor([[1, 76, 136]])])
    stand_in_for(balancing.calculate_workload, workload.with_vision(vision))
    assert by_name(lengths).tolist() == workload(lengths, vision).tolist()
    with refused(ConfigError, "2"):
        stand_in_for(table, workload)


def test_a_profile_without_a_language_model_is_refused(profile: Profile) -> None:
    from dataclasses import replace

    vision = replace(profile, layers=tuple(layer for layer in profile.layers if layer.tower == "vision"))
    with refused(ConfigError):
        vlm_workload(vision)
