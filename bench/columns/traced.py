"""Column "traced": layers counted without weights, to the byte.

    TORCHVISION=FOLDER PYTHONPATH=src:EXTRA python bench/columns/traced.py [FAMILY ...]

Gemma 3n and Perception LM take their vision towers from timm, which imports torchvision, and Inkling takes an initial
value from scipy. EXTRA holds both (`pip install --no-deps --target EXTRA timm==1.0.31 scipy==1.17.1`), FOLDER an
unpacked wheel of torchvision (0.28.0 with torch 2.13; see `sized.py`). Without them these three say what is missing.

Of a small model of each family: the saved bytes of random subsets of recomputed layers, traced without weights, equal
what autograd keeps on the real module; every tower but the audio one runs; and a traced profile is made of it.
"""

import copy
import logging
import os
import random
import sys
import types
from pathlib import Path

if "TORCHVISION" in os.environ:
    sys.path.append(os.environ["TORCHVISION"])
    sys.modules["torchvision._meta_registrations"] = types.ModuleType("torchvision._meta_registrations")  # of operators

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path += [str(ROOT), str(ROOT / "tests" / "torch")]
from bench.columns.cell import Cell, sweep  # noqa: E402
from shrunk_models import make_shrunk, shrink  # noqa: E402
from traced_families import kept_bytes  # noqa: E402

from trimtab.costs.devices import DEVICES  # noqa: E402
from trimtab.costs.measured.timed_model import build_to_run  # noqa: E402
from trimtab.costs.measured.traced import profile_traced  # noqa: E402
from trimtab.costs.measured.traced_step import trace_step  # noqa: E402
from trimtab.models.asking.batches import Batches  # noqa: E402
from trimtab.models.asking.model import describe_fields  # noqa: E402
from trimtab.models.asking.units import split_units  # noqa: E402
from trimtab.specs import ModelSpec  # noqa: E402


def check(family: str) -> Cell:
    logging.disable(logging.CRITICAL)  # torch's own account of calls that are only tried
    config = shrink(family, {})
    spec = describe_fields(config.to_dict())
    wrong = _compare_subsets(family, spec)
    if wrong:
        return Cell(yes=False, note=wrong)
    found = profile_traced(config.to_dict(), spec, DEVICES["H200"], attention="sdpa", rows=(256, 512))
    return Cell(yes=True, note="; ".join(found.warnings))


def _compare_subsets(family: str, spec: ModelSpec) -> str | None:
    """Why the bytes of random subsets are not those that autograd keeps; None where they are."""
    real = make_shrunk(family).train()
    attention = "eager" if real.config._attn_implementation == "eager" else "sdpa"
    module = build_to_run(copy.deepcopy(shrink(family, {})), dtype=torch.float32, attention=attention)
    batch = Batches(module, split_units(module), packed=True).make(2, 20)
    parts = dict(module.named_modules())
    names = [x.name for x in spec.layers if x.name in parts]
    blocks = [x.name for x in spec.layers if x.kind == "block" and x.name in parts]
    trace = trace_step(module, names, batch.inputs)
    called = {x.name for x in trace.layers if x.num_calls}
    idle = sorted({x.tower for x in spec.layers} - {x.tower for x in spec.layers if x.name in called} - {"audio"})
    if idle:
        return f"no image of ours is taken: {', '.join(idle)} did not run"
    chance = random.Random(family)
    for share in (0.0, 1.0, 0.3, 0.6):
        subset = [x for x in blocks if chance.random() < share]
        ours, theirs = trace.saved_bytes(subset), kept_bytes(real, batch.inputs, subset)
        if ours != theirs:
            return f"{len(subset)} of {len(blocks)} blocks recomputed: {ours} bytes are traced, autograd keeps {theirs}"
    return None


if __name__ == "__main__":
    sweep(check, "traced")
