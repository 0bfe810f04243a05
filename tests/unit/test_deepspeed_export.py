"""Plans as a module for DeepSpeed's PipelineModule: what it says, and what DeepSpeed cannot run."""

import ast

from export_cases import by_counts, cut, decide, first_block, make_model
from trimtab.adapters import deepspeed
from trimtab.adapters.deepspeed import deepspeed_runs
from trimtab.adapters.running import Exported
from trimtab.specs import ModelSpec, ParallelDims, RecomputeChoice, Stage

MODEL = make_model(tied=True)
BLOCK = first_block(MODEL)


def export(model: ModelSpec, stages: tuple[Stage, ...], **options) -> Exported:
    return deepspeed.export(decide(model, stages, **options), None)


def constants(python: str) -> dict[str, object]:
    """The module's constants, without importing DeepSpeed."""
    found: dict[str, object] = {}
    for node in ast.parse(python).body:
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            value = node.value.args[0] if isinstance(node.value, ast.Call) else node.value
            found[node.targets[0].id] = ast.literal_eval(value)
    return found


def test_the_module_says_every_layer_and_the_plans_bounds():
    stages = cut(MODEL, 3, BLOCK + 2)  # inside the tower: DeepSpeed can
    found = constants(export(MODEL, stages).text)
    assert found["LAYERS"] == [layer.name for layer in MODEL.layers]
    assert found["PARTS"] == [0, 3, BLOCK + 2, len(MODEL.layers)]
    assert found["RECOMPUTE"] == []
    assert found["TIED"] == [("embed_tokens", "lm_head")]
    config = found["CONFIG"]
    assert (config["train_micro_batch_size_per_gpu"], config["gradient_accumulation_steps"]) == (1, 8)
    assert config["zero_optimization"] == {"stage": 1}
    assert all(len(line) <= 120 for line in export(MODEL, stages).text.splitlines())


def test_recompute_is_carried_layer_by_layer_and_selective_becomes_full():
    chosen = {
        0: [RecomputeChoice(tier="full", layers=(2,)), RecomputeChoice(tier="selective", layers=(1,))],
        1: [RecomputeChoice(tier="full", layers=(BLOCK + 7, BLOCK + 8))],
    }
    stages = by_counts(MODEL, 6, 6, recompute=chosen)
    found = export(MODEL, stages)
    assert constants(found.text)["RECOMPUTE"] == [1, 2, BLOCK + 7, BLOCK + 8]
    assert any("1 layers are planned with selective recompute" in w for w in found.warnings)
    assert [c.layers for c in found.runs[0].recompute] == [(1, 2)]
    way = deepspeed_runs(stages)
    assert found.runs == way
    assert export(MODEL, way).warnings == ()


def test_tensor_parallelism_is_left_to_the_layers():
    found = export(MODEL, by_counts(MODEL, 6, 6), dims=ParallelDims(dp=3, pp=2, tp=4))
    assert any("PipeModelDataParallelTopology(num_pp=2, num_mp=4, num_dp=3)" in w for w in found.warnings)
