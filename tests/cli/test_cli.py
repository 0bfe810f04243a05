"""Every verb on real input: fixed JSON names, exit codes, the same bytes from the same input."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from trimtab.address import Allowed
from trimtab.cli.describe import megatron_flags
from trimtab.plan.file.records import open_records
from trimtab.plan.file.yaml import load_plan
from trimtab.report.plan_tables import device_hours, differences

Run = Any


def test_describe(run: Run) -> None:
    found = run("describe", "Qwen2.5-VL-7B", "--json").json
    assert found["family"] == "qwen2_5_vl"
    assert set(found["num_params"]) == {"vision", "projector", "language", "total"}
    assert found["num_params"]["total"] == 8_292_166_656
    assert found["layers"][0]["name"] == "model.visual.patch_embed"
    assert "model.language_model.layers[0..27]" in run("describe", "Qwen2.5-VL-7B").out
    cuts = re.search(r"Forbidden cuts: (\d+)-(\d+)\.", run("describe", "Qwen3-VL-2B").out)
    assert cuts is not None  # the decoder's first blocks read the tower's middle ones
    assert int(cuts[1]) < int(cuts[2])


def test_image_size(run: Run) -> None:
    found = run("image-size", "InternVL-Chat-V1-5", "1920x1080", "--json").json
    assert (found["patches"], found["tokens"]) == (9225, 2304)
    assert "9,225 ViT patches" in run("image-size", "InternVL-Chat-V1-5", "1920x1080").out
    limited = run("image-size", "InternVL-Chat-V1-5", "1920x1080", "--set", "max_tiles=4", "--json").json
    assert limited["tiles"] <= 5


def test_size_then_pack(run: Run, drawn: Path, tmp_path: Path) -> None:
    table = tmp_path / "sizes.npz"
    words = ["--model", "InternVL-Chat-V1-5", "--tokenizer", drawn / "tokenizer.json", "--out", table]
    sized = run("size", drawn / "data.jsonl", *words, "--json").json
    assert (sized["num_samples"], sized["num_bad"], sized["tokens_exact"]) == (240, 0, True)
    limits = ["--max-patches", sized["max_patches"], "--max-tokens", sized["max_tokens"]]
    packed = run("pack", table, *limits, "--dp", "2", "--out", tmp_path / "packs", "--json").json
    assert packed["num_samples"] == packed["num_packed"] == 240
    assert packed["num_oversize"] == 0
    assert packed["num_packs"] >= packed["lower_bound_packs"]
    names = [
        *("pad_ratio", "dist_ratio_vit", "dist_ratio_llm", "dist_ratio_cost"),
        *("utilisation", "shuffle_chi2", "seconds"),
    ]
    assert all(name in packed for name in names)
    indices = np.load(tmp_path / "packs" / "indices.npy", allow_pickle=False)
    assert sorted(indices.tolist()) == list(range(240))
    assert "samples per pack" in run("pack", table, *limits).out


@pytest.mark.parametrize("method", ["balanced", "isf", "random", "length_group", "device_group"])
@pytest.mark.parametrize("order", ["random", "sorted"])
def test_every_method_and_order_packs_every_sample(run: Run, planned: Path, method: str, order: str) -> None:
    limits = ["--max-patches", "200000", "--max-tokens", "40000"]
    found = run("pack", planned / "samples.npz", *limits, "--method", method, "--set", f"order={order}", "--json").json
    assert found["num_packed"] == 240


def test_isf_takes_the_papers_arguments(run: Run, planned: Path) -> None:
    words = ["pack", planned / "samples.npz", "--max-patches", "60000", "--max-tokens", "16000", "--method"]
    isf = [*words, "isf", "--set", "filters=50000,15000", "--dp", "1"]
    once, often = (run(*isf, "--set", f"iterations={n}", "--json").json for n in ("1", "10"))
    assert once["num_packed"] == often["num_packed"]
    assert once["num_packs"] > often["num_packs"]


def test_a_plan_holds_until_something_changes(run: Run, planned: Path, tmp_path: Path) -> None:
    assert run("check", planned, "--json").json == {"ok": True, "problems": []}
    assert run("check", planned / "plan.yaml").code == 0
    copy = tmp_path / "copy"
    shutil.copytree(planned, copy)
    offsets = np.load(copy / "offsets.npy")
    np.save(copy / "offsets.npy", offsets[:-1])
    changed = run("check", copy, "--json")
    assert changed.code == 1
    assert not changed.json["ok"]
    assert "offsets.npy is not the one" in changed.json["problems"][0]


def test_a_changed_decision_is_found(run: Run, planned: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(planned, copy)
    text = (copy / "plan.yaml").read_text(encoding="utf-8")
    for before, after, message in (
        ("memory_bytes: ", "", "pipeline rank 0 holds"),
        ("language_model.layers[", "language_model.lairs[", "forward order"),
        ("max_tokens: ", "max_tokens: 1 # ", "packs hold more than"),
        ("num_samples: 240", "num_samples: 241", "num_samples is 241 in the plan and 240"),
        ("parallel: {dp: ", "parallel: {dp: 1", "the cluster has 8 devices"),
        ("num_nodes: 1", "num_nodes: 2", "the cluster has 16 devices"),
        ("num_params: 8292166656", "num_params: 5", "num_params is 5"),
        ("num_packs: ", "num_packs: 1 # ", "num_packs is 1"),
        ("num_skipped: 0", "num_skipped: -7", "-7"),
        ("num_microbatches: 4", "num_microbatches: 99999999999999999999", "1048576"),
        ("memory_bytes: 8", "memory_bytes: 1 # ", "memory"),
        ("layers_blake2b: ", "layers_blake2b: '0' # ", "other layers or image sizes"),
    ):
        assert before in text
        changed = shrink_memory(text) if before == "memory_bytes: " else text.replace(before, after)
        (copy / "plan.yaml").write_text(changed, encoding="utf-8")
        problems = run("check", copy, "--json")
        assert problems.code == 1, before
        assert any(message in problem for problem in problems.json["problems"]), (before, problems.json)


def shrink_memory(text: str) -> str:
    return re.sub(r"(?<=[ {])memory_bytes: \d+", "memory_bytes: 20000000000", text)


def test_report_draws_again_from_the_files(run: Run, planned: Path, tmp_path: Path) -> None:
    found = run("report", planned, "--out", tmp_path, "--json").json
    assert Path(found["report"]).read_bytes() == (planned / "report.html").read_bytes()
    assert Path(found["report"]).stat().st_size < 500_000
    assert "Before and after" in run("report", planned, "--out", tmp_path).out


PLAN = ["--cluster", "8xH100-80GB", "--pp", "2", "--set", "num_microbatches=4", "--set", "schedule=1F1B"]


def test_the_same_command_gives_the_same_bytes_whatever_the_workers_and_the_hash_seed(drawn, tmp_path):
    contents = []
    for number, (workers, seed) in enumerate((("1", "0"), ("2", "1"), ("1", "2"))):
        out = tmp_path / str(number)
        words = ["plan", "Qwen2.5-VL-7B", "data.jsonl", "--tokenizer", "tokenizer.json", *PLAN]
        command = [sys.executable, "-m", "trimtab", *words, "--set", f"workers={workers}", "--out", str(out)]
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        subprocess.run(command, cwd=drawn, env=environment, check=True, capture_output=True)
        contents.append({path.name: path.read_bytes() for path in sorted(out.iterdir())})
    assert contents[0] == contents[1] == contents[2]
    assert set(contents[0]) == {
        "plan.yaml", "samples.npz", "offsets.npy", "indices.npy", "schedule.npy", "report.html",
    }  # fmt: skip


def test_a_run_of_ones_own_is_predicted_and_told_beside_a_plan(run: Run, drawn: Path) -> None:
    words = ["--cluster", "16xA100-80GB", "--tokenizer", drawn / "tokenizer.json", "--with-plan"]
    flags = "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 1 --bf16"
    own = [
        "predict",
        "Qwen2.5-VL-7B",
        drawn / "data.jsonl",
        *words,
        "--from-megatron",
        flags,
        "--set",
        "num_microbatches=4",
    ]
    found = run(*own, "--json").json
    assert (found["dp"], found["pp"], found["num_microbatches"], len(found["peak_bytes"])) == (4, 2, 4, 2)
    assert found["plan_gain"] > 0
    told = run(*own).out
    assert "16 A100-80GB as dp 4 x pp 2 x tp 2, 4 micro-batches a rank and step" in told
    assert "x the samples/s" in told
    alone = run(*(word for word in own if word != "--with-plan")).out
    assert alone
    assert told.startswith(alone.rstrip())


def test_skipped_samples_are_named_and_counted(run: Run, drawn: Path, tmp_path: Path) -> None:
    data = drawn / "with_a_bad_line.jsonl"
    data.write_text((drawn / "data.jsonl").read_text(encoding="utf-8") + "{broken\n", encoding="utf-8")
    words = [data, "--tokenizer", drawn / "tokenizer.json", *PLAN, "--out", tmp_path / "p", "--json"]
    refused = run("plan", "Qwen2.5-VL-7B", *words)
    assert refused.code == 2
    assert "with_a_bad_line.jsonl:241" in refused.err
    assert not (tmp_path / "p").exists()
    skipped = run("plan", "Qwen2.5-VL-7B", *words, "--on-bad", "skip")
    assert skipped.json["num_skipped"] == 1
    assert "with_a_bad_line.jsonl:241" in skipped.err


def test_version(run: Run) -> None:
    assert run("--version").out.startswith("trimtab 0.")


def test_a_source_key_survives_resume_and_parquet(run: Run, drawn: Path, tmp_path: Path) -> None:
    import json

    import pyarrow as pa
    import pyarrow.parquet as parquet

    from trimtab.samples.table import load_table

    words = ["--model", "InternVL-Chat-V1-5", "--tokenizer", drawn / "tokenizer.json", "--set", "source_key=source"]
    for name in ("first", "again"):
        extra = ["--set", f"resume={tmp_path}/parts", "--out", tmp_path / f"{name}.npz"]
        assert run("size", drawn / "data.jsonl", *words, *extra).code == 0
    assert (tmp_path / "first.npz").read_bytes() == (tmp_path / "again.npz").read_bytes()
    records = [json.loads(line) for line in (drawn / "data.jsonl").read_text(encoding="utf-8").splitlines()]
    for record in records:
        record["image"] = [record["image"]] if isinstance(record.get("image"), str) else record.get("image")
    parquet.write_table(pa.Table.from_pylist(records), drawn / "data.parquet")
    assert run("size", drawn / "data.parquet", *words, "--out", tmp_path / "parquet.npz").code == 0
    sources = [load_table(tmp_path / f"{name}.npz").source_names for name in ("first", "parquet")]
    assert sources[0] == sources[1]
    assert len(sources[0]) > 3


def test_several_saved_tables_keep_what_they_skipped_and_assumed(run: Run, drawn: Path, tmp_path: Path) -> None:
    lines = (drawn / "data.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    tables = []
    for name, content in (("a", lines[:120]), ("b", [*lines[120:], "{broken\n"])):
        (drawn / f"part_{name}.jsonl").write_text("".join(content), encoding="utf-8")
        words = ["--model", "Qwen2.5-VL-7B", "--on-bad", "skip", "--out", tmp_path / f"{name}.npz"]
        assert run("size", drawn / f"part_{name}.jsonl", *words).code == 0
        tables.append(tmp_path / f"{name}.npz")
    found = run("plan", "Qwen2.5-VL-7B", *tables, *PLAN, "--out", tmp_path / "p", "--json").json
    assert (found["num_samples"], found["num_skipped"]) == (240, 1)
    assert any("estimate" in sentence for sentence in found["assumptions"])
    other = run("plan", "InternVL-Chat-V1-5", *tables, *PLAN, "--out", tmp_path / "q")
    assert other.code == 2
    assert "the rule qwen_smart_resize" in other.err
    ignored = run("plan", "Qwen2.5-VL-7B", tables[0], *PLAN, "--tokenizer", "/nope", "--out", tmp_path / "r")
    assert "tokenizer change nothing" in ignored.err


def test_a_wrong_variable_of_numba_is_one_sentence(planned: Path) -> None:
    words = ["pack", str(planned / "samples.npz"), "--max-patches", "60000", "--max-tokens", "60000"]
    done = subprocess.run(
        [sys.executable, "-m", "trimtab", *words],
        env={**os.environ, "NUMBA_NUM_THREADS": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "NUMBA_" in done.stderr


# -- export of data files ----------------------------------------------------------------------------------------------


NUM_SAMPLES = 240


def test_each_data_format_is_written_and_told(run: Run, planned: Path, tmp_path: Path) -> None:
    for verb, out, files in (("jsonl", tmp_path / "ordered.jsonl", 1), ("qwen-packs", tmp_path / "packs.jsonl", 1)):
        result = run("export", verb, planned, "--out", out, "--json")
        assert result.code == 0, result.err
        assert result.json["num_records"] == NUM_SAMPLES
        assert len(result.json["files"]) == files
        assert all(Path(name).is_file() for name in result.json["files"])
    with (tmp_path / "packs.jsonl").open(encoding="utf-8") as file:
        assert sum(len(json.loads(line)) for line in file) == NUM_SAMPLES


# -- data as people have it --------------------------------------------------------------------------------------------


@pytest.fixture
def meta(drawn: Path, tmp_path: Path) -> Path:
    """The drawn data in two sources, one of them three times, images elsewhere than the records."""
    lines = (drawn / "data.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    for name, part in (("first", lines[:40]), ("second", lines[40:60])):
        (tmp_path / f"{name}.jsonl").write_text("".join(part), encoding="utf-8")
    sets = {
        "web": {"root": str(drawn), "annotation": "first.jsonl", "repeat_time": 1, "data_augment": False},
        "docs": {"root": str(drawn), "annotation": "second.jsonl", "repeat_time": 3, "data_augment": False},
    }
    (tmp_path / "meta.json").write_text(json.dumps(sets, indent=1), encoding="utf-8")
    return tmp_path / "meta.json"


def test_a_plan_of_a_meta_file_knows_repeats_and_roots(run: Run, drawn: Path, meta: Path, tmp_path: Path) -> None:
    words = [
        *("--tokenizer", drawn / "tokenizer.json", "--cluster", "8xA100-80GB"),
        *("--pp", "2", "--set", "num_microbatches=2"),
    ]
    made = run("plan", "Qwen2.5-VL-7B", meta, *words, "--allow-outside", "--out", tmp_path / "plan")
    assert made.code == 0, made.err
    data = load_plan(tmp_path / "plan").inputs.data
    assert data.num_samples == 40 + 3 * 20
    assert [(Path(file.path).name, file.media_root) for file in data.files] == [
        ("first.jsonl", str(drawn)),
        ("second.jsonl", str(drawn)),
    ]
    records = open_records(tmp_path / "plan")
    assert records.media_root(99) == drawn
    assert records[40] == records[60] == records[80]
    assert open_records(tmp_path / "plan", [meta], allowed=Allowed(outside=True)).media_root(0) == drawn
    assert run("check", tmp_path / "plan").code == 0
    written = run("export", "jsonl", tmp_path / "plan", "--out", tmp_path / "planned.jsonl")
    assert written.code == 0, written.err
    assert len((tmp_path / "planned.jsonl").read_text(encoding="utf-8").splitlines()) == 100


# -- compare, and plans on several clusters ----------------------------------------------------------------------------


@pytest.fixture
def two(run: Run, drawn: Path, tmp_path: Path) -> tuple[Path, Any]:
    """Plans of one run on two clusters, and what was printed; a third cluster is too small."""
    words = ["plan", "Qwen2.5-VL-7B", drawn / "data.jsonl", "--tokenizer", drawn / "tokenizer.json"]
    result = run(*words, "--cluster", "8xH100, 16xH100,1xA10", "--out", tmp_path, "--json")
    assert result.code == 0, result.err
    return tmp_path, result


def test_clusters_are_planned_with_one_batch_and_priced_in_device_hours(two: tuple[Path, Any], run: Run) -> None:
    out, result = two
    rows = result.json["plans"]
    assert list(rows) == ["8xH100", "16xH100"]
    assert "1xA10: " in result.err
    plans = {name: load_plan(out / name) for name in rows}
    assert {plan.decisions.packing.global_batch for plan in plans.values()} == {240}  # all of the data
    assert {name: rows[name]["device_hours"] for name in rows} == {
        name: int(name.split("x")[0]) * plan.estimates.epoch_s / 3600 for name, plan in plans.items()
    }
    cheapest = min(plans, key=lambda name: device_hours(plans[name]))
    assert f"fewest device-hours: {cheapest}" in result.err
    # the command of each plan makes that plan again
    command = plans["16xH100"].command.split()
    assert command[command.index("--cluster") + 1] == "16xH100"
    again = out / "again"
    assert run(*command[1:], "--out", again).code == 0
    assert load_plan(again) == plans["16xH100"]


def test_plans_are_compared_by_what_differs(two: tuple[Path, Any], run: Run) -> None:
    out, _ = two
    small, large = load_plan(out / "8xH100"), load_plan(out / "16xH100")
    assert differences({"a": small, "b": small}) == {}
    found = differences({"a": small, "b": large})
    assert found["inputs.cluster.num_nodes"] == ("1", "2")
    assert found["decisions.parallel.dp"] == (str(small.decisions.parallel.dp), str(large.decisions.parallel.dp))
    assert not any(place.startswith("inputs.model") for place in found)
    shown = run("compare", out / "8xH100", out / "16xH100")
    assert shown.code == 0
    assert "inputs.cluster.num_nodes" in shown.out
    assert set(run("compare", out / "8xH100", out / "16xH100", "--json").json["differs"]) == set(found)


# -- uneven ------------------------------------------------------------------------------------------------------------


def test_the_answer_beside_the_optimum(run):
    told = run("uneven", "Qwen2-VL-7B", "--pp", "2", "--first", "12", "--json").json
    assert {name: split["counts"] for name, split in told["splits"].items()} == {
        "even": [14, 14],
        "the rule": [13, 15],
        "optimum": [14, 14],
        "yours": [12, 16],
    }
    assert told["splits"]["the rule"]["flags"].endswith(
        "first-pipeline-num-layers 13 --decoder-last-pipeline-num-layers 15"
    )
    memory = told["splits"]["the rule"]["memory"]
    assert round(sum(memory[0].values()) / 1e9, 3) == 51.340
    assert told["smallest_tp"] == 1  # of 102 GB


@pytest.mark.parametrize(("device", "batch", "tp"), [("H20", 1, 2), ("A100-40GB", 1, 4), ("L4", 1, 8), ("L4", 8, None)])
def test_tp_is_raised_until_the_memory_of_the_notebook_fits(run, device, batch, tp):
    words = ["InternVL-Chat-V1-5", "--pp", "4", "--image", "1792x896", "--seq", "4096"]
    words += ["--device", device, "--micro-batch", batch]
    assert run("uneven", *words, "--json").json["smallest_tp"] == tp


def test_a_model_that_the_rule_cannot_divide(run, tmp_path):
    words = ["InternVL-Chat-V1-5", "--pp", "4", "--image", "1792x896", "--seq", "4096"]
    told = run("uneven", *words, "--out", tmp_path / "drawn.html").out
    assert "The rule has no answer here" in told
    assert (tmp_path / "drawn.html").read_text().count("<h3>") == 2  # even and the optimum
    assert (
        "Flags: --pipeline-model-parallel-layout 'E|t*16|t*16|t*16L' (a count of 0 is refused by Megatron-Core)" in told
    )


@pytest.mark.parametrize(
    ("counts", "flags"),
    [
        ((14, 14), ""),
        ((13, 15), "--decoder-first-pipeline-num-layers 13 --decoder-last-pipeline-num-layers 15"),
        ((4, 8, 8, 8), "--decoder-first-pipeline-num-layers 4 --decoder-last-pipeline-num-layers 8"),
        ((0, 28), "--pipeline-model-parallel-layout 'E|t*28L'"),
        ((4, 9, 8, 1), "--pipeline-model-parallel-layout 'Et*4|t*9|t*8|tL'"),
    ],
)
def test_flags_that_say_the_split(counts, flags):
    assert megatron_flags(counts)[0] == flags
