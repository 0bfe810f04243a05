"""`trimtab export FRAMEWORK` and `trimtab check --for FRAMEWORK`, on plans and on bare Megatron flags."""

import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).parents[2] / "bench"))

import exports
import tables
from trimtab.adapters.frameworks import FRAMEWORKS, find_target
from trimtab.models.describe import describe

Run = Any
FLAGS = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 4"


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_every_framework_has_its_file_its_help_and_its_row_in_the_docs(run: Run, name: str) -> None:
    assert tables.EXPORTS_PAGE.read_text(encoding="utf-8") == tables.exports_page()
    assert FRAMEWORKS[name].help.split()[0] in run("export", name, "--help").out


def test_what_a_host_is_said_to_carry_is_proved_by_a_test_that_is_there() -> None:
    root = Path(__file__).parents[2]
    text = (root / "docs" / "tables" / "exports.md").read_text(encoding="utf-8")
    proofs = dict(re.findall(r"^- (\w): `(tests/[\w/]+\.py::test_\w+)`", text, re.MULTILINE))
    for path, _, function in (proof.partition("::") for proof in proofs.values()):
        assert f"\ndef {function}(" in (root / path).read_text(encoding="utf-8"), f"{path} has no {function}"
    _, _, table = text.partition("| host | packs | split | recompute | vision data parallel | sharded state |")
    rows = [row.strip("| ").split(" | ") for row in table.partition("\n\n")[0].strip().splitlines()[1:]]
    carried = [cell for row in rows for cell in row[1:] if cell.startswith("carried")]
    assert len(carried) > 40
    for cell in (cell for row in rows for cell in row[1:]):
        assert re.fullmatch(r"carried \w(, .*)?|(recipe|priced|–)(, .*)?", cell), cell
    assert {cell.split()[1].rstrip(",") for cell in carried} == set(proofs)
    titles = [find_target(name).title for name in FRAMEWORKS]
    assert all(any(row[0].startswith(title) for row in rows) for title in titles)


@pytest.fixture(scope="module")
def split(plan_drawn: Callable[..., Path]) -> Path:
    """A plan over four ranks: it cuts inside the vision tower."""
    return plan_drawn("--pp 4 --tp 2", "num_microbatches=8")


@pytest.mark.parametrize("name", ["megatron", "ms-swift", "pai-megatron"])
def test_a_plan_that_megatron_cannot_run_is_refused_and_fitted(run, split, tmp_path, name):
    refused = run("export", name, split, "--json")
    assert refused.code == 2
    assert "--fit" in refused.json["error"]
    failing = run("check", split, "--for", name, "--json")
    assert failing.code == 1
    assert all(x in failing.json["problems"][0] for x in ("model.visual.blocks.", "--fit", "--for megatron"))

    fitted = run("export", name, split, "--fit", tmp_path / "fit", "--out", tmp_path / "out.txt", "--json")
    assert fitted.code == 0, fitted.err
    assert fitted.json["file"] == str(tmp_path / "out.txt")
    assert (tmp_path / "out.txt").read_text(encoding="utf-8").endswith("\n")
    assert "the best plan found for" in fitted.json["notes"][0]
    assert run("check", tmp_path / "fit", "--for", name, "--vision-cleared").code == 0
    assert run("export", name, tmp_path / "fit").out == (tmp_path / "out.txt").read_text(encoding="utf-8")
    again = run("export", name, tmp_path / "fit", "--json").json
    assert again == {key: value for key, value in {**fitted.json, "notes": []}.items() if key != "file"}


def test_the_vision_trap_fails_the_check_until_the_launcher_is_said_to_clear_it(run, split, tmp_path):
    assert run("export", "megatron", split, "--fit", tmp_path / "fit").code == 0
    caught = run("check", tmp_path / "fit", "--for", "megatron")
    assert caught.code == 1
    assert "of 32 vision layers are built, silently" in caught.out
    cleared = run("check", tmp_path / "fit", "--for", "megatron", "--vision-cleared")
    assert cleared.code == 0
    assert "megatron can run it" in cleared.out
    assert run("check", tmp_path / "fit", "--for", "ms-swift").code == 0


