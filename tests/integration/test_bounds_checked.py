"""Compiled loops of the packer never leave their arrays: the property tests once more, compiled with bounds checked."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FILES = ("test_packing.py", "test_pack_loops.py", "test_schedule.py", "test_step.py", "test_image_assignment.py")

pytestmark = pytest.mark.integration


def test_property_tests_hold_with_bounds_checked(tmp_path):
    environment = os.environ | {"NUMBA_BOUNDSCHECK": "1", "NUMBA_CACHE_DIR": str(tmp_path)}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    done = subprocess.run(
        [*command, *(str(ROOT / "tests" / "unit" / name) for name in FILES)],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-3000:]
