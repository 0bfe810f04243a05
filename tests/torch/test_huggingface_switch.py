"""Needs torch and Transformers: which layers our lines switch on in a real model."""

from real_parameters import build
from tiny_models import QWEN25_VIT, describe_here, odd_config, preprocessor_of

from trimtab.adapters.huggingface import TARGETS
from trimtab.adapters.running import Decided
from trimtab.runtime.recompute import _Recomputed
from trimtab.specs import ParallelDims, RecomputeChoice, Stage


def test_the_lines_switch_on_exactly_the_planned_layers():
    config = odd_config("qwen2_5_vl")
    model, spec = build(config), describe_here(config, preprocessor=preprocessor_of("qwen2_5_vl", QWEN25_VIT))
    vision, language = spec.indices("vision", "block"), spec.indices("language", "block")
    chosen = (
        RecomputeChoice(tier="full", layers=(*vision[1:3], language[0])),
        RecomputeChoice(tier="selective", layers=(language[2],)),
    )
    stages = (Stage(index=0, start=0, stop=len(spec.layers), recompute=chosen),)
    plan = Decided(model=spec, stages=stages, dims=ParallelDims(), schedule="1F1B", num_microbatches=1)
    exec(TARGETS["transformers"].export(plan).text, {"model": model, "TrainingArguments": lambda **_: None})
    found = {
        name: module.forward.granularity
        for name, module in model.named_modules()
        if isinstance(module.__dict__.get("forward"), _Recomputed)
    }
    assert found == {spec.layers[i].name: choice.tier for choice in chosen for i in choice.layers}