def test_the_other_frameworks_take_every_cut(run: Run, split: Path, tmp_path: Path) -> None:
    module = tmp_path / "planned.py"
    assert run("export", "deepspeed", split, "--out", module).out.strip() == str(module)
    compile(module.read_text(encoding="utf-8"), module, "exec")


@pytest.mark.parametrize("name", FRAMEWORKS)
def test_an_export_of_a_plan_made_for_it_warns_of_nothing(run: Run, drawn: Path, tmp_path: Path, name: str) -> None:
    runs_whole = find_target(name).can(describe("Qwen2.5-VL-7B"), 1).choices.get("pp") == (1,)
    plan, model = tmp_path / "plan", "Qwen2.5-VL-3B" if runs_whole else "Qwen2.5-VL-7B"
    words = ["plan", model, drawn / "data.jsonl", "--tokenizer", drawn / "tokenizer.json", "--out", plan, "--for", name]
    words += ["--cluster", "8xA100-80GB", "--global-batch", "64", "--max-pixels", "501760"]
    words += [] if runs_whole else ["--pp", "2", "--memory", "50GiB"]
    assert run(*words).code == 0
    told = run("export", name, plan, "--json")
    assert told.code == 0, told.err
    assert told.json["warnings"] == []
    parallel = yaml.safe_load((plan / "plan.yaml").read_text(encoding="utf-8"))["decisions"]["parallel"]
    assert parallel["tp"] * parallel["pp"] == 1 or not runs_whole
    assert run("check", plan, "--for", name, "--vision-cleared").code == 0
    packs = find_target(name).packs
    first = run("export", name, plan).out.splitlines()[0]
    assert first.startswith(f"# {find_target(name).title} takes single samples") == (packs is None)


@pytest.mark.parametrize(
    ("model", "name", "refusal"),
    [
        ("LLaVA-OneVision-7B", "ms-swift", None),
        ("LLaVA-OneVision-7B", "megatron-bridge", "llava_onevision"),
        ("InternVL3_5-8B", "mindspeed-mm", "internvl_chat"),
    ],
)
def test_real_models_are_exported_without_a_warning_or_refused_in_a_sentence(drawn, tmp_path, model, name, refusal):
    cell = exports.try_export(model, name, drawn, tmp_path, "16xA100-80GB")
    assert cell.warnings == ()
    assert (cell.step_ms is None) == (refusal is not None)
    assert (refusal or "") in cell.refusal
    assert "Traceback" not in cell.refusal
    assert (cell.single is not None) == (refusal is None and find_target(name).packs is None)


def test_bare_flags_are_checked_against_a_model(run: Run) -> None:
    def check(flags: str, *more: str) -> Any:
        return run("check", "--for", "megatron", "--flags", flags, "--config", "Qwen2.5-VL-7B", *more)

    good = check(FLAGS)
    assert good.code == 0
    assert good.out == "megatron: these flags build every layer of the model once\n"
    bad = check(f"{FLAGS} --decoder-first-pipeline-num-layers 5", "--json")
    assert bad.code == 1
    assert not bad.json["ok"]
    assert any("23 layers" in problem for problem in bad.json["problems"])
    assert any("5 of 32" in problem for problem in bad.json["problems"])
    even = check(f"{FLAGS} --decoder-first-pipeline-num-layers 4", "--vision-cleared")
    assert even.code == 0


def test_an_unknown_framework_is_exit_code_two(run: Run) -> None:
    assert run("check", "plan", "--for", "abacus").code == 2


@pytest.mark.parametrize(
    ("name", "code", "told"),
    [
        ("deepspeed", 0, r"warning: \d+ layers are planned with .*DeepSpeed can run it"),
        ("pai-megatron", 0, r"warning: the scripts recompute.*pai-megatron can run it"),
    ],
)
def test_a_check_for_a_framework_tells_what_differs_and_what_is_refused(run, planned, name, code, told):
    result = run("check", planned, "--for", name)
    assert result.code == code, result.err
    assert re.search(told, result.out.strip(), re.DOTALL | re.IGNORECASE), result.out


def test_the_page_of_devices_is_the_table_of_devices() -> None:
    assert tables.DEVICES_PAGE.read_text(encoding="utf-8") == tables.devices_page()
