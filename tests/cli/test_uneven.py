"""Tests of `trimtab uneven`: the notebook's split of a described model, what it says, and bad input."""

import pytest

from trimtab.cli.describe import megatron_flags


def test_the_answer_beside_the_optimum(run):
    told = run("uneven", "Qwen2-VL-7B", "--pp", "2", "--first", "12", "--json").json
    assert {name: split["counts"] for name, split in told["splits"].items()} == {
        "even": [14, 14],
        "the rule": [13, 15],
        "optimum": [14, 14],
        "yours": [12, 16],
    }
    assert told["splits"]["the rule"]["flags"].endswith(
        "first-pipeline-num-layers 13 --decoder-last-pipeline-num-layers 15"
    )
    memory = told["splits"]["the rule"]["memory"]
    assert round(sum(memory[0].values()) / 1e9, 3) == 51.340


def test_a_model_that_the_rule_cannot_divide(run):
    words = ["InternVL-Chat-V1-5", "--pp", "4", "--image", "1792x896", "--seq", "4096"]
    told = run("uneven", *words).out
    assert "The rule has no answer here" in told
    assert (
        "Flags: --pipeline-model-parallel-layout 'E|t*16|t*16|t*16L' (a count of 0 is refused by Megatron-Core)" in told
    )


@pytest.mark.parametrize(
    ("counts", "flags"),
    [
        ((14, 14), ""),
        ((13, 15), "--decoder-first-pipeline-num-layers 13 --decoder-last-pipeline-num-layers 15"),
        ((4, 8, 8, 8), "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 8"),
        ((0, 28), "--pipeline-model-parallel-layout 'E|t*28L'"),
        ((4, 9, 8, 1), "--pipeline-model-parallel-layout 'Et*4|t*9|t*8|tL'"),
    ],
)
def test_flags_that_say_the_split(counts, flags):
    assert megatron_flags(counts)[0] == flags
