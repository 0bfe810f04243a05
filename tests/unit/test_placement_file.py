"""placement.yaml: written the same everywhere, read back whole, refused with all its problems at once."""

import json
import re
from pathlib import Path

import pytest
from rich.console import Console

from trimtab import describe, place
from trimtab.placement.machine import Workload, parse_machine
from trimtab.placement.placed import Assessed, assess_map, split_model_map
from trimtab.plan.file.placement import load_placement, placement_file, write_placement
from trimtab.plan.file.yaml import record_to_yaml
from trimtab.report.tables import print_placement

MODEL = describe("Qwen2.5-VL-7B")
MACHINE = parse_machine("12GiB,2xA100-80GB:8GiB", cpu="16GiB")
WORK = Workload(batch=2, seq_len=512, images=((1024, 1024), (1024, 1024), (640, 480)))


def written(folder: Path, machine=MACHINE):
    placement = place(MODEL, machine, WORK)
    other = assess_map(MODEL, machine, WORK, split_model_map(MODEL, len(machine.gpus)), rule="split_model")
    record = placement_file(MODEL, machine, WORK, placement, [other], "trimtab map")
    write_placement(folder, record, placement)
    return placement, record


def test_what_was_written_is_what_is_read(tmp_path):
    placement, record = written(tmp_path)
    found = load_placement(tmp_path)
    assert found == record == load_placement(tmp_path / "placement.yaml")
    assert found.device_map == dict(placement.device_map)
    assert found.inputs.model.config_blake2b == MODEL.config_blake2b
    assert found.inputs.workload.images == ("1024x1024,2", "640x480")


def test_a_spilled_map_says_which_gpu_each_layer_is_copied_to(tmp_path):
    placement, _ = written(tmp_path, parse_machine("7GiB,6GiB", cpu="16GiB"))
    assert set(placement.runs_on.values()) == {0, 1}
    assert set(placement.runs_on) | set(placement.run_on_cpu) == {
        name for name, home in placement.device_map.items() if home == "cpu"
    }
    found = load_placement(tmp_path)
    assert found.runs_on == placement.runs_on
    assert found.decisions.run_on_cpu == placement.run_on_cpu
    assert json.loads((tmp_path / "map.json").read_text()) == {
        "device_map": dict(placement.device_map),
        "runs_on": placement.runs_on,
        "run_on_cpu": list(placement.run_on_cpu),
    }
    rows = [line for line in (tmp_path / "placement.yaml").read_text().splitlines() if "runs_on" in line]
    assert [re.search(r"device: cpu, runs_on: \d, modules", line) is not None for line in rows] == [True] * 2


def test_the_same_placement_gives_the_same_bytes_and_rows_take_a_line(tmp_path):
    written(tmp_path / "a")
    written(tmp_path / "b")
    text = (tmp_path / "a" / "placement.yaml").read_text()
    assert text == (tmp_path / "b" / "placement.yaml").read_text()
    assert text.startswith('placement_version: "1.0"\n')
    assert re.search(r"^    - \{device: 0, modules: \[.*\]\}$", text, re.M)
    assert "'model.visual.blocks[0..31]'" in text or "model.visual.blocks[" in text


def test_placement_v1_0_still_loads():
    found = load_placement(Path(__file__).parents[1] / "golden" / "placement_v1_0.yaml")
    assert found.inputs.model.name == "Qwen2.5-VL-7B"
    assert len(found.device_map) == len(MODEL.layers) + 2
    assert set(found.device_map) >= {layer.name for layer in MODEL.layers}


def test_an_unknown_key_is_a_warning(tmp_path):
    written(tmp_path)
    path = tmp_path / "placement.yaml"
    path.write_text(path.read_text() + "mood: good\n")
    with pytest.warns(UserWarning, match="key mood is unknown"):
        load_placement(path)


def test_estimates_add_up_to_the_placement():
    placement = place(MODEL, MACHINE, WORK)
    record = placement_file(MODEL, MACHINE, WORK, placement)
    for row, use in zip(record.estimates.devices, placement.uses, strict=True):
        parts = row.weights_gib + row.kv_gib + row.activations_gib + row.streamed_gib + row.reserve_gib
        assert parts == pytest.approx(row.total_gib, abs=0.003)
        assert row.total_gib == pytest.approx(use.total_bytes / 2**30, abs=0.001)
    assert f"{100 * placement.fullest:.1f} %" in record.summary
    assert record_to_yaml(record).count("\n") < 60


# -- what a placement shows in a terminal ------------------------------------------------------------------------------


TWO_IMAGES = Workload(batch=4, images=((1024, 1024),) * 2)


def compared(machine) -> list[Assessed]:
    found = assess_map(
        MODEL, machine, TWO_IMAGES, split_model_map(MODEL, len(machine.gpus)), rule="InternVL split_model(0.5)"
    )
    return [found, Assessed(rule="Accelerate auto", placement=None, problems=("accelerate is not installed",))]


def test_the_terminal_shows_bytes_modules_and_the_public_maps():
    machine = parse_machine("2x9GiB", cpu="16GiB")
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        print_placement(place(MODEL, machine, TWO_IMAGES), compared(machine), console)
        text = console.export_text()
    for words in ("GPU 0", "host memory", "model.language_model.layers[", "computed in host memory: ", "does not fit"):
        assert words in text, words
    assert "not compared: accelerate is not installed" in text
