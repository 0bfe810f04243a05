"""`verify_packing`: which models compute packs exactly, and which layer leaks elsewhere. Needs Transformers."""

import copy
from typing import Any

import pytest
import torch
import transformers
from drawn_images import draw_image_samples
from shrunk_models import draw_weights, make_shrunk, shrink

from refusals import refused
from trimtab.errors import SampleError, UnknownModelError, UnsupportedPlanError
from trimtab.runtime.data.collate import PackedCollator, attend_by_sample
from trimtab.runtime.data.formats import PackFormat, ask_format, pack_format
from trimtab.runtime.data.packing import verify_packing

pytestmark = pytest.mark.filterwarnings("ignore")

DECODERS = {
    "llava": "full attention",
    "cohere2_vision": "sliding windows",
    "llama4": "chunks and experts",
    "kimi_k25": "latent attention and experts",
    "gemma4": "per-layer embeddings",
    "paligemma": "prefixes that see themselves whole",
    "glm4v_moe": "M-RoPE",
}
STATEFUL = {
    "qwen3_5": "gated delta",
    "lfm2_vl": "a convolution",
    "lfm3_vl": "one without a kernel",
    "nemotron_h_omni": "Mamba",
}


# -- exact ------------------------------------------------------------------------------------------------------------


@pytest.fixture(params=["one mask", "by sample"])
def made(request):
    """Makes a shrunk model of a family, whose language model attends to a pack in either way."""

    def make(family):
        model = make_shrunk(family)
        if request.param == "by sample":
            attend_by_sample(model)
        return model

    return make


@pytest.mark.parametrize("family", DECODERS)
def test_packs_of_text_are_exact(family, made):
    proof = verify_packing(made(family))
    assert proof.leak <= 1e-6
    assert proof.logits_error <= 1e-5
    assert proof.gradient_error <= 1e-4


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "idefics3", "hunyuan_vl"])
def test_packs_with_images_are_exact(family, made):
    model = made(family)
    samples = draw_image_samples(model)
    assert samples is not None
    proof = verify_packing(model, samples, max_tokens=64)
    assert proof.num_samples == 4
    assert max(proof.leak, proof.logits_error, proof.gradient_error / 10) <= 1e-5


@pytest.mark.parametrize(("family", "is_apart"), [("qwen3_vl", True), ("llava", True), ("gemma3", False)])
def test_samples_attend_apart_where_nothing_but_their_order_decides_who_is_seen(family, is_apart, monkeypatch):
    model = make_shrunk(family)
    attend_by_sample(model)
    samples = [{"input_ids": torch.arange(5, 5 + n), "labels": torch.arange(5, 5 + n)} for n in (4, 9, 1, 6)]
    pack = PackedCollator(model.config, vision_in_every_pack=False)(samples)
    own, rows = torch.nn.functional.scaled_dot_product_attention, []

    def watched(query, *args, **options):
        rows.append(query.shape[2])
        return own(query, *args, **options)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", watched)
    model(**pack)
    assert sorted(set(rows)) == ([1, 4, 6, 9] if is_apart else [20])
    assert len(rows) == model.config.get_text_config().num_hidden_layers * (4 if is_apart else 1)


def test_other_batches_run_as_they_did_before_samples_attended_apart():
    model = make_shrunk("llava").eval()
    ids = torch.arange(5, 29).reshape(2, 12)
    mask = torch.ones_like(ids)
    mask[1, :5] = 0  # padded on the left
    before = model(input_ids=ids, attention_mask=mask).logits
    words = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False)
    attend_by_sample(model)
    assert torch.equal(model(input_ids=ids, attention_mask=mask).logits, before)
    assert torch.equal(model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=4, do_sample=False), words)


