"""A plan's decision to share images, carried out on two gloo ranks against one process. Needs torch, Transformers 5."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs tiny models on gloo ranks")
pytest.importorskip("transformers", minversion="5", reason="holds the models")

import vision_plans
from gloo_ranks import on_ranks

pytestmark = [pytest.mark.torch, pytest.mark.filterwarnings("ignore")]


def test_two_ranks_share_images_as_their_plan_decides(tmp_path: Path) -> None:
    """Over tp, sp, cp and dp, summed and averaged, by time and by memory; and what no group can carry out."""
    on_ranks(vision_plans.run_plans, tmp_path)
