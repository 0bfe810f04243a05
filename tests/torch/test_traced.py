"""Traced steps against what autograd keeps and the allocator hands out; traced profiles against whole traced models.

Needs torch and Transformers.
"""

import copy
import functools
import random

import numpy as np
import pytest
import torch
from tiny_models import as_saved, make_tiny_model
from traced_families import DESCRIBED, FAMILIES, allocated_peak_bytes, find_layers, kept_bytes, make_family

from refusals import refused
from trimtab.costs.devices import DEVICES
from trimtab.costs.measured import traced as traced_profiles
from trimtab.costs.measured.timed_model import build_to_run
from trimtab.costs.measured.traced import profile_traced
from trimtab.costs.measured.traced_fit import share_bytes
from trimtab.costs.measured.traced_step import trace_step
from trimtab.costs.profile import load_profile, profile_model, save_profile
from trimtab.errors import ConfigError, TrimtabError, UnknownModelError
from trimtab.models.asking.batches import Batches
from trimtab.models.asking.units import split_units
from trimtab.models.describe import describe, read_config
from trimtab.specs import WORK_TERMS, evaluate

H200 = DEVICES["H200"]
TOKENS, TOKENS_SQ, TILES_SQ = (WORK_TERMS.index(x) for x in ("tokens", "tokens_sq", "patches_sq"))
ROTATION = [(torch.bfloat16, "sdpa"), (torch.float32, "eager"), (torch.float32, "sdpa"), (torch.bfloat16, "eager")]


def weightless(family, dtype, attention):
    return build_to_run(copy.deepcopy(family.config), dtype=dtype, attention=attention)


def name_dtype_attention():
    """All families in turn under the four kinds of arithmetic; those we do not describe among the integration tests."""
    for i, name in enumerate(FAMILIES):
        marks = [] if name in DESCRIBED else [pytest.mark.integration]
        yield pytest.param(name, *ROTATION[i % len(ROTATION)], marks=marks)


@pytest.mark.parametrize(("name", "dtype", "attention"), list(name_dtype_attention()))
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # torch's own, on making real tensors of a graph fake
def test_bytes_of_every_subset_are_those_autograd_keeps(name, dtype, attention):
    family = make_family(name, dtype)
    real = family.make_real(dtype=dtype, attention=attention)
    layers = find_layers(real)
    trace = trace_step(weightless(family, dtype, attention), layers, family.inputs)
    chance = random.Random(name)
    for subset in ([], layers, layers[::2], [x for x in layers if chance.random() < 0.5]):
        assert trace.saved_bytes(subset) == kept_bytes(real, family.inputs, subset)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("internvl", torch.bfloat16),
        ("internvl", torch.float32),
        ("qwen2_5_vl", torch.bfloat16),
        ("gemma3", torch.bfloat16),
    ],
)
@pytest.mark.filterwarnings("ignore")  # the profiler's own
def test_peak_is_the_allocators_but_for_the_kernels_workspaces(name, dtype):
    family = make_family(name, dtype)
    real = family.make_real(dtype=dtype, attention="sdpa")
    layers = find_layers(real)
    model = weightless(family, dtype, "sdpa")
    for subset in ([], layers, layers[::2]):
        traced = trace_step(model, layers, family.inputs, recomputed=subset).peak_bytes
        assert traced == pytest.approx(allocated_peak_bytes(real, family.inputs, subset), rel=1e-3)


def test_recompute_flops_are_those_that_recompute_adds():
    family = make_family("qwen3_vl", torch.bfloat16)
    model = weightless(family, torch.bfloat16, "sdpa")
    layers = find_layers(model)
    kept = trace_step(model, layers, family.inputs)
    again = trace_step(model, layers, family.inputs, recomputed=layers)
    for before, after in zip(kept.layers, again.layers, strict=True):
        assert 0 < before.recompute_flops <= before.forward_flops
        assert after.backward_flops == before.backward_flops + before.recompute_flops
    assert kept.layers[-1].recompute_flops < kept.layers[-1].forward_flops  # it stops before the last product


def test_a_frozen_tower_keeps_nothing():
    family = make_family("internvl", torch.bfloat16)
    model = weightless(family, torch.bfloat16, "sdpa")
    layers = find_layers(model)
    vision = [name for name in layers if "vision" in name]
    model.model.vision_tower.requires_grad_(False)
    trace = trace_step(model, layers, family.inputs)
    assert not any(x.keeps or x.backward_flops for x in trace.layers if x.name in vision)
    assert trace.saved_bytes(vision) == trace.saved_bytes()
    assert trace.saved_bytes(layers[-1:]) < trace.saved_bytes()


