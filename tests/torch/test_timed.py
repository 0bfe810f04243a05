"""Layers timed on the CPU: every family is built, fed and timed; no test depends on how long anything takes.

Needs torch and Transformers.
"""

import itertools

import numpy as np
import pytest
import torch
from shrunk_models import make_shrunk
from tiny_models import as_saved, make_tiny_model

from refusals import refused
from trimtab.costs.formula.layers import Gradients
from trimtab.costs.formula.settings import CostSettings
from trimtab.costs.measured.timed import (
    TimingOptions,
    measure_device,
    open_device,
    profile_timed,
    time_layer,
    time_layers,
)
from trimtab.costs.measured.timed_model import build_model, refusing, runs
from trimtab.costs.profile import group_layers, load_profile, save_profile
from trimtab.errors import ConfigError, TrimtabError, UnknownModelError
from trimtab.models.asking.model import describe_model
from trimtab.models.describe import describe, read_config
from trimtab.specs import WORK_TERMS, SampleTable

CPU = torch.device("cpu")
PATCHES, SQUARES, WINDOWED, TOKENS = (
    WORK_TERMS.index(x) for x in ("patches", "patches_sq", "patches_windowed", "tokens")
)
CASES = (
    "llava phi3",
    "llava_next",
    "llava_onevision tied, sliding, head",
    "internvl qwen3, rms, qk norm, mask token, pooled by class token, tied",
    "internvl qwen3_moe, some dense",
    "qwen2_vl",
    "qwen2_5_vl",
    "qwen3_vl tied, biased, taps out of order",
    "qwen3_vl_moe",
    "gemma3",
    "glm4v_moe",
)


def settings(**more) -> CostSettings:
    return CostSettings(**{"attention": "sdpa", "dtype": "fp32", **more})


def time_small(config, model, **more):
    """By number of the layer."""
    options = TimingOptions(**{"dtype": "fp32", "attention": "sdpa", "sizes": (16, 48), "repeats": 1, **more})
    return {m.layer: m for m in time_layers(config, model, CPU, options)}


def timings_of(case: str, **more):
    torch.manual_seed(0)
    tiny = make_tiny_model(case)
    return tiny, time_small(as_saved(tiny.model.config), tiny.spec, **more)


def untimed(model, measured) -> set[str]:
    """Layers of which none of their kind was timed."""
    groups = group_layers(model, frozenset())
    timed = {groups[i] for i in measured}
    assert len(timed) == len(measured), "one layer of each kind"
    return {x.name for x, group in zip(model.layers, groups, strict=True) if group not in timed}


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("case", CASES)
def test_one_layer_of_each_kind_is_timed(case: str, attention: str) -> None:
    tiny, measured = timings_of(case, attention=attention)
    assert untimed(tiny.spec, measured) <= {"model.image_newline"}, "only a bare parameter has no module"
    for number, layer in measured.items():
        for timing in layer.timings:
            assert timing.forward_s > 0
            assert (timing.backward_s > 0) == (not tiny.spec.layers[number].unread)
            assert timing.work[0] == 1.0


def test_the_layers_have_the_weights_that_the_whole_model_has_and_others_none() -> None:
    tiny = make_tiny_model("internvl qwen2")
    chosen = [i for i, x in enumerate(tiny.spec.layers) if x.kind != "block" or x.name.endswith(".0")]
    real = build_model(as_saved(tiny.model.config), tiny.spec, chosen, settings(), CPU)
    for number, layer in enumerate(tiny.spec.layers):
        parameters = list(real.module.get_submodule(layer.name).parameters())
        assert {p.device.type for p in parameters} == {"cpu" if number in chosen else "meta"}
        if number in chosen:
            assert all(torch.isfinite(p).all() for p in parameters)
    rotary = real.module.model.language_model.rotary_emb
    torch.testing.assert_close(rotary.inv_freq, tiny.model.model.language_model.rotary_emb.inv_freq)


@pytest.mark.parametrize("case", ["internvl qwen2", "qwen2_5_vl", "qwen3_vl", "llava_next", "gemma3"])
def test_a_timed_layer_is_handed_what_it_gets_in_the_whole_model(case: str) -> None:
    """With all layers real and of equal weights, a layer run on what was captured gives what the model gave it."""
    torch.manual_seed(0)
    tiny = make_tiny_model(case)
    everything = range(len(tiny.spec.layers))
    real = build_model(as_saved(tiny.model.config), tiny.spec, everything, settings(), CPU)
    blocks = [i for i in everything if tiny.spec.layers[i].tower == "language" and tiny.spec.layers[i].kind == "block"]
    run = list(runs(real, (24,)))[-1]
    with torch.no_grad():
        for here, behind in itertools.pairwise(blocks):
            (call,) = run.calls[here]
            result = real.module.get_submodule(tiny.spec.layers[here].name)(*call.args, **call.kwargs)
            torch.testing.assert_close(result, run.calls[behind][0].rows)


