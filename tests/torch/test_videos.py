"""Videos from a record to a pack: tokens, rows and ids are the real processor's. Needs torch; PyAV for files."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch
for module in ("torch", "transformers", "PIL", "jinja2", "tokenizers"):
    pytest.importorskip(module, reason=f"{module} is not installed")

FAMILIES = ("qwen2_5_vl", "qwen3_vl", "internvl", "llava_onevision")
HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """What every family's run says, by name: one process for all, as torchvision's stand-in must come first."""
    folder = tmp_path_factory.mktemp("videos")
    command = [sys.executable, str(HERE / "video_runs.py"), str(folder), *FAMILIES]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ, timeout=500)
    assert done.returncode == 0, done.stderr[-3000:]
    found = [json.loads(line[1:]) for line in done.stdout.splitlines() if line.startswith("@")]
    return {run["family"]: run for run in found}


@pytest.mark.parametrize("family", FAMILIES)
def test_a_video_is_sized_trained_and_packed_as_its_processor_makes_it(runs, family):
    run = runs[family]
    assert all(run["same_ids"]), run
    assert all(run["same_keys"]), run
    assert all(apart < 1e-5 for apart in run["apart"]), "Pillow's images and torchvision's"
    per_tile = 17 / 16 if family == "internvl" else 1  # a class token with each tile
    assert [int(rows * per_tile) for rows in run["rows"]] == run["patches"]
    assert run["pack"] <= 1e-5 * run["scale"]
    assert {"frames", "column"} <= set(run["names"])
