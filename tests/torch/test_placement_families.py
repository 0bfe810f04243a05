"""A model spread over simulated devices answers what it answers whole. Needs torch and Transformers."""

import pytest
import torch
from rounding import assert_close
from simulated_devices import simulated
from spread_cases import FAMILIES, GENERATE, coarse_maps, make_case, maps_of

from trimtab.runtime.placing.load import load_placed, move_inputs

NUM_MAPS = 20


@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_every_map_gives_the_whole_models_answer(name, tmp_path):
    case = make_case(name, tmp_path)
    kinds = set()
    with simulated():
        for number, drawn in enumerate(maps_of(case, NUM_MAPS)):
            offload = (
                tmp_path / f"offload{number}" if name == "glm4v_moe" else None
            )  # whose experts loading puts together
            model = load_placed(case.folder, drawn.placement, offload_folder=offload)
            inputs = move_inputs(model, case.inputs) if number % 2 else case.inputs
            logits = model(**inputs).logits
            assert logits.device == inputs["input_ids"].device
            assert_close(logits.cpu(), case.logits, drawn)
            assert torch.equal(model.generate(**inputs, **GENERATE).cpu(), case.tokens), (drawn, "generate")
            kinds.add(drawn.kind)
        for drawn in coarse_maps(case):
            model = load_placed(case.folder, drawn)
            inputs = move_inputs(model, case.inputs)
            assert_close(model(**inputs).logits.cpu(), case.logits, drawn)
            assert torch.equal(model.generate(**inputs, **GENERATE).cpu(), case.tokens), (drawn, "generate")
    assert any("spilled" in kind and not kind.startswith("solved, 0") for kind in kinds)
