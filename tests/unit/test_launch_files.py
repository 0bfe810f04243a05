"""Tests of adapters/launch_files.py: a run as its launcher's own files say it."""

import pytest

from trimtab import GivenRun, describe
from trimtab.adapters.launch_files import completed, from_megatron, megatron_flags
from trimtab.errors import PlanError
from yaml_tables import read_table

MODEL = describe("Qwen2.5-VL-7B")  # 32 vision blocks, 28 of language
FLAGS = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4 --micro-batch-size 1 --global-batch-size 64 "
    "--bf16 --use-distributed-optimizer --lr 1e-5 --no-gradient-accumulation-fusion"
)


def test_megatrons_flags_from_the_command_line_and_from_a_file(tmp_path):
    expected = GivenRun(
        tp=2,
        pp=4,
        batch=1,
        global_batch=64,
        stages="32v+7l|7l|7l|7l",
        recompute="none",
        zero_stage=1,
        dtype="bf16",
        host="megatron",
        fused_kernels=True,
        sequence_parallel=False,
        tp_overlap=False,
    )
    assert from_megatron(FLAGS, MODEL) == expected
    file = tmp_path / "args.sh"
    file.write_text("# ours\n" + FLAGS.replace(" --", " \\\n--").replace("size 2", "size=2"))
    assert from_megatron(str(file), MODEL) == expected


def test_state_is_whole_without_the_distributed_optimizer():
    assert from_megatron(FLAGS.replace("--use-distributed-optimizer ", ""), MODEL).zero_stage == 0


MEANINGS = read_table("megatron_flags", "meanings")


@pytest.mark.parametrize(("more", "field", "value"), [x for x in MEANINGS if x[2] is not None])
def test_what_megatrons_flags_mean(more, field, value):
    found = getattr(from_megatron(f"{FLAGS} {more}", MODEL), field)
    assert (list(found) if isinstance(found, tuple) else found) == value


def test_state_and_format_are_wide_where_nothing_is_said():
    run = from_megatron("--micro-batch-size 1", MODEL)
    assert (run.dtype, run.sequence_parallel, run.zero_stage, run.recompute) == ("fp32", False, 0, "none")
    assert from_megatron("--micro-batch-size 1 --fp16", MODEL).dtype == "fp16"


def test_experts_are_grouped_or_one_after_the_other():
    model = describe("Qwen3-VL-30B-A3B")
    flags = "--bf16 --num-experts 128 --moe-token-dispatcher-type alltoall"
    assert from_megatron(flags, model).expert_products == "loop"
    assert from_megatron(f"{flags} --moe-grouped-gemm", model).expert_products == "grouped"


# -- every flag of the parser -----------------------------------------------------------------------------------------


def flags_that(what):
    return sorted(name for name, kind in megatron_flags().items() if kind == what)


def test_every_flag_that_is_read_has_a_meaning_here():
    others = "--fp16 --num-experts --moe-grouped-gemm --account-for-loss-in-pipeline-split"
    shown = " ".join([FLAGS, others, *(more for more, _, _ in MEANINGS)])
    assert [x for x in flags_that("read") if f"--{x.replace('_', '-')} " not in f"{shown} "] == []


@pytest.mark.parametrize("kind", ["", "bound"])
def test_flags_without_a_price_that_leave_the_figures_as_they_are(kind):
    bare = from_megatron(FLAGS, MODEL)
    for name in flags_that(kind):
        assert from_megatron(f"{FLAGS} --{name.replace('_', '-')} 1", MODEL) == bare, name


def test_every_other_flag_is_refused_by_name():
    others = {name: kind for name, kind in megatron_flags().items() if kind.startswith("=")}
    assert len(others) > 250
    assert {"optimizer_cpu_offload", "cpu_offloading_num_layers", "use_megatron_fsdp", "main_grads_dtype"} <= set(
        others
    )
    for name, kind in others.items():
        flag = f"--{name.replace('_', '-')}"
        with pytest.raises(PlanError) as refused:
            from_megatron(f"{FLAGS} {flag} 77", MODEL)
        assert f"{flag} 77" in str(refused.value)
        if default := kind.removeprefix("=").strip():
            assert from_megatron(f"{FLAGS} {flag} {default}", MODEL) == from_megatron(FLAGS, MODEL), name


def test_what_is_typed_goes_before_the_file():
    file = GivenRun(dp=2, pp=4, batch=1, global_batch=64, recompute="full", zero_stage=1)
    both = completed(GivenRun(recompute="none", num_microbatches=4), file)
    assert both == GivenRun(dp=2, pp=4, batch=1, num_microbatches=4, recompute="none", zero_stage=1)
    assert completed(GivenRun(max_tokens=9000), file).batch is None
