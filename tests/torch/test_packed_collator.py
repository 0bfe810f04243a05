"""What the packed collator puts in a batch, what it refuses, what its Trainer does. Needs torch and Transformers."""

import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import tokenizers
import torch
import transformers
from PIL import Image
from tiny_models import IMAGE_TOKEN
from tiny_packs import CASES, alone, make_tiny_packs

from refusals import refused
from trimtab.errors import SampleError, UnsupportedPlanError
from trimtab.runtime.data.collate import PackedCollator, image_numbers, pack_mask, packed_loss, step_denominator


@pytest.fixture(scope="module")
def qwen():
    return make_tiny_packs("qwen2_5_vl")


@pytest.fixture(scope="module")
def gemma():
    return make_tiny_packs("gemma3")


# -- what is in a batch -----------------------------------------------------------------------------------------------


def test_a_mask_by_hand():
    images = image_numbers([torch.tensor([0, 1, 1, 0]), torch.tensor([1, 0])])
    assert images.tolist() == [-1, 0, 0, -1, 1, -1]
    rows = pack_mask([4, 2], window=2, images=images)[0, 0].int().tolist()
    assert rows == [
        [1, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0],  # an image token sees all of its image
        [0, 1, 1, 0, 0, 0],  # and a window of two
        [0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 0],
        [0, 0, 0, 0, 1, 1],
    ]


def test_images_that_meet_at_a_border_stay_two():
    assert image_numbers([torch.tensor([0, 1]), torch.tensor([1, 0])]).tolist() == [-1, 0, 1, -1]


def test_no_label_crosses_into_the_next_sample(qwen):
    batch = PackedCollator(qwen.model.config)(qwen.samples)
    starts = (batch["position_ids"][0, 0] == 0).nonzero()[:, 0]
    assert len(starts) == len(qwen.samples)
    assert (batch["labels"][0, starts] == -100).all()
    kept = sum(int((sample["labels"][1:] != -100).sum()) for sample in qwen.samples)
    assert int((batch["labels"] != -100).sum()) == kept
    assert "loss_weights" not in batch  # the model's own loss, or any Trainer, can take it as it is


def test_sample_weights_add_up_to_the_number_of_samples_with_labels(qwen):
    batch = PackedCollator(qwen.model.config, loss_weighting="sample")(qwen.samples)
    assert float(batch["loss_weights"].sum()) == pytest.approx(len(qwen.samples) - 1)  # one has a single token
    assert float(step_denominator([batch, batch])) == pytest.approx(2 * (len(qwen.samples) - 1))


def test_a_sample_of_weight_zero_leaves_loss_and_denominator(qwen):
    a, b = qwen.samples[0], qwen.samples[1]
    collator = PackedCollator(qwen.model.config)
    assert float(step_denominator([collator([a, {**b, "loss_weight": 0}])])) == float(step_denominator([collator([a])]))
    half = collator([a, {**b, "loss_weight": 0.5}])
    assert float(step_denominator([half])) == float(step_denominator([collator([a])])) + 0.5 * (len(b["labels"]) - 1)


def test_label_masks_of_chat_templates_are_labels(qwen):
    ids = qwen.samples[1]["input_ids"]
    learnt = (torch.arange(len(ids)) >= 4).long()
    batch = PackedCollator(qwen.model.config, vision_in_every_pack=False)(
        [{"input_ids": ids, "assistant_masks": learnt}]
    )
    assert batch["labels"][0].tolist() == [-100] * 4 + ids[4:].tolist()


def test_lists_and_batches_of_one_are_taken_too(qwen):
    plain = PackedCollator(qwen.model.config)(qwen.samples[:3])
    lists = [{k: v.tolist() if v.dim() == 1 else v for k, v in sample.items()} for sample in qwen.samples[:3]]
    batched = [{k: v[None] if v.dim() == 1 else v for k, v in sample.items()} for sample in qwen.samples[:3]]
    for samples in (lists, batched):
        other = PackedCollator(qwen.model.config)(samples)
        assert other.keys() == plain.keys()
        assert all(torch.equal(torch.as_tensor(other[key]), torch.as_tensor(plain[key])) for key in plain)


def test_token_types_are_found_where_a_processor_gives_none(qwen):
    bare = [{k: v for k, v in sample.items() if k != "mm_token_type_ids"} for sample in qwen.samples]
    collator = PackedCollator(qwen.model.config)
    assert torch.equal(collator(bare)["position_ids"], collator(qwen.samples)["position_ids"])


def test_the_collator_goes_to_worker_processes(qwen):
    collator = pickle.loads(pickle.dumps(PackedCollator(qwen.model.config)))
    again, plain = collator(qwen.samples), PackedCollator(qwen.model.config)(qwen.samples)
    assert torch.equal(again["position_ids"], plain["position_ids"])


