"""The page of a placement: complete, self-contained, escaped, and right in its bars."""

from __future__ import annotations

import re
from dataclasses import replace

from rich.console import Console
from test_report_html import Page

from trimtab.models.describe import describe
from trimtab.placement.machine import parse_machine
from trimtab.placement.place import place
from trimtab.placement.split_model import Assessed, assess_map, split_model_map
from trimtab.placement.workload import Workload
from trimtab.report.placement_html import placement_html
from trimtab.report.placement_tables import print_placement

MODEL = describe("Qwen2.5-VL-7B")
WORK = Workload(batch=4, images=((1024, 1024),) * 2)
HOSTILE = '<script>alert("x")</script>'


def compared(machine, *, name: str = "InternVL split_model(0.5)") -> list[Assessed]:
    found = assess_map(MODEL, machine, WORK, split_model_map(MODEL, len(machine.gpus)), rule=name)
    return [found, Assessed(rule="Accelerate auto", placement=None, problems=("accelerate is not installed",))]


def page(gpus: str = "8GiB,16GiB,8GiB,6GiB", model=MODEL, name: str = "rule", **more) -> str:
    machine = parse_machine(gpus, **more)
    return placement_html(model, machine, WORK, place(model, machine, WORK), compared(machine, name=name))


def test_the_page_is_whole_and_loads_nothing():
    text = page()
    tags = [name for name, _ in Page(text).tags]
    assert not {"img", "link", "iframe"} & set(tags)
    assert tags.count("script") == 1
    assert "http" not in re.sub(r'http-equiv="Content-Security-Policy"', "", text)
    assert len(text) < 100_000


def test_every_device_of_every_map_has_its_bar_and_its_share():
    machine = parse_machine("8GiB,16GiB,8GiB,6GiB")
    ours, (theirs, _) = place(MODEL, machine, WORK), compared(machine)
    text = page()
    for placement in (ours, theirs.placement):
        for use in placement.uses:
            assert f">{100 * use.fraction:.1f} %<" in text
    assert text.count("<figure>") == 2
    assert 'class="over"' in text  # the published rule does not fit its first GPU
    assert "does not fit" in text
    assert "accelerate is not installed" in text


def test_a_map_that_fits_outlines_nothing():
    machine = parse_machine("4x40GiB")
    text = placement_html(MODEL, machine, WORK, place(MODEL, machine, WORK))
    assert 'class="over"' not in text
    assert "Beside the public maps" not in text


def test_what_spills_is_shown():
    text = page("2x9GiB", cpu="16GiB")
    assert "host memory" in text
    assert "move for each batch" in text


def test_foreign_strings_are_escaped():
    text = page(model=replace(MODEL, name=HOSTILE), name=HOSTILE)
    assert HOSTILE not in text
    assert "&lt;script&gt;" in text


def test_the_terminal_shows_bytes_modules_and_the_public_maps():
    machine = parse_machine("2x9GiB", cpu="16GiB")
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        print_placement(place(MODEL, machine, WORK), compared(machine), console)
        text = console.export_text()
    for words in ("GPU 0", "host memory", "model.language_model.layers[", "computed in host memory: ", "does not fit"):
        assert words in text, words
    assert "not compared: accelerate is not installed" in text
