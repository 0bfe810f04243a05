"""The house: a file imports from its own folder and from lower floors only; no torch below floor 5."""

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

from plain_cases import KEPT
from trimtab.models.families import FAMILIES
from trimtab.public import MODULES

SOURCE = Path(__file__).parents[2] / "src" / "trimtab"
FLOORS = {
    "errors": 0,
    "compiled": 0,
    **dict.fromkeys(("public", "torch", "vision", "testing"), 0),  # names, loaded when they are used
    "address": 0,
    "ask": 0,
    "files": 0,
    "limited": 0,
    "options": 0,
    "lora": 0,
    "units": 0,
    "parallel": 0,
    "typed_json": 0,
    "specs": 0,
    "models": 1,
    "samples": 2,
    "costs": 2,
    "balance": 3,
    "partition": 3,
    "placement": 3,
    "plan": 4,
    "runtime": 5,
    "adapters": 5,
    "report": 5,
    "demo": 5,
    "serve": 6,
    "cli": 7,
}
INNER_FLOORS = {
    "costs/bands": 0,
    "costs/devices": 0,
    "costs/formula": 1,
    "costs/profile": 2,  # the table that every solver reads
    "costs/measured": 3,
    "partition/schedules": 0,
    "partition/tiers": 0,
    "partition/assess": 1,
    "partition/cuts": 1,
    "partition/simulate": 1,
    "partition/layer_table": 2,
    "partition/stages": 3,
    "partition/published": 4,
    "partition/pai_notebook": 5,
    "models/images": 0,  # rules of counting
    "models/families": 1,
    "models/description": 2,
    "models/describe": 3,
    "models/asking": 4,  # torch, in a child process
    "plan/options": 0,  # no NumPy: `--help` reads it
    "plan/plan": 0,  # the nouns of the file
    "plan/decide": 1,
    "plan/file": 2,  # a decided case as a plan, and back
    "plan/build": 3,
    "plan/predict": 3,
    "plan/runs": 3,
    "plan/replan": 4,  # what a run taught, into the next plan
    "plan/layout": 3,  # what our own runtime carries out
}
"""The same inside the larger folders: a part imports from itself and from lower parts."""
TORCH_FILES = {
    *(f"costs/measured/{x}.py" for x in ("stand_ins", "timed", "timed_model", "traced", "traced_step")),
    *(f"models/asking/{x}.py" for x in ("units", "forward", "inputs", "batches", "blocks", "layers", "model")),
    *(f"models/asking/{x}.py" for x in ("blank", "images", "processors", "internvl_chat")),
}
FRAMEWORKS = {"torch", "transformers", "accelerate", "safetensors", "megatron", "deepspeed", "pandas"}
BANNED_NAMES = {"utils.py", "common.py", "base.py", "registry.py", "constants.py", "helpers.py"}


def files() -> list[Path]:
    return sorted(SOURCE.rglob("*.py"))


def imported_modules(path: Path) -> set[str]:
    """Return absolute names of everything a file imports, inside functions and for types alone as well."""
    modules: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            modules.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative imports hide the floor"
            modules.add(node.module or "")
    return modules


def test_a_file_imports_from_lower_floors_and_its_own_folder() -> None:
    wrong = []
    for path in files():
        room = path.relative_to(SOURCE).parts[0].removesuffix(".py")
        if room in ("__init__", "__main__"):
            continue
        assert room in FLOORS, f"{path} stands on no floor: add its folder to the design"
        for module in sorted(imported_modules(path)):
            if not module.startswith("trimtab.") or module.split(".")[1] == room:
                continue
            above = FLOORS[module.split(".")[1]]
            if above > FLOORS[room] or above == FLOORS[room] > 0:  # floor 0: the nouns
                wrong.append(f"{path.relative_to(SOURCE)} (floor {FLOORS[room]}) imports {module} (floor {above})")
    assert not wrong


def test_a_part_of_a_folder_imports_from_lower_parts_and_itself() -> None:
    wrong = []
    folders = {part.partition("/")[0] for part in INNER_FLOORS}
    for path in files():
        room, *rest = path.relative_to(SOURCE).with_suffix("").parts
        if room not in folders or rest == ["__init__"]:
            continue
        part = f"{room}/{rest[0]}"
        assert part in INNER_FLOORS, f"{path} stands on no floor of {room}"
        for module in sorted(imported_modules(path)):
            _, _, inside = module.partition(f"trimtab.{room}.")
            other = f"{room}/{inside.partition('.')[0]}"
            # floor 0: options and nouns
            if inside and other != part and INNER_FLOORS[other] >= max(1, INNER_FLOORS[part]):
                wrong.append(f"{path.relative_to(SOURCE)} imports {module}")
    assert not wrong


def test_no_circle_of_imports() -> None:
    """Imports inside functions count: they put off a circle, they do not open it."""
    home = {".".join(("trimtab", *path.relative_to(SOURCE).with_suffix("").parts)): path for path in files()}
    needs = {module: imported_modules(path) & set(home) for module, path in home.items()}
    while free := {module for module, needed in needs.items() if not needed & set(needs)}:
        needs = {module: needed for module, needed in needs.items() if module not in free}
    assert not needs


def test_no_framework_below_floor_five() -> None:
    wrong = []
    for path in files():
        relative = path.relative_to(SOURCE)
        if FLOORS.get(relative.parts[0].removesuffix(".py"), 0) in (5, 6) or str(relative) in TORCH_FILES:
            continue
        found = {m.split(".")[0] for m in imported_modules(path)} & FRAMEWORKS
        wrong += [f"{relative} imports {found}"] if found else []
    assert not wrong


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
    pytest.importorskip("torch.cuda", reason="some of them need torch")  # `torch` alone may be tests/torch
    pytest.importorskip("transformers", reason="some of them need Transformers")
    names = {module: sys.modules[module].__all__ for module in MODULES if importlib.import_module(module)}
    for module, public in names.items():
        for name in public:
            assert getattr(sys.modules[module], name) is not None
    assert len(names["trimtab"]) <= 45
    assert len({name for public in names.values() for name in public}) == sum(map(len, names.values()))  # each once


def test_every_name_in_the_table_of_long_tests_is_a_test() -> None:
    tests = Path(__file__).parents[1]
    for name in KEPT:
        file, _, function = name.partition("::")
        assert f"def {function}(" in (tests / file).read_text(encoding="utf-8"), f"plain_cases.py: no test {name}"


def test_a_declared_family_is_named_in_its_own_file_and_by_exports_alone() -> None:
    """What is known of a family stands in one place; an export says which families its framework has."""
    named = set(FAMILIES)
    wrong = []
    for path in files():
        rooms = path.relative_to(SOURCE).parts
        if rooms == ("models", "families.py") or rooms[0] == "adapters":
            continue
        tree = ast.parse(path.read_text(encoding="utf-8"))
        wrong += [
            f"{path}:{node.lineno} {node.value}"
            for node in ast.walk(tree)
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value in named
        ]
    assert not wrong
