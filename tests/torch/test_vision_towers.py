"""Tests of runtime/vision/ (apply, handle, outputs, recipe, functions) where the tower's own forward is replaced.

Needs torch and Transformers, 5 or 4.57: under the latter run this file alone.
pip install 'transformers==4.57.6' && pytest tests/torch/test_vision_towers.py
"""

from pathlib import Path

import pytest

pytest.importorskip("transformers", minversion="4.57", reason="holds the towers")

import vision_towers
from gloo_ranks import on_ranks

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.integration
def test_patched_classes_share_images_and_are_whole_again(tmp_path: Path) -> None:
    """float64, features and gradients to 1e-12; fewer images than ranks, and clips."""
    on_ranks(vision_towers.run_patched, tmp_path, num_ranks=3)