def test_a_family_registered_here_needs_no_line():
    class OwnConfig(transformers.LlavaConfig):
        model_type = "trimtab_test_vl"

    class OwnModel(transformers.LlavaForConditionalGeneration):
        config_class = OwnConfig

    transformers.AutoConfig.register("trimtab_test_vl", OwnConfig)
    transformers.AutoModelForImageTextToText.register(OwnConfig, OwnModel)
    config = OwnConfig(**{k: v for k, v in shrink("internvl", {}).to_dict().items() if k == "text_config"})
    config.image_token_id, config.vision_config = 140, shrink("llava", {}).vision_config
    model = draw_weights(OwnModel(config))
    assert pack_format(config).joined == ("pixel_values", "image_sizes")
    assert verify_packing(model).logits_error <= 1e-5
    samples = draw_image_samples(model)
    assert samples is not None
    assert verify_packing(model, samples, max_tokens=64).logits_error <= 1e-5
    own = PackedCollator(config, family=PackFormat(joined=("pixel_values",)), vision_in_every_pack=False)
    assert verify_packing(model, samples, collator=own, max_tokens=64).logits_error <= 1e-5
    with refused(SampleError, "image_sizes", "trimtab_test_vl"):
        verify_packing(model, [{**samples[0], "image_sizes": torch.tensor([[56, 56]])}, samples[1]], collator=own)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_bound_is_that_of_the_type(dtype):
    model = make_shrunk("llava").to(dtype)
    proof = verify_packing(model)
    assert proof.logits_error <= proof.bound == {torch.bfloat16: 0.1, torch.float64: 1e-9}[dtype]
    ignore_masks(model.model.language_model.layers[0].self_attn)
    with refused(UnsupportedPlanError, "llava"):
        verify_packing(model)


# -- planted leaks ----------------------------------------------------------------------------------------------------


def ignore_masks(attention: Any) -> None:
    forward = attention.forward
    attention.forward = lambda *args, attention_mask=None, **kwargs: forward(*args, attention_mask=None, **kwargs)


@pytest.mark.parametrize("layer", [0, 1])
def test_a_layer_that_ignores_its_mask_is_found(layer):
    model = make_shrunk("cohere2_vision")
    ignore_masks(model.model.language_model.layers[layer].self_attn)
    with refused(UnsupportedPlanError, "cohere2_vision"):
        verify_packing(model)


@pytest.mark.parametrize("family", STATEFUL)
def test_layers_with_a_state_need_their_fused_kernels(family):
    with refused(UnsupportedPlanError, "kernels"):
        verify_packing(make_shrunk(family))


def test_a_layer_that_counts_through_the_row_is_found():
    """Positions that do not restart, where they are not relative."""
    model = make_shrunk("llava")
    layer = model.model.language_model.layers[1].mlp
    forward = layer.forward
    layer.forward = lambda x: forward(x) + 0.1 * torch.arange(x.shape[1])[None, :, None].to(x)
    with refused(UnsupportedPlanError):
        verify_packing(model)


class _Counting(PackedCollator):
    def __call__(self, samples: Any) -> Any:
        batch = PackedCollator.__call__(self, samples)
        axes = torch.arange(batch["input_ids"].shape[1]).expand(3, 1, -1)
        return {**batch, "position_ids": torch.cat([batch["position_ids"][:1], axes])}


def test_wrong_axes_of_mrope_are_found():
    model = make_shrunk("qwen2_5_vl")
    collator = _Counting(model.config, vision_in_every_pack=False)
    with refused(UnsupportedPlanError, "qwen2_5_vl", "PackFormat"):
        verify_packing(model, draw_image_samples(model), collator=collator, max_tokens=64)


def test_images_that_meet_in_a_bidirectional_mask_are_found():
    """Gemma 3 asked instead of declared: Transformers' own masks take two images that meet for one."""
    model = make_shrunk("gemma3")
    samples = draw_image_samples(model)
    asked = PackedCollator(model.config, family=ask_format(model.config), vision_in_every_pack=False)
    assert asked.family.types_key == "token_type_ids"
    with refused(UnsupportedPlanError, "gemma3"):
        verify_packing(model, samples, collator=asked, max_tokens=64)
    assert verify_packing(model, samples, max_tokens=64).logits_error <= 1e-5


