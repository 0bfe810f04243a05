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
from trimtab.runtime.data.collate import PackedCollator, attend_in_blocks
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


@pytest.mark.parametrize("family", DECODERS)
def test_packs_of_text_are_exact(family):
    proof = verify_packing(make_shrunk(family))
    assert proof.leak <= 1e-6
    assert proof.logits_error <= 1e-5
    assert proof.gradient_error <= 1e-4


@pytest.mark.parametrize("family", ["qwen3_vl", "internvl", "idefics3", "hunyuan_vl"])
def test_packs_with_images_are_exact(family):
    model = make_shrunk(family)
    samples = draw_image_samples(model)
    assert samples is not None
    proof = verify_packing(model, samples, max_tokens=64)
    assert proof.num_samples == 4
    assert max(proof.leak, proof.logits_error, proof.gradient_error / 10) <= 1e-5


@pytest.mark.parametrize("family", ["cohere2_vision", "qwen2_5_vl", "gemma3"])
def test_blocks_are_as_the_mask(family):
    model = make_shrunk(family, changes={"sliding_window": 8} if family == "cohere2_vision" else None)
    drawn = torch.Generator().manual_seed(3)
    texts = [torch.randint(5, 60, (length,), generator=drawn).tolist() for length in (30, 1, 12)]
    samples = draw_image_samples(model) + [{"input_ids": ids, "labels": ids} for ids in texts]

    def losses(attention: str) -> list[torch.Tensor]:
        collator = PackedCollator(model.config, attention=attention, vision_in_every_pack=False)
        assert verify_packing(model, samples, collator=collator, max_tokens=64).gradient_error <= 1e-4
        loss = model(**collator(samples)).loss
        return [loss.detach(), *torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)]

    masked = losses("sdpa")
    attend_in_blocks(model)
    for found, expected in zip(losses("sdpa_blocks"), masked, strict=True):
        assert (found is None) == (expected is None)
        if expected is not None:
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    # what is no pack is computed as before
    ids = torch.tensor([texts[0], texts[2] + [0] * 18])
    batch = {"input_ids": ids, "attention_mask": (ids > 0).long(), "use_cache": False}
    blocks = model(**batch).logits
    model.config.get_text_config()._attn_implementation = "sdpa"
    assert torch.equal(blocks, model(**batch).logits)


def test_blocks_are_refused_where_they_are_not_all():
    model = make_shrunk("llama4")
    attend_in_blocks(model)
    with refused(UnsupportedPlanError, "llama4", "chunked_attention"):
        PackedCollator(model.config, attention="sdpa_blocks", vision_in_every_pack=False)
    model.config.get_text_config()._attn_implementation = "eager"
    with refused(UnsupportedPlanError, "eager", "sdpa"):
        attend_in_blocks(model)


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
