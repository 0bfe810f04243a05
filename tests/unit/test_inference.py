"""Bytes that serving takes: weights by format, caches by layer, and what the phases of a layer keep alive."""

import pytest
from placement_cases import small_model

from trimtab.models.describe import describe
from trimtab.placement.bytes import inference_table
from trimtab.placement.machine import QUANTS, Workload, count_batch

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
