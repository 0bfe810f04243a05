"""A described model beside the real one of Transformers: every parameter in exactly one layer. Needs torch."""

from typing import Any

import torch
import transformers

from trimtab.specs import LayerSpec, ModelSpec


def build(config: Any) -> torch.nn.Module:
    with torch.device("meta"):
        return transformers.AutoModelForImageTextToText.from_config(config)


def owner_of(parameter: str, layers: dict[str, int]) -> str:
    """The one layer whose module path is a prefix of the parameter's."""
    parts = parameter.split(".")
    owners = [p for i in range(len(parts)) if (p := ".".join(parts[: i + 1])) in layers]
    assert len(owners) == 1, f"{parameter} belongs to {owners}"
    return owners[0]


def assert_same_parameters(spec: ModelSpec, model: torch.nn.Module) -> None:
    counted = {layer.name: 0 for layer in spec.layers}
    for name, parameter in model.named_parameters():  # a tied weight comes once, under its owner's name
        counted[owner_of(name, counted)] += parameter.numel()
    assert counted == {layer.name: layer.num_params for layer in spec.layers}
    for layer in spec.layers:  # the names are the model's own
        assert layer.bare or model.get_submodule(layer.name)
    head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
    assert bool(spec.tied) == (head.weight is embedding.weight)
    assert spec.vocab_size == head.weight.shape[0]


def layer(spec: ModelSpec, name: str) -> LayerSpec:
    return next(x for x in spec.layers if x.name.endswith(name))
