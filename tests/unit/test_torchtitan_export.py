"""Plans as torchtitan's configuration: its own module names, one recompute policy, whole vision encoders."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from export_cases import by_counts, cut, decide, first_block, make_model
from trimtab.adapters import torchtitan
from trimtab.adapters.running import Exported
from trimtab.adapters.torchtitan import titan_ladder, titan_unsupported_cuts
from trimtab.errors import UnsupportedPlanError
from trimtab.specs import ModelSpec, ParallelDims, RecomputeChoice, Stage

MODEL = make_model(family="qwen3_5")
BLOCK = first_block(MODEL)


def export(model: ModelSpec, stages: tuple[Stage, ...], *, price: float | None = None, **options) -> Exported:
    return torchtitan.export(decide(model, stages, **options), price)


def parallelism(found: Exported) -> dict[str, object]:
    settings = found.fields["parallelism"]
    assert isinstance(settings, dict)
    return settings


def parts(model: ModelSpec, stages: tuple[Stage, ...]) -> list[list[str]]:
    found = parallelism(export(model, stages))["module_fqns_per_model_part"]
    assert isinstance(found, list)
    return found


def test_parts_name_the_whole_model_once_in_order():
    assert parts(MODEL, by_counts(MODEL, 1, 2, 9)) == [
        ["vision_encoder", "tok_embeddings", "layers.0"],
        ["layers.1", "layers.2"],
        [*(f"layers.{i}" for i in range(3, 12)), "norm", "lm_head"],
    ]
    assert parts(MODEL, by_counts(MODEL, 0, 12))[0] == ["vision_encoder", "tok_embeddings"]
    assert parts(MODEL, cut(MODEL, len(MODEL.layers) - 1))[1] == ["lm_head"]
    text = make_model(num_vision=0)
    assert parts(text, by_counts(text, 6, 6))[0][0] == "tok_embeddings"


def test_lines_set_the_configuration():
    lines = export(MODEL, by_counts(MODEL, 6, 6), samples_per_pack=3.1).text
    cfg = SimpleNamespace(parallelism=SimpleNamespace(), training=SimpleNamespace())
    exec(lines, {"cfg": cfg})
    assert cfg.parallelism.pipeline_parallel_degree == 2
    assert cfg.parallelism.pipeline_parallel_schedule == "1F1B"
    assert cfg.parallelism.data_parallel_shard_degree == 2
    assert len(cfg.parallelism.module_fqns_per_model_part) == 2
    assert cfg.training.local_batch_size == 25  # samples, as it takes no packs
    behind = SimpleNamespace(
        parallelism=SimpleNamespace(num_pp_microbatches=1), training=SimpleNamespace(max_context_length=4096)
    )
    exec(lines, {"cfg": behind})
    assert behind.parallelism.num_pp_microbatches == 25
    assert behind.training.num_tokens_per_microbatch_per_dp_rank == 4096
    assert not hasattr(behind.parallelism, "pipeline_parallel_microbatch_size")
    assert not hasattr(behind.training, "local_batch_size")
    assert cfg.activation_checkpoint is None
    alone = export(MODEL, cut(MODEL), zero_stage=0)
    assert "module_fqns_per_model_part" not in parallelism(alone)
    assert parallelism(alone)["data_parallel_replicate_degree"] == 2


@pytest.mark.parametrize(("tier", "policy"), [("full", "FullAC"), ("selective", "SelectiveAC")])
def test_recompute_is_one_policy_for_all_blocks(tier, policy):
    chosen = {0: [RecomputeChoice(tier=tier, layers=(2, BLOCK))]}
    found = export(MODEL, by_counts(MODEL, 6, 6, recompute=chosen))
    assert found.fields["activation_checkpoint"] == policy
    assert f"import {policy}\n" in found.text
    assert found.text.endswith(f"cfg.activation_checkpoint = {policy}.Config()")
    assert [stage.num_recomputed() for stage in found.runs] == [6, 6]
    assert any("recompute of 1 of 12 blocks is planned" in w for w in found.warnings)
    assert any("recompute of 1 layers outside the decoder" in w for w in found.warnings)
    assert any("SelectiveAC" in w for w in found.warnings) == (tier == "selective")
    assert {choice.tier for stage in found.runs for choice in stage.recompute} == {tier}


@pytest.mark.parametrize(
    ("tiers", "policy", "lost"),
    [
        (("full", "selective"), "FullAC", "1 blocks are planned with selective recompute"),
    ],
)
def test_of_several_tiers_the_policy_is_the_one_that_holds_least(tiers, policy, lost):
    chosen = [RecomputeChoice(tier=tier, layers=(BLOCK + i,)) for i, tier in enumerate(tiers)]
    found = export(MODEL, by_counts(MODEL, 12, recompute={0: chosen}))
    assert found.fields["activation_checkpoint"] == policy
    assert any(lost in w and f"one torchtitan policy serves all ({policy})" in w for w in found.warnings)


def test_every_way_is_exported_as_it_is():
    for way in titan_ladder(MODEL, by_counts(MODEL, 4, 8)):
        assert export(MODEL, way).runs == way


def test_unsupported_cuts_are_exactly_the_refused_ones():
    for at in range(1, len(MODEL.layers)):
        if at in titan_unsupported_cuts(MODEL):
            with pytest.raises(UnsupportedPlanError, match="keeps the vision encoder whole beside the embedding"):
                export(MODEL, cut(MODEL, at))
        else:
            export(MODEL, cut(MODEL, at))


def test_all_problems_come_at_once_with_the_price():
    model = make_model(family="qwen3_5", tied=True, forbidden=frozenset({BLOCK + 1}), reason="DeepStack")
    with pytest.raises(UnsupportedPlanError) as caught:
        export(
            model,
            cut(model, 3, BLOCK + 1),
            dims=ParallelDims(pp=3, tp=3),
            schedule="ZBH1",
            price=1.5,
        )
    lines = str(caught.value).splitlines()
    assert lines[0].endswith("export with --fit FOLDER (the best plan without such cuts takes 1.50 x as long a step)")
    assert lines[1] == "the plan cuts stages before layers.1, which the model forbids (DeepStack): move the cut"
    assert lines[2].startswith("schedule ZBH1 was planned, and torchtitan does not run it: plan with 1F1B or GPipe or")
    assert lines[3].startswith("lm_head shares the weight of embed_tokens, and torchtitan refuses tied weights")
    assert lines[4] == "tp 3 does not divide the language model's 8 attention heads: choose a tp that does"
    with pytest.raises(UnsupportedPlanError, match="without such cuts nothing fits these degrees"):
        export(MODEL, cut(MODEL, 3), price=float("inf"))


def test_a_vision_model_that_torchtitan_lacks_is_refused():
    with pytest.raises(
        UnsupportedPlanError, match=r"family internvl, and torchtitan 0.3 .* qwen3_5, qwen3_5_moe: train by"
    ):
        export(make_model(family="internvl"), by_counts(MODEL, 6, 6))


def test_sharding_that_differs_from_the_plan_is_warned_of():
    assert any("ZeRO stage 1 was planned" in w for w in export(MODEL, by_counts(MODEL, 6, 6)).warnings)
    three = export(MODEL, by_counts(MODEL, 6, 6), zero_stage=3)
    assert not [w for w in three.warnings if "ZeRO" in w]