# -- profiles -------------------------------------------------------------------------------------------------------

CASES = [
    ("qwen3_vl_moe", "flash"),
    ("gemma3", "eager"),
    ("internvl qwen3, rms, qk norm, mask token, pooled by class token, tied", "sdpa"),
]


@functools.cache
def profile_of(case, attention, **more):
    tiny = make_tiny_model(case)
    return tiny, profile_traced(as_saved(tiny.model.config), tiny.spec, H200, attention=attention, **more)


@pytest.mark.parametrize(("case", "attention"), CASES)
def test_layers_add_up_to_a_whole_model_of_another_size(case, attention):
    tiny, traced = profile_of(case, attention)
    spec, profile = tiny.spec, traced.profile
    whole = build_to_run(copy.deepcopy(tiny.model.config), dtype=torch.bfloat16, attention=attention)
    parts = dict(whole.named_modules())
    names = [x.name for x in spec.layers if x.name in parts]
    batch = Batches(whole, split_units(whole), packed=True).make(6, 301)
    assert batch.has_images
    assert batch.packed
    trace = trace_step(whole, names, batch.inputs)
    block = next(x for x in spec.layers if x.tower == "vision" and x.kind == "block")
    rows = trace.layers[names.index(block.name)].output_bytes / (2 * block.hidden_size)
    work = np.zeros((1, len(WORK_TERMS)))
    work[0, :4] = 1, rows, rows**2, rows**2  # pairs of vision count for eager attention alone
    work[0, TOKENS:] = batch.num_tokens, batch.num_tokens**2, batch.num_tokens**2
    if attention == "eager":
        work[0, 2:4] = rows**2 / 6  # six tiles
    blocks = {x.name for x in spec.layers if x.kind == "block"}
    shares = share_bytes(trace, blocks=blocks)
    kept = sum(x.kept + x.context for x in shares)
    again = sum((x.recomputed if name in blocks else x.kept) + x.context for name, x in zip(names, shares, strict=True))
    layers = [x for x in profile.layers if x.name in parts]
    assert sum(evaluate(x.tiers[0].saved_bytes, work)[0] for x in layers) == pytest.approx(kept, rel=0.01)
    full = sum(evaluate(x.tiers[-1 if x.name in blocks else 0].saved_bytes, work)[0] for x in layers)
    assert full == pytest.approx(again, rel=0.015)  # a tapped block's rows are two layers' input
    # masks are counted even where recompute alone would hold them
    assert trace.saved_bytes() <= kept <= 1.03 * trace.saved_bytes()
    assert trace.saved_bytes(blocks) <= again <= 1.07 * trace.saved_bytes(blocks)


def test_flash_keeps_neither_masks_nor_repeated_keys():
    _, sdpa = profile_of("internvl qwen2", "sdpa")
    tiny, flash = profile_of("internvl qwen2", "flash")
    place = tiny.spec.indices("language", "block")[0]
    kept = {name: x.profile.layers[place].tiers[0].saved_bytes for name, x in {"sdpa": sdpa, "flash": flash}.items()}
    assert kept["flash"][TOKENS_SQ] == 0
    assert not any(x.kept_bytes[TILES_SQ] for x in flash.kinds)  # of equal tiles rows explain all
    assert kept["sdpa"][TOKENS_SQ] == 2  # the mask, cast to bf16
    # k and v of 2 heads each copied to 4, q copied by the join of rotary halves either way: 2 x 2 heads x 16 x 2 bytes
    assert kept["sdpa"][TOKENS] - kept["flash"][TOKENS] == pytest.approx(2 * 2 * 16 * 2, abs=1)


@pytest.mark.parametrize(("rows", "times"), [((64, 200), [4, 12]), ((4, 8), [1, 1])])
def test_steps_with_recompute_have_as_many_images_as_give_their_rows(monkeypatch, rows, times):
    found = []

    def spy(kinds, num_images, num_text, *, recompute=False):
        if recompute:
            found.append((num_images, num_text))
        return probe(kinds, num_images, num_text, recompute=recompute)

    probe = traced_profiles._probe
    monkeypatch.setattr(traced_profiles, "_probe", spy)
    tiny = make_tiny_model("internvl qwen2")
    profile_traced(as_saved(tiny.model.config), tiny.spec, H200, rows=rows)
    assert found == list(zip(times, rows, strict=True))


