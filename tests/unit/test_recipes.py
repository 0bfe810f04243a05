"""Plans as settings of launchers that run whole models, and as MindSpeed-MM's model file; without them."""

import ast
import json
from typing import Any

import pytest
import yaml

from export_cases import by_counts, cut, decide, first_block, make_model
from refusals import refused
from trimtab import Lora, ModelSpec, ParallelDims, RecomputeChoice, Stage
from trimtab.adapters import deepspeed
from trimtab.adapters.deepspeed import deepspeed_runs
from trimtab.adapters.frameworks import find_target
from trimtab.adapters.huggingface import TARGETS
from trimtab.adapters.running import Exported
from trimtab.errors import UnsupportedPlanError

MODEL = make_model(4, 6)  # layers 1 to 4 are vision blocks, 5 the projector, 6 the embedding, 7 to 12 decoder blocks


def export(name: str, model: ModelSpec, stages: tuple[Stage, ...], **options: Any) -> Exported:
    return find_target(name).export(decide(model, stages, **options))


def full(*layers: int) -> list[RecomputeChoice]:
    return [RecomputeChoice(tier="full", layers=layers)]


def test_mindspeed_cuts_inside_the_tower_and_recomputes_first_blocks_of_each() -> None:
    stages = cut(MODEL, 3, 9, recompute={0: full(1, 2), 1: full(3, 4, 7), 2: full(9)})
    made = export("mindspeed-mm", MODEL, stages, frozen_towers=("projector",))
    text = made.text.splitlines()
    file = json.loads(text[-1])
    assert file == made.fields["model"]
    encoder, decoder = file["image_encoder"], file["text_decoder"]
    assert encoder["vision_encoder"]["pipeline_num_layers"] == [2, 2, 0]
    assert decoder["pipeline_num_layers"] == [0, 2, 4]
    assert encoder["vision_encoder"]["recompute_num_layers"] == 2
    assert decoder["recompute_num_layers"] == 1
    assert (encoder["vision_encoder"]["freeze"], encoder["vision_projector"]["freeze"]) == (False, True)
    assert "--pipeline-model-parallel-size 3 \\" in text
    assert made.runs == stages
    assert made.warnings == ()


def test_mindspeed_recomputes_as_many_blocks_on_every_stage() -> None:
    stages = cut(MODEL, 3, 9, recompute={0: full(1), 2: full(9, 10)})
    made = export("mindspeed-mm", MODEL, stages)
    assert [x.recompute[0].layers for x in made.runs] == [(1,), (3, 7, 8), (9, 10)]
    assert len(made.warnings) == 2
    assert "4 in all" in made.warnings[1]


def test_mindspeeds_chunks_are_rows_of_ranks() -> None:
    stages = cut(MODEL, 3, 6, 9)
    made = export(
        "mindspeed-mm", MODEL, stages, dims=decide(MODEL, cut(MODEL, 3)).dims, num_chunks=2, schedule="Interleaved1F1B"
    )
    assert made.fields["model"]["text_decoder"]["pipeline_num_layers"] == [[0, 0], [2, 4]]  # type: ignore[index]
    assert made.text.startswith("export VP_SIZE=2\n")


@pytest.mark.parametrize("name", ["llama-factory", "axolotl"])
def test_hosts_with_a_trainer_of_transformers_run_the_plan_as_it_is(name: str) -> None:
    stages = cut(MODEL, recompute={0: full(2, 9)})
    made = export(name, MODEL, stages, zero_stage=3)
    told = yaml.safe_load(made.text)
    assert told == made.fields
    assert told["gradient_accumulation_steps"] == 8
    assert told["deepspeed"]["zero_optimization"] == {"stage": 3}
    assert made.runs == stages
    assert made.warnings == ()
    assert "deepspeed" not in export(name, MODEL, stages, zero_stage=0).fields


def test_llama_factorys_frozen_defaults_are_set() -> None:
    told = export("llama-factory", MODEL, cut(MODEL), zero_stage=0, frozen_towers=("vision",)).fields
    kinds = ("vision_tower", "multi_modal_projector", "language_model")
    assert [told[f"freeze_{kind}"] for kind in kinds] == [True, False, False]


@pytest.mark.parametrize("bits", [16, 4])
def test_llama_factory_is_told_adapters_of_the_language_model(bits: int) -> None:
    lora = Lora(r=8, targets=("q_proj", "v_proj"), bits=bits)
    told = export("llama-factory", MODEL, cut(MODEL), zero_stage=0, lora=lora).fields
    assert (told["finetuning_type"], told["lora_rank"], told["lora_target"]) == ("lora", 8, "q_proj,v_proj")
    assert told.get("quantization_bit") == (4 if bits == 4 else None)
    assert told["freeze_vision_tower"] is True
    with refused(UnsupportedPlanError, "weights=fp32,towers=language"):
        export("llama-factory", MODEL, cut(MODEL), zero_stage=0, lora=Lora(r=8, weights="same"))


