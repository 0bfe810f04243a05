"""Rows of a plan as processed samples, for every packed family, from files on disk to a forward; needs torch."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
import transformers
from PIL import Image
from sample_sets import SPECIAL, write_tokenizer
from tiny_models import ODD_CONFIGS
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.llava_next.image_processing_pil_llava_next import LlavaNextImageProcessorPil
from transformers.models.llava_onevision.image_processing_pil_llava_onevision import LlavaOnevisionImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

import trimtab
from trimtab.errors import ConfigError, PlanError, SampleError
from trimtab.files import fingerprint_file
from trimtab.models.describe import describe
from trimtab.options import ReadingOptions
from trimtab.plan.options import PlanOptions, PlanOrigin
from trimtab.plan.plan import DataFile
from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.data.conversations import open_conversations
from trimtab.runtime.data.missing import UnreadableSampleError
from trimtab.samples.tokens import MARKUPS

CASES = {
    "qwen2_vl": "qwen2_vl",
    "qwen2_5_vl": "qwen2_5_vl",
    "qwen3_vl": "qwen3_vl",
    "internvl": "internvl qwen2",
    "llava": "llava llama",
    "llava_next": "llava_next",
    "llava_onevision": "llava_onevision",
    "gemma3": "gemma3",
}
SQUARE = {"height": 56, "width": 56}


def image_processor(family, config):
    """Small settings of the family's real one."""
    if family.startswith("qwen"):
        limits = {"shortest_edge": 3136, "longest_edge": 50176}
        vision = config.vision_config
        return Qwen2VLImageProcessorPil(
            size=limits, patch_size=vision.patch_size, merge_size=vision.spatial_merge_size, temporal_patch_size=2
        )
    if family in ("llava_next", "llava_onevision"):
        cls = LlavaNextImageProcessorPil if family == "llava_next" else LlavaOnevisionImageProcessorPil
        points = config.image_grid_pinpoints
        size = {"shortest_edge": 56} if family == "llava_next" else SQUARE
        crop = {"crop_size": SQUARE} if family == "llava_next" else {}
        return cls(size=size, image_grid_pinpoints=points, **crop)
    return {
        "internvl": lambda: GotOcr2ImageProcessorPil(size=SQUARE, crop_to_patches=True, min_patches=1, max_patches=4),
        "llava": lambda: CLIPImageProcessorPil(size={"shortest_edge": 56}, crop_size=SQUARE),
        "gemma3": lambda: Gemma3ImageProcessorPil(size=SQUARE),
    }[family]()


def write_model(folder, family):
    """config.json, preprocessor and tokenizer of a tiny model."""
    model_type, vision, text, outer = json.loads(json.dumps(ODD_CONFIGS[CASES[family]]))
    markup = MARKUPS[family]
    special = (*SPECIAL, "<end_of_turn>")
    write_tokenizer(folder, template_of(markup), special=special)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
    soft = tokenizer.convert_tokens_to_ids(markup.soft)
    if family in ("qwen2_vl", "qwen2_5_vl"):
        text["rope_parameters"] = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]}
    text["vocab_size"] = len(tokenizer)
    token = {"image_token_index": soft} if family.startswith("llava") else {"image_token_id": soft}
    if family.startswith("qwen"):
        token |= {"video_token_id": tokenizer.convert_tokens_to_ids("<|video_pad|>")}
        token |= {"vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>")}
    config = transformers.AutoConfig.for_model(model_type, vision_config=vision, text_config=text, **{**outer, **token})
    written = json.loads(config.to_json_string(use_diff=False))
    written.pop("image_seq_length", None)
    (folder / "config.json").write_text(json.dumps(written))
    image_processor(family, config).save_pretrained(folder)
    return config


