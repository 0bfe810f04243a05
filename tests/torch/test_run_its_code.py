"""Code of a model's folder: it runs where the user asks for it, in a limited child, and nowhere else.

Of models/ (describe) and `ask`. Needs torch and Transformers.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from widget_model import Widget, WidgetConfig

from refusals import refused
from trimtab.errors import ConfigError, UnknownModelError
from trimtab.models import describe_model, save_description
from trimtab.models.describe import describe

CODE = Path(__file__).with_name("widget_model.py")
AUTO_MAP = {"AutoConfig": "modeling_own.WidgetConfig", "AutoModelForImageTextToText": "modeling_own.Widget"}


def write(folder: Path, *, first: str = "", auto_map: Any = AUTO_MAP) -> Path:
    """A folder whose code is the widget's, after a line of its own."""
    folder.mkdir()
    (folder / "modeling_own.py").write_text(CODE.read_text().replace("import torch\n", f"import torch\n{first}\n", 1))
    fields = {"model_type": "trimtab_widget", "num_hidden_layers": 5, "auto_map": auto_map}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_its_layers_are_those_that_the_code_builds(tmp_path: Path) -> None:
    folder = write(tmp_path / "own")
    found = describe(folder, run_its_code=True)
    with torch.device("meta"):
        built = Widget(WidgetConfig(num_hidden_layers=5))
    own = describe_model(built.eval())
    assert found.layers == own.layers
    assert found.num_params == own.num_params
    assert any("own code" in note for note in found.notes)
    save_description(found, tmp_path / "model.json")
    assert describe(tmp_path / "model.json").layers == own.layers


def test_it_does_not_run_unless_it_was_asked_for(tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    folder = write(tmp_path / "own", first=f"open({str(ran)!r}, 'w').close()")
    with refused(UnknownModelError, "trimtab_widget"):
        describe(folder)
    assert not ran.exists()
    describe(folder, run_its_code=True)
    assert ran.exists()


@pytest.mark.parametrize(
    "first",
    [
        "import socket; socket.create_connection(('127.0.0.1', 9))",
        "import subprocess; subprocess.run(['true'])",
        "import os; os.system('true')",
        "raise RuntimeError('no')",
        "import not_there_at_all",
    ],
)
def test_what_it_may_not_do_or_cannot_is_told(tmp_path: Path, first: str) -> None:
    folder = write(tmp_path / "own", first=first)
    with refused(ConfigError, str(folder)):
        describe(folder, run_its_code=True)


def test_a_folder_without_code_or_model_is_refused(tmp_path: Path) -> None:
    shutil.copytree(write(tmp_path / "own", auto_map={"AutoConfig": AUTO_MAP["AutoConfig"]}), tmp_path / "again")
    with refused(ConfigError, "auto_map"):
        describe(tmp_path / "own", run_its_code=True)
    (tmp_path / "again" / "config.json").write_text('{"model_type": "qwen2_vl"}')
    with refused(ConfigError, "--run-its-code"):
        describe(tmp_path / "again", run_its_code=True)
    with refused(ConfigError, "--run-its-code"):
        describe("Qwen2.5-VL-7B", run_its_code=True)
