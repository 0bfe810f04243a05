"""What has to hold of a model under recompute, whichever Transformers is installed. Needs torch and Transformers."""

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from traced_families import Family, find_layers, make_family

from trimtab.runtime.recompute import apply

RATE = 0.2


def with_dropout(model: nn.Module) -> nn.Module:
    """Every dropout that the family has, switched on."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = RATE
        for name in ("attention_dropout", "dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, RATE)
    return model


def count_forwards(model: nn.Module, names: Iterable[str]) -> Counter[str]:
    """Forwards of the layers, counted inside of them: at their first child."""
    counts: Counter[str] = Counter()
    for name in names:
        child = next(model.get_submodule(name).children())
        child.register_forward_pre_hook(lambda *_, name=name: counts.update([name]))
    return counts


def gradients(model: nn.Module, inputs: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Of one step, whose dropout draws from seed 1."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(1)
    model(**inputs).loss.backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def make_model(name: str, attention: str) -> tuple[Family, nn.Module]:
    family = make_family(name, torch.float32)
    return family, with_dropout(family.make_real(dtype=torch.float32, attention=attention))


def trace_of(model: nn.Module) -> dict[str, Any]:
    """What `apply` may not change, or has to put back: keys, hooks, instance attributes of every module."""
    hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks", "_state_dict_hooks")
    return {
        "keys": list(model.state_dict()),
        "hooks": {name: [len(getattr(m, kind)) for kind in hooks] for name, m in model.named_modules()},
        "attributes": {name: sorted(m.__dict__) for name, m in model.named_modules()},
        "classes": {name: type(m) for name, m in model.named_modules()},
    }


def assert_recompute_holds(name: str, attention: str, granularity: str) -> None:
    """Every second layer and two neighbours recompute, no other; gradients are bit-equal, nothing is left behind."""
    family, model = make_model(name, attention)
    expected = gradients(model, family.inputs)
    before = trace_of(model)
    layers = find_layers(model)
    chosen = sorted({*layers[::2], *layers[-2:]}, key=layers.index)
    with apply(model, chosen, granularity=granularity) as handle:
        assert handle.granularity == dict.fromkeys(chosen, granularity)
        assert {**trace_of(model), "attributes": None} == {**before, "attributes": None}
        found = gradients(model, family.inputs)
    assert found.keys() == expected.keys()
    for key, gradient in expected.items():
        assert torch.equal(found[key], gradient), key
    assert trace_of(model) == before
    with apply(model, chosen, granularity=granularity):
        counts = count_forwards(model, layers)
        gradients(model, family.inputs)
    again = {k for k in chosen if is_reached(model, k)}
    assert counts == {k: 2 if k in again else 1 for k in counts}
    assert again


def is_reached(model: nn.Module, layer: str) -> bool:
    """Whether a gradient came through the layer: some families read an earlier state of their tower than the last."""
    return any(p.grad is not None for p in model.get_submodule(layer).parameters())


def switch_all_on(model: nn.Module) -> None:
    """Transformers' own switch; it was renamed between the two versions."""
    new = "activation_checkpointing_enable"
    (getattr(model, new) if hasattr(model, new) else model.gradient_checkpointing_enable)()