@pytest.mark.parametrize("name", ["llama-factory", "axolotl"])
def test_stages_are_refused_and_another_sharding_is_warned_of(name: str) -> None:
    with refused(UnsupportedPlanError, "pp 1"):
        export(name, MODEL, cut(MODEL, 8))
    stages = find_target(name).can(MODEL, 1).choices["zero_stage"]
    warned = export(name, MODEL, cut(MODEL), zero_stage=1).warnings
    assert len(warned) == (1 not in stages)


# -- a module for DeepSpeed's PipelineModule ---------------------------------------------------------------------------


TIED = make_model(tied=True)
BLOCK = first_block(TIED)


def pipeline_module(model: ModelSpec, stages: tuple[Stage, ...], **options) -> Exported:
    return deepspeed.export(decide(model, stages, **options))


def constants(python: str) -> dict[str, object]:
    """The module's constants, without importing DeepSpeed."""
    found: dict[str, object] = {}
    for node in ast.parse(python).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            found[node.targets[0].id] = ast.literal_eval(value)
    return found


def test_the_module_says_every_layer_and_the_plans_bounds():
    stages = cut(TIED, 3, BLOCK + 2)  # inside the tower: DeepSpeed can
    found = constants(pipeline_module(TIED, stages).text)
    assert found["LAYERS"] == [layer.name for layer in TIED.layers]
    assert found["PARTS"] == [0, 3, BLOCK + 2, len(TIED.layers)]
    assert found["RECOMPUTE"] == []
    assert found["TIED"] == [("embed_tokens", "lm_head")]
    config = found["CONFIG"]
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (1, 8)
    assert config["zero_optimization"] == {"stage": 1}
    assert all(len(line) <= 120 for line in pipeline_module(TIED, stages).text.splitlines())


def test_recompute_is_carried_layer_by_layer_and_selective_becomes_full():
    chosen = {
        0: [RecomputeChoice(tier="full", layers=(2,)), RecomputeChoice(tier="selective", layers=(1,))],
        1: [RecomputeChoice(tier="full", layers=(BLOCK + 7, BLOCK + 8))],
    }
    stages = by_counts(TIED, 6, 6, recompute=chosen)
    found = pipeline_module(TIED, stages)
    assert constants(found.text)["RECOMPUTE"] == [1, 2, BLOCK + 7, BLOCK + 8]
    assert any("1 layers are planned with selective recompute" in w for w in found.warnings)
    assert [c.layers for c in found.runs[0].recompute] == [(1, 2)]
    way = deepspeed_runs(stages)
    assert found.runs == way
    assert pipeline_module(TIED, way).warnings == ()


def test_tensor_parallelism_is_left_to_the_layers():
    found = pipeline_module(TIED, by_counts(TIED, 6, 6), dims=ParallelDims(dp=3, pp=2, tp=4))
    assert any("PipeModelDataParallelTopology(num_pp=2, num_mp=4, num_dp=3)" in w for w in found.warnings)


# -- lines for Transformers --------------------------------------------------------------------------------------------


trainer_lines = TARGETS["transformers"].export
VISION = TIED.indices("vision", "block")


def test_layers_come_by_tier_in_ranges():
    chosen = [
        RecomputeChoice(tier="selective", layers=tuple(range(BLOCK, BLOCK + 3))),
        RecomputeChoice(tier="full", layers=(*VISION, BLOCK + 5)),
    ]
    found = trainer_lines(decide(TIED, by_counts(TIED, 12, recompute={0: chosen})))
    assert found.fields["recompute"] == {"full": ("visual.blocks[0..3]", "layers.5"), "selective": ("layers[0..2]",)}
    assert "'full': ['visual.blocks[0..3]', 'layers.5']," in found.text
    nothing = trainer_lines(decide(TIED, by_counts(TIED, 12), zero_stage=0))
    assert "apply_recompute" not in nothing.text
    assert "gradient_accumulation_steps=8, per_device_train_batch_size=1" in nothing.text.splitlines()[-1]


def test_a_frozen_tower_and_tensor_parallelism_are_named():
    found = trainer_lines(decide(TIED, by_counts(TIED, 12), dims=ParallelDims(tp=2), frozen_towers=("vision",)))
    assert "activation_checkpointing" in str(found.also)
    assert any("tp_plan='auto'" in w and " 2" in w for w in found.warnings)
    (other,) = trainer_lines(decide(TIED, by_counts(TIED, 12))).warnings
    assert "stage 3, not 1" in other


@pytest.mark.parametrize(
    ("name", "zero_stage", "line"),
    [
        ("transformers", 3, "fsdp=True)"),
        ("trl", 0, 'dataset_kwargs={"skip_prepare_dataset": True}'),
        ("accelerate", 0, "gradient_accumulation_steps=8)"),
        ("fsdp2", 3, "fully_shard(module, mp_policy=policy)"),
    ],
)
def test_each_host_is_told_its_steps_and_its_sharding(name: str, zero_stage: int, line: str):
    plan = decide(TIED, by_counts(TIED, 12), zero_stage=zero_stage)
    found = TARGETS[name].export(plan)
    assert line in found.text
    assert found.warnings == ()
    compile(found.text, name, "exec")
