"""The plug-in for vision data parallel inside verl's own FSDP engine, and in ROLL's source; needs torch, verl 0.9.1.

An environment of its own, as verl asks for Transformers below 5.11: bench/verl_engine.py says how.
"""

import ast
import importlib.metadata
import json
import os
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


def test_verl_imports_the_plug_in_where_a_model_is_configured() -> None:
    pytest.importorskip("torch")
    try:
        files = {str(file): file.locate() for file in importlib.metadata.files("verl") or []}
    except importlib.metadata.PackageNotFoundError:
        pytest.skip("needs verl 0.9.1: pip install --no-deps verl==0.9.1")
    from trimtab.runtime.vision import recipe

    imports: dict[str, Any] = {}
    exec(Path(files["verl/utils/import_utils.py"]).read_text(encoding="utf-8"), imports)
    sys.modules.pop("trimtab.runtime.vision.patched", None)
    try:
        imports["import_external_libs"]("trimtab.runtime.vision.patched")
        assert len(recipe._originals) == len(recipe._tower_classes()) > 0
    finally:
        recipe.unapply_vision_dp_patch()
    model = (
        node for node in ast.walk(tree_of(files["verl/workers/config/model.py"])) if isinstance(node, ast.ClassDef)
    )
    assert "import_external_libs(self.external_lib)" in ast.unparse(next(x for x in model if x.name == "HFModelConfig"))
    assert recipe._ULYSSES["verl.utils.ulysses"] in functions_of(files["verl/utils/ulysses.py"])


@pytest.mark.skipif("ROLL_SOURCE" not in os.environ, reason="needs ROLL_SOURCE, a clone of alibaba/ROLL: no release")
def test_rolls_source_has_what_the_plug_in_names() -> None:
    pytest.importorskip("torch")
    from trimtab.runtime.vision import recipe, roll

    source = Path(os.environ["ROLL_SOURCE"])
    try:
        for worker in roll.WORKERS.values():
            module, _, kind = worker.rpartition(".")
            found = ast.walk(tree_of(source / f"{module.replace('.', '/')}.py"))
            assert kind in {node.name for node in found if isinstance(node, ast.ClassDef)}
    finally:
        recipe.unapply_vision_dp_patch()
    for module, function in recipe._ULYSSES.items():
        if module.startswith("roll."):
            assert function in functions_of(source / f"{module.replace('.', '/')}.py")
    assert "safe_import_class(worker_cls)" in (source / "roll/distributed/executor/cluster.py").read_text()


def tree_of(file: Any) -> ast.Module:
    return ast.parse(Path(file).read_text(encoding="utf-8"))


def functions_of(file: Any) -> set[str]:
    return {node.name for node in ast.walk(tree_of(file)) if isinstance(node, ast.FunctionDef)}


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
