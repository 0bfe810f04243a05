"""Plans as Megatron-Core flags: what is said, what is refused, what is warned of."""

from dataclasses import replace

import pytest

from export_cases import by_counts, cut, decide, first_block, make_model
from trimtab.adapters import megatron
from trimtab.adapters.megatron import MegatronExport, megatron_flags, unsupported_cuts
from trimtab.errors import UnsupportedPlanError
from trimtab.specs import ModelSpec, ParallelDims, RecomputeChoice, Stage


def export(model: ModelSpec, stages: tuple[Stage, ...], **options) -> MegatronExport:
    options = {"dims": ParallelDims(pp=len(stages))} | options
    return megatron_flags(decide(model, stages, **options))


def value(flags: tuple[str, ...], name: str) -> str:
    return flags[flags.index(name) + 1]


# -- layouts --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("counts", "layout"),
    [
        ([3, 3, 3, 3], "Et*3|t*3|t*3|t*3L"),
        ([0, 12], "E|t*12L"),
        ([1, 11], "Et|t*11L"),
        ([6, 6, 0], "Et*6|t*6|L"),
        ([3, 3, 3, 2, 1], "Et*3|t*3|t*3|t*2|tL"),
    ],
)
def test_layout_of_known_splits(counts, layout):
    model = make_model()
    result = export(model, by_counts(model, *counts))
    assert result.layout == layout
    assert value(result.flags, "--pipeline-model-parallel-layout") == layout


def test_interleaved_layout_lists_stages_in_the_order_they_run():
    model = make_model()
    result = export(
        model, by_counts(model, 1, 2, 4, 5), dims=ParallelDims(pp=2), schedule="Interleaved1F1B", num_chunks=2
    )
    assert result.layout == "Et|t*2|t*4|t*5L"


def test_one_stage_needs_no_layout():
    # a first-stage count at pp 1 silently trains that many layers (NVIDIA/Megatron-LM#1778)
    model = make_model()
    result = export(model, cut(model))
    assert "--pipeline-model-parallel-layout" not in result.flags
    assert result.layout == "Et*12L"
    assert result.warnings == ()


def test_degrees_batches_and_sharding_become_flags():
    model = make_model()
    result = export(model, by_counts(model, 6, 6), dims=ParallelDims(dp=4, pp=2, tp=2, cp=2), num_microbatches=16)
    assert value(result.flags, "--tensor-model-parallel-size") == "2"
    assert value(result.flags, "--pipeline-model-parallel-size") == "2"
    assert value(result.flags, "--context-parallel-size") == "2"
    assert value(result.flags, "--micro-batch-size") == "1"
    assert value(result.flags, "--global-batch-size") == "64"
    assert "--use-distributed-optimizer" in result.flags
    plain = export(model, by_counts(model, 6, 6), zero_stage=0)
    assert not {"--use-distributed-optimizer", "--context-parallel-size"} & set(plain.flags)


def test_shell_lines_are_quoted_and_vision_fields_are_python():
    model = make_model()
    result = export(model, by_counts(model, 0, 12))
    assert "--pipeline-model-parallel-layout 'E|t*12L' \\\n--micro-batch-size 1" in result.shell()
    namespace = type("Config", (), {})()
    exec(result.vision_python(), {"vision_config": namespace})
    assert vars(namespace) == dict(result.vision_fields)
    assert namespace.pipeline_model_parallel_layout is None


# -- refusals -------------------------------------------------------------------------------------------------------


def test_unsupported_cuts_are_exactly_the_refused_ones():
    model = make_model()
    norm_cut = len(model.layers) - 1
    for at in range(1, len(model.layers)):
        if at in unsupported_cuts(model) - {norm_cut}:
            with pytest.raises(UnsupportedPlanError):
                export(model, cut(model, at))
        else:
            export(model, cut(model, at))
    assert norm_cut in unsupported_cuts(model)


def test_norm_moves_to_the_head_with_a_warning():
    model = make_model()
    result = export(model, cut(model, len(model.layers) - 1))
    assert result.layout == "Et*12|L"
    assert any("norm (100 parameters)" in warning for warning in result.warnings)


# -- recompute ------------------------------------------------------------------------------------------------------


def choose(model: ModelSpec, tier: str, *language: int) -> RecomputeChoice:
    return RecomputeChoice(tier=tier, layers=tuple(first_block(model) + i for i in language))


