"""The drop-in for vision data parallel inside verl's own FSDP engine; needs torch and verl 0.9.1.

An environment of its own, as verl asks for Transformers below 5.11: bench/verl_engine.py says how.
"""

from __future__ import annotations

import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.integration


@pytest.mark.skipif(find_spec("verl") is None, reason="needs verl 0.9.1")
def test_a_step_of_verls_engine_has_the_gradients_it_has_without_sharing() -> None:
    bench = Path(__file__).parents[2] / "bench" / "verl_engine.py"
    done = subprocess.run([sys.executable, str(bench)], capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-3000:]
    told = json.loads(done.stdout.splitlines()[-1])
    assert told["largest_relative_error_of_a_gradient"] < 1e-5
    assert told["of_the_tower"] > 20
    assert min(told["patches_encoded_by_rank"]) > 0
    assert sum(told["patches_encoded_by_rank"]) == 212
