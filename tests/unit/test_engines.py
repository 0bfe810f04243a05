"""Layer counts of serving engines: of placements made for stages, and of training plans."""

import pytest
from placement_cases import small_model

from refusals import refused
from trimtab.adapters.servers import StageCounts, count_placed_layers, engine_commands
from trimtab.errors import UnsupportedPlanError
from trimtab.models.describe import describe
from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import Workload, machine_of
from trimtab.placement.place import place
from trimtab.units import GIB

WORK = Workload(images=((1024, 1024),))


@pytest.mark.parametrize("name", ["Qwen2.5-VL-7B", "InternVL-Chat-V1-5"])
@pytest.mark.parametrize("free", [[40, 40, 40], [24, 40, 16], [60, 20]])
def test_counts_add_up_to_the_decoder_and_follow_the_map(name, free):
    model = describe(name)
    found = place(model, machine_of([x * GIB for x in free]), WORK, objective="pipeline")
    stages = count_placed_layers(found.device_map)
    assert sum(stages.layers) == len(model.indices("language", "block"))
    assert min(stages.layers) >= 1
    assert sorted(stages.gpus) == sorted(use.device for use in found.uses if use.modules)
    for layers, gpu in zip(stages.layers, stages.gpus, strict=True):
        held = next(use for use in found.uses if use.device == gpu).modules
        assert sum(".layers." in x and "vision" not in x for x in held) == layers


def test_the_first_stage_holds_fewer_layers_than_the_middle_ones():
    found = place(describe("Qwen2.5-VL-7B"), machine_of([24 * GIB] * 4), WORK, objective="pipeline")
    layers = count_placed_layers(found.device_map).layers
    assert layers[0] < layers[1]
    assert layers[-1] < layers[1]


def test_a_tied_weight_is_copied_to_the_stage_that_reads_it():
    model = small_model(tied=True, num_layers=6)
    found = place(model, machine_of([GIB] * 2), Workload(), objective="pipeline")
    own = inference_table(model, Workload()).weights.sum()
    assert sum(use.weight_bytes for use in found.uses) == own + 203 * 64 * 2


def test_one_decoder_layer_is_one_stage():
    found = place(small_model(num_layers=1), machine_of([GIB] * 3), Workload(), objective="pipeline")
    assert count_placed_layers(found.device_map).layers == (1,)


def test_the_environment_names_gpus_only_where_they_are_out_of_order():
    plain, turned = StageCounts(layers=(4, 6), gpus=(0, 1)), StageCounts(layers=(4, 6), gpus=(1, 0))
    assert plain.environment("vllm") == {"VLLM_PP_LAYER_PARTITION": "4,6"}
    assert turned.environment("sglang") == {"SGLANG_PP_LAYER_PARTITION": "4,6", "CUDA_VISIBLE_DEVICES": "1,0"}
    assert plain.shell("sglang") == "SGLANG_PP_LAYER_PARTITION=4,6  # with --pp-size 2"
    assert "--pipeline-parallel-size 2" in plain.shell("vllm")


def test_commands_serve_the_same_placement():
    stages = {f"model.language_model.layers.{i}": int(i > 2) for i in range(4)} | {"lm_head": 1}
    vllm, sglang = engine_commands("tiny", "qwen2_5_vl", stages)
    assert vllm == "VLLM_PP_LAYER_PARTITION=3,1 vllm serve tiny --pipeline-parallel-size 2"
    assert sglang == "SGLANG_PP_LAYER_PARTITION=3,1 python -m sglang.launch_server --model-path tiny --pp-size 2"
    assert engine_commands("tiny", "internvl", {"": 0})[0] == engine_commands("tiny", "x", None)[0] == "vllm serve tiny"
    with refused(UnsupportedPlanError):
        engine_commands("tiny", "qwen2_5_vl", {"model": 0, "lm_head": "cpu"})


@pytest.mark.parametrize("family", ["internvl", "internvl_chat", "qwen2_vl", "gemma3", "mllama"])
def test_sglang_gets_tensor_parallelism_where_it_runs_no_stages(family):
    stages = {f"model.language_model.layers.{i}": int(i > 2) for i in range(4)} | {"lm_head": 1}
    vllm, sglang = engine_commands("tiny", family, stages)
    assert "--pipeline-parallel-size 2" in vllm
    assert sglang.endswith("--model-path tiny --tp-size 2 --mm-enable-dp-encoder")
    counts = StageCounts(layers=(3, 1), gpus=(0, 1))
    counts.refuse_stages("vllm", family)
    with refused(UnsupportedPlanError, "--tp-size", "2", "--mm-enable-dp-encoder", family):
        counts.refuse_stages("sglang", family)
    assert counts.by_tensors("vllm") == "--tensor-parallel-size 2 --mm-encoder-tp-mode data"
