"""Tests of plan/file/check.py: a plan that was changed by hand, or whose tables or data were, is not run."""

import contextlib
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from plan_cases import tile_samples
from plans import origin_of

from refusals import refused
from trimtab import PlanOptions, describe, make_plan, parse_cluster, write_plan
from trimtab.errors import PlanError
from trimtab.plan.file.check import check_plan, verify_plan
from trimtab.plan.file.yaml import load_plan, name_table, plan_to_yaml
from trimtab.plan.plan import RecomputeDecision

MODEL = describe("InternVL-Chat-V1-5")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("made")
    data = folder / "data.jsonl"
    data.write_text("what is in the image\n")
    options = PlanOptions(pp=4, tp=2, num_microbatches=8, schedule="1F1B", zero_stage=1, risk=0.05)
    write_plan(make_plan(MODEL, tile_samples(100), parse_cluster("8xH200"), options, origin=origin_of(data)), folder)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path / "plan")
    verify_plan(tmp_path / "plan", MODEL)
    return tmp_path / "plan"


def change_decisions(folder, **change):
    plan = load_plan(folder)
    (folder / "plan.yaml").write_text(plan_to_yaml(replace(plan, decisions=replace(plan.decisions, **change))))


@pytest.mark.parametrize(
    ("name", "first", "message"), [("indices.npy", lambda table: table[1], ()), ("schedule.npy", lambda _: -7, ())]
)
def test_a_table_whose_hash_was_changed_with_it_is_read(folder, name, first, message):
    table = np.load(folder / name)
    table.flat[0] = first(table)
    np.save(folder / name, table)
    named = name_table(name, (folder / name).read_bytes())
    packing = load_plan(folder).decisions.packing
    change_decisions(folder, packing=replace(packing, **{name.removesuffix(".npy"): named}))
    with refused(PlanError, message):
        verify_plan(folder, MODEL)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: {"parallel": replace(d.parallel, pp=2)}, ("4", "=", "2")),
        (lambda _: {"recompute": (RecomputeDecision(stage=5, granularity="full", modules=("lm_head",)),)}, "5"),
    ],
)
def test_decisions_that_contradict_one_another_are_refused(folder, change, message):
    change_decisions(folder, **change(load_plan(folder).decisions))
    with refused(PlanError, message):
        verify_plan(folder, MODEL)


def test_a_data_file_that_was_changed_is_named(made, tmp_path):
    shutil.copytree(made, tmp_path / "plan")
    text = (tmp_path / "plan" / "plan.yaml").read_text()
    own = tmp_path / "plan" / "data.jsonl"
    (tmp_path / "plan" / "plan.yaml").write_text(text.replace(str(made / "data.jsonl"), str(own)))
    verify_plan(tmp_path / "plan", MODEL)
    own.write_text("WHAT is in the image\n")
    with refused(PlanError, "data.jsonl"):
        verify_plan(tmp_path / "plan", MODEL)


def test_a_plan_changed_by_hand_does_not_keep_its_old_claims(folder):
    assert check_plan(folder) == []
    plan = load_plan(folder)
    recompute = plan.decisions.recompute[0]
    change_decisions(folder, recompute=(replace(recompute, granularity="full"), *plan.decisions.recompute[1:]))
    assert any("estimates" in problem for problem in check_plan(folder))
    (folder / "plan.yaml").write_text(plan_to_yaml(replace(plan, summary=f"{plan.summary} It is twice as fast.")))
    assert [problem for problem in check_plan(folder) if "the summary is not that of" in problem]


def test_a_key_that_stands_twice_is_an_error(folder):
    """As a merge leaves it that keeps both sides."""
    text = (folder / "plan.yaml").read_text()
    (folder / "plan.yaml").write_text(text.replace("\n  recompute:", "\n  recompute: []\n  recompute:"))
    with refused(PlanError, "recompute"):
        load_plan(folder)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("config: ", "config: {long}  # "),
        ("preprocessor: ", "preprocessor: {long}  # "),
        ("- {path: ", "- {path: {long}, was: "),
        ("table: ", "table: {long}  # "),
        ("offsets: {file: ", "offsets: {file: {long}, was: "),
    ],
)
def test_a_name_longer_than_any_file_has_is_a_problem_like_any_other(folder, old, new):
    text = (folder / "plan.yaml").read_text()
    assert old in text, "the case changes nothing"
    (folder / "plan.yaml").write_text(text.replace(old, new.replace("{long}", "x" * 5000), 1))
    with pytest.warns(UserWarning, match="was") if "was" in new else contextlib.nullcontext():
        problems = check_plan(folder)
    assert any("x" * 5000 in problem for problem in problems)
