"""Plans as arguments of ColossalAI's hybrid plugin: its own count for every stage, and what it cannot say."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
from export_cases import by_counts, cut, first_block, make_model

from trimtab.adapters.colossalai import (
    ColossalExport,
    colossal_export,
    colossal_ladders,
    colossal_unsupported_cuts,
)
from trimtab.errors import UnsupportedPlanError
from trimtab.specs import ModelSpec, ParallelDims, RecomputeChoice, Stage

MODEL = make_model()
BLOCK = first_block(MODEL)


def export(model: ModelSpec, stages: tuple[Stage, ...], **options) -> ColossalExport:
    options = {"dims": ParallelDims(dp=2, pp=len(stages)), "schedule": "1F1B", "num_microbatches": 8} | options
    return colossal_export(model=model, stages=stages, **options)


def tier(name: str, *blocks: int) -> RecomputeChoice:
    return RecomputeChoice(tier=name, layers=tuple(BLOCK + i for i in blocks))


def run(text: str) -> SimpleNamespace:
    """What the lines build, with stand-ins that take any argument."""
    made = SimpleNamespace(enabled=0)
    lines = [line for line in text.splitlines() if not line.startswith("from ")]

    def enable() -> None:
        made.enabled += 1

    names = {
        "HybridParallelPlugin": lambda **given: SimpleNamespace(**given),
        "PipelineGradientCheckpointConfig": lambda **given: SimpleNamespace(**given),
        "language_model": SimpleNamespace(gradient_checkpointing_enable=enable),
    }
    exec("\n".join(lines), names)
    made.plugin = names["plugin"]
    return made


def test_every_stage_has_its_own_count():
    recompute = {0: [tier("full", 0, 1)], 2: [tier("full", 7)]}
    found = export(MODEL, by_counts(MODEL, 2, 4, 3, 3, recompute=recompute), dims=ParallelDims(dp=2, pp=4, tp=2))
    made = run(found.python())
    assert made.plugin.gradient_checkpoint_config.num_ckpt_layers_per_stage == [2, 0, 1, 0]
    assert made.plugin.num_layers_per_stage == [2, 4, 3, 3]
    assert (made.plugin.tp_size, made.plugin.pp_size, made.plugin.num_microbatches) == (2, 4, 8)
    assert (made.plugin.microbatch_size, made.plugin.zero_stage) == (1, 1)
    assert made.plugin.enable_metadata_cache is False
    assert made.enabled == 1
    # block 7 of stage 2, the second of its three, becomes the first
    assert [stage.recompute for stage in found.runs] == [(tier("full", 0, 1),), (), (tier("full", 6),), ()]


def test_without_recompute_nothing_is_switched_on():
    made = run(export(MODEL, by_counts(MODEL, 6, 6)).python())
    assert made.enabled == 0
    assert not hasattr(made.plugin, "gradient_checkpoint_config")


def test_without_a_pipeline_recompute_is_one_switch():
    whole = by_counts(MODEL, 12, recompute={0: [tier("full", 0, 1, 2)]})
    found = export(MODEL, whole)
    assert found.num_ckpt_layers_per_stage is None
    made = run(found.python())
    assert made.enabled == 1
    assert not hasattr(made.plugin, "num_layers_per_stage")
    assert found.runs[0].num_recomputed() == 12
    assert any("recompute of 3 of 12 decoder blocks is planned" in w for w in found.warnings)
    none, every = (ways for ladder in colossal_ladders(MODEL, whole) for ways in ladder)
    assert (none[0].num_recomputed(), every[0].num_recomputed()) == (0, 12)


def test_the_tower_is_said_to_be_the_users_own():
    recompute = {0: [RecomputeChoice(tier="full", layers=(1, 2)), tier("full", 0)]}
    found = export(MODEL, by_counts(MODEL, 6, 6, recompute=recompute))
    assert found.runs[0].recompute == (tier("full", 0),)
    assert any(
        "policies for language models alone: vision tower and projector need a custom_policy" in w
        for w in found.warnings
    )
    assert any("recompute of 2 layers outside the decoder (visual.blocks.0 is the first)" in w for w in found.warnings)
    text = make_model(num_vision=0)
    assert not [w for w in export(text, by_counts(text, 6, 6)).warnings if "tower" in w]


def test_other_tiers_and_kinds_are_warned_of():
    recompute = {0: [tier("attention", 0, 1), tier("selective", 2)]}
    found = export(MODEL, by_counts(MODEL, 6, 6, recompute=recompute))
    assert found.num_ckpt_layers_per_stage == (3, 0)
    assert any("2 decoder blocks are planned with attention recompute" in w for w in found.warnings)
    assert any("1 decoder blocks are planned with selective recompute" in w for w in found.warnings)
    mixed = make_model(kinds=True)
    chosen = {1: [RecomputeChoice(tier="full", layers=(first_block(mixed) + 11,))]}
    found = export(mixed, by_counts(mixed, 3, 9, recompute=chosen))
    assert any("stage 1 recomputes other kinds of blocks than its first 1" in w for w in found.warnings)


@pytest.mark.parametrize("counts", [(12,), (6, 6), (1, 7, 4), (0, 6, 6)])
def test_every_way_is_exported_as_it_is(counts):
    recompute = {0: [tier("full", 0)]} if counts[0] else {}
    for ladder in colossal_ladders(MODEL, by_counts(MODEL, *counts, recompute=recompute)):
        held = [sum(stage.num_recomputed() for stage in way) for way in ladder]
        assert held == sorted(held)
        for way in ladder:
            assert export(MODEL, way).runs == way


def test_unsupported_cuts_are_exactly_the_refused_ones():
    for at in range(1, len(MODEL.layers)):
        if at in colossal_unsupported_cuts(MODEL):
            with pytest.raises(UnsupportedPlanError, match="num_layers_per_stage counts decoder blocks alone"):
                export(MODEL, cut(MODEL, at))
        else:
            export(MODEL, cut(MODEL, at))


def test_all_problems_come_at_once_with_the_price():
    with pytest.raises(UnsupportedPlanError) as caught:
        export(
            MODEL,
            cut(MODEL, 3, BLOCK + 1),
            dims=ParallelDims(pp=3, tp=4, cp=2),
            schedule="Interleaved1F1B",
            num_chunks=2,
            num_microbatches=2,
            zero_stage=2,
            price=1.25,
        )
    lines = str(caught.value).splitlines()
    assert lines[0].startswith("the plan cuts stages before visual.blocks.2, and ColossalAI's")
    assert lines[0].endswith("export with --fit FOLDER (the best plan without such cuts takes 1.25 x as long a step)")
    assert lines[1:] == [
        "schedule Interleaved1F1B with 2 chunks a rank was planned, and ColossalAI 0.5.0 takes an uneven split with "
        "one stage a rank alone: plan with 1F1B",
        "2 micro-batches were planned for pp 3, and ColossalAI wants no fewer than stages: plan more",
        "ZeRO stage 2 was planned with pp 3, and ColossalAI's hybrid plugin shards by stage 0 or 1, and by 2 without a "
        "pipeline: plan with ZeRO stage 1",
        "cp 2 was planned, which this export cannot say for ColossalAI: plan with cp 1",
        "tp 4 was planned, and it does not divide the language model's 2 heads (of queries, or of keys and values), as "
        "ColossalAI wants: choose a tp that does",
    ]
    with pytest.raises(UnsupportedPlanError, match="without such cuts nothing fits these degrees"):
        export(MODEL, cut(MODEL, 3), price=float("inf"))
    assert export(MODEL, by_counts(MODEL, 12), zero_stage=2).plugin[-1] == ("zero_stage", 2)
