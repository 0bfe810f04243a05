"""Tests of runtime/training/balanced.py (a whole plan folder: recompute, and what the folder asks of the model)."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from balanced_cases import arguments, noted
from train_runs import write_run, write_variant

from refusals import refused
from trimtab.errors import ConfigError, PlanError
from trimtab.plan.file.yaml import load_plan, plan_to_yaml
from trimtab.runtime.data.collate import PackedCollator
from trimtab.runtime.recompute import applied_to, apply
from trimtab.runtime.training.balanced import balanced, planned_samples
from trimtab.runtime.training.in_force import Ran, differences
from trimtab.units import unfold_modules

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Qwen2.5-VL, drawn data, a plan of two stages, and the same packs on one stage that recomputes."""
    made = tmp_path_factory.mktemp("run")
    write_run(made, "qwen2_5_vl", dp=1)
    write_variant(made, "alone", num_stages=1, recompute=True)
    return made


def make_trainer(folder: Path, out: Path, **text: Any) -> Any:
    config = transformers.AutoConfig.from_pretrained(folder / "model")
    for name, value in text.items():
        setattr(config.text_config, name, value)
    transformers.set_seed(0)
    model = transformers.AutoModelForImageTextToText.from_config(config, attn_implementation="sdpa")
    return noted(transformers.Trainer)(
        model=model,
        args=arguments(out, max_steps=2, gradient_checkpointing=True, learning_rate=1e-3),
        train_dataset=planned_samples(folder / "alone", str(folder / "model")),
        data_collator=PackedCollator(config, attention="sdpa"),
    )


def test_what_runs_is_compared_with_the_plan_once(folder, tmp_path, caplog):
    class Changed(transformers.TrainerCallback):
        """A callback of one's own that undoes what the plan decides."""

        def on_train_begin(self, args, state, control, **kwargs):
            kwargs["model"].model.language_model.layers[0].__dict__.pop("forward")

    trainer = make_trainer(folder, tmp_path)
    trainer.add_callback(Changed())
    balanced(trainer, folder / "alone", reshuffle=False).train()
    said = [x.getMessage() for x in caplog.records if x.getMessage().startswith("not as planned")]
    assert len(said) == 1
    assert "1 layers do not recompute" in said[0]
    assert "layers.0 the first" in said[0]


def test_in_launchers_a_missing_library_or_file_is_no_bad_sample(folder, tmp_path):
    """Else every sample becomes a filler, and training runs to its end with a loss of 0."""
    model = shutil.copytree(folder / "model", tmp_path / "model")
    samples = planned_samples(folder / "alone", str(model))
    (model / "preprocessor_config.json").unlink()
    with refused(ConfigError, "image processor"):
        samples[0]
    assert samples.num_fillers == 0


RAN = Ran(ranks=1, num_packs=2, most_tokens=10, dtype=torch.bfloat16, attention="flash_attention_2", recomputed={})


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"ranks": 2}, "2 ranks"),
        ({"num_packs": 3}, "3 packs"),
        ({"most_tokens": 10**6}, "1000000 tokens"),
        ({"dtype": torch.float16}, "fp16"),
        ({"attention": "eager"}, "eager"),
        ({"recomputed": {"another": "full"}}, "another the first"),
    ],
)
def test_each_difference_is_one_sentence(folder, change, word):
    plan = load_plan(folder / "alone")
    layers = {name: x.granularity for x in plan.decisions.recompute for name in unfold_modules(x.modules)}
    training = replace(plan.inputs.training, dtype="bf16", attention="flash")
    plan = replace(plan, inputs=replace(plan.inputs, training=training))
    schedule = plan.decisions.schedule
    ran = replace(RAN, num_packs=plan.decisions.parallel.dp * schedule.num_microbatches, recomputed=layers)
    assert list(differences(plan, ran)) == []
    if "recomputed" in change:
        change = {"recomputed": layers | change["recomputed"]}
    (said,) = differences(plan, replace(ran, **change))
    assert word in said


def test_a_folder_decides_what_recomputes_and_changes_no_loss(folder, tmp_path, caplog):
    trainer = make_trainer(folder, tmp_path)
    apply(trainer.model, load_plan(folder / "alone"))  # as the lines of `export transformers` do
    balanced(trainer, folder / "alone", reshuffle=False).train()
    planned = {name for x in load_plan(folder / "alone").decisions.recompute for name in unfold_modules(x.modules)}
    assert len(planned) > 4
    assert applied_to(trainer.model).keys() == planned
    assert any("recompute" in record.getMessage() for record in caplog.records)
    assert not trainer.args.gradient_checkpointing

    nothing = folder / "nothing"
    if not nothing.exists():
        write_variant(folder, "nothing", num_stages=1)
    other = make_trainer(folder, tmp_path)
    balanced(other, nothing, reshuffle=False).train()
    assert not applied_to(other.model)
    assert other.losses == pytest.approx(trainer.losses, rel=1e-5)

    alone = make_trainer(folder, tmp_path)
    balanced(alone, folder / "alone")
    assert applied_to(alone.model) == applied_to(trainer.model)


def test_what_a_folder_asks_of_the_model_is_compared_with_it(folder, tmp_path):
    with refused(PlanError, "2"):
        balanced(make_trainer(folder, tmp_path), folder / "plan")
    with refused(PlanError):
        balanced(make_trainer(folder, tmp_path, intermediate_size=4096), folder / "alone")
    plan = load_plan(folder / "alone")
    family = replace(plan.inputs, model=replace(plan.inputs.model, family="gemma3"))
    written = folder / "gemma"
    written.mkdir()
    for file in (folder / "alone").iterdir():
        (written / file.name).write_bytes(file.read_bytes())
    (written / "plan.yaml").write_text(plan_to_yaml(replace(plan, inputs=family)))
    with refused(PlanError, "qwen2_5_vl"):
        balanced(make_trainer(folder, tmp_path), written)


def test_samples_that_were_not_all_sized_are_told_apart(folder, tmp_path):
    trainer = make_trainer(folder, tmp_path)
    whole = trainer.train_dataset
    trainer.train_dataset = [whole[row] for row in range(len(whole))] + [whole[0]]
    with refused(PlanError, "train_dataset", len(whole), len(whole) + 1):
        balanced(trainer, folder / "alone")
