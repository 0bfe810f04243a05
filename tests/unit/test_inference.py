"""Bytes that serving takes: weights by format, caches by layer, and what the phases of a layer keep alive."""

import pytest
from placement_cases import small_model

from refusals import refused
from trimtab import ModelSpec, place, profile_model
from trimtab.costs.devices import DEVICES
from trimtab.errors import ConfigError, ImageError, PartitionError
from trimtab.models.describe import describe, image_rule, read_config
from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import QUANTS, Gpu, Machine, Workload, count_batch
from trimtab.units import GIB

IMAGE = ((112, 112),)


def test_quantised_formats_leave_norms_embedding_and_head_alone():
    model = describe("Qwen2.5-VL-7B")
    full = inference_table(model, Workload()).weights
    for quant, settings in QUANTS.items():
        found = inference_table(model, Workload(quant=quant)).weights
        for i, layer in enumerate(model.layers):
            if layer.kind in ("embed", "norm", "head") or layer.tower not in settings.towers:
                assert found[i] == full[i], (quant, layer.name)
            else:
                covered = layer.num_matmul_params
                assert found[i] == pytest.approx(full[i] - covered * (2 - settings.weight_bytes), abs=2)


def test_experts_are_quantised_only_by_formats_that_know_them():
    moe = describe("Qwen3-VL-30B-A3B")
    at = next(i for i, x in enumerate(moe.layers) if x.tower == "language" and x.kind == "block")
    layer, experts = moe.layers[at], 128 * 3 * 2048 * 768
    attention = 2048 * (32 + 4 + 4) * 128 + 32 * 128 * 2048
    full = 2 * layer.num_params + layer.extra_bytes
    assert inference_table(moe, Workload(quant="bnb-int8")).weights[at] == full - attention
    both = attention + experts
    assert inference_table(moe, Workload(quant="fp8")).weights[at] == pytest.approx(
        full - both * (1 - 4 / 128**2), abs=1
    )


def test_images_of_a_prompt_are_counted_by_the_models_own_rule():
    model = small_model()
    rows = count_batch(model, Workload(batch=2, seq_len=10, images=((112, 112), (224, 112))))
    assert rows.patches == 2 * (64 + 128)
    assert rows.prompt_tokens == 10 + 48
    assert rows.largest_patches_sq == 128**2


def test_without_images_the_tower_takes_weights_alone():
    model = small_model()
    table = inference_table(model, Workload())
    for i in model.indices("vision"):
        assert table.weights[i] > 0
        assert table.prefill[i] == table.held[i] == table.runs[i] == table.touched[i] == 0


def test_a_request_runs_the_tower_once_and_the_decoder_once_a_token():
    model = small_model()
    table = inference_table(model, Workload(seq_len=10, max_new_tokens=7, images=IMAGE))
    assert {int(table.runs[i]) for i in model.indices("vision")} == {1}
    assert {int(table.runs[i]) for i in model.indices("language")} == {7}
    embed = next(i for i, x in enumerate(model.layers) if x.tower == "language" and x.kind == "embed")
    assert table.touched[embed] == (10 + 16 + 6) * 64 * 2  # rows, not the table


def test_a_mask_is_counted_where_prompts_differ_in_length():
    model = small_model()
    block = next(i for i, x in enumerate(model.layers) if x.tower == "language" and x.kind == "block")
    plain = inference_table(model, Workload(batch=2, seq_len=2000, padded=False)).prefill[block]
    masked = inference_table(model, Workload(batch=2, seq_len=2000)).prefill[block]
    flash = inference_table(model, Workload(batch=2, seq_len=2000, attention="flash")).prefill[block]
    assert masked > plain + 2 * 2000**2
    assert flash == plain


# -- Mllama, as shipped ------------------------------------------------------------------------------------------------


NAME = "Llama-3.2-90B-Vision"
MODEL = describe(NAME)
ROWS = 4 * 1608  # of one image: four tiles of 40 x 40 patches and a class token, padded to a multiple of 8


def crossing(model: ModelSpec) -> list[int]:
    return [i for i, x in enumerate(model.layers) if x.attention is not None and x.attention.cross]


def test_every_image_costs_the_same_and_is_one_token():
    rule = MODEL.image_rule
    for size in ((1, 1), (1920, 1080), (560, 560), (30, 9000)):
        counts = rule.count(*size)
        assert (counts.patches, counts.tokens, counts.tiles, counts.patches_sq) == (ROWS, 1, 4, ROWS**2)
    with refused(ImageError):
        rule.count(0, 5)


@pytest.mark.parametrize(
    ("file", "name"),
    [
        ({"max_image_tiles": 6}, ("max_image_tiles", "6")),
        ({"size": {"height": 448, "width": 448}}, "preprocessor_config.size"),
        ({"do_resize": False}, "do_resize"),
    ],
)
def test_a_processor_file_of_another_checkpoint_is_refused(file, name):
    with refused(ConfigError, name):
        image_rule(read_config(NAME), file)


def test_without_images_cross_attention_layers_do_not_run():
    table = inference_table(MODEL, Workload(seq_len=100))
    for i in crossing(MODEL):
        assert table.runs[i] == table.kv_prompt[i] == table.kv_full[i] == table.touched[i] == 0
    for i in (*MODEL.indices("vision"), *MODEL.indices("projector")):
        assert table.prefill[i] == table.held[i] == 0


def test_flash_attention_is_refused_in_a_sentence():
    with refused(PartitionError):
        inference_table(MODEL, Workload(attention="flash"))


def test_a_map_holds_the_whole_tower_on_one_gpu():
    work = Workload(batch=2, seq_len=1000, images=((1920, 1080),))
    found = place(MODEL, Machine(gpus=tuple(Gpu(index=i, free_bytes=75 * GIB) for i in range(4))), work)
    tower = {key: device for key, device in found.device_map.items() if key.startswith("model.vision_model.")}
    assert len(tower) == len(MODEL.indices("vision"))
    assert len({*tower.values(), found.device_map["model.multi_modal_projector"]}) == 1
    assert len(set(found.device_map.values())) == 4


def test_what_the_tower_cannot_call_for_never_spills():
    # less than the tower: all of it that can leaves the GPU
    machine = Machine(gpus=(Gpu(index=0, free_bytes=150 * GIB),), cpu_bytes=512 * GIB)
    found = place(MODEL, machine, Workload(seq_len=500, images=((640, 480),)))
    spilled = {name for gone in found.spilled for name in gone.modules}
    assert any(name.startswith("model.vision_model.") for name in spilled)
    assert not spilled & {"model.vision_model.class_embedding", "model.vision_model.patch_embedding"}


def test_training_is_refused_with_the_first_layer_that_crosses():
    with refused(PartitionError, NAME, "20", "model.language_model.layers.3", "trimtab map"):
        profile_model(MODEL, DEVICES["A100-80GB"])
