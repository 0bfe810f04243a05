"""Tests of adapters/launch_files.py: a run as its launcher's own files say it."""

from __future__ import annotations

import pytest

from trimtab.adapters.launch_files import completed, from_megatron
from trimtab.errors import TrimtabError
from trimtab.models.describe import describe
from trimtab.plan.given import GivenRun

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
        fused_kernels=True,
    )
    assert from_megatron(FLAGS, MODEL) == expected
    file = tmp_path / "args.sh"
    file.write_text("# ours\n" + FLAGS.replace(" --", " \\\n--").replace("size 2", "size=2"))
    assert from_megatron(str(file), MODEL) == expected


def test_state_is_whole_without_the_distributed_optimizer():
    assert from_megatron(FLAGS.replace("--use-distributed-optimizer ", ""), MODEL).zero_stage == 0


@pytest.mark.parametrize(
    ("more", "field", "value"),
    [
        ("--decoder-first-pipeline-num-layers 4", "stages", "32v+4l|8l|8l|8l"),
        ("--decoder-last-pipeline-num-layers 10", "stages", "32v+6l|6l|6l|10l"),
        ("--decoder-first-pipeline-num-layers 2 --decoder-last-pipeline-num-layers 6", "stages", "32v+2l|10l|10l|6l"),
        ("--pipeline-model-parallel-layout 'Et*3|(t*8|)*2t*9L'", "stages", "32v+3l|8l|8l|9l"),
        ("--pipeline-model-parallel-layout 'E|t*14|t*14|L'", "stages", "32v|14l|14l|0l"),
        ("--pipeline-model-parallel-layout 'Et*3|(t*4|)*6tL'", "num_chunks", 2),
        ("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "recompute", "full"),
        ("--recompute-granularity selective", "recompute", "none"),
        ("--num-virtual-stages-per-pipeline-rank 7", "schedule", "Interleaved1F1B"),
        ("--num-layers-per-virtual-pipeline-stage 1", "num_chunks", 7),
        ("--optimizer sgd", "optimizer", "sgd_momentum"),
        ("--transformer-impl local", "fused_kernels", False),
        ("--fp8-format hybrid", "dtype", "fp8"),
        ("--fp8-format e4m3 --fp8-recipe mxfp8", "dtype", "mxfp8"),
        ("--tp-comm-overlap", "tp_overlap", True),
        ("--overlap-moe-expert-parallel-comm", "ep_overlap", True),
        ("--context-parallel-size 2", "cp", 2),
        ("--expert-model-parallel-size 4", "ep", 4),
        ("--expert-tensor-parallel-size 1", "etp", 1),
    ],
)
def test_what_megatrons_flags_mean(more, field, value):
    assert getattr(from_megatron(f"{FLAGS} {more}", MODEL), field) == value


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            FLAGS + " --encoder-pipeline-model-parallel-size 2",
            "encoder-pipeline-model-parallel-size 2 is not priced yet",
        ),
        (FLAGS + " --recompute-granularity full --recompute-method block", "give --recompute the number of blocks"),
        (FLAGS + " --num-virtual-stages-per-pipeline-rank 2", "7 layers do not divide into 2 virtual stages"),
        (FLAGS + " --recompute-granularity most", "'most' is unknown"),
        (FLAGS + " --decoder-first-pipeline-num-layers 3", "25 layers are left for 3 stages"),
        (FLAGS.replace("size 2", "size two"), "'two' is no whole number"),
        (FLAGS + " --pipeline-model-parallel-layout 'Et*27|||L'", "has 27 t, and the model 28 blocks"),
        (FLAGS + " --optimizer lion", "optimizer 'lion' has no price"),
        ("--lr '1", "cannot be read"),
    ],
)
def test_what_megatrons_flags_cannot_say_is_refused(flags, message):
    with pytest.raises(TrimtabError, match=message):
        from_megatron(flags, MODEL)


@pytest.mark.parametrize("number", ["9" * 5000, "²"])
def test_a_number_of_megatrons_that_is_none_is_refused(number):
    with pytest.raises(TrimtabError, match=r"tensor-model-parallel-size .* whole number"):
        from_megatron(f"--tensor-model-parallel-size {number}", describe("Qwen2.5-VL-7B"))


def test_what_is_typed_goes_before_the_file():
    file = GivenRun(dp=2, pp=4, batch=1, global_batch=64, recompute="full", zero_stage=1)
    both = completed(GivenRun(recompute="none", num_microbatches=4), file)
    assert both == GivenRun(dp=2, pp=4, batch=1, num_microbatches=4, recompute="none", zero_stage=1)
    assert completed(GivenRun(max_tokens=9000), file).batch is None
