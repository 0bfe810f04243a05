"""Tests of runtime/training/balanced.py and data/dataset.py: needs torch, Transformers 4.57 or later, Accelerate.

Under an older Transformers run this file alone: pip install 'transformers==4.57.6' && pytest THIS_FILE
"""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import balanced_cases
import pytest
import torch
import transformers
from balanced_cases import Collator, Raw, arguments, make_model, noted, plain_of, tables_of
from gloo_ranks import on_ranks
from rounding import assert_close
from safetensors.torch import load_file, save_file

from refusals import refused
from trimtab.errors import PlanError, SampleError, UnsupportedPlanError
from trimtab.runtime.training import restore
from trimtab.runtime.training.balanced import balanced
from trimtab.runtime.training.shared import SampleSize, SharedSampler, steps_of

pytestmark = pytest.mark.filterwarnings("ignore")


def make_trainer(folder: Path, family: str = "qwen2_5_vl", **more: Any) -> Any:
    kind = more.pop("kind", noted(transformers.Trainer))
    given = {"train_dataset": Raw(), "data_collator": Collator(family), **more.pop("given", {})}
    return kind(model=make_model(family), args=arguments(folder, **more), **given)


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_one_line_gives_the_losses_of_the_plain_loop(family: str, tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path, family)
    same = balanced(trainer, tables_of(), reshuffle=False)
    assert same is trainer
    assert isinstance(trainer, transformers.Trainer)
    trainer.train()
    assert trainer.losses == pytest.approx(plain_of(family), rel=1e-5)
    assert trainer.state.global_step == 4


@pytest.mark.parametrize(
    ("family", "accumulation"), [("qwen2_5_vl", 1), ("qwen3_vl", 1), ("internvl", 1), ("internvl", 3)]
)
def test_without_a_plan_training_is_the_trainers_own(family: str, accumulation: int, tmp_path: Path) -> None:
    """Two epochs of the same batches, the last of each smaller: the same weights. (Qwen's own Trainer weighs tokens
    alike inside a micro-batch alone, so its steps have one.)"""
    more = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": accumulation}
    plain, shared = (make_trainer(tmp_path / name, family, **more) for name in ("plain", "shared"))
    plain.train()
    assert balanced(shared).train().global_step == plain.state.global_step
    for (name, own), expected in zip(shared.model.named_parameters(), plain.model.parameters(), strict=True):
        assert_close(own, expected, name)


def test_without_a_plan_steps_are_shared_evenly_and_hold_the_trainers_rows(tmp_path: Path) -> None:
    own = make_trainer(tmp_path, per_device_train_batch_size=3, gradient_accumulation_steps=1).get_train_dataloader()
    sizes = {row: SampleSize(tokens=row + 1, patches=0, flops=float(row + 1)) for row in range(7)}
    asked = {"own": own, "data": Raw(), "size_of": None, "rank": 0, "num_ranks": 1, "seed": 0, "sizes": sizes}
    sampler = SharedSampler(**asked, num_microbatches=2)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        found = list(sampler)
        sampler.set_epoch(epoch)
        first, second = steps_of(own, 1, 2)
        assert sorted(found[0] + found[1]) == sorted(first[0] + first[1])
        assert found[2:] == second
        loads = [sum(row + 1 for row in rows) for rows in found[:2]]
        assert abs(loads[0] - loads[1]) <= 1


@pytest.mark.integration
def test_without_a_plan_two_ranks_have_the_weights_of_the_trainers_own(tmp_path: Path) -> None:
    on_ranks(balanced_cases.train_without_plan, tmp_path, num_ranks=2)


def test_without_a_plan_a_run_resumes_inside_an_epoch(tmp_path: Path) -> None:
    more = {"gradient_accumulation_steps": 1, "per_device_train_batch_size": 2}
    whole = balanced(make_trainer(tmp_path, save_strategy="steps", save_steps=1, **more))
    whole.train()
    again = balanced(make_trainer(tmp_path, **more))
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.parts == pytest.approx(whole.parts[2:], rel=1e-6)


