"""LLaMA-Factory's supervised training from a plan.

`torchrun --nproc-per-node N -m trimtab.runtime.training.llama_factory_run PLAN FILE.yaml`.

Everything is LLaMA-Factory's own but its data set, and its trainer is `balanced`. It has no plug-in for them: two names
of `llamafactory.train.sft.workflow` are replaced. Tested with 0.9.5.
"""

from __future__ import annotations

import sys
from typing import Any

from llamafactory.train.sft import workflow
from llamafactory.train.tuner import run_exp

from trimtab.runtime.training.balanced import planned_samples, run_as_planned


def train(plan: str, arguments: dict[str, Any] | None = None) -> None:
    """Run `llamafactory-cli train` with these arguments, or those of the command line, and the plan's packs."""

    def samples_of(_template: Any, model_args: Any, *_: Any, **__: Any) -> dict[str, Any]:
        return {"train_dataset": planned_samples(plan, model_args.model_name_or_path)}

    class PlannedTrainer(workflow.CustomSeq2SeqTrainer):  # type: ignore[misc]
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            run_as_planned(self, plan)

    workflow.get_dataset, workflow.CustomSeq2SeqTrainer = samples_of, PlannedTrainer
    run_exp(arguments)


if __name__ == "__main__":
    train(sys.argv.pop(1))
