"""docs/tables/model-support.md is the page of the sweeps, and a sample of each sweep is run again."""

import importlib.util
import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import transformers

BENCH = Path(__file__).parents[2] / "bench"
sys.path[:0] = [str(BENCH), str(BENCH / "columns")]
from cell import FAMILIES, read_column, read_version  # noqa: E402

import model_support  # noqa: E402

SAMPLE = ("smolvlm", "qwen2_5_vl", "blip")  # one that follows the conventions, one by hand, one without a decoder's


def test_the_page_is_that_of_the_sweeps():
    assert model_support.PAGE.read_text(encoding="utf-8") == model_support.page()


def test_every_column_has_a_cell_for_every_family_and_a_reason_for_every_no():
    if read_version("described") != transformers.__version__:
        pytest.skip("another Transformers than the table's")
    for name in model_support.COLUMNS:
        cells = read_column(name)
        assert list(cells) == FAMILIES
        assert all(cell.yes or cell.note for cell in cells.values()), name


@pytest.mark.parametrize("column", model_support.COLUMNS)
def test_a_sample_of_the_sweep_gives_the_written_cells(column):
    if column == "sized" and "TORCHVISION" not in os.environ:
        pytest.skip(
            "real processors want the Python code of torchvision: TORCHVISION=FOLDER, see bench/columns/sized.py"
        )
    script, *arguments = model_support.COLUMNS[column][0]
    path = BENCH / "columns" / script  # by its path: bench/ has a script of one of the names
    spec = importlib.util.spec_from_file_location(f"column_{column}", path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclasses look there
    spec.loader.exec_module(module)
    check = getattr(module, "_".join(["check", *(word.strip("-").replace("-", "_") for word in arguments)]))
    written = read_column(column)
    for family in SAMPLE:
        try:
            found = check(family).yes
        except Exception:  # as in a sweep
            found = False
        assert found == written[family].yes, family


def test_a_wrong_count_is_seen(monkeypatch):
    import described

    honest = described.describe_fields

    def dishonest(fields):
        spec = honest(fields)
        first, *others = spec.layers
        return replace(spec, layers=(replace(first, num_params=first.num_params + 1), *others))

    assert described.check("smolvlm").yes
    assert "embed_dim must be divisible by num_heads" in described.check("aya_vision").note
    monkeypatch.setattr(described, "describe_fields", dishonest)
    assert described.check("smolvlm").note == "parameters of model.vision_model.embeddings differ"
