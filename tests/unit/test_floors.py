"""The house: a file imports from its own folder and from lower floors only; no torch below floor 4."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from plain_cases import KEPT

SOURCE = Path(__file__).parents[2] / "src" / "trimtab"
FLOORS = {
    "errors": 0,
    "files": 0,
    "units": 0,
    "typed_json": 0,
    "specs": 0,
    "models": 1,
    "samples": 1,
    "costs": 1,
    "balance": 2,
    "partition": 2,
    "plan": 3,
    "runtime": 4,
    "adapters": 4,
    "report": 4,
    "demo": 4,
    "serve": 5,
    "cli": 6,
}
TORCH_FILES = {
    *("costs/traced.py", "costs/traced_step.py", "costs/traced_mode.py", "costs/traced_kernels.py"),
    *("costs/traced_weights.py", "costs/traced_inputs.py", "costs/timed.py", "costs/timed_model.py"),
    *(f"models/asking/{x}.py" for x in ("build", "units", "forward", "inputs", "blocks", "layers", "model")),
}
FRAMEWORKS = {"torch", "transformers", "accelerate", "safetensors", "megatron", "deepspeed", "ray", "pandas"}
BANNED_NAMES = {"utils.py", "common.py", "base.py", "registry.py", "constants.py", "helpers.py"}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Absolute names of everything a file imports, inside functions too; type-only imports left out."""
    modules: set[str] = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor"
            modules.add(node.module or "")
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return modules


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_a_file_imports_from_lower_floors_and_its_own_folder(path: Path) -> None:
    room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    if room in ("__init__", "__main__"):
        return
    assert room in FLOORS, f"{path} stands on no floor: add its folder to the design"
    for module in imported_modules(path):
        if not module.startswith("trimtab."):
            continue
        other = module.split(".")[1]
        if other == room:
            continue
        together = FLOORS[room] == FLOORS[other] and FLOORS[room] == 0  # the nouns
        assert FLOORS[other] < FLOORS[room] or together, (
            f"{path.relative_to(SOURCE)} (floor {FLOORS[room]}) imports {module} (floor {FLOORS[other]})"
        )


@pytest.mark.parametrize("path", files(), ids=lambda p: str(p.relative_to(SOURCE)))
def test_no_framework_below_floor_four(path: Path) -> None:
    relative = path.relative_to(SOURCE)
    room = relative.parts[0].removesuffix(".py")
    if FLOORS.get(room, 0) in (4, 5) or str(relative) in TORCH_FILES:
        return
    found = {m.split(".")[0] for m in imported_modules(path)} & FRAMEWORKS
    assert not found, f"{relative} imports {found}"


def test_no_file_is_named_after_nothing() -> None:
    assert not [p for p in files() if p.name in BANNED_NAMES]


def modules_after(statement: str) -> set[str]:
    code = f"import sys; {statement}; print('\\n'.join(sorted(m.split('.')[0] for m in sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(result.stdout.split())


def test_import_trimtab_loads_nothing_heavy() -> None:
    heavy = {"numpy", "numba", "pydantic", "yaml", "rich", "typer", "pyarrow", "PIL", "tokenizers"} | FRAMEWORKS
    assert not modules_after("import trimtab") & heavy


def test_the_command_line_starts_without_heavy_modules() -> None:
    heavy = {"numpy", "numba", "pydantic", "yaml", "pyarrow", "PIL", "tokenizers"} | FRAMEWORKS
    assert not modules_after("import trimtab.cli.main") & heavy


def test_every_public_name_exists() -> None:
    import trimtab

    for name in trimtab.__all__:
        assert getattr(trimtab, name) is not None
    assert set(trimtab.__all__) == set(trimtab._HOMES)


def test_every_name_in_the_table_of_long_tests_is_a_test() -> None:
    tests = Path(__file__).parents[1]
    for name in KEPT:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (tests / file).read_text(encoding="utf-8"), f"plain_cases.py: no test {name}"
