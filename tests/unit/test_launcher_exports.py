"""Megatron-Bridge, ms-swift and Pai-Megatron-Patch: what each of these launchers is told, and what none can be."""

import dataclasses
import shlex
import subprocess
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from export_cases import by_counts, cut, decide, first_block, make_model
from refusals import refused
from trimtab.adapters import megatron_hosts, pai_megatron
from trimtab.adapters.frameworks import find_target
from trimtab.adapters.launch_files import from_megatron
from trimtab.adapters.megatron import MegatronExport, megatron_flags, megatron_ladders, unsupported_cuts
from trimtab.adapters.pai_megatron import pai_ladder, pai_splits
from trimtab.adapters.running import Exported, Launch, degree_problems
from trimtab.errors import UnsupportedPlanError
from trimtab.options import DType, Precision
from trimtab.plan.plan import VisionDecision
from trimtab.specs import ModelSpec, ParallelDims, RecomputeChoice, Stage


def megatron(model: ModelSpec, stages: tuple[Stage, ...], **options) -> MegatronExport:
    return megatron_flags(decide(model, stages, **options))


def bridge(model: ModelSpec, stages: tuple[Stage, ...], **options) -> Exported:
    return megatron_hosts.export_bridge(decide(model, stages, **options))


def swift(model: ModelSpec, stages: tuple[Stage, ...], **options) -> Exported:
    return megatron_hosts.export_swift(decide(model, stages, **options))


def pai(model: ModelSpec, stages: tuple[Stage, ...], **options) -> Exported:
    return pai_megatron.export(decide(model, stages, **options))


def full(*layers: int) -> list[RecomputeChoice]:
    return [RecomputeChoice(tier="full", layers=layers)]


MODEL = make_model()
BLOCK = first_block(MODEL)
VISION = MODEL.indices("vision", "block")


# -- what Megatron-Core makes of a plan -----------------------------------------------------------------------------


def test_megatron_runs_the_largest_recompute_on_every_stage():
    export = megatron(MODEL, by_counts(MODEL, 4, 8, recompute={1: full(BLOCK + 6, BLOCK + 7)}))
    assert [[c.layers for c in stage.recompute] for stage in export.runs] == [
        [(BLOCK, BLOCK + 1)],
        [(BLOCK + 4, BLOCK + 5)],
    ]
    norm_cut = len(MODEL.layers) - 1
    assert megatron(MODEL, cut(MODEL, norm_cut)).runs[1].start == norm_cut - 1
    selective = {0: [RecomputeChoice(tier="selective", layers=(BLOCK,))]}
    export = megatron(MODEL, by_counts(MODEL, 4, 8, recompute=selective))
    assert [len(stage.recompute[0].layers) for stage in export.runs] == [4, 8]


def test_every_way_of_megatron_is_exported_as_it_is():
    for stages in (by_counts(MODEL, 0, 12), by_counts(MODEL, 3, 4, 5)):
        ways = [way for ladder in megatron_ladders(MODEL, stages) for way in ladder]
        most = max(stage.stop - stage.start for stage in stages[1:]) - 2
        assert len(ways) == len(set(ways)) == 2 * (most + 1)
        for way in ways:
            export = megatron(MODEL, way)
            assert export.runs == way
            assert export.warnings == ()


# -- Megatron-Bridge ------------------------------------------------------------------------------------------------


def test_bridge_copies_the_recompute_to_qwen3_vls_tower_alone():
    model = make_model(family="qwen3_vl")
    export = bridge(model, by_counts(model, 3, 4, 5, recompute={1: full(BLOCK + 3, BLOCK + 4)}))
    assert [c.layers for c in export.runs[0].recompute] == [(*VISION[:2], BLOCK, BLOCK + 1)]
    assert any("2 vision layers" in w and "0 are" in w and "copies" in w for w in export.warnings)
    for family in ("qwen3_vl", "qwen2_5_vl"):
        model = make_model(family=family)
        can = megatron_hosts.TARGETS["megatron-bridge"].can(model, 3)
        ways = [way for ladder in can.ladders(by_counts(model, 3, 4, 5)) for way in ladder]
        assert max(stage.num_recomputed() for way in ways for stage in way[:1]) == (7 if family == "qwen3_vl" else 3)
        for way in ways:
            assert bridge(model, way).runs == way
            assert bridge(model, way).warnings == ()


