"""For all tests: a thread of torch a process, for workers share the cores; kernels compiled once; a fault of torch."""

import os
import subprocess
import sys
import tempfile
from collections.abc import Generator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))
from plain_cases import mark_the_rest

pytest_plugins = ["refusals"]

SOURCE = Path(__file__).parents[1] / "src" / "trimtab"

# before anything imports torch, and for every process a test starts; set them yourself to test with more
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")
# what Transformers was asked is remembered for this run alone, by all workers: their environment is the first process's
ANSWERS = None if "TRIMTAB_CACHE" in os.environ else tempfile.TemporaryDirectory(prefix="trimtab-tests-")
if ANSWERS is not None:
    os.environ["TRIMTAB_CACHE"] = ANSWERS.name

# torch 2.13: bf16 attention on an AVX-512 processor held to AVX2 by ATEN_CPU_CAPABILITY
FAULT_OF_TORCH = "pack_vnni2 is only supported when avx512 is supported"


def _skip_fault_of_torch() -> Generator[None, object, object]:
    try:
        return (yield)
    except Exception as error:
        if "ATEN_CPU_CAPABILITY" in os.environ and FAULT_OF_TORCH in str(error):
            pytest.skip(f"torch's own fault under ATEN_CPU_CAPABILITY: {FAULT_OF_TORCH}")
        raise


@pytest.hookimpl(wrapper=True)
def pytest_runtest_setup() -> Generator[None, object, object]:
    return (yield from _skip_fault_of_torch())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, object, object]:
    return (yield from _skip_fault_of_torch())


# compiles the loops of `balance`: 24 s of CPU on a fast core, into numba's cache beside the source
PACKS = """
import numpy as np
from trimtab.balance.packing import warm_up
from trimtab.balance.step import share_step
warm_up()
share_step(np.ones((8, 2), np.int64), np.ones(8), limits=(3, 9), dp=2)
"""


def pytest_sessionstart(session: pytest.Session) -> None:
    """Before workers start: else each of them compiles every kernel for itself."""
    is_worker = hasattr(session.config, "workerinput")
    if is_worker or not session.config.getoption("numprocesses", None):
        return
    if not any((SOURCE / "balance" / "__pycache__").glob("*.nbi")):
        subprocess.run([sys.executable, "-c", PACKS], check=False)  # one that fails fails in the tests too


@pytest.hookimpl(tryfirst=True)  # before -m chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark_the_rest(items)
