"""`balanced` in ms-swift's `swift sft`, by its own plug-ins: `--external_plugins balanced.py`, a file of two lines.

    from trimtab.runtime.training.swift_plugin import balance
    balance()  # or balance("plan-folder")

ms-swift makes its trainer by the name in `TrainerFactory.TRAINER_MAPPING`; written for 4.6.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from swift.trainers import Seq2SeqTrainer, TrainerFactory

from trimtab.runtime.training.balanced import balanced


class BalancedTrainer(Seq2SeqTrainer):  # type: ignore[misc]  # a class of ms-swift, which has no types
    """ms-swift's trainer of `swift sft` under `balanced`."""

    plan: Path | str | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        balanced(self, self.plan)


def balance(plan: Path | str | None = None) -> None:
    """Have `swift sft` train under `balanced`, as the plan says where one is given."""
    BalancedTrainer.plan = plan
    TrainerFactory.TRAINER_MAPPING["causal_lm"] = f"{__name__}.{BalancedTrainer.__name__}"
