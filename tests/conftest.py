"""For all tests: one thread of torch a process, for the workers share the cores; a fault of torch that is not ours."""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

# before anything imports torch, and for every process a test starts; set them yourself to test with more
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

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
