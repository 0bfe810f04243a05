"""Recompute on Transformers 5.17, whose layers checkpoint `__call__` where those of 5.23 checkpoint `forward`.

Runs the tests of tests/torch/test_recompute.py in an environment that has it; needs torch and transformers==5.17.*.
"""

import sys
from pathlib import Path

import pytest

pytest.importorskip("torch", reason="runs tiny models")
transformers = pytest.importorskip("transformers", reason="holds the models that recompute")
if not transformers.__version__.startswith("5.17."):
    pytest.skip(f"needs Transformers 5.17, and {transformers.__version__} is installed", allow_module_level=True)

sys.path.insert(0, str(Path(__file__).parents[1] / "torch"))  # the helpers of tests/torch, as pytest finds them there

from test_recompute import *  # noqa: E402, F403

pytestmark = [
    pytest.mark.integration,
    pytest.mark.torch,
    pytest.mark.filterwarnings("ignore:.*hidden_state.* is deprecated:FutureWarning"),
]
