"""The Typer application: each verb is loaded when it is called; messages on a wrong command line are short."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from trimtab import __version__
from trimtab.cli.settings import moved_to
from trimtab.cli.verbs import VERBS, help_text, load_verb
from trimtab.errors import TrimtabError
from trimtab.files import refuse_special

_SHOWN = {"int": "N", "int range": "N", "float": "X", "float range": "X", "str": "TEXT", "path": "PATH", "Path": "PATH"}
"""The name of a value in the help, by the type that Typer shows."""
_LONGEST = 200  # characters of a word in a message


class Verb(TyperCommand):
    """A command whose help shows each option whole, and whose old options are answered with the new spelling."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """Report a wrong command line once a machine, not once a process of torchrun."""
        with _reported_once():
            return super().make_context(*args, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Refuse an empty `--out`, which Python takes for the current folder, and flags that are settings."""
        if "--out=" in args or ("--out", "") in pairwise(args):
            raise TrimtabError("--out is empty, and names no file or folder: give a name, or . for this folder")
        typed = list(args)  # Typer takes words from the list
        try:
            return super().parse_args(ctx, args)
        except Exception as problem:  # Typer's own, whose classes are private
            flag = getattr(problem, "option_name", None)
            if type(problem).__name__ == "NoSuchOption" and isinstance(flag, str):
                self._refuse_moved(flag, typed)
            raise

    def _refuse_moved(self, flag: str, args: list[str]) -> None:
        values = [word.partition("=")[2] for word in args if word.startswith(flag + "=")]
        values += [value for word, value in pairwise(args) if word == flag and not value.startswith("--")]
        now = moved_to(getattr(self.callback, "settings", {}), flag, values[0] if values else None)
        if now is not None:
            raise TrimtabError(f"{flag} is a setting: write it as {now}")

    def invoke(self, ctx: Any) -> Any:
        """Refuse what is no file where a file is to be read, before anything is done."""
        for name, given in ctx.params.items():
            for value in given if isinstance(given, list | tuple) else [given]:
                if name != "out" and isinstance(value, str | Path):
                    refuse_special(value)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        """Write arguments, then options, in the order they are declared."""
        groups: dict[str, list[tuple[str, str]]] = {"Arguments": [], "Options": []}
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is None:
                continue
            flags = re.sub(r"<(?:list\[)?([\w ]+)\]?>", lambda kind: _SHOWN.get(kind[1], kind[0]), record[0])
            text = re.sub(r"\s*\[(?:[\d.]+<=)?x(?:>=|<=)[\d.]+\]$", "", record[1]).replace("; x>=1]", "]")
            if parameter.param_type_name == "argument":  # the first line shows it
                text = text.removesuffix("  [required]")
            name, _, choices = flags.partition(" <")
            if choices and len(flags) > 36:  # a list of choices longer than its column
                flags = f"{name} NAME"
            record = flags, text
            groups["Arguments" if parameter.param_type_name == "argument" else "Options"].append(record)
        for title, listed in getattr(self.callback, "sections", {}).items():
            groups[title] = list(listed().items())
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


class Verbs(TyperGroup):
    """All verbs; one is loaded when it is asked for."""

    def list_commands(self, ctx: Any) -> list[str]:  # noqa: ARG002
        return list(VERBS)

    def get_command(self, ctx: Any, cmd_name: str) -> Any:  # noqa: ARG002
        if cmd_name not in VERBS:
            return None
        if cmd_name not in self.commands:
            one = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
            one.command(cmd_name, cls=Verb)(load_verb(cmd_name))
            self.commands[cmd_name] = typer.main.get_command(one)
        return self.commands[cmd_name]

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Find the verb; a long word that is none is not shown whole."""
        with _reported_once():
            return super().resolve_command(ctx, args)

    def format_help(self, ctx: Any, formatter: Any) -> None:  # noqa: ARG002
        formatter.write(help_text(formatter.width))


app = typer.Typer(cls=Verbs, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


def is_further_rank() -> bool:
    """Return whether torchrun started this process after another one, on the same machine, with the same command."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


def shorten_words(message: str) -> str:
    """Cut longer words of `message`, and what was typed, to about 80 characters: both ends tell which it is."""
    typed = (word.strip() for word in sys.argv)
    words = {*re.findall(r"\S+", message), *typed}
    for word in sorted((x for x in words if len(x) > _LONGEST), key=len, reverse=True):
        message = message.replace(word, f"{word[:57]}...{word[-20:]}")
    return message


@contextmanager
def _reported_once() -> Iterator[None]:
    """Shorten Typer's words on a wrong command line; only one process of a machine prints them."""
    try:
        yield
    except Exception as problem:  # Typer's own, whose classes are private
        if is_further_rank() and not isinstance(problem, typer.Exit):
            sys.exit(2)
        if hasattr(problem, "message"):
            problem.message = shorten_words(problem.message)
        raise
