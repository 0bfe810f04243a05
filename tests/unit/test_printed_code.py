"""Code that is printed or shown: every name of ours in it is there."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from trimtab.public import MODULES, homes

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src"
SHOWN = [*(ROOT / "docs").rglob("*.md"), *(ROOT / "examples").rglob("*.py"), ROOT / "README.md"]
_IMPORT = re.compile(r"from (trimtab[\w.]*) import (\([^)]*\)|[\w, ]+)")
_DOTTED = re.compile(r"(?<![\w./-])trimtab(?:\.\w+)+")
_FILES = (".py", ".md", ".toml", ".json", ".yaml", ".html", ".npz", ".org", ".git")


def names_in(text: str) -> Iterator[str]:
    """Dotted names that a text imports or spells."""
    for module, imported in _IMPORT.findall(text):
        for name in re.sub(r"#.*", "", imported).strip("()").replace("\n", " ").split(","):
            if name.strip():
                yield f"{module}.{name.split()[0]}"
    yield from (name for name in _DOTTED.findall(text) if not name.endswith(_FILES))


def strings_in(path: Path) -> str:
    """The texts of a file of ours that are no documentation, but for its examples."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return "\n".join(x.value for x in ast.walk(tree) if isinstance(x, ast.Constant) and isinstance(x.value, str))


def is_there(name: str) -> bool:
    """Whether a dotted name is a public one, or stands in the module of that path."""
    parts = name.split(".")
    for stop in range(len(parts), 0, -1):
        path = SOURCE.joinpath(*parts[:stop])
        file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if not file.is_file():
            continue
        rest = parts[stop:]
        public = homes(str(file)) if ".".join(parts[:stop]) in MODULES else {}
        return not rest or rest[0] in public or not {rest[0], "__getattr__"}.isdisjoint(_defined(file))
    return False


def _defined(file: Path) -> set[str]:
    found = {"__version__"}
    for node in ast.parse(file.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            found |= {x.asname or x.name for x in node.names}
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {x.id for x in targets if isinstance(x, ast.Name)}
    return found


def test_every_name_of_ours_in_shown_code_is_there() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SHOWN}
    texts |= {path: strings_in(path) for path in (SOURCE / "trimtab").rglob("*.py")}
    wrong = [f"{path.name}: {name}" for path, text in texts.items() for name in names_in(text) if not is_there(name)]
    assert not wrong


def test_a_name_that_is_not_there_is_seen() -> None:
    assert is_there("trimtab.torch.apply_recompute")
    assert not is_there("trimtab.apply_recompute")
    assert list(names_in("from trimtab import a, b as c\n")) == ["trimtab.a", "trimtab.b"]
