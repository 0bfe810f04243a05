"""The verbs of `trimtab`, as data: `--help` shows them without loading one, or Typer. Tests hold them to the code."""

from __future__ import annotations

import textwrap
from importlib import import_module
from types import MappingProxyType
from typing import Any

VERBS = MappingProxyType(
    {
        "demo": (
            "report:demo",
            "Run the whole flow on a small data set of images that is drawn here: no download, no GPU, no torch.",
        ),
        "plan": (
            "plan:plan",
            "Plan the training of CONFIG on DATA: packs, stages and recompute, compared with the unbalanced baseline.",
        ),
        "predict": (
            "plan:predict",
            "Predict step time, memory and idle of a run you already have on DATA; nothing is decided.",
        ),
        "check": (
            "check:check",
            "Check coverage, limits, memory and input hashes of PLAN; exit code 1 when something does not hold.",
        ),
        "probe": (
            "run:probe",
            "Run PLAN's heaviest packs through MODEL, alone or under torchrun as `trimtab train`; "
            "choose recompute that fits.",
        ),
        "train": (
            "run:train",
            "Train MODEL as PLAN says: `torchrun --nproc-per-node N --no-python trimtab train PLAN MODEL`, or alone.",
        ),
        "replan": (
            "plan:replan",
            "Say where a run differs from PLAN, refit the costs, and plan the rest of it, with the same batches.",
        ),
        "compare": (
            "report:compare",
            "Show what plans take, and which inputs and decisions differ, in one table.",
        ),
        "report": (
            "report:report",
            "Simulate PLAN again and write report.html (self-contained).",
        ),
        "serve": (
            "map:serve",
            "Serve MODEL_DIR on this machine by Transformers' own OpenAI application, one request at a time.",
        ),
        "map": (
            "map:map_model",
            "Place CONFIG on GPUs for inference: device map, and the bytes of each device by kind.",
        ),
        "describe": (
            "describe:describe",
            "Print layers in forward order, parameters per tower, tied weights and forbidden cuts.",
        ),
        "image-size": (
            "describe:image_size",
            "Print ViT patches and LLM tokens of an image of SIZE pixels, or of a clip of --frames such images.",
        ),
        "profile": (
            "profile:profile",
            "Price every layer of CONFIG: forward and backward seconds, share, rate, and how far they may be off.",
        ),
        "size": (
            "data:size",
            "Count images, ViT patches and LLM tokens of every sample of DATA, from image headers and the tokenizer.",
        ),
        "pack": (
            "pack:pack",
            "Pack the samples of SIZES and print pad ratio, dist ratios, fill and shuffle quality.",
        ),
        "uneven": (
            "describe:uneven",
            "Layers for uneven pipeline stages by Pai-Megatron-Patch's notebook: FLOPs, split, memory, flags.",
        ),
        "export": (
            "export:export",
            "Write a plan's decisions, or a placed model, in another framework's words.",
        ),
        "options": (
            "settings:list_settings",
            "List the settings that --set and --options take, with type, default and help.",
        ),
    }
)
"""Module and function of each verb, and the first sentence of its help."""

_HEAD = """\
Usage: trimtab [OPTIONS] COMMAND [ARGS]...

  Balance data, pipeline stages and memory of vision-language models; write the
  decisions as one plan.

Options:
  --version             Print the version and stop.
  --install-completion  Complete verbs, options and settings in this shell.
  --show-completion     Print the completion, to copy or customise it.
  --help                Show this message and exit.

Commands:
"""


def help_text(width: int = 80) -> str:
    """The help of `trimtab` itself."""
    longest = max(map(len, VERBS))
    lines = []
    for name, (_, summary) in VERBS.items():
        head = f"  {name:<{longest}}  "
        lines += textwrap.wrap(summary, width, initial_indent=head, subsequent_indent=" " * len(head))
    return _HEAD + "\n".join(lines) + "\n"


def load_verb(name: str) -> Any:
    """The function of a verb."""
    module, _, function = VERBS[name][0].partition(":")
    return getattr(import_module(f"trimtab.cli.{module}"), function)
