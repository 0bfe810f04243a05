"""Bad input ends with one clear sentence, exit code 2, no traceback and nothing half-written."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from trimtab.costs.devices import find_device
from trimtab.costs.profile import TIME_ERROR, profile_model, save_profile
from trimtab.models.describe import describe

Run = Any

PLAN = ["plan", "Qwen2.5-VL-7B", "{data}", "--cluster"]
A100 = [*PLAN, "8xA100-80GB"]
PREDICT = ["predict", *A100[1:]]
FLAGS = ["check", "--for", "megatron", "--config", "Qwen2.5-VL-7B", "--flags"]

CASES = [
    (["describe", "no-such-model"], "config.json"),
    (["describe", "{empty}"], "not JSON|is no JSON|JSON"),
    (["image-size", "Qwen2.5-VL-7B", "1920"], "width x height"),
    (["image-size", "Qwen2.5-VL-7B", "0x10"], "0"),
    (["image-size", "Qwen2.5-VL-7B", "4000x10"], "more than 200 times"),
    (["size", "{missing}", "--model", "Qwen2.5-VL-7B"], "missing.jsonl"),
    (["size", "{text}", "--model", "Qwen2.5-VL-7B"], "text.txt"),
    (["size", "{data}", "--model", "Qwen2.5-VL-7B", "--tokenizer", "{empty}"], "tokenizer"),
    (["size", "{data}", "--model", "Qwen2.5-VL-7B", "--out", "sizes.csv"], "end the name in .npz"),
    (["pack", "{missing}", "--max-patches", "9", "--max-tokens", "9"], "missing.jsonl"),
    (["probe", "{plan}", "model", "--budget", "lots"], "'lots' is not a size in bytes: write it as 80GiB"),
    (["probe", "{plan}", "model", "--risk", "much"], "'much' is not a share: write it as 6% or 0.06"),
    (["profile", "Qwen2.5-VL-7B", "--device", "H200", "--repeats", "3"], "--repeats 3 was given, and nothing is timed"),
    (["check", "{plan}", "--config", "Qwen2.5-VL-7B"], "names its model itself: leave it out, or give --memory too"),
    (["pack", "{table}", "--max-patches", "1", "--max-tokens", "1"], "do not fit a pack"),
    ([*PLAN, "8xAbacus"], "Abacus"),
    ([*PLAN, "zero"], "no device is called"),
    ([*A100, "--memory", "lots"], "size in bytes"),
    ([*A100, "--node-link", "fast"], "'fast' is no link between nodes"),
    ([*PREDICT, "--batch", "1", "--pp", "3"], "are 6 devices, and the cluster has 8|degrees whose product"),
    ([*PREDICT], "not said what a micro-batch holds"),
    ([*PREDICT, "--from-deepspeed", "{text}"], "is no DeepSpeed configuration"),
    (
        [*PREDICT, "--from-megatron", "--encoder-pipeline-model-parallel-size 2"],
        "encoder-pipeline-model-parallel-size 2 is not priced",
    ),
    ([*PREDICT, "--from-megatron", "--bf16", "--from-deepspeed", "{empty}"], "one launcher: give one of them"),
    ([*A100, "--memory", "1GiB"], "do not fit"),
    ([*A100, "--risk", "much"], "share"),
    ([*A100, "--pp", "3"], "multiple of 3"),
    ([*A100, "--freeze", "head"], "frozen"),
    ([*A100, "--schedule", "auto", "--for", "megatron"], "--for megatron, which runs some schedules alone"),
    ([*A100, "--tp", "1", "--vision-dp", "tp"], "a group of one that shares with no other rank"),
    ([*A100, "--max-tokens", "100"], "do not fit a pack"),
    (["plan", "Qwen2.5-VL-7B", "{tiles}", "--cluster", "8xA100-80GB"], "own resolution"),
    (["check", "{missing}"], "give a plan.yaml"),
    (["check", "{text}"], "plan_version|mapping|YAML"),
    (["report", "{missing}"], "give a plan.yaml"),
    (["export", "megatron", "{missing}"], "give a plan.yaml"),
    (["demo", "--model", "no-such-model"], "config.json"),
    (
        ["profile", "Qwen2.5-VL-7B", "--device", "H200", "--out", "."],
        r"cannot use \.: is a directory; name another file",
    ),
    (["export", "megatron", "{plan}", "--out", "."], r"cannot use \.: is a directory; name another file"),
    (["export", "npy", "{plan}", "--out", "{text}"], "cannot use .*text.txt"),
    (["export", "jsonl", "{plan}", "--out", "."], r"cannot use \.: is a directory; name another file"),
    (
        ["export", "megatron", "{plan}", "--fit", "{plan}"],
        "the plan that it is made from lies there: name another folder",
    ),
    (["check"], "takes either a plan or --flags: give one of them"),
    (["check", "plan", "--for", "megatron", "--flags", "--x 1"], "either a plan or --flags"),
    (["check", "--flags", "--x 1", "--config", "Qwen2.5-VL-7B"], "give --for one of megatron, megatron-bridge"),
    (["check", "--for", "deepspeed", "--flags", "--x 1", "--config", "Qwen2.5-VL-7B"], "they are Megatron-LM's"),
    (["check", "--for", "megatron", "--flags", "--x 1"], "without the model they are for: give --config"),
    ([*FLAGS, "--num-layers x"], "no whole number"),
    (["check", "--for", "megatron", "--flags", "--x 1", "--config", "no-such-model"], "config.json"),
    (["profile", "Qwen2.5-VL-7B", "--device", "H200", "--from-logs", "{logs}"], "iteration_s is 1e-300: give a number"),
    ([*A100, "--profile", "{profile}"], "time_error: expected a finite number of 0 or more, found -5"),
    (["check", "{nan}"], "estimates.step_ms is nan, and a plan has finite numbers"),
    (["report", "{plan}", "--run", "{log}"], "line 1 of the run log .* is no record"),
]


@pytest.fixture
def places(drawn: Path, planned: Path, tmp_path: Path) -> dict[str, Path]:
    (tmp_path / "empty.json").write_text("", encoding="utf-8")
    (tmp_path / "text.txt").write_text("just words\n", encoding="utf-8")
    (tmp_path / "tiles.json").write_text('[{"vit_num": 2, "token_num": 600, "image_flags": 2}]', encoding="utf-8")
    run = {
        "iteration_s": 1e-300,
        "num_microbatches": 2,
        "stages": [{"vision": 32, "language": 28}],
        "work": {"patches": 9, "tokens": 9},
    }
    (tmp_path / "logs.json").write_text(json.dumps({"format": "trimtab-runs 1.0", "runs": [run]}))
    (tmp_path / "run.jsonl").write_text('{"kind": "run", "plan": null}\n')
    a_profile = tmp_path / "profile.json"
    save_profile(profile_model(describe("Qwen2.5-VL-7B"), find_device("A100-80GB")), a_profile)
    a_profile.write_text(a_profile.read_text().replace(f'"time_error": {TIME_ERROR}', '"time_error": -5'))
    text = (planned / "plan.yaml").read_text(encoding="utf-8")
    (tmp_path / "nan.yaml").write_text(re.sub("\n  step_ms: .*", "\n  step_ms: .nan", text, count=1), encoding="utf-8")
    return {
        "plan": planned,
        "logs": tmp_path / "logs.json",
        "log": tmp_path / "run.jsonl",
        "nan": tmp_path / "nan.yaml",
        "profile": a_profile,
        "empty": tmp_path / "empty.json",
        "text": tmp_path / "text.txt",
        "tiles": tmp_path / "tiles.json",
        "missing": tmp_path / "missing.jsonl",
        "data": drawn / "data.jsonl",
        "table": planned / "samples.npz",
    }


@pytest.mark.parametrize(("words", "message"), CASES, ids=lambda v: " ".join(v)[:60] if isinstance(v, list) else "")
def test_bad_input_is_one_sentence(
    run: Run, places: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    before = set(tmp_path.rglob("*"))
    filled = [word.format(**places) for word in words]
    if words[0] == "plan":
        filled += ["--out", str(tmp_path / "out")]
    result = run(*filled, "--json")
    assert result.code == 2, result
    assert "Traceback" not in result.err
    assert re.match(r"(planning: \d+ of \d+\n)*trimtab: ", result.err), result.err  # a busy machine shows progress
    assert re.search(message, result.json["error"]), result.json["error"]
    assert set(tmp_path.rglob("*")) == before, "something was written"


def test_a_wrong_option_is_exit_code_two_as_well(run: Run) -> None:
    result = run("pack", "x.json", "--max-patches", "none")
    assert result.code == 2
    assert "Traceback" not in result.err