def test_bridge_shares_images_over_cp_where_its_provider_can():
    shared = VisionDecision(
        group="cp",
        degree=2,
        exchange="gather",
        pooling=1,
        rule="contiguous",
        objective="time",
        reduction=None,
    )
    for family, runs in (("qwen3_vl", True), ("qwen2_5_vl", False)):
        model = make_model(family=family)
        export = bridge(model, by_counts(model, 3, 4, 5), vision=shared)
        assert export.fields.get("cfg.model.vision_dp_when_cp", False) is runs
        assert export.warnings == ()
    by_cost = dataclasses.replace(shared, rule="balanced")
    model = make_model(family="qwen3_vl")
    assert any("contiguous" in x for x in bridge(model, by_counts(model, 3, 4, 5), vision=by_cost).warnings)


def test_bridge_lines_set_the_configuration():
    export = bridge(MODEL, by_counts(MODEL, 2, 4, 6, recompute={0: full(*VISION, BLOCK)}))
    parts = {name: SimpleNamespace() for name in ("train", "ddp", "optimizer")}
    cfg = SimpleNamespace(model=SimpleNamespace(params_dtype="bf16"), **parts)
    exec(export.text, {"cfg": cfg})
    assert cfg.model.pipeline_model_parallel_layout == "Et*2|t*4|t*6L"
    assert cfg.model.num_layers_in_first_pipeline_stage is None
    assert cfg.model.account_for_loss_in_pipeline_split is False
    assert (cfg.model.recompute_granularity, cfg.model.recompute_num_layers) == ("full", 1)
    assert (cfg.train.micro_batch_size, cfg.train.global_batch_size) == (1, 16)
    assert cfg.ddp.use_distributed_optimizer is True
    assert any("vision layers" in w and "4 are planned" in w for w in export.warnings)
    assert cfg.model.pipeline_dtype == "bf16"
    assert [c.layers for c in export.runs[0].recompute] == [(BLOCK,)]
    selective = {0: [RecomputeChoice(tier="selective", layers=(BLOCK,))]}
    exec(bridge(MODEL, by_counts(MODEL, 6, 6, recompute=selective)).text, {"cfg": cfg})
    assert cfg.model.recompute_modules == ["layernorm", "mlp"]


@pytest.mark.parametrize(("dtype", "grad_dtype"), [("bf16", "fp32"), ("bf16", "bf16"), ("fp16", "fp16")])
def test_bridges_recipe_of_a_precision_reduces_gradients_as_planned(dtype: Precision, grad_dtype: DType):
    """The recipe's own setting is written over that of `cfg.ddp`: fp32 beside bf16, and fp16 beside fp16."""
    export = bridge(MODEL, by_counts(MODEL, 6, 6), launch=Launch(dtype=dtype, grad_dtype=grad_dtype))
    parts = {name: SimpleNamespace() for name in ("train", "ddp", "optimizer")}
    cfg = SimpleNamespace(model=SimpleNamespace(params_dtype="bf16"), **parts)

    def recipe(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, grad_reduce_in_fp32=name == "bf16_mixed")

    exec(export.text, {"cfg": cfg, "get_mixed_precision_config": recipe})
    given = recipe(cfg.mixed_precision) if isinstance(cfg.mixed_precision, str) else cfg.mixed_precision
    assert (given.name, given.grad_reduce_in_fp32) == (f"{dtype}_mixed", grad_dtype == "fp32")


# -- ms-swift -------------------------------------------------------------------------------------------------------