def template_of(markup):
    """ChatML with the family's placeholder."""
    shown = markup.written or markup.placeholder
    return (
        "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string %}{{ m.content }}{% else %}"
        "{% for c in m.content %}{% if c.type == 'image' %}" + shown + "{% else %}{{ c.text }}{% endif %}{% endfor %}"
        "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )


def write_data(folder, *, num=8, seed=0):
    folder.mkdir()
    rng = random.Random(seed)
    with (folder / "data.jsonl").open("w") as file:
        for number in range(num):
            names = []
            for image in range(number % 3):
                names.append(f"{number}-{image}.png")
                size = (rng.randrange(40, 220), rng.randrange(40, 220))
                pixels = np.random.default_rng(number).integers(0, 255, (size[1], size[0], 3), np.uint8)
                Image.fromarray(pixels).save(folder / names[-1])
            turns = [
                {"from": "human", "value": "<image>\n" * len(names) + "what is in the picture"},
                {"from": "gpt", "value": "a red cat " * (1 + number)},
            ]
            file.write(json.dumps({"id": f"s{number}", "image": names, "conversations": turns}) + "\n")
    return folder / "data.jsonl"


def write_plan_of(folder, family, data, options, cluster, **limits):
    """plan/ for the model in model/ and this data, whose largest sample fills a pack unless `options` say otherwise."""
    spec = describe(folder / "model", **limits)
    sized = trimtab.size_samples(
        data, image_rule=spec.image_rule, image_markup=MARKUPS[family], tokenizer=folder / "model"
    )
    most = {"max_patches": int(sized.table.num_patches.max()), "max_tokens": int(sized.table.num_tokens.max())}
    file = DataFile(path=str(data), num_bytes=data.stat().st_size, blake2b=fingerprint_file(data))
    details = trimtab.make_plan(
        spec,
        sized.table,
        trimtab.parse_cluster(cluster),
        PlanOptions(**most | options),
        origin=PlanOrigin(data_files=(file,)),
    )
    trimtab.write_plan(details, folder / "plan")


def write_planned(tmp_path, family, **limits):
    config = write_model(tmp_path / "model", family)
    data = write_data(tmp_path / "data")
    options = {"dp": 1, "pp": 1, "num_microbatches": 2, "max_patches": 4096, "max_tokens": 1024}
    write_plan_of(tmp_path, family, data, options, "1xA100-80GB", **limits)
    return config


@pytest.mark.parametrize("family", CASES)
def test_every_row_comes_out_as_it_was_sized_and_packs_run(tmp_path, family):
    config = write_planned(tmp_path, family)
    rows = open_conversations(tmp_path / "plan", tmp_path / "model")
    samples = [rows[row] for row in range(len(rows))]
    assert [len(sample["input_ids"]) for sample in samples] == rows.records.samples.num_tokens.tolist()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "model" / "tokenizer.json"))
    for number, sample in enumerate(samples):
        learnt = sample["labels"][sample["labels"] != -100]
        assert tokenizer.decode(learnt) == "a red cat " * (1 + number) + "<|im_end|>"
        assert ("pixel_values" in sample) == (number % 3 > 0)
    torch.manual_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    batch = PackedCollator(model.config)([samples[1], samples[0], samples[5]])
    with torch.no_grad():
        assert torch.isfinite(model(**batch).loss)


@pytest.mark.parametrize(
    ("family", "limit", "most"), [("qwen2_5_vl", {"max_pixels": 8 * 28 * 28}, 8 * 4), ("internvl", {"max_tiles": 2}, 3)]
)
def test_the_users_own_limits_reach_the_processor(tmp_path, family, limit, most):
    write_planned(tmp_path, family, **limit)
    rows = open_conversations(tmp_path / "plan", tmp_path / "model")
    assert max(len(rows[row].get("pixel_values", ())) for row in (1, 4, 7)) <= most
    assert [len(rows[row]["input_ids"]) for row in range(8)] == rows.records.samples.num_tokens.tolist()


def test_rows_travel_to_worker_processes(tmp_path):
    write_planned(tmp_path, "internvl")
    rows = open_conversations(tmp_path / "plan", tmp_path / "model")
    here = [rows[row]["input_ids"] for row in range(8)]
    loader = torch.utils.data.DataLoader(rows, batch_size=None, num_workers=1, sampler=range(8))
    assert all(torch.equal(a, b["input_ids"]) for a, b in zip(here, loader, strict=True))


def test_another_model_than_the_plans_is_refused(tmp_path):
    write_planned(tmp_path, "internvl")
    write_model(tmp_path / "other", "llava")
    with pytest.raises(PlanError, match=r"has other layers or counts images otherwise than .* plan again"):
        open_conversations(tmp_path / "plan", tmp_path / "other")


def test_a_model_without_its_preprocessor_is_told_so(tmp_path):
    write_planned(tmp_path, "internvl")
    for file in (tmp_path / "model").glob("*processor*_config.json"):
        file.unlink()
    with pytest.raises(PlanError, match=r"says of no image how it is cut, .*: put preprocessor_config.json"):
        open_conversations(tmp_path / "plan", tmp_path / "model")


def test_other_token_counts_than_the_plans_are_refused(tmp_path):
    write_planned(tmp_path, "internvl")
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    rows = open_conversations(tmp_path / "plan", tmp_path / "model", ReadingOptions(chat_template=plain))
    with pytest.raises(SampleError, match=r"sample s0 \(.*data.jsonl:1\) has \d+ tokens and was sized at \d+: train"):
        rows[0]


def test_an_image_that_is_gone_or_broken_is_named(tmp_path):
    write_planned(tmp_path, "internvl")
    rows = open_conversations(tmp_path / "plan", tmp_path / "model")
    whole = (tmp_path / "data" / "1-0.png").read_bytes()
    (tmp_path / "data" / "1-0.png").write_bytes(whole[:60] + bytes(len(whole) - 80) + whole[-20:])
    with pytest.raises(UnreadableSampleError, match=r"sample s1 .*cannot be decoded .*replace or drop it"):
        rows[1]
    (tmp_path / "data" / "1-0.png").unlink()
    with pytest.raises(SampleError, match=r"sample s1 .*1-0.png cannot be opened"):
        rows[1]


def test_a_family_of_remote_code_is_refused(tmp_path):
    write_planned(tmp_path, "internvl")
    rows = open_conversations(tmp_path / "plan", tmp_path / "model")
    with pytest.raises(ConfigError, match=r"the family internvl_chat .* its code is remote and is never run: take a"):
        type(rows)(
            rows.records,
            replace(rows.model, family="internvl_chat"),
            rows._tokenizer,
            tmp_path,
            options=ReadingOptions(),
            limits=rows._limits,
        )
