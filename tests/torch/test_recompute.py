"""Recompute switched on in real models: exactly the chosen layers, the same gradients. Needs torch and Transformers."""

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from recompute_checks import assert_recompute_holds, count_forwards, gradients, make_model, switch_all_on
from recompute_ranks import WAYS, run_ranks
from tiny_packs import trainer_arguments
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from traced_families import FAMILIES, find_layers

from refusals import refused
from trimtab.errors import PlanError
from trimtab.plan.file.yaml import load_plan
from trimtab.plan.plan import RecomputeDecision
from trimtab.runtime.recompute import apply

ROOT = Path(__file__).parents[2]
TEXT, TOWER = "model.language_model", "model.visual"


@pytest.mark.filterwarnings("ignore:.*hidden_state.* is deprecated:FutureWarning")
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_are_bit_equal_and_nothing_is_left_behind(family):
    assert_recompute_holds(family, "sdpa", "full")


@pytest.mark.parametrize(("attention", "granularity"), [("eager", "full"), ("sdpa", "selective")])
@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "gemma3", "qwen3_vl_moe"])
def test_gradients_are_bit_equal_with_eager_attention_and_what_is_held_in_part(family, attention, granularity):
    assert_recompute_holds(family, attention, granularity)


# -- what a granularity repeats ---------------------------------------------------------------------------------------


class Operations(TorchDispatchMode):
    """Counts products and fused attention."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, operator: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(operator)
        self.counts["products"] += name in ("aten.mm.default", "aten.addmm.default")
        self.counts["attention"] += "scaled_dot_product" in name and "backward" not in name
        return operator(*args, **(kwargs or {}))


def test_selective_repeats_neither_products_nor_attention():
    family, model = make_model("internvl", "sdpa")
    for module in model.modules():  # with dropout SDPA is no fused operation on the CPU
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    counts = {}
    for granularity in (None, "selective", "full"):
        handle = apply(model, find_layers(model) if granularity else [], granularity=granularity or "full")
        with handle, Operations() as operations:
            gradients(model, family.inputs)
        counts[granularity] = operations.counts
    assert counts["selective"] == counts[None]
    assert counts["full"]["attention"] > counts[None]["attention"]
    assert counts["full"]["products"] > counts[None]["products"]


# -- frozen towers ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["qwen2_5_vl", "internvl", "llava_onevision", "gemma3"])
def test_a_frozen_tower_is_not_run_again(family):
    made, model = make_model(family, "sdpa")
    layers = find_layers(model)
    tower = [name for name in layers if "language_model" not in name]
    getattr(model.model, tower[0].split(".")[1]).requires_grad_(False)
    apply(model, layers)
    forwards = count_forwards(model, layers)
    gradients(model, made.inputs)
    assert forwards == {name: 1 if name in tower else 2 for name in layers}


def test_a_frozen_layer_behind_a_trained_one_recomputes():
    family, model = make_model("llava", "sdpa")
    layers = find_layers(model)
    model.requires_grad_(False)
    model.model.multi_modal_projector.requires_grad_(True)
    expected = gradients(model, family.inputs)
    apply(model, layers)
    forwards = count_forwards(model, layers)
    found = gradients(model, family.inputs)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert all(forwards[name] == (2 if "language_model" in name else 1) for name in layers)


# -- caches, copies, other wrappers -----------------------------------------------------------------------------------


def test_a_cache_is_filled_once():
    family, model = make_model("qwen2_5_vl", "sdpa")
    inputs = {**family.inputs, "use_cache": True}
    expected = gradients(model, inputs)
    apply(model, find_layers(model))
    found = gradients(model, inputs)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    result = model.eval()(**inputs)
    assert result.past_key_values.get_seq_length() == inputs["input_ids"].shape[1]
    result.loss.backward()


class Plain(nn.Module):
    """A layer that knows nothing of checkpoints, as those of remote code."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.dropout = nn.Dropout(0.3)

    def forward(self, x: torch.Tensor, *, scales: dict[str, torch.Tensor]) -> torch.Tensor:
        return x + self.dropout(torch.tanh(self.linear(x * scales["scale"])))


