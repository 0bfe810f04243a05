"""What a folder's configuration and weights say: the format of the weights, ties, positions."""

import json
from dataclasses import replace

import numpy as np
import pytest
from described_configs import describe

from trimtab.costs.devices import parse_cluster
from trimtab.lora import Lora
from trimtab.models.describe import read_config, stored_format
from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import Workload
from trimtab.plan.build import make_plan
from trimtab.plan.options import PlanOptions
from trimtab.specs import SampleTable
from trimtab.units import GIB

QWEN = dict(read_config("Qwen2.5-VL-7B"))
FORMATS = [
    ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bnb-nf4"),
    ({"load_in_4bit": True, "bnb_4bit_use_double_quant": True}, "bnb-nf4-double"),
    ({"quant_method": "bitsandbytes", "load_in_8bit": True}, "bnb-int8"),
    ({"quant_method": "awq", "bits": 4, "group_size": 128}, "awq"),
    ({"quant_method": "gptq", "bits": 4}, "awq"),
    ({"quant_method": "gptq", "bits": 8}, "gptq-8"),
    ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "fp8"),
    ({"quant_method": "hqq"}, "hqq"),
]


@pytest.mark.parametrize(("said", "name"), FORMATS)
def test_every_quantization_config_has_a_name(said, name):
    assert stored_format(said) == name
    assert describe({**QWEN, "quantization_config": said}).stored_as == name


@pytest.mark.parametrize(("name", "gib"), [("bnb-nf4-double", 5.5), ("awq", 6.45), (None, 15.45)])
def test_a_map_counts_weights_as_they_are_stored(name, gib):
    model = replace(describe("Qwen2.5-VL-7B"), stored_as=name)
    found = inference_table(model, Workload()).weights.sum() / GIB
    assert found == pytest.approx(gib, rel=0.01)
    assert inference_table(model, Workload(quant="bnb-int8")).weights.sum() / GIB == pytest.approx(8.7, rel=0.05)


def table(tokens: int = 700) -> SampleTable:
    patches, num_tokens = np.full(64, 400), np.full(64, tokens)
    squares = {"patches_sq": patches**2, "patches_windowed": patches * 64}
    return SampleTable(
        num_images=np.ones(64, np.int64),
        num_patches=patches,
        num_tokens=num_tokens,
        source=np.zeros(64, np.int32),
        **squares,
    )


def test_samples_longer_than_the_positions_are_said():
    text = {**QWEN["text_config"], "max_position_embeddings": 600}
    model = describe({**QWEN, "text_config": text})
    assert model.max_positions == 600
    details = make_plan(model, table(), parse_cluster("8xA100-80GB"), PlanOptions(pp=1, tp=1, num_microbatches=4))
    assert any("64 samples" in x and "600" in x for x in details.plan.assumptions)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_head_that_lies_in_the_files_is_not_tied(tmp_path, sharded):
    (tmp_path / "config.json").write_text(json.dumps(dict(read_config("Qwen2.5-VL-3B"))))
    tied = describe(tmp_path)
    assert tied.tied
    names = ["model.embed_tokens.weight", "lm_head.weight"]
    if sharded:
        index = {"weight_map": dict.fromkeys(names, "model-00001.safetensors")}
        (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        header = json.dumps({name: {} for name in names}).encode()
        (tmp_path / "model.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    apart = describe(tmp_path)
    assert not apart.tied
    assert apart.num_params == tied.num_params + 2048 * 151936
    (tmp_path / "model.safetensors").write_bytes(b"\xff" * 20)
    (tmp_path / "model.safetensors.index.json").unlink(missing_ok=True)
    assert describe(tmp_path) == tied


def test_4_bit_weights_are_trained_under_adapters_of_4_bits():
    model = replace(describe("Qwen2.5-VL-3B"), stored_as="bnb-nf4-double")
    options = PlanOptions(pp=1, tp=1, num_microbatches=4, lora=Lora(r=8, bits=4))
    assert make_plan(model, table(), parse_cluster("1xA100-80GB"), options).plan
