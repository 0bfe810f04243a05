"""What a placement shows in a terminal."""

from rich.console import Console

from trimtab.models.describe import describe
from trimtab.placement.machine import Workload, parse_machine
from trimtab.placement.place import place
from trimtab.placement.published import Assessed, assess_map, split_model_map
from trimtab.report.tables import print_placement

MODEL = describe("Qwen2.5-VL-7B")
WORK = Workload(batch=4, images=((1024, 1024),) * 2)


def compared(machine) -> list[Assessed]:
    found = assess_map(
        MODEL, machine, WORK, split_model_map(MODEL, len(machine.gpus)), rule="InternVL split_model(0.5)"
    )
    return [found, Assessed(rule="Accelerate auto", placement=None, problems=("accelerate is not installed",))]


def test_the_terminal_shows_bytes_modules_and_the_public_maps():
    machine = parse_machine("2x9GiB", cpu="16GiB")
    console = Console(width=120, record=True, file=open("/dev/null", "w"))  # noqa: SIM115
    with console.file:
        print_placement(place(MODEL, machine, WORK), compared(machine), console)
        text = console.export_text()
    for words in ("GPU 0", "host memory", "model.language_model.layers[", "computed in host memory: ", "does not fit"):
        assert words in text, words
    assert "not compared: accelerate is not installed" in text