def test_swift_is_told_to_leave_out_what_it_does_by_default():
    given = swift(MODEL, by_counts(MODEL, 6, 6), zero_stage=0).fields
    assert given["recompute_granularity"] == "none"
    assert given["vit_gradient_checkpointing"] is False
    assert given["use_distributed_optimizer"] is False
    assert given["packing"] is True
    assert given["global_batch_size"] == 16  # packs
    frozen = swift(MODEL, by_counts(MODEL, 6, 6), frozen_towers=("vision",)).fields
    for name, value in (("freeze_llm", False), ("freeze_vit", True), ("freeze_aligner", False)):
        assert frozen[name] is value
        assert given[name] is False  # its own default freezes all but the language model
    words = shlex.split(swift(MODEL, by_counts(MODEL, 0, 12)).text.replace("\\\n", " "))
    assert words[:2] == ["megatron", "sft"]
    assert words[words.index("--pipeline_model_parallel_layout") + 1] == "E|t*12L"
    assert words[words.index("--vit_gradient_checkpointing") + 1] == "false"


def test_swift_recomputes_the_whole_tower_or_nothing():
    export = swift(MODEL, by_counts(MODEL, 6, 6, recompute={0: full(VISION[0])}))
    assert export.fields["vit_gradient_checkpointing"] is True
    assert export.runs[0].recompute == tuple(full(*VISION))
    assert any("4 vision layers, 1" in w for w in export.warnings)
    whole = swift(MODEL, by_counts(MODEL, 6, 6, recompute={0: full(*VISION)}))
    assert not [w for w in whole.warnings if "vision layers" in w]
    kept = [RecomputeChoice(tier="selective", layers=(*VISION, BLOCK))]
    export = swift(MODEL, by_counts(MODEL, 6, 6, recompute={0: kept}))
    assert any("planned with selective" in w for w in export.warnings)


# -- Pai-Megatron-Patch ---------------------------------------------------------------------------------------------


def test_the_scripts_of_pai_get_24_arguments(tmp_path: Path):
    export = pai(MODEL, by_counts(MODEL, 3, 3, 3, 3), dims=ParallelDims(dp=2, pp=4, tp=2))
    assert export.fields["environment"] == {}
    export = pai(MODEL, by_counts(MODEL, 6, 3, 3), dims=ParallelDims(dp=2, pp=3, tp=2))
    assert export.fields["environment"] == {"MP_PP0_LAYERS": "6"}
    assert len(export.fields["arguments"]) == 24
    script = 'echo "$3 $4 ${10} ${11} ${12} ${13} ${14} ${16} ${24} $MP_PP0_LAYERS $#"\n'
    (tmp_path / "run_mcore_qwen.sh").write_text(script, encoding="utf-8")
    command = f"OUTPUT_BASEPATH='a b'; {export.text}"
    done = subprocess.run(["sh", "-c", command], cwd=tmp_path, capture_output=True, text=True, check=True)
    assert done.stdout.split("\n")[0] == "1 16 2 3 1 false true none a b 6 24"


def test_pai_recomputes_everything_or_nothing():
    export = pai(MODEL, by_counts(MODEL, 6, 6, recompute={1: full(BLOCK + 7)}))
    assert export.fields["environment"] == {"MP_AC_LAYERS": "1"}
    assert export.fields["arguments"][15] == "full"
    assert any("16 blocks" in w and "1 are" in w for w in export.warnings)
    assert [stage.num_recomputed() for stage in export.runs] == [10, 6]
    kept = [RecomputeChoice(tier="selective", layers=(BLOCK,))]
    export = pai(MODEL, by_counts(MODEL, 6, 6, recompute={0: kept}))
    assert any("1 layers are planned with selective recompute" in w for w in export.warnings)
    nowhere, everywhere = pai_ladder(MODEL, by_counts(MODEL, 6, 6))
    assert pai(MODEL, nowhere).runs == nowhere
    assert pai(MODEL, everywhere).runs == everywhere
    assert pai(MODEL, everywhere).warnings == ()