def test_a_tower_that_mixes_images_is_found():
    model = make_shrunk("internvl")
    tower = model.model.vision_tower
    forward = tower.forward
    tower.forward = lambda pixel_values, **kwargs: forward(pixel_values + pixel_values.mean(0, keepdim=True), **kwargs)
    with refused(UnsupportedPlanError):
        verify_packing(model, draw_image_samples(model), max_tokens=64)


# -- what stays as it was ---------------------------------------------------------------------------------------------


def test_nothing_of_a_run_changes():
    model = make_shrunk("qwen3_vl").train()
    model.model.visual.eval()
    parameter = next(model.parameters())
    parameter.grad = torch.ones_like(parameter)
    before, modes = copy.deepcopy(model.state_dict()), [module.training for module in model.modules()]
    torch.manual_seed(5)
    state = torch.get_rng_state()
    verify_packing(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert [p.grad is not None for p in model.parameters()].count(True) == 1
    assert bool((parameter.grad == 1).all())


def test_frozen_weights_and_dropout_do_not_matter():
    model = make_shrunk("llava", changes={"text_config.attention_dropout": 0.5}).train()
    model.requires_grad_(False)
    assert verify_packing(model).gradient_error <= 1e-4


# -- the collator's part ----------------------------------------------------------------------------------------------


def test_layers_with_a_state_are_told_where_samples_start():
    config = shrink("qwen3_5", {})
    collator = PackedCollator(config, vision_in_every_pack=False)
    batch = collator([{"input_ids": ids, "labels": ids} for ids in ([5, 6, 7], [8], [9, 10])])
    assert batch["seq_idx"].tolist() == [[0, 0, 0, 1, 2, 2]]
    assert batch["cu_seq_lens_q"].tolist() == [0, 3, 4, 6]
    assert batch["seq_idx"].dtype == batch["cu_seq_lens_q"].dtype == torch.int32
    assert batch["position_ids"].tolist() == [[[0, 1, 2, 0, 0, 1]]] * 4


def test_images_of_unlike_numbers_and_sizes_are_padded():
    config = shrink("idefics3", {})
    collator = PackedCollator(config, vision_in_every_pack=False)
    token = config.image_token_id
    samples = [
        {"input_ids": [token, 5], "labels": [-100, 5], "pixel_values": torch.ones(1, num, 3, 28, 28)} for num in (1, 2)
    ]
    pixels = collator(samples)["pixel_values"]
    assert pixels.shape == (2, 2, 3, 28, 28)
    assert pixels.flatten(2).amax(-1).tolist() == [[1, 0], [1, 1]]


@pytest.mark.parametrize("family", ["glm4v"])
def test_packs_without_images_get_the_smallest_of_an_asked_family(family):
    model = make_shrunk(family)
    ids = torch.arange(5, 12)
    batch = PackedCollator(model.config)([{"input_ids": ids, "labels": ids}])
    assert batch["image_grid_thw"].tolist() == [[1, 2, 2]]
    logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    alone = model(input_ids=ids[None], use_cache=False).logits
    assert float((logits[0, :7] - alone[0]).detach().norm() / alone.detach().norm()) <= 1e-5
    assert (batch["labels"][0, 7:] == -100).all()


# -- bad input --------------------------------------------------------------------------------------------------------


def test_bad_samples_and_settings_are_refused():
    model = make_shrunk("llava")
    with refused(UnsupportedPlanError, "1"):
        verify_packing(model, [{"input_ids": [5, 6], "labels": [5, 6]}])
    with refused(SampleError, "0"):
        verify_packing(model, [{"input_ids": [], "labels": []}] * 2)
    with refused(UnsupportedPlanError, "idefics3", "vision_in"):
        PackedCollator(shrink("idefics3", {}))
    with refused(UnknownModelError):
        ask_format(transformers.SiglipVisionConfig())
