"""Needs torch and Transformers: which layers the own switch of real models recomputes, and what our lines switch on."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from tiny_models import ODD_CONFIGS, describe_here, preprocessor_of
from transformers.modeling_layers import GradientCheckpointingLayer

from trimtab.adapters.huggingface import export, plain_settings
from trimtab.adapters.running import Decided
from trimtab.runtime.recompute.apply import _Recomputed
from trimtab.specs import ModelSpec, ParallelDims, RecomputeChoice, Stage

ONE_OF_EACH = ("llava llama", "llava_next", "llava_onevision", "internvl qwen2", "qwen2_vl", "qwen2_5_vl", "qwen3_vl")
ONE_OF_EACH += ("qwen3_vl_moe", "gemma3", "glm4v_moe")


def build(case: str) -> tuple[torch.nn.Module, ModelSpec]:
    model_type, vision, text, outer = copy.deepcopy(ODD_CONFIGS[case])
    config = transformers.AutoConfig.for_model(model_type, vision_config=vision, text_config=text, **outer)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    return model, describe_here(config, preprocessor=preprocessor_of(model_type, vision))


def switched_on(model: torch.nn.Module) -> set[str]:
    return {
        name
        for name, module in model.named_modules()
        if isinstance(module, GradientCheckpointingLayer) and module.gradient_checkpointing
    }


@pytest.mark.parametrize("case", ONE_OF_EACH)
def test_every_nth_layer_is_what_transformers_switches_on(case):
    model, spec = build(case)
    whole = (Stage(index=0, start=0, stop=len(spec.layers)),)
    for plain in plain_settings(spec, whole):
        given = plain.arguments()
        kwargs = dict(given.get("activation_checkpointing_kwargs", {}))
        if given["activation_checkpointing"]:
            every_n_layers = kwargs.pop("every_n_layers", 1)
            model.activation_checkpointing_enable(kwargs, every_n_layers=every_n_layers)
        said = {spec.layers[i].name for choice in plain.stages[0].recompute for i in choice.layers}
        assert switched_on(model) == said, plain
        model.activation_checkpointing_disable()


def test_the_arguments_are_fields_of_training_arguments(tmp_path):
    _, spec = build("qwen2_vl")
    plain = list(plain_settings(spec, (Stage(index=0, start=0, stop=len(spec.layers)),)))[2]
    arguments = transformers.TrainingArguments(output_dir=str(tmp_path), use_cpu=True, **plain.arguments())
    assert arguments.activation_checkpointing_kwargs == {"use_reentrant": False, "every_n_layers": 2}


def test_the_lines_switch_on_exactly_the_planned_layers():
    model, spec = build("qwen2_5_vl")
    vision, language = spec.indices("vision", "block"), spec.indices("language", "block")
    chosen = (
        RecomputeChoice(tier="full", layers=(*vision[1:3], language[0])),
        RecomputeChoice(tier="attention", layers=(language[1],)),
        RecomputeChoice(tier="selective", layers=(language[2],)),
    )
    stages = (Stage(index=0, start=0, stop=len(spec.layers), recompute=chosen),)
    plan = Decided(model=spec, stages=stages, dims=ParallelDims(), schedule="1F1B", num_microbatches=1)
    exec(export(plan, None).text, {"model": model, "TrainingArguments": lambda **_: None})
    found = {
        name: module.forward.granularity
        for name, module in model.named_modules()
        if isinstance(module.__dict__.get("forward"), _Recomputed)
    }
    assert found == {spec.layers[i].name: choice.tier for choice in chosen for i in choice.layers}
