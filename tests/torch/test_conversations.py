"""Rows of a plan as processed samples, for every packed family, from files on disk to a forward; needs torch."""

import json
from dataclasses import replace

import pytest
import torch
import transformers
from model_folders import CASES, write_data, write_model, write_plan_of

from refusals import refused
from trimtab.errors import ConfigError, PlanError, SampleError
from trimtab.options import ReadingOptions
from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.data.conversations import UnreadableSampleError, open_conversations


def write_planned(tmp_path, family, **limits):
    config = write_model(tmp_path / "model", family)
    data = write_data(tmp_path / "data")
    options = {"dp": 1, "pp": 1, "num_microbatches": 2, "max_patches": 4096, "max_tokens": 1024}
    write_plan_of(tmp_path, data, options, **limits)
    return config


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    folder = tmp_path_factory.mktemp("internvl")
    write_planned(folder, "internvl")
    return folder


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


def test_a_parts_own_size_is_trained_as_it_is_sized(tmp_path):
    write_model(tmp_path / "model", "qwen2_5_vl")
    data = write_data(tmp_path / "data")
    own = [{}, {"max_pixels": 3136, "min_pixels": 1}, {"resized_height": 84, "resized_width": 140}]
    parts = [{"type": "image", "image": "1-0.png", **asked} for asked in own]
    turns = [{"role": "user", "content": [*parts, "what"]}, {"role": "assistant", "content": "a red cat"}]
    data.write_text((json.dumps({"messages": turns}) + "\n") * 2)
    options = {"dp": 1, "pp": 1, "num_microbatches": 2, "max_patches": 4096, "max_tokens": 1024}
    sized = write_plan_of(tmp_path, data, options)
    sample = open_conversations(tmp_path / "plan", tmp_path / "model")[0]
    assert sample["image_grid_thw"].prod(-1).tolist() == sized.table.image_patches.tolist()[:3]
    assert sample["image_grid_thw"][2].tolist() == [1, 6, 10]


def test_rows_travel_to_worker_processes(planned):
    rows = open_conversations(planned / "plan", planned / "model")
    here = [rows[row]["input_ids"] for row in range(8)]
    loader = torch.utils.data.DataLoader(rows, batch_size=None, num_workers=1, sampler=range(8))
    assert all(torch.equal(a, b["input_ids"]) for a, b in zip(here, loader, strict=True))


def test_another_model_than_the_plans_is_refused(planned, tmp_path):
    write_model(tmp_path / "other", "llava")
    with refused(PlanError):
        open_conversations(planned / "plan", tmp_path / "other")


def test_a_model_without_its_preprocessor_is_told_so(tmp_path):
    write_planned(tmp_path, "internvl")
    for file in (tmp_path / "model").glob("*processor*_config.json"):
        file.unlink()
    with refused(PlanError, "preprocessor_config.json"):
        open_conversations(tmp_path / "plan", tmp_path / "model")


def test_other_token_counts_than_the_plans_are_refused(planned, tmp_path):
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}{{ m.content }}\n{% endfor %}")
    rows = open_conversations(planned / "plan", planned / "model", ReadingOptions(chat_template=plain))
    with refused(SampleError, "data.jsonl", "1"):
        rows[0]


def test_an_image_that_is_gone_or_broken_is_named(tmp_path):
    write_planned(tmp_path, "internvl")
    rows = open_conversations(tmp_path / "plan", tmp_path / "model")
    whole = (tmp_path / "data" / "1-0.png").read_bytes()
    (tmp_path / "data" / "1-0.png").write_bytes(whole[:60] + bytes(len(whole) - 80) + whole[-20:])
    with refused(UnreadableSampleError):
        rows[1]
    (tmp_path / "data" / "1-0.png").unlink()
    with refused(SampleError, "1-0.png"):
        rows[1]


def test_a_family_of_remote_code_is_refused(planned):
    rows = open_conversations(planned / "plan", planned / "model")
    with refused(ConfigError, "internvl_chat"):
        reader = rows._reader
        type(reader)(
            replace(rows.model, family="internvl_chat"),
            reader._tokenizer,
            planned,
            options=ReadingOptions(),
            limits=reader._limits,
        )
