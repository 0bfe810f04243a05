"""`trimtab train`: carry a plan out, alone or on the processes that torchrun started."""

from __future__ import annotations

import os

from trimtab.cli.output import JsonOption, print_json
from trimtab.cli.settings import verb
from trimtab.runtime.training.settings import TrainSettings


@verb
def train(
    settings: TrainSettings,
    as_json: JsonOption = False,
) -> None:
    """Train MODEL as PLAN says: `torchrun --nproc-per-node N --no-python trimtab train PLAN MODEL`, or alone."""
    from trimtab.runtime.training.loop import train as run

    records = run(settings)
    if as_json and os.environ.get("RANK", "0") == "0":
        print_json(
            {
                "steps": len(records),
                "loss": records[-1].loss if records else None,
                "log": str(settings.out / "run.jsonl"),
            }
        )
