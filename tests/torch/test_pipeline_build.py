"""Flows, cuts, recompute and refusals, in one process. Needs torch and Transformers."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from pipeline_runs import FAMILIES, collate, freeze, layer_groups, make_packs, step_alone
from tiny_models import make_tiny_model
from tiny_packs import TinyPacks

from refusals import refused
from trimtab.errors import UnsupportedPlanError
from trimtab.models.asking.units import split_units
from trimtab.plan.file.yaml import load_plan
from trimtab.plan.layout import PipelineLayout, Recompute, read_layout
from trimtab.runtime.pipeline import build as builder
from trimtab.runtime.pipeline.build import build_pipeline, layers_of
from trimtab.runtime.pipeline.cuts import Cuts, Way
from trimtab.runtime.pipeline.trace import Call, Output, Trace
from trimtab.runtime.probe.trial import CpuMeter

TEXT = "model.language_model"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A group of one."""
    store = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def layout_of(packs: TinyPacks, *cuts: str, **options: Any) -> PipelineLayout:
    stages = layer_groups(packs.layers, cuts)
    return PipelineLayout(**{"stages": stages, "schedule": "GPipe", "num_microbatches": 4, **options})


# -- what crosses -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_has_the_layers_of_the_description_and_reads_those_it_says_are_read(family):
    packs, tiny = make_packs(family), make_tiny_model(FAMILIES[family])
    (batch,) = collate(packs, [[0]])
    assert layers_of(packs.model, batch) == packs.layers
    assert Cuts(packs.model, packs.layers).way(batch).read == {x.name for x in tiny.spec.layers if not x.unread}


@pytest.mark.parametrize("family", FAMILIES)
def test_something_crosses_every_cut_with_images_and_text_alone_behind_the_embedding(family):
    packs = make_packs(family)
    cuts = Cuts(packs.model, packs.layers)
    images, text = collate(packs, [[0, 2], [1]])
    embedded = packs.layers.index(f"{TEXT}.embed_tokens")
    for cut in range(1, len(packs.layers)):
        assert cuts.wires(cut, images)
        assert all(wire.requires_grad and all(wire.shape) for wire in cuts.wires(cut, images))
        assert [wire.name for wire in cuts.wires(cut, text)] == ([packs.layers[cut - 1]] if cut > embedded else [])
    assert cuts.wires(0, images) == cuts.wires(len(packs.layers), images) == ()


def test_deepstack_features_cross_until_their_layer_has_read_them():
    packs = make_packs("qwen3_vl")
    cuts = Cuts(packs.model, packs.layers)
    (batch,) = collate(packs, [[0]])

    def names(layer: str) -> set[str]:
        wires = cuts.wires(packs.layers.index(layer), batch)
        return {wire.name.removeprefix("model.").removeprefix("visual.") for wire in wires}

    first, second = "deepstack_merger_list.0", "deepstack_merger_list.1"
    assert names("model.visual.blocks.2") == {"blocks.1", first}
    assert names("model.visual.merger") == {"blocks.3", first, second}
    images, first, second = "image features", "image features 1", "image features 2"
    assert names(f"{TEXT}.embed_tokens") == {images, first, second}
    assert names(f"{TEXT}.layers.0") == {"language_model.embed_tokens", images, first, second}
    assert names(f"{TEXT}.layers.1") == {"language_model.layers.0", first, second}
    assert names(f"{TEXT}.layers.2") == {"language_model.layers.1", second}
    assert names(f"{TEXT}.norm") == {"language_model.layers.2"}


