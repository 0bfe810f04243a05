"""The verbs of `trimtab`, as data: `--help` shows them without loading one, or Typer. Tests hold them to the code."""

import textwrap
from importlib import import_module
from importlib.resources import files
from typing import Any

_LINES = files("trimtab.cli").joinpath("verbs.txt").read_text(encoding="utf-8").splitlines()
VERBS = {name: (where, summary) for name, where, summary in (line.split(" ", 2) for line in _LINES)}
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
