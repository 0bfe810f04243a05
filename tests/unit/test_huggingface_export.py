"""Plans as lines for Transformers: every layer by its tier, and each host's steps and sharding."""

import pytest

from export_cases import by_counts, decide, first_block, make_model
from trimtab.adapters.huggingface import TARGETS
from trimtab.specs import ParallelDims, RecomputeChoice

export = TARGETS["transformers"].export
MODEL = make_model()
BLOCK = first_block(MODEL)
VISION = MODEL.indices("vision", "block")


def test_layers_come_by_tier_in_ranges():
    chosen = [
        RecomputeChoice(tier="selective", layers=tuple(range(BLOCK, BLOCK + 3))),
        RecomputeChoice(tier="full", layers=(*VISION, BLOCK + 5)),
    ]
    found = export(decide(MODEL, by_counts(MODEL, 12, recompute={0: chosen})), None)
    assert found.fields["recompute"] == {"full": ("visual.blocks[0..3]", "layers.5"), "selective": ("layers[0..2]",)}
    assert "'full': ['visual.blocks[0..3]', 'layers.5']," in found.text
    nothing = export(decide(MODEL, by_counts(MODEL, 12), zero_stage=0), None)
    assert "apply_recompute" not in nothing.text
    assert "gradient_accumulation_steps=8, per_device_train_batch_size=1" in nothing.text.splitlines()[-1]


def test_a_frozen_tower_and_tensor_parallelism_are_named():
    found = export(decide(MODEL, by_counts(MODEL, 12), dims=ParallelDims(tp=2), frozen_towers=("vision",)), None)
    assert "activation_checkpointing" in str(found.also)
    assert any("tp_plan='auto'" in w and " 2" in w for w in found.warnings)
    (other,) = export(decide(MODEL, by_counts(MODEL, 12)), None).warnings
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
    plan = decide(MODEL, by_counts(MODEL, 12), zero_stage=zero_stage)
    found = TARGETS[name].export(plan, None)
    assert line in found.text
    assert found.warnings == ()
    compile(found.text, name, "exec")
