"""Column "timed": one layer of each kind of a family's small model is timed, vision tower and language model alike.

python bench/columns/timed.py [FAMILY ...]      # all: 5 CPU minutes
"""

import sys
from pathlib import Path

import torch
from cell import Cell, sweep

sys.path.insert(0, str(Path(__file__).parents[2] / "tests" / "torch"))
from shrunk_models import make_shrunk
from tiny_models import as_saved

from trimtab.costs.devices import DEVICES
from trimtab.costs.measured.timed import TimingOptions, time_layers
from trimtab.costs.profile import profile_model
from trimtab.models.asking.model import describe_model


def check(family: str) -> Cell:
    """Every block's kind ran; layers that no formula prices are refused before."""
    model = make_shrunk(family)
    fields = as_saved(model.config)
    spec = describe_model(model.to("meta"))
    formulas = profile_model(spec, DEVICES["H200"], dtype="fp32", attention="sdpa")
    options = TimingOptions(dtype="fp32", attention="sdpa", sizes=(32, 96), repeats=1)
    measured = time_layers(fields, spec, torch.device("cpu"), options)
    ran = {formulas.layers[x.layer].group for x in measured}
    blocks = [i for i, x in enumerate(spec.layers) if x.kind == "block" and x.tower != "audio"]  # samples hold no sound
    left = {spec.layers[i].tower for i in blocks if formulas.layers[i].group not in ran}
    return Cell(yes=not left, note=f"not run: {', '.join(sorted(left))}" if left else "")


if __name__ == "__main__":
    sweep(check, "timed")
