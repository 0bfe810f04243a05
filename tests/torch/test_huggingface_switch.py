"""Needs torch and Transformers: which layers our lines switch on in a real model."""

from __future__ import annotations

import copy

import torch
import transformers
from tiny_models import ODD_CONFIGS, describe_here, preprocessor_of

from trimtab.adapters.huggingface import export
from trimtab.adapters.running import Decided
from trimtab.runtime.recompute.apply import _Recomputed
from trimtab.specs import ModelSpec, ParallelDims, RecomputeChoice, Stage


def build(case: str) -> tuple[torch.nn.Module, ModelSpec]:
    model_type, vision, text, outer = copy.deepcopy(ODD_CONFIGS[case])
    config = transformers.AutoConfig.for_model(model_type, vision_config=vision, text_config=text, **outer)
    with torch.device("meta"):
        model = transformers.AutoModelForImageTextToText.from_config(config)
    return model, describe_here(config, preprocessor=preprocessor_of(model_type, vision))


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
