"""Which pipelines are run beside one process: families x schedules x places of the cuts. Needs torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from pipeline_runs import MICROBATCHES, MIRRORED, TEXT_ALONE, WITH_VIDEO, Case

TEXT, VISUAL, TOWER = "model.language_model", "model.visual", "model.vision_tower.encoder"
LAYERS = {"layer": f"{TEXT}.layers", "embed": f"{TEXT}.embed_tokens", "norm": f"{TEXT}.norm", "head": "lm_head"}
LAYERS |= {"intern": f"{TOWER}.layer", "clip": f"{TOWER}.layers", "projector": "model.multi_modal_projector"}
LAYERS |= {"block": f"{VISUAL}.blocks", "deep": f"{VISUAL}.deepstack_merger_list", "merger": f"{VISUAL}.merger"}
PACKS = {"plain": MICROBATCHES, "mirrored": MIRRORED, "text": TEXT_ALONE, "video": WITH_VIDEO}
PACKS |= {"one image": ((0,), (1, 5), (5,), (1,))}
SEVERAL = ("Interleaved1F1B", "ZBVZeroBubble")  # the two schedules with several stages a device


def _cases(row: dict[str, Any]) -> Iterator[Case]:
    first, dot, number = zip(*(cut.partition(".") for cut in row.pop("cuts")), strict=True)
    cuts = tuple(LAYERS.get(a, a) + b + c for a, b, c in zip(first, dot, number, strict=True))
    packs = tuple(PACKS[name] for name in row.pop("packs", ()))
    several = row["schedule"] == "both"
    for schedule in SEVERAL if several else (row["schedule"],):
        given = {"chunks": 2 if several else 1, **row, "schedule": schedule, "frozen": tuple(row.get("frozen", ()))}
        yield Case(cuts=cuts, packs=packs, **given)


_ROWS = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text())
CASES = [case for row in _ROWS for case in _cases(row)]
