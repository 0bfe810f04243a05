"""Batches that a family's forward takes, and prices of layers that only a traced step knows; faults in both.

Needs torch and Transformers.
"""

import copy
import functools
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from shrunk_models import make_shrunk, shrink
from tiny_models import make_tiny_model
from torch import nn

from refusals import refused
from trimtab.costs.devices import DEVICES
from trimtab.costs.measured.timed_model import build_to_run
from trimtab.costs.measured.traced import price_layers, profile_traced
from trimtab.costs.measured.traced_fit import KindCounts
from trimtab.costs.profile import group_layers, profile_model
from trimtab.errors import PartitionError, UnknownModelError
from trimtab.models.asking.batches import Batches, find_scattered
from trimtab.models.asking.model import describe_fields
from trimtab.models.asking.units import split_units
from trimtab.specs import NUM_WORK_TERMS, MeasuredWork


def weightless(family: str) -> Any:
    return build_to_run(copy.deepcopy(shrink(family, {})), dtype=torch.float32, attention="sdpa")


def batches_of(model: Any, *, packed: bool = True) -> Batches:
    return Batches(model, split_units(model), packed=packed)


def refuse(model: Any, name: str | None, reason: str = "not here") -> Any:
    """A fault: `model` whose forward raises if it is given `name`, or always."""
    forward = model.forward

    @functools.wraps(forward)
    def refusing(**given: Any) -> Any:
        if name is None or name in given:
            raise ValueError(reason)
        return forward(**given)

    model.forward = refusing
    return model


# -- batches --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "rows"),
    [
        ("llava", 16),  # patches of an image of 56 pixels
        ("t5gemma2", 4),  # which also writes one vector over ends of images
        ("kosmos-2", 4),  # queries; its places are a mask, with no token
    ],
)
def test_images_have_as_many_places_as_the_forward_fills(family, rows):
    batches, real = batches_of(weightless(family)), make_shrunk(family)
    for times in (1, 2):
        batch = batches.make(times, 12)
        assert batch.has_images
        ids, places = batch.inputs["input_ids"], batch.inputs.get("image_embeds_position_mask")
        at = ids == batches.token if places is None else places
        assert int(at.sum()) == rows * times
        if places is None:
            assert torch.equal(batch.inputs["labels"] == -100, at)
        with torch.no_grad():
            loss = real(**batch.inputs).loss
            pixels = torch.randn_like(batch.inputs["pixel_values"])
            assert abs(loss - real(**{**batch.inputs, "pixel_values": pixels}).loss) > 1e-4  # the images are read
    fewer = {**batch.inputs, "pixel_values": batch.inputs["pixel_values"][:1]}
    with torch.no_grad(), pytest.raises((ValueError, RuntimeError)):
        real(**fewer)


def test_a_pack_is_two_samples_in_a_row_of_the_multiple_asked_for():
    batch = batches_of(weightless("llava")).make(1, 12, multiple=64)
    positions = batch.inputs["position_ids"]
    assert batch.packed
    assert batch.num_tokens == 64
    assert batch.num_pairs == 64**2
    assert positions[0].tolist() == [*range(63), 0]
    alone = batches_of(weightless("llava"), packed=False).make(1, 12, multiple=64)
    assert not alone.packed
    assert "position_ids" not in alone.inputs
    assert alone.num_tokens == 64


def test_what_the_forward_refuses_is_left_out_and_said():
    one = batches_of(refuse(weightless("llava"), "position_ids")).make(1, 12)
    assert (one.packed, one.has_images, one.num_tokens) == (False, True, 12 + 16)
    text = batches_of(refuse(weightless("kosmos-2"), "pixel_values")).images
    assert list(text.choices())  # any of its calls may be right: only the forward knows
    model = weightless("llava")
    model.get_image_features = refuse(SimpleNamespace(forward=model.get_image_features), None).forward
    text = batches_of(model).make(2, 12)
    assert (text.packed, text.has_images, text.num_tokens) == (True, False, 13)
    with refused(UnknownModelError, "ValueError"):
        batches_of(refuse(weightless("llava"), None, "shapes of another kind")).make(1, 12)


