"""The drop-in for vision data parallel inside verl's own FSDP engine; needs torch and verl 0.9.1.

An environment of its own, as verl asks for Transformers below 5.11: bench/verl_engine.py says how.
"""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

pytestmark = pytest.mark.integration


def test_the_workload_stands_in_for_the_function_of_verls_own_module(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    try:
        files = importlib.metadata.files("verl") or []
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs verl 0.9.1: pip install --no-deps verl==0.9.1")
    from trimtab.adapters.verl import stand_in_for

    (path,) = [file.locate() for file in files if str(file) == "verl/utils/seqlen_balancing.py"]
    stubs: dict[str, Any] = {n: ModuleType(n) for n in ("verl", "verl.protocol", "verl.utils", "verl.utils.device")}
    stubs["verl.protocol"].DataProto, stubs["verl.utils"].tensordict_utils = object, None
    stubs["verl.utils.device"].get_device_name = lambda: "cpu"
    for name, stub in stubs.items():
        monkeypatch.setitem(sys.modules, name, stub)
    balancing: dict[str, Any] = {}
    exec(Path(path).read_text(encoding="utf-8"), balancing)
    by_name, lengths = balancing["calculate_workload"], torch.tensor([10, 1, 1, 1])
    before = by_name(lengths).tolist()
    assert before == [24576 * n + n * n for n in lengths.tolist()]
    stand_in_for(by_name, lambda tokens: torch.where(tokens == 1, 300, 1))
    assert by_name(lengths).tolist() == [1, 300, 300, 300]
    assert "calculate_workload" in balancing["rearrange_micro_batches"].__code__.co_names


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
