"""Megatron-LM flags checked against a model: what fails, what costs, and that both say what to try."""

import pytest

from export_cases import first_block, make_model
from trimtab.adapters.megatron_check import (
    MegatronFlags,
    built_vision_layers,
    check_megatron,
    expand_layout,
    parse_megatron_flags,
)
from trimtab.specs import ModelSpec
from yaml_tables import read_table


def failures(model: ModelSpec, text: str, **options) -> list[str]:
    return [f.message for f in check_megatron(model, parse_megatron_flags(text), **options) if f.fails]


def costs(model: ModelSpec, text: str, **options) -> list[str]:
    return [f.message for f in check_megatron(model, parse_megatron_flags(text), **options) if not f.fails]


TEXT = make_model(num_vision=0)


def test_flags_are_read_as_a_shell_and_argparse_would():
    flags = parse_megatron_flags(
        "torchrun pretrain_vlm.py --lr 1e-4 --tensor-model-parallel-size 2 \\\n --pipeline_model_parallel_size=4 "
        "--num-layers 10 --num-layers 12 --account-for-loss-in-pipeline-split "
        "--pipeline-model-parallel-layout 'Et*3|t*3|t*3|t*3L'"
    )
    assert flags == MegatronFlags(
        tensor_model_parallel_size=2,
        pipeline_model_parallel_size=4,
        num_layers=12,
        account_for_loss_in_pipeline_split=True,
        pipeline_model_parallel_layout="Et*3|t*3|t*3|t*3L",
    )


SHORT = {
    "--pp": "--pipeline-model-parallel-size",
    "--first": "--decoder-first-pipeline-num-layers",
    "--last": "--decoder-last-pipeline-num-layers",
    "--layout": "--pipeline-model-parallel-layout",
    "--embedding": "--account-for-embedding-in-pipeline-split",
    "--loss": "--account-for-loss-in-pipeline-split",
}


def written(text: str) -> str:
    """Flags with their whole names."""
    return " ".join(SHORT.get(word, word) for word in text.split())


@pytest.mark.parametrize(("text", "names"), read_table("megatron_flags", "fails"))
def test_what_cannot_start_or_trains_something_else_fails(text, names):
    found = failures(TEXT, written(text))
    assert any(all(name in sentence for name in names) for sentence in found), found


@pytest.mark.parametrize("text", read_table("megatron_flags", "runs"))
def test_what_runs_is_not_complained_of(text):
    assert check_megatron(TEXT, parse_megatron_flags(written(text))) == []


def test_key_value_heads_and_vision_heads():
    odd = make_model(heads=12, kv=3, vision_heads=25)
    assert any("3 key-value heads" in m for m in failures(odd, "--tensor-model-parallel-size 2"))
    assert any("25 " in m and "26" in m for m in costs(odd, "--tensor-model-parallel-size 2"))


@pytest.mark.parametrize(
    ("split", "built"),
    [
        ("--decoder-first-pipeline-num-layers 3", 3),
        ("--decoder-last-pipeline-num-layers 3", 3),
        ("--decoder-first-pipeline-num-layers 3 --decoder-last-pipeline-num-layers 1", 1),
        ("--pipeline-model-parallel-layout Et*2|t*4|t*4|t*2L", 2),
        ("--pipeline-model-parallel-layout E|t*4|t*4|t*4L", 0),
        ("", 24),
    ],
)
def test_a_truncated_vision_tower_is_counted(split, built):
    model = make_model(num_vision=24)
    text = f"--pipeline-model-parallel-size 4 {split}"
    assert built_vision_layers(24, parse_megatron_flags(text)) == built
    found = [m for m in failures(model, text) if "vision layers are built" in m]
    if built == 24:
        assert not found
        return
    assert f"{built} of 24 vision layers are built, silently" in found[0]
    assert "pass --vision-cleared" in found[0]
    assert not [m for m in failures(model, text, vision_cleared=True) if "vision layers" in m]
    for launcher in ("ms-swift", "megatron-bridge"):
        assert not [m for m in failures(model, text, launcher=launcher) if "vision layers" in m]


def test_which_of_the_scripts_of_pai_truncate():
    first = "--pipeline-model-parallel-size 4 --decoder-first-pipeline-num-layers 3"
    both = f"{first} --decoder-last-pipeline-num-layers 3"
    old, new = make_model(num_vision=24, family="qwen2_vl"), make_model(num_vision=24)
    assert any("examples/qwen2_vl" in m for m in failures(old, first, launcher="pai-megatron"))
    assert not failures(new, first, launcher="pai-megatron")
    assert any("3 of 24" in m for m in failures(new, both, launcher="pai-megatron"))


def test_deepstack_cuts_name_the_count_that_is_enough():
    block = first_block(make_model())
    model = make_model(forbidden=frozenset(range(block, block + 3)), reason="DeepStack: features enter layers 0 to 2")
    split = "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout"
    found = failures(model, f"{split} Et*2|t*10L", vision_cleared=True)
    assert len(found) == 1
    assert "layers 0 to 2: give it 3" in found[0]
    assert any("ends after 0 language blocks" in m for m in failures(model, f"{split} E|t*12L"))
    assert failures(model, f"{split} Et*3|t*9L", vision_cleared=True) == []


def test_tied_weights_on_two_stages_cost_memory():
    model = make_model(num_vision=0, tied=True)
    (message,) = costs(model, "--pipeline-model-parallel-size 2")
    assert "lm_head shares the weight of embed_tokens" in message
    assert "5.00 k parameters" in message
    assert costs(model, "--pipeline-model-parallel-size 1") == []


def test_layouts_are_written_out_and_bounded():
    assert expand_layout("Et*3|(tt|)*2,m|L") == ["Ettt", "tt", "tt", "m", "L"]
    assert expand_layout("Et*0|tL") == ["E", "tL"]
    assert expand_layout("E t|tL") is None
    assert expand_layout("Et*999999|L") is None  # no million letters from outside


def test_what_fails_comes_first():
    model = make_model(num_vision=4, vision_heads=25)
    found = check_megatron(
        model, parse_megatron_flags("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 5")
    )
    assert [f.fails for f in found] == sorted((f.fails for f in found), reverse=True)
    assert {f.fails for f in found} == {True, False}
