"""Needs torch, Transformers and Accelerate: maps against the real models' modules and the libraries' own readers."""

import copy

import pytest
import torch
import transformers
from accelerate.utils.modeling import check_device_map
from tiny_models import BARE, ODD_CONFIGS, describe_here, preprocessor_of
from transformers.integrations.accelerate import expand_device_map

from trimtab import describe, place
from trimtab.placement.machine import Gpu, Machine, Workload, machine_of
from trimtab.placement.placed import assess_map
from trimtab.runtime.placing.load import auto_map, build_on_meta, max_memory
from trimtab.units import GIB


def build(case: str, num_layers: int = 12):
    """Description and meta model of one family, with more than ten decoder blocks."""
    model_type, vision, text, outer = copy.deepcopy(ODD_CONFIGS[case])
    text["num_hidden_layers"] = num_layers
    for key in ("layer_types", "max_window_layers"):
        text.pop(key, None)
    config = transformers.AutoConfig.for_model(model_type, vision_config=vision, text_config=text, **outer)
    spec = describe_here(config, preprocessor=preprocessor_of(model_type, vision), name=case)
    with torch.device("meta"):
        return spec, transformers.AutoModelForImageTextToText.from_config(config, dtype=torch.bfloat16)


FAMILIES = {case[0]: name for name, case in reversed(ODD_CONFIGS.items())}


def placed(spec, num: int, *, share: float = 1.0, **more):
    """A map that needs all of `num` devices."""
    workload = Workload(seq_len=16, max_new_tokens=2)
    whole = place(spec, Machine(gpus=(Gpu(index=0, free_bytes=GIB),), context_bytes=0), workload).uses[0].total_bytes
    gpus = tuple(Gpu(index=i, free_bytes=int(share * (whole // num + whole // 6))) for i in range(num))
    return place(spec, Machine(gpus=gpus, context_bytes=0, **more), workload)


@pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)
def test_every_parameter_and_buffer_has_exactly_one_key_and_every_key_a_module(case):
    spec, model = build(case)
    for num in (1, 2, 3):
        found = placed(spec, num).device_map
        tensors = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        for name in tensors:
            parts = name.split(".")
            owners = [p for i in range(len(parts)) if (p := ".".join(parts[: i + 1])) in found]
            assert len(owners) == 1, f"{name} belongs to {owners}"
        for key in found:
            assert any(name == key or name.startswith(f"{key}.") for name in tensors) or key == "lm_head", key
            if key not in BARE:
                model.get_submodule(key)
        # a bare parameter of the model has no module to be named by; Accelerate warns of every such key
        named = {key: device for key, device in found.items() if key not in BARE}
        if named == dict(found):
            check_device_map(model, named)
        else:
            with pytest.warns(UserWarning, match="|".join(BARE)):
                check_device_map(model, dict(found))


@pytest.mark.parametrize("case", FAMILIES.values(), ids=FAMILIES)
def test_the_loader_of_transformers_reads_the_map_as_it_is_meant(case):
    """It matches keys as prefixes without a dot: layers.1 must not take layers.10."""
    spec, model = build(case)
    found = placed(spec, 3, cpu_bytes=GIB).device_map
    assert len(set(found.values())) == 3
    names = [name for name, _ in model.named_parameters()]
    read = expand_device_map(dict(found), names)
    for name in names:
        key = next(key for key in found if name == key or name.startswith(f"{key}."))
        assert read[name] == found[key], name


@pytest.mark.parametrize("library", ["accelerate", "transformers"])
@pytest.mark.parametrize("case", ["qwen2_5_vl", "gemma3", "internvl qwen2"])
def test_public_maps_are_read_in_our_bytes(library, case):
    spec, model = build(case)
    buffers = sum(x.numel() * x.element_size() for x in model.buffers())
    whole = sum(x.numel() for x in model.parameters()) * 2 + buffers
    machine = machine_of([whole, whole, whole])
    theirs = auto_map(model, machine, library=library)
    found = assess_map(spec, machine, Workload(seq_len=16), theirs, rule=library)
    assert found.placement is not None
    assert not [x for x in found.problems if "without a device" in x]
    sizes = {use.device: use.weight_bytes for use in found.placement.uses}
    assert sum(sizes.values()) == whole
    counted = dict.fromkeys(sizes, 0)
    for name, tensor in model.named_parameters():
        key = max((k for k in theirs if name == k or name.startswith(f"{k}.") or k == ""), key=len)
        counted[theirs[key]] += 2 * tensor.numel()
    if case != "gemma3":  # its tower may be cut inside the embeddings, which count where their first part lies
        # a rotary table counts with the block that reads it first, wherever the map puts it
        assert all(counted[device] <= size <= counted[device] + buffers for device, size in sizes.items())


def test_limits_of_the_libraries_are_what_is_free():
    machine = machine_of([3, 4], cpu_bytes=5)
    assert max_memory(machine) == {0: 3, 1: 4, "cpu": 5}


def test_a_model_is_built_from_its_configuration():
    from trimtab.models.describe import read_config

    spec = describe("Qwen2.5-VL-7B")
    model = build_on_meta(read_config("Qwen2.5-VL-7B"), tied=bool(spec.tied))
    assert sum(x.numel() for x in model.parameters()) == spec.num_params
    assert all(x.is_meta for x in model.parameters())
    assert {x.dtype for x in model.parameters()} == {torch.bfloat16}