def saved(folder: Path, family: str = "qwen2_5_vl", **more: Any) -> Any:
    """A run that left checkpoints at each of its four steps."""
    trainer = balanced(make_trainer(folder, family, save_strategy="steps", save_steps=1, **more), tables_of())
    trainer.train()
    return trainer


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_a_resumed_run_has_the_losses_of_one_without_a_break(family: str, tmp_path: Path) -> None:
    """Of a model that begins with other weights; Transformers 5 stores two of the families under older names."""
    whole = saved(tmp_path, family)
    weights = tmp_path / "checkpoint-4" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])  # torn: the one before is taken
    again = make_trainer(tmp_path, family)
    with torch.no_grad():
        for parameter in again.model.parameters():
            parameter.mul_(1.5)
    assert balanced(again, tables_of()).train(resume_from_checkpoint=True).global_step == 4
    assert again.losses == pytest.approx(whole.losses[3:], rel=1e-6)


def test_optimizer_and_scheduler_come_back(tmp_path: Path) -> None:
    """Compared after a whole step, whose update needs both; a rate that decays needs the scheduler's place."""
    more = {"lr_scheduler_type": "cosine", "learning_rate": 1e-2, "optim": "adamw_torch"}
    whole = saved(tmp_path, **more)
    again = balanced(make_trainer(tmp_path, **more), tables_of())
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert again.losses == pytest.approx(whole.losses[2:], rel=1e-6)
    for own, resumed in zip(whole.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(own, resumed)


@pytest.mark.parametrize("change", ["no optimizer", "a fresh optimizer", "no scheduler", "another place"])
def test_states_that_cannot_be_restored_are_refused(change: str, tmp_path: Path) -> None:
    """The Trainer goes on with fresh ones where a file is missing, without a word."""
    more = {"lr_scheduler_type": "linear", "optim": "adamw_torch"}
    saved(tmp_path, **more)
    folder = tmp_path / "checkpoint-2"
    if change.startswith("no "):
        (folder / f"{change[3:]}.pt").unlink()
    elif change == "a fresh optimizer":
        state = torch.load(folder / "optimizer.pt", weights_only=True)
        torch.save({**state, "state": {}}, folder / "optimizer.pt")
    else:
        state = torch.load(folder / "scheduler.pt", weights_only=True)
        torch.save({**state, "last_epoch": 0}, folder / "scheduler.pt")
    state = json.loads((folder / "trimtab_plan.json").read_text())
    state["files"] = {name: (folder / name).stat().st_size for name in state["files"] if (folder / name).is_file()}
    (folder / "trimtab_plan.json").write_text(json.dumps(state))
    with refused(PlanError, "scheduler" if "place" in change else "optimizer"):
        balanced(make_trainer(tmp_path, **more), tables_of()).train(resume_from_checkpoint=str(folder))


def test_a_run_that_saved_its_model_alone_does_not_resume(tmp_path: Path) -> None:
    saved(tmp_path, save_only_model=True, optim="adamw_torch")
    with refused(PlanError, "save_only_model"):
        balanced(make_trainer(tmp_path, optim="adamw_torch"), tables_of()).train(
            resume_from_checkpoint=str(tmp_path / "checkpoint-2")
        )


def test_the_best_checkpoint_comes_back_at_the_end(tmp_path: Path) -> None:
    more = {"load_best_model_at_end": True, "eval_strategy": "steps", "eval_steps": 1, "learning_rate": 1e6}
    trainer = saved(tmp_path, given={"eval_dataset": [Raw()[0]]}, **more)  # a rate that makes each step worse
    best = Path(trainer.state.best_model_checkpoint)
    kept = type(trainer.model).from_pretrained(best).state_dict()
    assert all(torch.equal(x, kept[name]) for name, x in trainer.model.state_dict().items())


@pytest.mark.parametrize("change", ["tensor", "shape", "bytes", "number"])
def test_weights_that_cannot_be_restored_are_refused(change: str, tmp_path: Path) -> None:
    saved(tmp_path)
    folder = tmp_path / "checkpoint-2"
    content = load_file(folder / "model.safetensors")
    name = next(iter(content))
    if change == "tensor":
        del content[name]
    elif change == "shape":
        content[name] = torch.cat([content[name], content[name]])
    elif change == "number":
        content[name].view(-1)[0] += 1
    save_file(content, folder / "model.safetensors", metadata={"format": "pt"})
    if change == "bytes":
        (folder / "model.safetensors").write_bytes(b"\xff" * 64)
    state = json.loads((folder / "trimtab_plan.json").read_text())
    state["files"]["model.safetensors"] = (folder / "model.safetensors").stat().st_size
    (folder / "trimtab_plan.json").write_text(json.dumps(state))
    with refused(PlanError):
        balanced(make_trainer(tmp_path), tables_of()).train(resume_from_checkpoint=str(folder))


def test_adapters_are_restored_and_compared(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted() -> Any:
        trainer = make_trainer(tmp_path, save_strategy="steps", save_steps=1)
        config = peft.LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
        trainer.model = trainer.model_wrapped = peft.get_peft_model(trainer.model, config)
        return balanced(trainer, tables_of())

    adapted().train()
    folder = tmp_path / "checkpoint-4"
    adapted().train(resume_from_checkpoint=str(folder))
    content = load_file(folder / "adapter_model.safetensors")
    content[next(iter(content))] += 1
    save_file(content, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    with refused(PlanError, "q_proj.lora_"):
        adapted().train(resume_from_checkpoint=str(folder))


def test_a_weight_on_more_ranks_agrees_and_another_does_not() -> None:
    cpu, model = torch.device("cpu"), torch.nn.Linear(4, 3).bfloat16()
    own = restore.weigh(model, cpu)
    restore.check_weights(model, {name: [2 * bits, 2 * count] for name, (bits, count) in own.items()}, "", cpu)
    with torch.no_grad():
        model.bias.zero_()
    for kept in (own, {"weight": own["weight"]}, {**own, "bias": [0, 1]}):
        with refused(PlanError, "bias"):
            restore.check_weights(model, kept, "", cpu)
    restore.check_weights(model, {**own, "bias": [0, 0]}, "", cpu)


_STAGES = {
    stage: {
        "ddp_backend": "gloo",
        "use_cpu": False,
        "deepspeed": {
            "zero_optimization": {"stage": stage},
            "optimizer": {"type": "Adam", "params": {"lr": "auto", "torch_adam": True}},
            **dict.fromkeys(
                ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps"), "auto"
            ),
        },
    }
    for stage in (2, 3)
}


@pytest.mark.integration
@pytest.mark.parametrize("way", ["FSDP2", "ZeRO-2", "ZeRO-3"])
def test_weights_and_states_in_pieces_are_restored_and_compared(way: str, tmp_path: Path) -> None:
    if way == "FSDP2":
        adam = {"optim": "adamw_torch", "learning_rate": 1e-3}
        on_ranks(balanced_cases.resume_in_pieces, tmp_path, adam, 2, num_ranks=2)
    else:
        pytest.importorskip("deepspeed", reason="needs deepspeed: DS_BUILD_OPS=0 pip install deepspeed==0.19.8")
        on_ranks(balanced_cases.resume_in_pieces, tmp_path, _STAGES[int(way[-1])], num_ranks=2)


@pytest.mark.parametrize("given", [True, "checkpoint-9"])
def test_no_whole_checkpoint_is_one_sentence(given: Any, tmp_path: Path) -> None:
    for step in (8, 9):
        (tmp_path / f"checkpoint-{step}").mkdir()
    trainer = balanced(make_trainer(tmp_path), tables_of())
    with refused(PlanError, "trimtab_plan.json"):
        trainer.train(resume_from_checkpoint=given if given is True else str(tmp_path / given))


def test_a_state_of_another_shape_is_one_sentence(tmp_path: Path) -> None:
    saved(tmp_path)
    path = tmp_path / "checkpoint-2" / "trimtab_plan.json"
    state = json.loads(path.read_text())
    for key, odd in (
        ("weights", {"a": "x"}),
        ("weights", []),
        ("optimizer", {"a": [1]}),
        ("scheduler", [{}]),
        ("dp", "2"),
    ):
        path.write_text(json.dumps({**state, key: odd}))
        with refused(PlanError):
            balanced(make_trainer(tmp_path), tables_of()).train(resume_from_checkpoint=str(path.parent))
    path.write_text("[" * 100_000)
    with refused(PlanError):
        balanced(make_trainer(tmp_path), tables_of()).train(resume_from_checkpoint=str(path.parent))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "internvl"])
def test_a_loop_around_accelerate_needs_one_line_too(family: str) -> None:
    version = tuple(map(int, transformers.__version__.split(".")[:2]))
    if family == "qwen3_vl" and version < (5, 17):  # its loss is a mean of its own there
        with refused(UnsupportedPlanError, "num_items_in_batch", "packed_loss"):
            balanced_cases.run_accelerate_example(family)
        return
    assert balanced_cases.run_accelerate_example(family) == pytest.approx(plain_of(family), rel=1e-5)


def test_a_model_whose_loss_knows_no_steps_is_refused() -> None:
    model = make_model("qwen2_5_vl")
    mean = model.loss_function
    model.loss_function = lambda *args, num_items_in_batch=None, **kwargs: mean(*args, **kwargs)
    loader = torch.utils.data.DataLoader(Raw(), collate_fn=Collator("qwen2_5_vl"))
    with refused(UnsupportedPlanError, "Qwen2_5_VLForConditionalGeneration", "num_items"):
        balanced(loader, tables_of(), model=model)


def test_a_loader_is_refused_without_a_model_and_inside_a_step() -> None:
    loader = torch.utils.data.DataLoader(Raw(), collate_fn=Collator("qwen2_5_vl"))
    with refused(UnsupportedPlanError):
        balanced(loader, tables_of())
    made = balanced(loader, tables_of(), model=make_model("qwen2_5_vl"), verify=False)
    next(iter(made))
    with refused(PlanError):
        made.load_state_dict(made.state_dict())


@pytest.mark.integration
def test_two_ranks_that_share_their_images_have_the_losses_of_the_plain_loop(tmp_path: Path) -> None:
    on_ranks(balanced_cases.train_sharing_images, tmp_path, num_ranks=2)


class OwnLoss(transformers.Trainer):  # type: ignore[misc]
    def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
        return super().compute_loss(*args, **kwargs)


def test_only_a_trainer_is_balanced_and_only_once(tmp_path: Path) -> None:
    with refused(UnsupportedPlanError, "SimpleNamespace", "transformers.Trainer"):
        balanced(SimpleNamespace(), tables_of())
    trainer = balanced(make_trainer(tmp_path), tables_of())
    with refused(UnsupportedPlanError):
        balanced(trainer, tables_of())


def test_a_model_that_mixes_samples_is_refused_before_the_first_step(tmp_path: Path) -> None:
    trainer = make_trainer(tmp_path)
    attention = trainer.model.model.language_model.layers[1].self_attn
    forward = attention.forward
    attention.forward = lambda *args, attention_mask=None, **kwargs: forward(*args, attention_mask=None, **kwargs)
    with refused(UnsupportedPlanError, "qwen2_5_vl"):
        balanced(trainer, tables_of()).train()


def test_a_collator_that_packs_by_itself_is_refused(tmp_path: Path) -> None:
    def flat(items: list[Any]) -> dict[str, Any]:
        batch = Collator("qwen2_5_vl")(items)
        return {**batch, "input_ids": batch["input_ids"][0]}

    trainer = balanced(make_trainer(tmp_path, given={"data_collator": flat}), tables_of())
    with refused(SampleError, "input_ids", "24"):
        next(iter(trainer.get_train_dataloader()))


def test_an_image_that_stood_in_the_padding_is_left_out_and_long_packs_are_said_once(tmp_path, caplog):
    from trimtab.runtime.data.dataset import AloneThenPacked
    from trimtab.runtime.data.packing import collator_of

    collate = Collator("qwen2_5_vl")

    def busy(items: list[Any]) -> dict[str, Any]:  # text alone gets an image behind its end, as in LLaMA-Factory
        if items[0]["side"] is not None:
            return collate(items)
        with_image = collate([{**items[0], "prompt": items[0]["prompt"] + items[0]["answer"], "answer": [], "side": 2}])
        text = len(items[0]["prompt"]) + len(items[0]["answer"])
        with_image["attention_mask"][:, text:] = 0
        return with_image

    data, model = Raw(), make_model("qwen2_5_vl")
    packed = AloneThenPacked(busy, collator_of(model), max_tokens=16)
    text, image = packed([data[1]]), packed([data[1], data[0]])
    assert text["input_ids"].tolist() == [data[1]["prompt"] + data[1]["answer"]]
    assert "pixel_values" not in text
    assert image["image_grid_thw"].shape == (1, 3)
    packed([data[1], data[0]])
    (found,) = [record.getMessage() for record in caplog.records if record.name == "trimtab"]
    assert "17 tokens" in found
    assert "16" in found
