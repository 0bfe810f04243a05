"""LoRA as PEFT and bitsandbytes make it, beside what is planned: parameters, kept bytes, stored bytes, and a run.

pip install peft bitsandbytes
"""

import copy
import json
from dataclasses import replace

import pytest
import torch
from shrunk_models import make_shrunk
from train_runs import run_on_ranks, settings_of, values_of, write_run, write_variant

from trimtab.adapters.huggingface import peft_config, quantisation_config
from trimtab.costs.formula.adapters import count_adapters
from trimtab.costs.measured.stand_ins import AdaptedLinear
from trimtab.lora import NF4_BYTES, Lora
from trimtab.models.asking.model import describe_model
from trimtab.plan.file.yaml import load_plan, plan_to_yaml

pytestmark = [pytest.mark.integration, pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")]
peft = pytest.importorskip("peft")

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "llava", "glm4v", "gemma3", "internvl")
TOWERS = (("language",), ("language", "vision", "projector"))


def described(model):
    return describe_model(without_weights(model))


def without_weights(model):
    with torch.device("meta"):
        return type(model)(copy.deepcopy(model.config))


@pytest.mark.parametrize("family", FAMILIES)
def test_peft_trains_as_many_parameters_as_are_planned(family):
    model = make_shrunk(family)
    spec = described(model)
    for towers in TOWERS:
        lora = Lora(r=3, towers=towers)
        adapted = peft.get_peft_model(copy.deepcopy(model), peft.LoraConfig(**peft_config(spec, lora)))
        trained = sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        assert count_adapters(spec, lora).num_params == trained, towers


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_layer_of_the_tests_is_pefts(autocast, dtype):
    torch.manual_seed(0)
    base = torch.nn.Linear(48, 32, dtype=torch.bfloat16)
    ours = AdaptedLinear(copy.deepcopy(base), 4, dtype=dtype)
    holder = torch.nn.Sequential(base)
    theirs = peft.get_peft_model(
        holder,
        peft.LoraConfig(r=4, lora_alpha=8, target_modules=["0"], init_lora_weights="gaussian"),
        autocast_adapter_dtype=dtype == torch.float32,
    )
    parts = dict(theirs.named_parameters())
    for name in ("lora_A", "lora_B"):
        getattr(ours, name).weight.data.copy_(next(v for k, v in parts.items() if name in k).data)
    x = torch.randn(8, 48, dtype=torch.bfloat16)
    kept = []
    for module in (ours, theirs):
        sizes: dict[int, int] = {}
        fixed = {p.untyped_storage().data_ptr() for p in module.parameters()}
        alive = []

        def pack(t, sizes=sizes, alive=alive, fixed=fixed):
            alive.append(t)
            if t.untyped_storage().data_ptr() not in fixed:
                sizes[t.untyped_storage().data_ptr()] = t.untyped_storage().nbytes()
            return t

        module.requires_grad_(False)
        for name, parameter in module.named_parameters():
            parameter.requires_grad_("lora_" in name)
        leaf = x.clone().requires_grad_()
        with (
            torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t),
            torch.autocast("cpu", torch.bfloat16, enabled=autocast),
        ):
            kept.append((module(leaf), sum(sizes.values())))
    assert torch.equal(kept[0][0], kept[1][0])
    assert kept[0][1] == kept[1][1]


def test_bitsandbytes_stores_what_is_planned():
    bnb = pytest.importorskip("bitsandbytes")
    weight = torch.randn(512, 1024, dtype=torch.bfloat16)
    stored = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4", compress_statistics=True).to("cpu")
    state = stored.quant_state
    parts = [stored.data, state.absmax, state.state2.absmax]
    found = sum(p.numel() * p.element_size() for p in parts)
    assert found == NF4_BYTES * weight.numel()
    tables = [state.code, state.state2.code, state.offset]
    assert sum(p.numel() * p.element_size() for p in tables) <= 1096 < 0.01 * found


def test_transformers_quantises_the_layers_that_are_planned():
    pytest.importorskip("bitsandbytes")
    from transformers import BitsAndBytesConfig
    from transformers.integrations.bitsandbytes import replace_with_bnb_linear

    model = make_shrunk("llava")
    spec, lora = described(model), Lora(r=3, bits=4)
    config = BitsAndBytesConfig(**quantisation_config(spec, lora, sharded=False))
    quantised = replace_with_bnb_linear(
        without_weights(model), modules_to_not_convert=config.llm_int8_skip_modules, quantization_config=config
    )
    names = {name for name, x in quantised.named_modules() if type(x).__name__ == "Linear4bit"}
    planned = {
        f"{layer.name}.{x.name}" for layer in spec.layers if layer.tower == "language" for x in layer.linears or ()
    }
    assert names == planned - {"lm_head", "lm_head."}


def test_a_run_with_adapters_loses_the_same_on_two_stages_and_exports_them_merged(tmp_path):
    from safetensors.torch import load_file

    write_run(tmp_path, "internvl")
    lora, runs = Lora(r=4, alpha=8), []
    for num_stages in (1, 2):
        folder = write_variant(tmp_path, f"stages-{num_stages}", num_stages=num_stages)
        plan = load_plan(folder)
        inputs = replace(plan.inputs, training=replace(plan.inputs.training, lora=lora))
        (folder / "plan.yaml").write_text(plan_to_yaml(replace(plan, inputs=inputs)))
        out = f"run-{num_stages}"
        runs.append(settings_of(tmp_path, folder, out, learning_rate=1e-2, export=tmp_path / f"model-{num_stages}"))
        run_on_ranks([runs[-1]], num_stages)
    one, two = map(values_of, runs)
    assert one == pytest.approx(two, rel=1e-5)
    assert one[-1] < 0.95 * one[0]
    files = [next((tmp_path / f"model-{n}").glob("*.safetensors")) for n in (1, 2)]
    merged, again = map(load_file, map(str, files))
    assert merged.keys() == again.keys()
    assert not any("lora" in name or "base_layer" in name for name in merged)
    for name, value in merged.items():
        assert torch.allclose(value, again[name], atol=1e-4), name
    frozen = settings_of(tmp_path, runs[0].plan, "run-0", steps=1, learning_rate=1e-9, export=tmp_path / "model-0")
    run_on_ranks([frozen], 1)
    before = load_file(str(next((tmp_path / "model-0").glob("*.safetensors"))))
    changed = {name for name in merged if not torch.allclose(merged[name], before[name], atol=1e-6)}
    assert changed
    assert all(".language_model.layers." in name and name.endswith("proj.weight") for name in changed)
    import transformers

    loaded = transformers.AutoModelForImageTextToText.from_pretrained(tmp_path / "model-1")
    assert json.loads((tmp_path / "model-1" / "config.json").read_text())["model_type"] == loaded.config.model_type
