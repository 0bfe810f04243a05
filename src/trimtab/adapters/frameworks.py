"""The frameworks that a plan can be made for and exported to: one line here, and one file for each or for a few alike.

The `TARGETS` of `adapters/FILE.py` say by name all that is known of a framework: what it can run, how it spells its
settings, whether it takes packs. The command line, its help, `check --for` and `plan --for` read this table; no adapter
is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.adapters.running import Target


@dataclass(frozen=True, slots=True)
class Framework:
    """Where a framework is declared, and the first line of its help."""

    file: str
    help: str


FRAMEWORKS: Mapping[str, Framework] = {
    "megatron": Framework("megatron", "Print Megatron-Core flags for PLAN, or why it cannot be run."),
    "megatron-bridge": Framework("megatron_hosts", "Print assignments to a Megatron-Bridge configuration for PLAN."),
    "ms-swift": Framework("megatron_hosts", "Print arguments of ms-swift's `megatron sft` for PLAN."),
    "pai-megatron": Framework("pai_megatron", "Print environment and arguments of Pai-Megatron-Patch's scripts."),
    "mindspeed-mm": Framework("mindspeed_mm", "Print arguments and model-file fields of MindSpeed-MM for PLAN."),
    "deepspeed": Framework("deepspeed", "Write a Python module with a PipelineModule that is cut as PLAN says."),
    "transformers": Framework("huggingface", "Print the lines that train PLAN with the Trainer of Transformers."),
    "accelerate": Framework("huggingface", "Print the lines that train PLAN with Accelerate and DDP."),
    "fsdp2": Framework("huggingface", "Print the lines that train PLAN with torch's fully_shard."),
    "trl": Framework("huggingface", "Print the lines that train PLAN with TRL's SFTTrainer."),
    "llama-factory": Framework("huggingface", "Print settings of a LLaMA-Factory file that trains PLAN and its packs."),
    "axolotl": Framework("huggingface", "Print settings of an axolotl file that trains PLAN, packs and all."),
}
"""By the name on the command line."""


def find_target(name: str) -> Target:
    """Return what the adapter of one of `FRAMEWORKS` declares.

    >>> find_target("deepspeed").title
    'DeepSpeed'
    """
    target: Target = importlib.import_module(f"trimtab.adapters.{FRAMEWORKS[name].file}").TARGETS[name]
    return target
