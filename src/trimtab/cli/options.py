"""The command line of a verb from the dataclasses that hold its options: `verb`."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from dataclasses import MISSING, fields, is_dataclass
from typing import Annotated, Any

import typer

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
            else typer.Option(*filter(None, [flag]), help=option.text, min=option.least, max=option.most)
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


def _parameter_name(name: str, option: Option) -> str:
    return name if option.flag is None else option.flag.removeprefix("--").replace("-", "_")