def test_only_what_lies_behind_a_trained_layer_carries_a_gradient():
    packs = make_packs("qwen3_vl")
    freeze(packs.model, ("model.visual.patch_embed", "model.visual.pos_embed", "model.visual.blocks", TEXT))
    cuts = Cuts(packs.model, packs.layers)
    images, text = collate(packs, [[0], [1]])

    def graded(layer: str, batch: Any) -> set[str]:
        wires = cuts.wires(packs.layers.index(layer), batch)
        return {wire.name.rpartition("visual.")[2] for wire in wires if wire.requires_grad}

    assert graded("model.visual.blocks.2", images) == {"deepstack_merger_list.0"}  # its merger is trained
    assert graded(f"{TEXT}.layers.2", images) == {"image features 2", f"{TEXT}.layers.1"}
    assert graded(f"{TEXT}.layers.1", text) == set()


@pytest.mark.parametrize("family", ["internvl", "qwen3_vl"])
def test_what_crosses_is_found_without_memory_for_what_layers_return(family):
    packs = make_packs(family)
    cuts, (batch,) = Cuts(packs.model, packs.layers), collate(packs, [[0, 1, 3]])
    meter, given = CpuMeter(), [x for x in batch.values() if isinstance(x, torch.Tensor)]
    with meter.watch([*packs.model.parameters(), *packs.model.buffers()], given):
        before = meter.peak_bytes
        trace = cuts.way(batch).trace
    returned = sum(prod(x.shape) * x.dtype.itemsize for call in trace.calls for x in call.outputs)
    assert not trace.writes
    assert meter.peak_bytes - before < returned / 3


def test_sizes_are_foretold_once_micro_batches_of_several_sizes_were_seen(monkeypatch):
    packs = make_packs("qwen3_vl")
    cuts, runs = Cuts(packs.model, packs.layers), []
    run = cuts.tracer.run
    monkeypatch.setattr(cuts.tracer, "run", lambda batch: runs.append(1) or run(batch))
    batches = collate(packs, [[0], [2], [3], [4], [0, 2], [2, 3], [0, 1, 3], [4, 5]])
    for batch in batches:
        right = {x.name: x.shape for call in run(batch).calls for x in call.outputs}
        for cut in range(1, len(packs.layers)):
            assert all(wire.shape == right[wire.name] for wire in cuts.wires(cut, batch))
    assert len(runs) <= 4


# -- one stage --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("schedule", "cuts"), [("1F1B", ()), ("ZBVZeroBubble", (f"{TEXT}.layers.0",))])
def test_a_pipeline_on_one_device_is_the_model(alone, schedule, cuts):
    packs = make_packs("qwen2_5_vl tied")
    batches = collate(packs, [[0], [1], [2], [3, 4]])
    expected_loss = step_alone(packs.model, batches)
    expected = {name: p.grad.clone() for name, p in packs.model.named_parameters()}
    layout = layout_of(packs, *cuts, schedule=schedule, num_chunks=len(cuts) + 1)
    pipeline = build_pipeline(packs.model, layout)
    result = pipeline.step(batches)
    assert float(result.loss) == expected_loss
    assert {name for name, _ in pipeline.named_parameters()} == expected.keys()
    for name, parameter in pipeline.named_parameters():
        assert float((parameter.grad - expected[name]).norm()) <= (1e-6 if cuts else 0) * float(expected[name].norm())
    assert float(pipeline.step(batches, denominator=2 * result.denominator).loss) == pytest.approx(expected_loss / 2)


def test_a_state_dict_goes_in_and_out_under_the_models_own_names(alone):
    first, second = make_packs("internvl"), make_packs("internvl")
    state = {name: value.clone() for name, value in first.model.state_dict().items()}
    with torch.no_grad():
        for parameter in second.model.parameters():
            parameter.zero_()
    pipeline = build_pipeline(second.model, layout_of(second))
    pipeline.load_state_dict(state)
    assert pipeline.state_dict().keys() == state.keys()
    assert all(torch.equal(value, state[name]) for name, value in pipeline.state_dict().items())
    del state["lm_head.weight"]
    with refused(KeyError, "lm_head"):
        pipeline.load_state_dict(state)


# -- refusals ---------------------------------------------------------------------------------------------------------