def test_work_is_the_image_rule_s() -> None:
    """Grids of 14-pixel patches, in windows of 112 pixels."""
    tiny = make_tiny_model("qwen2_5_vl")
    numbers = {x.name: i for i, x in enumerate(tiny.spec.layers)}
    real = build_model(as_saved(tiny.model.config), tiny.spec, range(len(numbers)), settings(), CPU)
    windowed, full = (numbers[f"model.visual.blocks.{n}"] for n in (0, 1))
    steps = [run for run in runs(real, (64, 400)) if full in run.calls]
    assert len(steps) == 4, "each size as one image and as four"
    for run in steps:
        grids = run.calls[numbers["model.visual.patch_embed"]][0].rows.shape[0]
        images = len(run.calls[full][0].kwargs["cu_seqlens"]) - 1
        high = 8 * max(1, round((grids / images / 64) ** 0.5))  # near to square, as `image_calls` makes them
        counts = tiny.spec.image_rule.count(14 * (grids // images // high), 14 * high)
        assert run.work[full][PATCHES] == run.work[windowed][PATCHES] == images * counts.patches
        assert run.work[full][SQUARES] == images * counts.patches_sq
        assert run.work[windowed][WINDOWED] == images * counts.patches_windowed
    assert {len(run.calls[full][0].kwargs["cu_seqlens"]) - 1 for run in steps} == {1, 4}
    assert any(run.work[windowed][WINDOWED] < run.work[full][SQUARES] for run in steps)


def test_a_pack_is_a_sample_and_one_token_so_that_there_is_a_mask() -> None:
    tiny = make_tiny_model("internvl qwen2")
    real = build_model(as_saved(tiny.model.config), tiny.spec, range(len(tiny.spec.layers)), settings(), CPU)
    *_, run = runs(real, (32,))
    first = next(i for i, x in enumerate(tiny.spec.layers) if x.tower == "language" and x.kind == "block")
    mask = run.calls[first][0].kwargs["attention_mask"]
    assert mask.shape[-2:] == (32, 32)
    assert not mask[0, 0, 31, :31].any()
    table = SampleTable.of([0, 0], [31, 1])
    assert run.work[first] == (1.0, *table.work().sum(axis=0)[1:])


def test_towers_are_timed_at_their_sizes_and_words_at_theirs() -> None:
    tiny = make_tiny_model("internvl qwen2")
    real = build_model(as_saved(tiny.model.config), tiny.spec, range(len(tiny.spec.layers)), settings(), CPU)
    tile = tiny.spec.image_rule.rows_per_tile
    steps = list(runs(real, (3 * tile, 7 * tile)))
    seen = {(run.work[0][PATCHES], run.work[0][TOKENS]) for run in steps}
    assert all(run.work[0][SQUARES] == tile * run.work[0][PATCHES] for run in steps), "each tile attends to itself"
    assert {patches for patches, _ in seen if patches} == {3 * tile, 7 * tile}
    assert {tokens for patches, tokens in seen if not patches} == {3 * tile, 7 * tile}


@pytest.mark.parametrize("family", ["smolvlm", "idefics2", "glm4v", "mistral3", "paligemma", "ovis2"])
def test_a_family_that_is_named_nowhere_is_timed(family: str) -> None:
    model = make_shrunk(family)
    config = as_saved(model.config)
    spec = describe_model(model.to("meta"))
    measured = time_small(config, spec, sizes=(32, 96))
    blocks = [i for i in measured if spec.layers[i].kind == "block"]
    assert {spec.layers[i].tower for i in blocks} >= {"vision", "language"}
    assert all(t.forward_s > 0 and t.backward_s > 0 for i in blocks for t in measured[i].timings)
    assert untimed(spec, measured) <= {x.name for x in spec.layers if x.bare}


def test_a_frozen_tower_has_no_backward_and_the_projector_behind_it_has() -> None:
    tiny, measured = timings_of("internvl qwen2", frozen_towers=("vision",))
    for number, layer in measured.items():
        frozen = tiny.spec.layers[number].tower == "vision"
        assert all((t.backward_s == 0) == frozen for t in layer.timings)


def test_a_timed_profile_is_whole_grows_with_its_work_and_is_saved(tmp_path) -> None:
    tiny = make_tiny_model("qwen2_5_vl")
    options = TimingOptions(dtype="fp32", sizes=(16, 48, 96), repeats=3)
    timed = profile_timed(as_saved(tiny.model.config), tiny.spec, CPU, options)
    profile = timed.profile
    assert (profile.method, profile.device.name, profile.attention) == ("timed", "cpu", "sdpa")
    assert [x.name for x in profile.layers] == [x.name for x in tiny.spec.layers]
    for name in ("forward_s", "backward_s"):
        assert profile.matrix(name).min() >= 0, "so seconds never fall as work grows"
        assert (profile.matrix(name).sum(axis=1) > 0).all()
    for layer in profile.layers:
        assert np.all(np.array(layer.weight_s) <= np.array(layer.backward_s))
    by_group = {x.group: (x.forward_s, x.backward_s) for x in profile.layers}
    assert all(by_group[x.group] == (x.forward_s, x.backward_s) for x in profile.layers)
    assert profile.time_error > 0
    assert {kind.group for kind in timed.kinds} == set(by_group)
    save_profile(profile, tmp_path / "p.json")
    assert load_profile(tmp_path / "p.json") == profile


@pytest.mark.parametrize(("dtype", "flops"), [("fp32", 2 * 2 * 768**3), ("bf16", 2 * 768**3)])
def test_a_device_is_rated_by_its_fastest_product_and_copy(dtype: str, flops: int, monkeypatch) -> None:
    def known(steps, *_args, **_more):
        assert [tuple(step().shape) for step in steps] == [(768, 768), (2**26,)]
        return [(3.0, 2.0), (0.5, 4.0)]

    monkeypatch.setattr("trimtab.costs.measured.timed.time_each", known)
    device = measure_device(CPU, dtype)
    assert (device.name, device.peak_flops, device.memory_bytes_per_s) == ("cpu", flops / 2.0, 2 * 2**26 / 0.5)
    assert f"measured: {dtype} products" in device.source


@pytest.mark.parametrize("weights", [True, False])
def test_a_frozen_layer_takes_no_gradients_of_its_weights(weights: bool) -> None:
    tiny = make_tiny_model("internvl qwen2")
    block = tiny.spec.indices("language", "block")[0]
    real = build_model(as_saved(tiny.model.config), tiny.spec, [block], settings(), CPU)
    module = real.module.get_submodule(tiny.spec.layers[block].name)
    gradients = Gradients(inputs=True, weights=weights)
    time_layer(module, real, block, gradients, list(runs(real, (16,)))[-1:], TimingOptions(repeats=1))
    assert {p.requires_grad for p in module.parameters()} == {weights}


# -- what cannot be timed -------------------------------------------------------------------------------------------


def test_a_family_of_remote_code_is_refused() -> None:
    with refused(UnknownModelError, "internvl_chat"):
        time_small(read_config("InternVL-Chat-V1-5"), describe("InternVL-Chat-V1-5"))


def test_what_a_models_own_code_raises_is_one_sentence() -> None:
    model = describe("Qwen2.5-VL-7B")
    with refused(UnknownModelError, "qwen2_5_vl", "RuntimeError") as caught, refusing(model):
        raise RuntimeError("a\nshape")
    assert "\n" not in str(caught.value)
    with pytest.raises(torch.OutOfMemoryError), refusing(model):
        raise torch.OutOfMemoryError("full")


def test_flash_on_the_cpu_is_refused() -> None:
    tiny = make_tiny_model("internvl qwen2")
    with refused(TrimtabError):
        time_small(as_saved(tiny.model.config), tiny.spec, attention="flash")


def test_a_description_of_another_model_is_refused() -> None:
    tiny, other = make_tiny_model("internvl qwen2"), make_tiny_model("internvl llama")
    with refused(ConfigError):
        time_small(as_saved(other.model.config), tiny.spec)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_a_missing_cuda_device_is_refused() -> None:
    with refused(TrimtabError, "--device"):
        open_device("cuda")
    assert open_device().type == "cpu"


def test_the_second_of_one_cuda_device_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with refused(TrimtabError, "1", "0"):
        open_device("cuda:1")


def test_too_little_memory_is_said_in_a_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_args, **_kwargs):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("trimtab.costs.measured.timed.build_model", full)
    tiny = make_tiny_model("internvl qwen2")
    with refused(TrimtabError, "48"):
        time_small(as_saved(tiny.model.config), tiny.spec)
