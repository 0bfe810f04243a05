"""`python -m bench.gpu` on a CPU: what is cut off goes on, and the page is what the lines say."""

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "bench")]

from bench.gpu.page import PAGE, RESULTS, SUITES, make_page  # noqa: E402
from bench.gpu.record import Record, read_records  # noqa: E402

MACHINE = {"device": "A device", "torch": "1"}


def test_a_record_goes_on_where_it_was_cut_off(tmp_path):
    record = Record(tmp_path, "costs", MACHINE)
    record.add("one", 0, {"seconds": 1.0})
    record.add("two", 0, {"error": "no luck"})
    with record.path.open("a") as file:
        file.write('{"case": "three", "repet')  # killed here
    again = Record(tmp_path, "costs", MACHINE)
    assert [again.has(case, 0) for case in ("one", "two", "three")] == [True, False, False]
    again.add("three", 0, {"seconds": 3.0})
    lines = read_records(tmp_path)
    assert [(line["case"], line["suite"]) for line in lines] == [("one", "costs"), ("two", "costs"), ("three", "costs")]
    assert all(line["machine"] == MACHINE and line["commit"] for line in lines)


def test_the_page_is_what_the_lines_say():
    assert PAGE.read_text(encoding="utf-8") == make_page(read_records(RESULTS))


@pytest.mark.integration
def test_all_suites_run_on_tiny_models_and_again_measure_nothing_twice(tmp_path):
    command = [sys.executable, "-m", "bench.gpu", "--tiny", "--device", "cpu", "--repetitions", "1"]
    command += ["--out", str(tmp_path)]
    first = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert first.returncode == 0, first.stdout + first.stderr
    lines = read_records(tmp_path)
    assert {line["suite"] for line in lines} == set(SUITES)
    assert not [line for line in lines if "error" in line]
    told = make_page(lines)
    assert [line[4:] for line in told.splitlines() if line.startswith("### ")] == list(SUITES)
    assert "| tiny | balanced packs |" in told
    assert "| tiny, flash | flash attention is not timed: it needs a CUDA device" in told
    fitted = [sys.executable, "-m", "bench.gpu.refit", "--results", str(tmp_path)]
    moved = subprocess.run(fitted, cwd=ROOT, capture_output=True, text=True, check=True, timeout=600).stdout
    for name in ("matmul", "attention", "memory", "band of seconds", "band of bytes, formula", "start of a kernel"):
        assert f"| {name} | costs/" in moved
    assert re.search(r"^sdpa: median error on held-out sizes .*% before, .*% after$", moved, re.M)
    kept = {path: path.read_bytes() for path in tmp_path.glob("*/*.jsonl")}
    path = next(path for path in kept if path.stem == "kernels")
    whole = path.read_text().splitlines(keepends=True)
    path.write_text("".join(whole[:-1]) + json.dumps({"case": "launch"})[:9])  # the last line was cut off
    subprocess.run([*command, "kernels", "costs"], cwd=ROOT, check=True, capture_output=True, timeout=1500)
    assert len(read_records(tmp_path)) == len(lines)
    assert path.read_text().splitlines(keepends=True)[:-1] == whole[:-1]
