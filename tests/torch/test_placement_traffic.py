"""Bytes over the links of a model that does not fit, beside Accelerate's. Needs torch, Transformers and Accelerate."""

from __future__ import annotations

import logging

import pytest
from offload_traffic import FAMILIES, open_shop, run_accelerate, run_ours

pytestmark = [
    pytest.mark.torch,
    # Transformers at a model whose first module Accelerate has offloaded
    pytest.mark.filterwarnings("ignore:You are calling .generate\\(\\) with the `input_ids` being on a device type"),
]
NUM_NEW = 64  # a tower streams into the room that their cache takes later


@pytest.fixture(autouse=True)
def quiet_accelerate():
    """It says at each dispatch that parameters are on the meta device."""
    logger = logging.getLogger("accelerate.big_modeling")
    before, logger.disabled = logger.disabled, True
    yield
    logger.disabled = before


@pytest.mark.parametrize("family", FAMILIES)
def test_a_shortage_of_vision_tower_and_embedding_costs_a_fiftieth(family, tmp_path):
    shop = open_shop(family, tmp_path, num_new=NUM_NEW)
    for share in (0.3, 1.0):
        gpus = {0: int(shop.weights - share * shop.movable)}
        ours, theirs = run_ours(shop, gpus).total, run_accelerate(shop, gpus).total
        assert 50 * ours <= theirs, (share, ours, theirs)


def test_two_gpus_and_deeper_shortages_never_cost_more(tmp_path):
    shop = open_shop("gemma3", tmp_path, num_new=8)
    for share, num_gpus in ((2.0, 1), (4.0, 1), (0.5, 2)):
        free = int(shop.weights - share * shop.movable)
        gpus = {i: int(free / num_gpus * 1.05) for i in range(num_gpus)}
        ours, theirs = run_ours(shop, gpus), run_accelerate(shop, gpus)
        assert ours.total <= theirs.total, (share, num_gpus, ours, theirs)
