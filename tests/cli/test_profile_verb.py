"""`trimtab profile` and `trimtab plan --profile`; what is timed needs torch and Transformers."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

Run = Any

QWEN = ["profile", "Qwen2.5-VL-7B"]


def test_formulas_are_printed_for_each_kind_of_layer(run: Run) -> None:
    result = run(*QWEN, "--device", "H200")
    assert result.code == 0, result.err
    for part in ("visual.blocks.0", "language_model.layers.0", "lm_head", "H200, bf16, flash", "Seconds ± 30 %"):
        assert part in result.out


def test_formulas_as_json_add_up(run: Run, tmp_path: Path) -> None:
    result = run(*QWEN, "--device", "H200", "--tp", "2", "--out", tmp_path / "p.json", "--json").json
    assert result["method"] == "analytic"
    assert sum(kind["share"] for kind in result["kinds"]) == pytest.approx(1.0)
    assert sum(kind["num_layers"] for kind in result["kinds"]) == 65
    assert all(kind["error"] is None for kind in result["kinds"])
    assert max(kind["efficiency"] for kind in result["kinds"]) <= 0.7
    assert json.loads((tmp_path / "p.json").read_text())["dims"]["tp"] == 2


def test_a_timed_profile_makes_a_plan_that_says_so(run: Run, tiny: Path, drawn: Path, tmp_path: Path) -> None:
    pytest.importorskip("transformers", reason="times real layers: pip install 'trimtab[torch]'")
    words = [
        *("profile", tiny, "--timed", "--device", "cpu", "--dtype"),
        *("fp32", "--set", "sizes=32,96", "--set", "repeats=2"),
    ]
    result = run(*words, "--out", tmp_path / "p.json", "--json")
    assert result.code == 0, result.err
    assert (result.json["method"], result.json["attention"]) == ("timed", "sdpa")
    assert all(kind["error"] > 0 and kind["forward_s"] > 0 for kind in result.json["kinds"])
    plan = ["plan", tiny, drawn / "data.jsonl", "--tokenizer", drawn / "tokenizer.json", "--cluster", "4xcpu"]
    plan += ["--profile", tmp_path / "p.json", "--out", tmp_path / "plan", "--max-pixels", "50000"]
    planned = run(*plan, "--set", "dtype=fp32", "--set", "attention=sdpa", "--pp", "2", "--json")
    assert planned.code == 0, planned.err
    assert "Seconds were measured layer by layer on cpu" in "\n".join(planned.json["assumptions"])
    assert "costs: timed" in (tmp_path / "plan" / "plan.yaml").read_text()
    assert run("check", tmp_path / "plan").code == 0
    assert run("report", tmp_path / "plan").code == 0
    unlike = run(*plan, "--set", "dtype=bf16", "--set", "attention=sdpa", "--json")
    assert unlike.code == 2
    assert all(name in unlike.json["error"] for name in ("dtype", "fp32", "bf16"))


def test_a_traced_profile_counts_bytes_and_makes_a_plan_that_is_checked(run, tiny, drawn, tmp_path):
    pytest.importorskip("transformers", reason="traces real layers: pip install 'trimtab[torch]'")
    result = run("profile", tiny, "--traced", "--device", "H200", "--out", tmp_path / "p.json", "--json").json
    assert result["method"] == "traced"
    text = next(row for row in result["kept"] if row["name"] == "model.language_model.layers.0")
    assert text["num_layers"] == json.loads((tiny / "config.json").read_text())["text_config"]["num_hidden_layers"]
    assert 0 < text["recomputed_bytes"] < text["kept_bytes"]
    printed = run(
        "profile", tiny, "--traced", "--device", "H200", "--set", "attention=eager", "--set", "fused_kernels=true"
    ).out
    assert "Bytes that one layer keeps for backward" in printed
    assert printed.count("warning: Eager attention") == 1

    folder = tmp_path / "plan"
    plan = ["plan", tiny, drawn / "data.jsonl", "--tokenizer", drawn / "tokenizer.json", "--cluster", "2xH200"]
    plan += ["--profile", tmp_path / "p.json", "--out", folder, "--max-pixels", "50000", "--pp", "2"]
    plan += ["--set", "schedule=1F1B"]
    for mib in range(230, 60, -10):  # until the memory asks for recompute
        planned = run(*plan, "--memory", f"{mib}MiB", "--json")
        assert planned.code == 0, planned.err
        written = (folder / "plan.yaml").read_text()
        if "  recompute:\n    - " in written:
            break
    assert "costs: traced" in written
    assert run("check", folder).code == 0
    recompute = re.search(r"  recompute:\n(    - .*\n)+", written)
    assert recompute is not None, "a plan that recomputes nothing shows nothing"
    (folder / "plan.yaml").write_text(written.replace(recompute[0], "  recompute: []\n"))
    changed = run("check", folder, "--json")
    assert changed.code == 1
    assert any("pipeline rank" in problem for problem in changed.json["problems"]), changed.json["problems"]


def test_logged_runs_are_fitted_and_shown_beside_the_fit(run: Run, tmp_path: Path) -> None:
    work = {"patches": 1024, "patches_per_image": 256, "tokens": 2048, "tokens_per_sample": 2048}
    runs = [
        {
            "name": f"{first} first",
            "stages": [{"vision": 32, "language": first}, {"language": 28 - first}],
            "iteration_s": seconds,
            "num_microbatches": 32,
            "tp": 2,
            "work": work,
        }
        for first, seconds in ((4, 20.9), (8, 17.7), (16, 15.3), (20, 18.2))
    ]
    (tmp_path / "runs.json").write_text(json.dumps({"format": "trimtab-runs 1.0", "runs": runs}))
    words = [*QWEN, "--device", "H20", "--tp", "2", "--from-logs", tmp_path / "runs.json"]
    result = run(*words, "--out", tmp_path / "p.json", "--json")
    assert result.code == 0, result.err
    assert result.json["method"] == "logged"
    assert [row["name"] for row in result.json["runs"]] == ["4 first", "8 first", "16 first", "20 first"]
    assert {term["name"] for term in result.json["terms"]} >= {"host", "language"}
    assert json.loads((tmp_path / "p.json").read_text())["method"] == "logged"
    printed = run(*words).out
    assert "16 first" in printed
    assert "Seconds come from formulas fitted to 4 logged runs" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--device", "tpu"], "'tpu': give cpu, cuda or cuda:1"),
        (["--device", "cpu", "--set", "sizes=many"], "sizes 'many' are not numbers of rows: write them as 1024,4096"),
        (["--device", "cpu", "--set", "sizes=2"], "each of 16 rows or more"),
        (["--device", "cpu", "--set", "attention=flash"], "attention=sdpa"),
    ],
)
def test_what_cannot_be_timed_is_one_sentence(run: Run, tiny: Path, words: list[str], message: str) -> None:
    pytest.importorskip("transformers", reason="times real layers: pip install 'trimtab[torch]'")
    result = run("profile", tiny, "--timed", *words, "--json")
    assert result.code == 2, result
    assert message in result.json["error"]


def test_a_broken_profile_is_one_sentence(run: Run, tmp_path: Path) -> None:
    (tmp_path / "p.json").write_text("{")
    words = ["plan", "Qwen2.5-VL-7B", "x.jsonl", "--cluster", "8xH200", "--profile", tmp_path / "p.json", "--json"]
    result = run(*words)
    assert result.code == 2
    assert "p.json is no profile" in result.json["error"]
