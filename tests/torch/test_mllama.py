"""Mllama: what Transformers says of it, what serving it takes, where it may be cut, and that its training is refused.

Needs torch and Transformers.
"""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest

from refusals import refused
from trimtab.costs.devices import DEVICES
from trimtab.costs.profile import profile_model
from trimtab.errors import ConfigError, ImageError, PartitionError
from trimtab.models.asking.model import describe_fields
from trimtab.models.describe import image_rule
from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import Gpu, Machine, Workload
from trimtab.placement.place import place
from trimtab.specs import ModelSpec
from trimtab.units import GIB

pytestmark = pytest.mark.integration  # to describe 11B takes 5 s

# sizes of Llama-3.2-11B-Vision
CONFIG = {
    "model_type": "mllama",
    "vision_config": {
        "hidden_size": 1280,
        "num_hidden_layers": 32,
        "num_global_layers": 8,
        "attention_heads": 16,
        "num_channels": 3,
        "intermediate_size": 5120,
        "vision_output_dim": 7680,
        "image_size": 560,
        "patch_size": 14,
        "max_num_tiles": 4,
        "intermediate_layers_indices": [3, 7, 15, 23, 30],
        "supported_aspect_ratios": [[1, 1], [1, 2], [1, 3], [1, 4], [2, 1], [2, 2], [3, 1], [4, 1]],
    },
    "text_config": {
        "model_type": "mllama_text_model",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "num_hidden_layers": 40,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 14336,
        "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38],
        "tie_word_embeddings": False,
    },
}
ROWS = 4 * 1608  # of one image: four tiles of 40 x 40 patches and a class token, padded to a multiple of 8


@functools.cache
def described() -> ModelSpec:
    return replace(describe_fields(CONFIG), name="Llama-3.2-11B-Vision", image_rule=image_rule(CONFIG))


def crossing(model: ModelSpec) -> list[int]:
    return [i for i, x in enumerate(model.layers) if x.attention is not None and x.attention.cross]


def test_every_image_costs_the_same_and_is_one_token():
    rule = image_rule(CONFIG)
    for size in ((1, 1), (1920, 1080), (560, 560), (30, 9000)):
        counts = rule.count(*size)
        assert (counts.patches, counts.tokens, counts.tiles, counts.patches_sq) == (ROWS, 1, 4, ROWS**2)
    with refused(ImageError):
        rule.count(0, 5)


@pytest.mark.parametrize(
    ("file", "message"),
    [
        ({"max_image_tiles": 6}, "max_image_tiles is 6"),
        ({"size": {"height": 448, "width": 448}}, "preprocessor_config.size is"),
        ({"do_resize": False}, "do_resize is false"),
    ],
)
def test_a_processor_file_of_another_checkpoint_is_refused(file, message):
    with refused(ConfigError, message):
        image_rule(CONFIG, file)


def test_without_images_cross_attention_layers_do_not_run():
    model = described()
    table = inference_table(model, Workload(seq_len=100))
    for i in crossing(model):
        assert table.runs[i] == table.kv_prompt[i] == table.kv_full[i] == table.touched[i] == 0
    for i in (*model.indices("vision"), *model.indices("projector")):
        assert table.prefill[i] == table.held[i] == 0


def test_flash_attention_is_refused_in_a_sentence():
    with refused(PartitionError):
        inference_table(described(), Workload(attention="flash"))


def test_a_map_holds_the_whole_tower_on_one_gpu():
    model = described()
    work = Workload(batch=2, seq_len=1000, images=((1920, 1080),))
    found = place(model, Machine(gpus=tuple(Gpu(index=i, free_bytes=9 * GIB) for i in range(4))), work)
    tower = {key: device for key, device in found.device_map.items() if key.startswith("model.vision_model.")}
    assert len(tower) == len(model.indices("vision"))
    assert len({*tower.values(), found.device_map["model.multi_modal_projector"]}) == 1
    assert len(set(found.device_map.values())) == 4


def test_what_the_tower_cannot_call_for_never_spills():
    model = described()
    # less than the tower: all of it that can leaves the GPU
    machine = Machine(gpus=(Gpu(index=0, free_bytes=18 * GIB),), cpu_bytes=64 * GIB)
    found = place(model, machine, Workload(seq_len=500, images=((640, 480),)))
    spilled = {name for gone in found.spilled for name in gone.modules}
    assert any(name.startswith("model.vision_model.") for name in spilled)
    assert not spilled & {"model.vision_model.class_embedding", "model.vision_model.patch_embedding"}


def test_training_is_refused_in_one_sentence():
    with pytest.raises(PartitionError) as caught:
        profile_model(described(), DEVICES["A100-80GB"])
    assert str(caught.value) == (
        "training Llama-3.2-11B-Vision cannot be planned: 8 layers, model.language_model.layers.3 the first, attend to "
        "image rows by cross-attention, which no cost formula prices: plan another family, or `trimtab map` this one "
        "for inference"
    )