def test_plain_modules_recompute_and_inputs_in_a_mapping_count():
    torch.manual_seed(0)
    layers = nn.ModuleList(Plain() for _ in range(3))
    scale = torch.randn(8, requires_grad=True)
    x = torch.randn(4, 8)

    def step() -> list[torch.Tensor]:
        layers.zero_grad(set_to_none=True)
        scale.grad = None
        torch.manual_seed(2)
        result = x
        for layer in layers:
            result = layer(result, scales={"scale": scale})
        result.square().sum().backward()
        return [scale.grad, *(p.grad for p in layers.parameters() if p.grad is not None)]

    layers[0].requires_grad_(False)  # reached through `scale` alone
    expected = step()
    apply(layers, ["0", "2"])
    counts = count_forwards(layers, ["0", "1", "2"])
    assert all(torch.equal(a, b) for a, b in zip(step(), expected, strict=True))
    assert counts == {"0": 2, "1": 1, "2": 2}


# -- decisions --------------------------------------------------------------------------------------------------------


def test_a_plans_decision_is_read_with_its_ranges():
    _, model = make_model("qwen2_5_vl", "sdpa")
    decisions = [
        RecomputeDecision(stage=0, granularity="full", modules=(f"{TOWER}.blocks[0..1]",)),
        RecomputeDecision(stage=1, granularity="selective", modules=(f"{TEXT}.layers.1",)),
    ]
    handle = apply(model, decisions)
    full = {f"{TOWER}.blocks.{i}": "full" for i in range(2)}
    assert handle.granularity == {**full, f"{TEXT}.layers.1": "selective"}
    handle.remove()
    assert apply(model, f"{TEXT}.layers[0..1]").granularity == {f"{TEXT}.layers.{i}": "full" for i in range(2)}


def test_a_whole_plan_names_layers_of_the_model_it_was_made_for():
    plan = load_plan(ROOT / "tests/golden/plan_v1_0.yaml")
    _, model = make_model("qwen2_5_vl", "sdpa")
    with refused(PlanError):
        apply(model, plan)


def test_all_that_is_wrong_is_said_at_once():
    _, model = make_model("qwen2_5_vl", "sdpa")
    handle = apply(model, [f"{TEXT}.layers.0"])
    switch_all_on(model)
    names = ["visual.blocks.0", f"{TEXT}.layers.0", f"{TEXT}.layers.1", f"{TEXT}.layers.1", f"{TEXT}.layers.1.mlp"]
    with refused(PlanError, "most", "selective, full", *names, "gradient_checkpointing_disable()") as caught:
        apply(model, names, granularity="most")  # type: ignore[arg-type]
    assert len(str(caught.value).splitlines()) == 6
    assert list(handle.granularity) == [f"{TEXT}.layers.0"]
    assert "forward" not in model.get_submodule(f"{TEXT}.layers.1").__dict__


# -- trainers and wrappers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_transformers_trainer_trains_to_the_same_weights(tmp_path, dtype):
    trained = []
    for recomputed in (False, True):
        family, model = make_model("qwen2_5_vl", "sdpa")
        if recomputed:
            apply(model, find_layers(model)[::2])
            forwards = count_forwards(model, find_layers(model))
        row = {name: x for name, x in family.inputs.items() if name != "use_cache"}
        trainer = transformers.Trainer(
            model=model,
            args=trainer_arguments(
                tmp_path / str(recomputed),
                max_steps=2,
                gradient_accumulation_steps=2,
                learning_rate=1e-2,
                bf16=dtype == "bf16",
            ),
            train_dataset=[row] * 4,
            data_collator=lambda rows: rows[0],
        )
        trainer.train()
        trained.append(model.state_dict())
    assert forwards == {name: 8 if i % 2 == 0 else 4 for i, name in enumerate(find_layers(model))}
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


def test_under_ddp_and_fsdp2_gradients_are_bit_equal(tmp_path):
    results = run_ranks(tmp_path)
    assert {(r["wrapper"], r["when"], r["rank"]) for r in results} == {
        (wrapper, when, rank) for wrapper in ("ddp", "fsdp2") for when in WAYS for rank in (0, 1)
    }
    for r in results:
        assert r["equal"], r
        assert r["forwards"] == r["wanted"], r
        assert r["gathers"][0] >= r["gathers"][1], r  # recompute gathers no weights a further time
