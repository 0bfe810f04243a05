"""The command line of a verb from the dataclasses that hold its options, `verb`; and the help of all verbs."""

from __future__ import annotations

import functools
import inspect
import os
import re
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, is_dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperGroup

from trimtab.errors import TrimtabError
from trimtab.files import refuse_special
from trimtab.options import Option, option_fields


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """`function` as Typer takes it: a parameter that is a dataclass becomes an option for each of its fields.

    Fields without an `Option` keep their defaults. `function` is called with the dataclasses, made and checked.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    for parameter in inspect.signature(function, eval_str=True).parameters.values():
        if is_dataclass(parameter.annotation):
            groups[parameter.name] = parameter.annotation
            parameters += _parameters(parameter.annotation)
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(function)
    def command(**given: Any) -> None:
        made = {name: _make(kind, given) for name, kind in groups.items()}
        function(**given, **made)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    return command


def _parameters(kind: Any) -> Iterator[inspect.Parameter]:
    for field, (name, hint, option) in zip(fields(kind), option_fields(kind), strict=True):
        if is_dataclass(hint):
            yield from _parameters(hint)
        if option is None:
            continue
        default, flag = field.default, option.flag
        if option.read is not None:
            hint, default = option.typed, option.shown
            hint = hint if default is not None else hint | None
        elif hint is bool:
            flag, default = flag or "--" + name.replace("_", "-"), False  # one flag, that changes the default
        told: Any = (
            typer.Argument(help=option.text)
            if option.argument
            else typer.Option(
                *filter(None, [flag]),
                help=option.text,
                min=option.least,
                max=option.most,
                rich_help_panel=None if option.common else _title(kind),
            )
        )
        yield inspect.Parameter(
            _parameter_name(name, option),
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if default is MISSING else default,
            annotation=Annotated[hint, told],
        )


def _make(kind: Any, given: dict[str, Any]) -> Any:
    """The dataclass from what was typed, which leaves `given`; what was not typed keeps the dataclass's default."""
    made = {}
    for field, (name, hint, option) in zip(fields(kind), option_fields(kind), strict=True):
        if is_dataclass(hint):
            made[name] = _make(hint, given)
        if option is None:
            continue
        value = given.pop(_parameter_name(name, option))
        if value is None or value == []:
            continue
        if option.read is not None:
            value = option.read(value)
        elif hint is bool:
            value = value != field.default
        made[name] = value
    return kind(**made)


def _title(kind: type) -> str:
    """ "Plan" of `PlanOptions`, "Vision" of `VisionChoice`."""
    return re.sub(r"(?<=[a-z])(?=[A-Z]).*", "", kind.__name__)


_TOLD = {"int": "N", "int range": "N", "float": "X", "float range": "X", "str": "TEXT", "path": "PATH", "Path": "PATH"}
"""What a value is called in the help, by the type that Typer shows."""


class Verb(TyperCommand):
    """A command whose help lists its options in groups: those of no group first, in the order they are declared."""

    def make_context(self, *args: Any, **extra: Any) -> Any:
        """What is wrong with the command line is said once a machine, not once a process of torchrun."""
        with _told_once():
            return super().make_context(*args, **extra)

    def parse_args(self, ctx: Any, args: list[str]) -> Any:
        """Refuses an empty `--out`: Python takes it for the folder that the user is in."""
        if "--out=" in args or ("--out", "") in pairwise(args):
            raise TrimtabError("--out is empty, and names no file or folder: give a name, or . for this folder")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        """Refuses what is no file where a file is to be read, before anything is done."""
        for name, given in ctx.params.items():
            for value in given if isinstance(given, list | tuple) else [given]:
                if name != "out" and isinstance(value, str | Path):
                    refuse_special(value)
        return super().invoke(ctx)

    def format_options(self, ctx: Any, formatter: Any) -> None:
        groups: dict[str, list[tuple[str, str]]] = defaultdict(list, {"Arguments": [], "Options": []})
        for parameter in self.get_params(ctx):
            record = parameter.get_help_record(ctx)
            if record is not None:
                record = (
                    re.sub(r"<(?:list\[)?([\w ]+)\]?>", lambda kind: _TOLD.get(kind[1], kind[0]), record[0]),
                    record[1],
                )
                name, _, choices = record[0].partition(" <")
                if len(record[0]) > formatter.width - 2:  # a list of choices longer than a line
                    record = (name, f"{record[1]} One of {choices.rstrip('>').replace('|', ', ')}.")
                is_argument = parameter.param_type_name == "argument"
                panel = getattr(parameter, "rich_help_panel", None)
                groups["Arguments" if is_argument else panel or "Options"].append(record)
        for title, records in groups.items():
            if records:
                with formatter.section(title):
                    formatter.write_dl(records)


def is_further_rank() -> bool:
    """Whether torchrun has started this process behind another one, on the same machine, with the same command."""
    return os.environ.get("LOCAL_RANK", "0") != "0"


_LONGEST = 200


def shorten_words(message: str) -> str:
    """`message` with about 80 characters of each longer word, and of what was typed: both ends tell which it is."""
    typed = (word.strip() for word in sys.argv)
    words = {*re.findall(r"\S+", message), *typed}
    for word in sorted((x for x in words if len(x) > _LONGEST), key=len, reverse=True):
        message = message.replace(word, f"{word[:57]}...{word[-20:]}")
    return message


@contextmanager
def _told_once() -> Iterator[None]:
    """Typer's words on a wrong command line: shortened, and said by one process of a machine."""
    try:
        yield
    except Exception as problem:  # Typer's own, whose classes are private
        if is_further_rank() and not isinstance(problem, typer.Exit):
            sys.exit(2)
        if hasattr(problem, "message"):
            problem.message = shorten_words(problem.message)
        raise


class Verbs(TyperGroup):
    """A group of commands whose help shows the first sentence of each, whole."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """As Typer does; a long word that is no verb is not shown whole."""
        with _told_once():
            return super().resolve_command(ctx, args)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        commands = ((name, self.get_command(ctx, name)) for name in self.list_commands(ctx))
        with formatter.section("Commands"):
            formatter.write_dl([(name, found.get_short_help_str(500)) for name, found in commands if found is not None])


def _parameter_name(name: str, option: Option) -> str:
    return name if option.flag is None else option.flag.removeprefix("--").replace("-", "_")