@pytest.mark.parametrize(("name", "adapter"), [("pai-megatron", pai_megatron), ("megatron-bridge", megatron_hosts)])
def test_a_family_that_a_host_lacks_is_refused_before_a_plan_is_made(name: str, adapter: ModuleType):
    with refused(UnsupportedPlanError):
        adapter.TARGETS[name].can(make_model(family="internvl"), 2)
    assert adapter.TARGETS[name].can(MODEL, 2).choices["zero_stage"] == (1, 0)


def test_the_oldest_script_of_pai_splits_evenly_or_builds_another_tower():
    old = make_model(family="qwen2_vl")
    with refused(UnsupportedPlanError, "4"):
        pai(old, by_counts(old, 4, 8))
    assert pai(old, by_counts(old, 6, 6)).warnings == ()
    assert pai(MODEL, by_counts(MODEL, 4, 8)).warnings == ()
    assert len(pai_splits(old, 3)) == 1


def test_pais_script_for_qwen3_vl_takes_the_experts_degrees_behind_cp():
    model = make_model(family="qwen3_vl")
    export = pai(model, by_counts(model, 6, 6), dims=ParallelDims(dp=2, pp=2, tp=2), samples_per_pack=2.5)
    arguments = export.fields["arguments"]
    assert len(arguments) == 26
    assert arguments[9:18] == ("2", "2", "1", "2", "1", "false", "true", "true", "none")
    assert arguments[20] == "$DATASET_PATH"
    assert arguments[3] == "40"  # samples: it takes no packs
    assert export.text.startswith("# in examples/qwen3_vl\n")


@pytest.mark.parametrize("dims", [{"ep": 4, "etp": 1}, {"cp": 2, "ep": 2}, {"etp": 4}])
def test_degrees_of_experts_and_contexts_are_told_and_read_back(dims):
    model = make_model(family="qwen3_vl", experts=8)
    given = decide(model, by_counts(model, 6, 6), dims=ParallelDims(dp=4, pp=2, tp=2, **dims))
    flags = megatron_flags(given).shell()
    read = from_megatron(flags, model)
    assert "--pipeline-model-parallel-layout 'Et*6|t*6L'" in flags
    assert read.stages == f"{len(model.indices('vision', 'block'))}v+6l|6l"
    own = given.dims
    assert (read.tp, read.pp, read.cp or 1, read.ep, read.etp) == (2, 2, own.cp, own.ep, own.expert_tp)
    assert ("--sequence-parallel" in flags, "--moe-token-dispatcher-type alltoall" in flags) == (True, own.ep > 1)
    arguments = pai_megatron.export(given).fields["arguments"]
    assert arguments[11:15] == (str(own.cp), str(own.expert_tp), str(own.ep), "true")


def test_hosts_without_these_degrees_refuse_them():
    model = make_model(experts=8)
    given = decide(model, by_counts(model, 6, 6), dims=ParallelDims(dp=4, pp=2, ep=4))
    without = find_target("deepspeed").can(model, 2).degrees
    (problem,) = degree_problems(given.dims, "DeepSpeed", without)
    assert "ep 4" in problem
    assert degree_problems(given.dims, "Megatron-Core", find_target("megatron").can(model, 2).degrees) == []


@pytest.mark.parametrize("pp", [1, 2, 3, 4, 5])
def test_pai_knows_every_split_with_a_first_count_and_even_rest(pp):
    splits = pai_splits(MODEL, pp)
    assert len(splits) == {1: 1, 2: 11, 3: 5, 4: 3, 5: 2}[pp]
    for cuts in splits:
        assert unsupported_cuts(MODEL).isdisjoint(cuts)
        assert pai(MODEL, cut(MODEL, *cuts)).runs == cut(MODEL, *cuts)
