"""Tests of adapters/launch_files.py: a run as its launcher's own files say it."""

from __future__ import annotations

import json

import pytest

from trimtab.adapters.launch_files import completed, from_deepspeed, from_megatron, from_torchtitan
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
        tp_overlap=False,
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


def test_deepspeeds_file(tmp_path):
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps(
            {
                "train_micro_batch_size_per_gpu": 2,
                "gradient_accumulation_steps": "auto",
                "train_batch_size": 64,
                "zero_optimization": {"stage": 3, "offload_optimizer": {"device": "none"}},
                "bf16": {"enabled": True},
                "optimizer": {"type": "AdamW", "params": {"lr": 1e-5}},
            }
        )
    )
    assert from_deepspeed(file) == GivenRun(batch=2, global_batch=64, zero_stage=3, dtype="bf16", optimizer="adamw")
    file.write_text(json.dumps({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}))
    with pytest.raises(TrimtabError, match=r"ds.json: zero_optimization.offload_param is not priced"):
        from_deepspeed(file)


def test_torchtitans_file(tmp_path):
    file = tmp_path / "job.toml"
    file.write_text(
        "[parallelism]\ntensor_parallel_degree = 2\npipeline_parallel_degree = 4\n"
        'pipeline_parallel_schedule = "1F1B"\npipeline_parallel_microbatch_size = 1\n'
        "[training]\nlocal_batch_size = 8\nsteps = 9\n[activation_checkpoint]\nmode = 'selective'\n"
    )
    assert from_torchtitan(file) == GivenRun(
        tp=2, pp=4, zero_stage=2, batch=1, num_microbatches=8, schedule="1F1B", num_chunks=1, recompute="selective"
    )
    file.write_text("[training]\nlocal_batch_size = 2\nglobal_batch_size = 64\n")
    assert from_torchtitan(file) == GivenRun(pp=1, zero_stage=3, batch=2, global_batch=64, recompute="none")
    file.write_text("[parallelism]\ncontext_parallel_degree = 2\nexpert_parallel_degree = 8\n")
    assert from_torchtitan(file) == GivenRun(pp=1, cp=2, ep=8, zero_stage=3, recompute="none")


@pytest.mark.parametrize("content", ["", "{", "[]", '{"zero_optimization": 3}', "\ud800", "[" * 5000, '{"bf16": []}'])
def test_a_file_that_is_none_is_one_sentence(tmp_path, content):
    file = tmp_path / "file"
    file.write_bytes(content.encode("utf-8", "surrogatepass"))
    for read in (from_deepspeed, from_torchtitan):
        if read is from_torchtitan and content in ("", "[]"):
            continue  # an empty TOML is a job of defaults
        with pytest.raises(TrimtabError, match=r"is no (DeepSpeed configuration|torchtitan job)"):
            read(file)


@pytest.mark.parametrize("value", [0, -1, 2.5, True, "many", None, [2]])
def test_a_number_that_is_none_is_refused(tmp_path, value):
    file = tmp_path / "ds.json"
    file.write_text(json.dumps({"train_micro_batch_size_per_gpu": value, "zero_optimization": {"stage": value}}))
    if value is None:
        assert from_deepspeed(file).batch is None
        return
    with pytest.raises(TrimtabError, match=r"ds.json: batch .* was asked for"):
        from_deepspeed(file)


@pytest.mark.parametrize(
    "line",
    ["parallelism.pipeline_parallel_degree='2'", "training.local_batch_size=[4]", "training.local_batch_size=1.5"],
)
def test_a_number_of_torchtitans_that_is_none_is_refused(tmp_path, line):
    (tmp_path / "job.toml").write_text(f"{line}\nparallelism.pipeline_parallel_microbatch_size = 2")
    with pytest.raises(
        TrimtabError, match=rf"{line[9:].partition('=')[0].partition('.')[2]} is .*: give a whole number"
    ):
        from_torchtitan(tmp_path / "job.toml")


@pytest.mark.parametrize("number", ["9" * 5000, "²"])
def test_a_number_of_megatrons_that_is_none_is_refused(number):
    with pytest.raises(TrimtabError, match=r"tensor-model-parallel-size .* whole number"):
        from_megatron(f"--tensor-model-parallel-size {number}", describe("Qwen2.5-VL-7B"))


def test_what_is_typed_goes_before_the_file():
    file = GivenRun(dp=2, pp=4, batch=1, global_batch=64, recompute="full", zero_stage=1)
    both = completed(GivenRun(recompute="none", num_microbatches=4), file)
    assert both == GivenRun(dp=2, pp=4, batch=1, num_microbatches=4, recompute="none", zero_stage=1)
    assert completed(GivenRun(max_tokens=9000), file).batch is None