class Writes(nn.Module):
    """Puts `rows` of images where ids are 7, by a mask or by an index, and one vector over every 9."""

    def __init__(self, rows: int, how: str) -> None:
        super().__init__()
        self.embed, self.rows, self.how = nn.Embedding(10, 4), rows, how

    def forward(self, input_ids: Any, pixel_values: Any) -> Any:
        words = self.embed(input_ids)
        words[input_ids == 9] = torch.zeros(4)
        images, mask = torch.ones(self.rows, 4), input_ids == 7
        if self.how == "scatter":
            return words.masked_scatter(mask[..., None], images)
        if self.how == "index":
            words[mask] = images
        return words


@pytest.mark.parametrize(("how", "found"), [("scatter", 5), ("index", 5), ("none", None)])
def test_rows_are_seen_where_they_are_written(how, found):
    inputs = {"input_ids": torch.tensor([[1, 9, 7, 2]]), "pixel_values": torch.ones(1)}
    assert find_scattered(Writes(5, how), inputs) == found


# -- prices ---------------------------------------------------------------------------------------------------------


def counted(layer: int, group: int) -> KindCounts:
    none, work = (0.0,) * NUM_WORK_TERMS, (1e9,) * NUM_WORK_TERMS
    terms = {name: none for name in KindCounts.__annotations__ if name.endswith(("_bytes", "_flops"))}
    return KindCounts(layer=layer, group=group, **{**terms, "forward_flops": work, "kept_bytes": work})


def test_counted_work_prices_what_no_formula_knows_and_idle_layers_have_none():
    spec = make_tiny_model("llava llama").spec
    vision, language = spec.indices("vision", "block")[:2], spec.indices("language", "block")[:2]
    crossing, unread, sound = language[0], vision[0], vision[1]
    layers = list(spec.layers)
    layers[crossing] = replace(layers[crossing], attention=replace(layers[crossing].attention, cross=True))
    layers[unread] = replace(layers[unread], measured=MeasuredWork())
    layers[sound] = replace(layers[sound], tower="audio", measured=MeasuredWork())
    model = replace(spec, layers=tuple(layers))
    groups = group_layers(model, frozenset())
    kinds = [counted(crossing, groups[crossing]), counted(language[1], groups[language[1]])]

    with refused(PartitionError, "2"):  # nothing ran them: their work is unknown, not none
        profile_model(price_layers(model, kinds, groups, idle=()), DEVICES["H200"])
    priced = price_layers(model, kinds, groups, idle=set(groups))
    assert priced.layers[crossing].measured.forward_flops == (1e9,) * NUM_WORK_TERMS
    assert priced.layers[unread].measured.forward_flops == (0.0,) * NUM_WORK_TERMS
    assert priced.layers[sound].measured == MeasuredWork()  # samples hold no sound, so that no step says what it does
    kept = [i for i in range(len(layers)) if i not in (crossing, unread)]
    assert all(priced.layers[i] == model.layers[i] for i in kept)  # a formula's layer keeps its formula

    both = replace(priced, layers=tuple(x for x in priced.layers if x.tower != "audio"))
    costs = {x.name: x for x in profile_model(both, DEVICES["H200"]).layers}
    assert sum(costs[layers[crossing].name].forward_s) > 0
    assert costs[layers[unread].name].tiers[0].saved_bytes == (0.0,) * NUM_WORK_TERMS


@pytest.mark.integration
def test_a_tower_whose_like_is_never_run_is_run_itself():
    fields = shrink("video_llava", {}).to_dict()  # blocks for clips come first, and are like those for images
    found = profile_traced(fields, describe_fields(fields), DEVICES["H200"], rows=(256, 512))
    assert not any("No image" in x for x in found.warnings)