def test_fused_kernels_save_norm_copies_and_an_activation():
    tiny, traced = profile_of("internvl qwen2", "flash")
    _, fused = profile_of("internvl qwen2", "flash", fused_kernels=True)
    place = tiny.spec.indices("language", "block")[0]
    kept, less = (x.profile.layers[place].tiers[0].saved_bytes for x in (traced, fused))
    h, f = 64, 112
    # each norm: fp32 copy and normed rows become the input; the gate: its activated half
    expected = [-(2 * 4 * h + 2 * f) if i == TOKENS else 0 for i in range(len(WORK_TERMS))]
    assert np.subtract(less, kept) == pytest.approx(expected, abs=1e-3)


@pytest.mark.parametrize("case", ["internvl qwen2", "qwen2_5_vl"])
def test_a_blocks_transient_is_its_workspace_without_what_it_computes_again(case):
    """Of dense blocks the formulas' is exact; whoever adds up a stage counts what is computed again himself."""
    tiny, traced = profile_of(case, "flash" if case.startswith("internvl") else "sdpa")
    formulas = profile_model(tiny.spec, H200, attention=traced.profile.attention)
    work = np.array([1.0, 4096, 4096**2 / 16, 4096 * 64, 4096, 4096**2 / 4, 4096**2 / 4])
    ours, theirs = (
        dict(zip([x.name for x in p.layers], p.transients(work), strict=True)) for p in (traced.profile, formulas)
    )
    for place in tiny.spec.indices("language", "block") + tiny.spec.indices("vision", "block"):
        name = tiny.spec.layers[place].name
        assert ours[name] == pytest.approx(theirs[name], rel=0.01)


def test_a_stage_that_begins_inside_a_tower_holds_its_masks():
    tiny, traced = profile_of("gemma3", "eager")
    layers, spec = traced.profile.layers, tiny.spec
    first, *others = spec.indices("language")
    blocks = spec.indices("language", "block")
    masks = sum(np.array(x.context_bytes) for x in traced.kinds if spec.layers[x.layer].tower == "language")
    assert masks[TOKENS_SQ] == 2 * layers[first].tiers[0].saved_bytes[TOKENS_SQ] / 2 > 0  # of full and windowed blocks
    assert not layers[first].entry_bytes
    for place in others:
        assert layers[place].entry_bytes == (tuple(masks) if place in blocks else ())


def test_profile_is_saved_and_says_how_it_was_made(tmp_path):
    tiny, traced = profile_of("gemma3", "eager")
    profile = traced.profile
    assert profile.method == "traced"
    assert any("grow with the square" in x for x in traced.warnings)
    assert any("counted on the real layers" in x for x in profile.assumptions)
    save_profile(profile, tmp_path / "profile.json")
    assert load_profile(tmp_path / "profile.json") == profile
    formulas = profile_model(tiny.spec, H200, attention="eager")
    for ours, theirs in zip(profile.layers, formulas.layers, strict=True):
        assert ours.forward_s == theirs.forward_s
        assert ours.state_bytes == theirs.state_bytes
        if len(theirs.tiers) > 1:
            assert ours.tiers[-1].extra_backward_s <= theirs.tiers[-1].extra_backward_s


# -- refusals -------------------------------------------------------------------------------------------------------


def test_bad_layers_are_refused():
    family = make_family("llava", torch.float32)
    model = weightless(family, torch.float32, "sdpa")
    layers = find_layers(model)
    with refused(TrimtabError, "nowhere.3", "LlavaForConditionalGeneration"):
        trace_step(model, [*layers, "nowhere.3"], family.inputs)
    with refused(TrimtabError, "model.vision_tower"):
        trace_step(model, ["model.vision_tower", *layers], family.inputs)
    with refused(TrimtabError, "lm_head", "4"):
        trace_step(model, layers, family.inputs, recomputed=["lm_head"])
    trace = trace_step(model, layers, family.inputs)
    with refused(TrimtabError, "lm_head", "4"):
        trace.saved_bytes(["lm_head"])
    with refused(TrimtabError, "4"):
        trace_step(model, layers, family.inputs, recomputed=layers).saved_bytes()


def test_bad_models_are_refused():
    tiny = make_tiny_model("qwen2_5_vl")
    config = as_saved(tiny.model.config)
    without = copy.deepcopy(config)
    del without["text_config"]["rope_parameters"]["mrope_section"]
    with refused(UnknownModelError):
        profile_traced(without, tiny.spec, H200)
    wider = copy.deepcopy(config)
    wider["text_config"]["intermediate_size"] = 128
    with refused(ConfigError):
        profile_traced(wider, tiny.spec, H200)
    with refused(UnknownModelError, "internvl_chat"):
        profile_traced(read_config("InternVL-Chat-V1-5"), describe("InternVL-Chat-V1-5"), H200)
