"""What `trimtab train` runs of what a plan decides, without torch: `trimtab plan --for trimtab` asks here.

Degrees and schedules that it has no code for are refused by `read_layout`, before a run and before a plan is written.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import get_args

from trimtab.address import place_of
from trimtab.errors import ConfigError, SampleError, UnsupportedPlanError
from trimtab.lora import Lora
from trimtab.models.families import family_of
from trimtab.plan.decide.expressible import Expressible
from trimtab.runtime.data.records import refuse_tars
from trimtab.runtime.layout import TorchSchedule
from trimtab.samples.table import is_saved_table, sized_files
from trimtab.specs import ModelSpec, SampleTable

CHOICES: Mapping[str, tuple[object, ...]] = MappingProxyType(
    {
        "tp": (1,),
        "schedule": get_args(TorchSchedule),
        "fills_pipeline": (True,),
        "zero_stage": (0,),  # every data-parallel rank holds the whole state of its stages
        "fused_kernels": (False,),
        "host": ("eager",),
        "dtype": ("bf16", "fp32"),
        "optimizer": ("adamw", "sgd_momentum", "sgd"),  # of torch.optim
    }
)


def can_train(model: ModelSpec) -> Expressible:
    """What the loop can run of a model; raises `ConfigError` for one that it cannot run at all."""
    refuse_remote_code(model)
    return Expressible(choices=CHOICES)


def refuse_data(samples: SampleTable, files: Sequence[Path]) -> None:
    """Raises `SampleError` for data that the loop cannot read one by one, or whose sizes it could not meet.

    `files`: as `find_sources` found them.
    """
    if not samples.tokens_exact:
        raise SampleError(
            "a plan to be trained was asked for, and its data was sized without a tokenizer, by estimates that no "
            "sample meets: give --tokenizer"
        )
    saved = [file for file in files if is_saved_table(file)]
    behind = [place_of(file.path) for table in saved for file in sized_files(table)]
    refuse_tars([file for file in (*files, *behind) if file not in saved and file.is_file()])


def refuse_quantised(lora: Lora | None) -> None:
    """Raises `UnsupportedPlanError` for adapters over weights that the loop, which loads float32, does not hold."""
    if lora is not None and lora.bits < 16:
        raise UnsupportedPlanError(
            f"LoRA over {lora.bits}-bit weights was asked for ({lora}), and `trimtab train` loads them in float32: "
            "leave bits out, or train by TRL or ms-swift (`trimtab export trl`)"
        )


def refuse_remote_code(model: ModelSpec) -> None:
    if family_of(model.family).is_remote_code:
        raise ConfigError(
            f"samples of the family {model.family} were to be made, but its code is remote and is never run: take a "
            "checkpoint that Transformers has a class for (their names often end in -hf), or process the data yourself"
        )