def test_full_recompute_takes_the_largest_count_and_warns_of_the_rest():
    model = make_model()
    recompute = {0: [choose(model, "full", 0, 1)], 1: [choose(model, "full", 4, 5, 6)]}
    result = export(model, by_counts(model, 4, 4, 2, 2, recompute=recompute))
    assert value(result.flags, "--recompute-granularity") == "full"
    assert value(result.flags, "--recompute-method") == "block"
    assert value(result.flags, "--recompute-num-layers") == "3"
    assert any(
        "the first 3 blocks of every stage, 5 more than planned (3 instead of 2 on stage 0, 2 instead of 0 on stage 2, "
        "2 instead of 0 on stage 3)" in warning
        for warning in result.warnings
    )


def test_what_megatron_runs_as_planned_has_no_warning():
    model = make_model(num_vision=0)
    recompute = {0: [choose(model, "full", 0, 1)], 1: [choose(model, "full", 6, 7)]}
    result = export(model, by_counts(model, 6, 6, recompute=recompute))
    assert value(result.flags, "--recompute-num-layers") == "2"
    assert (result.vision_fields, result.warnings) == ({}, ())
    assert not [word for word in export(model, by_counts(model, 6, 6)).flags if "recompute" in word]


def test_selective_beside_full_becomes_full():
    model = make_model()
    recompute = {0: [choose(model, "selective", 0, 1), choose(model, "full", 2)]}
    result = export(model, by_counts(model, 6, 6, recompute=recompute))
    assert value(result.flags, "--recompute-num-layers") == "3"
    assert any("2 selective and 1 full" in w for w in result.warnings)


@pytest.mark.parametrize(
    ("experts", "module", "note"), [(None, "mlp", "the whole MLP"), (8, "moe_act", "grouped-gemm")]
)
def test_selective_recompute_takes_the_nearest_modules(experts, module, note):
    model = make_model(experts=experts)
    recompute = {0: [choose(model, "selective", *range(6))]}
    result = export(model, by_counts(model, 6, 6, recompute=recompute))
    at = result.flags.index("--recompute-modules")
    assert result.flags[at - 1] == "selective"
    assert result.flags[at + 1 : at + 3] == ("layernorm", module)
    assert f"--recompute-modules layernorm {module} \\\n" in result.shell()
    assert "--recompute-num-layers" not in result.flags
    assert any(note in warning for warning in result.warnings)
    assert any("6 more than planned (6 instead of 0 on stage 1)" in warning for warning in result.warnings)


def test_vision_recompute_goes_into_the_vision_fields():
    model = make_model()
    vision = model.indices("vision", "block")
    recompute = {0: [RecomputeChoice(tier="full", layers=tuple(vision[:4]))]}
    fields = dict(export(model, by_counts(model, 6, 6, recompute=recompute)).vision_fields)
    assert (fields["recompute_granularity"], fields["recompute_method"], fields["recompute_num_layers"]) == (
        "full",
        "block",
        4,
    )
    none = dict(export(model, by_counts(model, 6, 6)).vision_fields)
    assert (none["recompute_granularity"], none["recompute_method"], none["recompute_num_layers"]) == (None, None, None)
    recompute = {0: [RecomputeChoice(tier="selective", layers=tuple(vision))]}
    result = export(model, by_counts(model, 6, 6, recompute=recompute))
    assert dict(result.vision_fields)["recompute_num_layers"] == 4
    assert any("4 vision layers are planned with selective recompute" in warning for warning in result.warnings)


def test_recompute_of_other_layers_and_of_other_kinds_is_warned_of():
    model = make_model()
    projector = model.indices("projector")[0]
    recompute = {0: [RecomputeChoice(tier="full", layers=(projector,))]}
    result = export(model, by_counts(model, 6, 6, recompute=recompute))
    assert any("visual.merger" in warning for warning in result.warnings)
    layers = list(model.layers)
    layers[first_block(model) + 5] = replace(layers[first_block(model) + 5], num_params=9999)
    mixed = replace(model, layers=tuple(layers))
    recompute = {0: [choose(mixed, "full", 5)]}
    result = export(mixed, by_counts(mixed, 6, 6, recompute=recompute))
    assert any("stage 0" in warning and "other kinds" in warning for warning in result.warnings)


# -- the vision trap ------------------------------------------------------------------------------------------------


def test_vision_heads_that_tp_does_not_divide_are_padded():
    model = make_model(vision_heads=25)  # InternViT-6B
    result = export(model, by_counts(model, 6, 6), dims=ParallelDims(pp=2, tp=2))
    assert dict(result.vision_fields)["num_attention_heads"] == 26
    told = megatron.export(decide(model, by_counts(model, 6, 6), dims=ParallelDims(pp=2, tp=2)))
    assert "vision_config.num_attention_heads = 26" in str(told.also)
    assert "builds fewer vision layers silently" in str(told.also)
    assert "padded with zero weights" in str(told.also)
    assert told.warnings == ()
