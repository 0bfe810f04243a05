"""Every test of this folder needs the extras [data,torch]: it is marked so, and skipped with a reason without them."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

import pytest

sys.path.append(str(Path(__file__).parents[1] / "unit"))  # configurations that both folders read
NEEDED = ("torch", "transformers", "accelerate", "PIL", "tokenizers", "jinja2")
MISSING = [name for name in NEEDED if find_spec(name) is None]


class _Skipped(pytest.Module):
    def collect(self) -> NoReturn:
        pytest.skip(f"needs {' and '.join(MISSING)}: pip install 'trimtab[data,torch]'", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module:
    module: pytest.Module = (_Skipped if MISSING else pytest.Module).from_parent(parent, path=module_path)
    module.add_marker(pytest.mark.torch)
    return module


@pytest.fixture
def in_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Questions to Transformers are answered here instead of in a child process, which takes seconds to start."""
    from trimtab.models.asking.model import described

    monkeypatch.setattr("trimtab.models.describe.ask_transformers", lambda config, _: described(config))
