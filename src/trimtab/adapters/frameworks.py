"""The frameworks that a plan's stages and recompute can be exported to: one line here, and one file each.

The file of `my-framework` is `adapters/my_framework.py`, and its `TARGET` says all that is known of the framework. The
command line, its help, `check --for` and `plan --for` read this table; no adapter is imported before it is asked for.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trimtab.adapters.running import Target

FRAMEWORKS: Mapping[str, str] = {
    "megatron": "Print Megatron-Core flags for PLAN, or say why Megatron-Core cannot express it and what that costs.",
    "megatron-bridge": "Print assignments to a Megatron-Bridge configuration for PLAN.",
    "ms-swift": "Print arguments of ms-swift's `megatron sft` for PLAN.",
    "pai-megatron": "Print environment and arguments of Pai-Megatron-Patch's Qwen-VL scripts for PLAN.",
    "torchtitan": "Print torchtitan's parallelism and recompute settings for PLAN.",
    "deepspeed": "Write a Python module with a PipelineModule that is cut as PLAN says.",
    "torch-pipelining": "Write modules, rank and recompute of each stage as JSON for torch.distributed.pipelining.",
    "huggingface": "Print the lines that recompute PLAN's layers in a Transformers model, and its own nearest setting.",
}
"""Name on the command line, and the first line of its help."""


def find_target(name: str) -> Target:
    """What the adapter of one of `FRAMEWORKS` declares.

    >>> find_target("deepspeed").title
    'DeepSpeed'
    """
    target: Target = importlib.import_module(f"trimtab.adapters.{name.replace('-', '_')}").TARGET
    return target