# -- packs without images, empty packs --------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("which", ["empty", "text"])
def test_fillers_reach_every_parameter_and_move_none(case, which):
    packs = make_tiny_packs(case)
    samples = [] if which == "empty" else [packs.samples[1]]
    batch = PackedCollator(packs.model.config)(samples)
    denominator = step_denominator([batch])
    logits = packs.model(**{key: value for key, value in batch.items() if key != "labels"}).logits
    if which == "text":
        expected = packs.model(**alone(packs.samples[1])).logits[0]
        assert float((logits[0, : len(expected)] - expected).detach().abs().max()) <= 1e-5
    loss = packed_loss(logits, batch, denominator=denominator)
    loss.backward()
    towers = [p.grad for name, p in packs.model.named_parameters() if "patch_embed" in name]
    assert towers
    assert all(grad is not None and not grad.any() for grad in towers)  # there, so that no rank waits; and zero
    if which == "empty":
        assert float(denominator) == float(loss.detach()) == 0


def test_image_free_packs_may_stay_without_vision(qwen):
    batch = PackedCollator(qwen.model.config, vision_in_every_pack=False)([qwen.samples[1]])
    assert "pixel_values" not in batch
    assert batch["input_ids"].shape[1] == len(qwen.samples[1]["input_ids"])


# -- what is refused --------------------------------------------------------------------------------------------------


def config_of(**text: Any) -> Any:
    """As much of a configuration as the checks read."""
    inner = SimpleNamespace(**{"_attn_implementation": None, "layer_types": None, **text})
    return SimpleNamespace(model_type="internvl", get_text_config=lambda: inner)


def test_flash_attention_of_gemma3_is_refused(gemma):
    config = gemma.model.config.__class__.from_dict(gemma.model.config.to_dict())
    with refused(UnsupportedPlanError):
        PackedCollator(config, attention="flash_attention_2")


def test_samples_without_ids_and_several_bad_ones(qwen):
    bad = [{"labels": [1]}, {"input_ids": [1, 2]}]
    with refused(SampleError, "1", "input_ids", "2"):
        PackedCollator(qwen.model.config)([qwen.samples[0], *bad])


# -- what real processors give ----------------------------------------------------------------------------------------


def tokenizer_with(*special: str) -> Any:
    """Words a, b, c and the special tokens, the last of which is the tiny models' image token."""

    words = {word: number for number, word in enumerate(["<unk>", "<pad>", "a", "b", "c", *special[:-1]])}
    model = tokenizers.models.WordLevel({**words, special[-1]: IMAGE_TOKEN}, unk_token="<unk>")
    plain = tokenizers.Tokenizer(model)
    plain.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=plain, unk_token="<unk>", pad_token="<pad>", additional_special_tokens=list(special)
    )


def processor_of(case: str) -> Any:
    """The families whose processor needs no torchvision."""
    square = {"height": 56, "width": 56}
    if case == "gemma3":
        tokenizer = tokenizer_with("<boi>", "<eoi>", "<image>")
        for name, token in (("boi_token", "<boi>"), ("eoi_token", "<eoi>"), ("image_token", "<image>")):
            setattr(tokenizer, name, token)
            setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
        images = transformers.Gemma3ImageProcessor(size=square)
        return transformers.Gemma3Processor(image_processor=images, tokenizer=tokenizer, image_seq_length=4)
    options = {"patch_size": 14, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    tokenizer = tokenizer_with("<image>")
    if case == "llava_next":
        images = transformers.LlavaNextImageProcessor(
            size={"shortest_edge": 56}, crop_size=square, image_grid_pinpoints=[[112, 56], [112, 112]]
        )
        return transformers.LlavaNextProcessor(image_processor=images, tokenizer=tokenizer, **options)
    images = transformers.CLIPImageProcessor(size={"shortest_edge": 56}, crop_size=square)
    return transformers.LlavaProcessor(image_processor=images, tokenizer=tokenizer, **options)


@pytest.mark.parametrize("case", ["gemma3", "llava llama", "llava_next"])
@torch.no_grad()
def test_what_processors_give_goes_in(case):
    packs, processor = make_tiny_packs(case), processor_of(case)
    mark = "<boi>" if case == "gemma3" else "<image>"
    one, two = (Image.new("RGB", size, color) for size, color in (((90, 50), "red"), ((40, 100), "blue")))
    processed = [
        dict(processor(text=[f"a b {mark} c"], images=[[one]], return_tensors="pt")),
        dict(processor(text=["c b a"], return_tensors="pt")),
        dict(processor(text=[f"{mark} b {mark} a"], images=[[one, two]], return_tensors="pt")),
    ]
    expected = torch.cat([packs.model(**inputs).logits[0] for inputs in processed])
    batch = PackedCollator(packs.model.config)([{**sample, "labels": sample["input_ids"]} for sample in processed])
    logits = packs.model(**{key: value for key, value in batch.items() if key != "labels"}).logits[0]
    assert float((logits - expected).abs().max()) <= 1e-5