def test_stages_that_are_not_the_models_layers_are_refused(alone):
    packs = make_packs("internvl")
    layers = packs.layers
    wrong = (*layers[1:3], "model.vision_tower.encoder.layer.7", layers[4], *layers[4:])
    layout = PipelineLayout(stages=(wrong,), schedule="GPipe", num_microbatches=4)
    tower = "model.vision_tower"
    missing, unknown = (f"{tower}.embeddings", f"{tower}.encoder.layer.2"), f"{tower}.encoder.layer.7"
    with refused(UnsupportedPlanError, missing, unknown, "model.multi_modal_projector") as caught:
        build_pipeline(packs.model, layout)
    assert len(str(caught.value).splitlines()) == 3


def test_a_group_of_another_size_and_recompute_of_strangers_are_refused(alone):
    packs = make_packs("llava")
    layout = layout_of(packs, "lm_head", recompute=(Recompute(modules=("model.visual.blocks.0",)),))
    with refused(UnsupportedPlanError, "--pp 1", "model.visual.blocks.0") as caught:
        build_pipeline(packs.model, layout)
    assert len(str(caught.value).splitlines()) == 2


def test_parameters_outside_of_the_layers_are_refused(alone):
    packs = make_packs("llava")
    packs.model.model.adapter = torch.nn.Linear(2, 2, bias=False)
    with refused(UnsupportedPlanError, "model.adapter"):
        build_pipeline(packs.model, layout_of(packs))


def test_several_weights_shared_across_devices_are_refused():
    packs = make_packs("llava tied")
    blocks = packs.model.model.language_model.layers
    blocks[2].mlp.up_proj.weight = blocks[0].mlp.up_proj.weight
    layout = layout_of(packs, f"{TEXT}.layers.1")
    with refused(UnsupportedPlanError, "2"):
        builder.check_layout(layout, split_units(packs.model), packs.model, num_ranks=2, shares_images=False)


def test_an_experts_balancing_loss_is_refused(alone):
    packs = make_packs("qwen3_vl")
    packs.model.config.get_text_config().output_router_logits = True
    with refused(UnsupportedPlanError):
        build_pipeline(packs.model, layout_of(packs))


def test_a_step_of_another_number_of_micro_batches_is_refused(alone):
    packs = make_packs("internvl")
    pipeline = build_pipeline(packs.model, layout_of(packs))
    with refused(ValueError, "1", "4"):
        pipeline.step(collate(packs, [[0]]))


def test_a_layout_is_what_the_plan_decides():
    plan = load_plan(ROOT / "tests" / "golden" / "plan_v1_0.yaml")
    with refused(UnsupportedPlanError, "2"):
        read_layout(plan)
    parallel = replace(plan.decisions.parallel, tp=1)
    layout = read_layout(replace(plan, decisions=replace(plan.decisions, parallel=parallel)))
    assert [len(stage) for stage in layout.stages] == [25, 29]
    assert layout.modules[24:26] == ("model.visual.blocks.23", "model.language_model.layers.0")
    assert (layout.schedule, layout.num_microbatches, layout.num_chunks) == ("1F1B", 4, 1)
    assert layout.recompute[0].modules[0] == "model.visual.blocks.0"


def test_what_crosses_a_cut_comes_in_the_order_in_which_it_is_written():
    """Both sides of a cut are processes of their own, and a set's order of names is a process's own."""
    names = [f"blocks.{i}" for i in range(9)]
    leaves = [Output(name=name, shape=(1,), dtype=torch.float32) for name in names]
    calls = [
        Call(layer=name, reads=frozenset(names[:i]), returned=(leaf,), spec=None)
        for i, (name, leaf) in enumerate(zip(names, leaves, strict=True))
    ]
    way = Way(layers=tuple(names), trace=Trace(calls=calls, result=frozenset(names)), graded=frozenset())
    assert [way.alive(cut) for cut in range(1, 9)] == [tuple(names[:cut]) for cut in range(1, 9)]
