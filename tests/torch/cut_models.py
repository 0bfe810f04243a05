"""A small model of any family, its stages and its samples, for `verify_pipeline`. Needs torch and Transformers."""

import inspect
import itertools
from collections.abc import Sequence
from typing import Any

from drawn_images import draw_image_samples
from torch import nn

from trimtab.models.asking.layers import main_lists
from trimtab.models.asking.units import split_units
from trimtab.options import Tower
from trimtab.runtime.data.conversations import read_processed
from trimtab.runtime.data.formats import ask_format, model_classes
from trimtab.runtime.data.packing import alone, draw_samples, types_key_of
from trimtab.runtime.pipeline.trace import Batch, has_images


def draw_batches(model: Any) -> tuple[list[Batch], bool]:
    """Micro-batches of one sample each, of several sizes, and whether the first has an image."""
    family = ask_format(model.config)
    key = types_key_of(inspect.signature(model_classes(model.config)[1].forward).parameters)
    drawn = draw_image_samples(model)
    samples = read_processed(drawn or draw_samples(model, family), model.config, family)
    batches = [{**alone(x, key), "labels": x.labels[None]} for x in samples]
    if "pixel_values" in required_of(model):  # no forward without an image
        batches = [batch for batch in batches if has_images(batch)]
    return batches, drawn is not None


def required_of(model: nn.Module) -> set[str]:
    """Arguments that the forward cannot do without."""
    taken = inspect.signature(type(model).forward).parameters.values()
    return {x.name for x in taken if x.default is x.empty and x.name != "self" and x.kind is x.POSITIONAL_OR_KEYWORD}


def cut_at(layers: Sequence[str], firsts: Sequence[str]) -> list[tuple[str, ...]]:
    places = [0, *(layers.index(name) for name in firsts), len(layers)]
    return [tuple(layers[a:b]) for a, b in itertools.pairwise(places)]


def blocks_of(model: Any, tower: Tower, layers: Sequence[str]) -> list[str]:
    """The tower's blocks in forward order."""
    units = split_units(model)
    path = main_lists(units)[tower]
    members = {unit.path for unit in units if unit.list_path == path and path is not None}
    return [name for name in layers if name in members]
