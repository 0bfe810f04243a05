"""Options of a verb from the dataclasses that hold them: flags for the common fields, `--set NAME=VALUE` for the rest.

A field with `Option(common=True)` becomes a flag of its own. Each field is also a setting: `--set` and the file of
`--options` give it by name, `trimtab options VERB` lists it with its help.
"""

import difflib
import functools
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields, is_dataclass
from pathlib import Path
from types import NoneType
from typing import Annotated, Any, get_args, get_origin

import typer

from trimtab.cli.output import JsonOption, print_json
from trimtab.errors import TrimtabError, join_problems
from trimtab.files import read_small
from trimtab.options import Option, literals_of, option_fields, option_problems
from trimtab.typed_json import parse_yaml


@dataclass(frozen=True, slots=True)
class Setting:
    """One field of a verb's dataclasses, as the command line names it."""

    name: str  # "max_tokens"
    hint: Any
    default: Any
    option: Option

    @property
    def takes_many(self) -> bool:
        """Return whether several values may be given, one a `--set`."""
        return self.option.read is not None and get_origin(self.option.typed) is list

    @property
    def kind(self) -> Any:
        """The type of what is typed."""
        if self.option.read is not None:
            typed = self.option.typed
            return get_args(typed)[0] if self.takes_many else typed
        if NoneType not in get_args(self.hint):
            return self.hint
        return next(part for part in get_args(self.hint) if part is not NoneType)

    @property
    def shown_kind(self) -> str:
        """Return N, X, PATH, true|false, or the words to choose from."""
        words = literals_of(self.kind)
        return "|".join(words) if words else _KINDS.get(self.kind, "TEXT")

    @property
    def shown_default(self) -> str | None:
        """The default as it would be typed; None where there is none."""
        value = self.option.shown if self.option.read is not None else self.default
        if isinstance(value, bool):
            return str(value).lower()
        return None if value in (None, MISSING, (), []) else str(value)

    def read(self, words: Sequence[str]) -> Any:
        """The field's value from what was typed."""
        values = [self._read_one(word) for word in words]
        given: Any = values if self.takes_many else values[-1]
        return given if self.option.read is None else self.option.read(given)

    def _read_one(self, word: str) -> Any:
        kind, known = self.kind, literals_of(self.kind)
        if known and word not in known:
            raise TrimtabError(f"{self.name}={word} was given: choose one of {', '.join(known)}")
        if kind is bool:
            if word.lower() not in ("true", "false"):
                raise TrimtabError(f"{self.name}={word} was given: write {self.name}=true or {self.name}=false")
            return word.lower() == "true"
        if kind in (int, float):
            try:
                return kind(word)
            except ValueError:
                whole = "whole " if kind is int else ""
                raise TrimtabError(f"{self.name}={word} was given, and it takes a {whole}number") from None
        return Path(word) if kind is Path else word


_KINDS = {int: "N", float: "X", Path: "PATH", bool: "true|false"}


def settings_of(kind: type) -> Iterator[Setting]:
    """Yield all options of a dataclass, those of the dataclasses in it too."""
    for field, (_, hint, option) in zip(fields(kind), option_fields(kind), strict=True):
        if is_dataclass(hint):
            assert isinstance(hint, type)
            yield from settings_of(hint)
        if option is not None:
            yield Setting(_flat_name(field.name, option), hint, field.default, option)


def _flat_name(name: str, option: Option) -> str:
    return name if option.flag is None else option.flag.removeprefix("--").replace("-", "_")


# -- a verb ---------------------------------------------------------------------------------------------------------


def verb(function: Callable[..., None]) -> Callable[..., None]:
    """Return `function` as Typer takes it: a parameter that is a dataclass is made from flags and settings.

    Fields without an `Option` keep their defaults.
    """
    parameters: list[inspect.Parameter] = []
    groups: dict[str, Any] = {}
    known: dict[str, Setting] = {}
    own = inspect.signature(function, eval_str=True).parameters
    for parameter in own.values():
        if is_dataclass(parameter.annotation):
            kind: Any = parameter.annotation
            groups[parameter.name] = kind
            parameters += _flags(kind)
            known |= {setting.name: setting for setting in settings_of(kind)}
        else:
            parameters.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
    settings = {name: setting for name, setting in known.items() if not setting.option.argument}
    if "context" not in own:
        parameters.append(_keyword("context", typer.Context))
    parameters += _setting_flags(settings)

    @functools.wraps(function)
    def command(context: typer.Context, set_words: list[str] | None, set_file: Path | None, **given: Any) -> None:
        typed = _typed_flags(context, known, given)
        words = _words_of_file(context, set_file, settings) | _words_of_set(context, set_words or (), settings, typed)
        context.meta["settings"] = {name: words[name] for name in settings if name in words and name not in typed}
        values = _read(words, settings) | typed
        made = {name: _make(kind, values) for name, kind in groups.items()}
        if "context" in own:
            made["context"] = context
        plain = {name: value for name, value in given.items() if name in own and name not in groups}
        function(**plain, **made)

    command.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    command.settings = settings  # type: ignore[attr-defined]
    return command


def _keyword(name: str, annotation: Any, default: Any = inspect.Parameter.empty) -> inspect.Parameter:
    return inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, annotation=annotation, default=default)


def _flags(kind: Any) -> Iterator[inspect.Parameter]:
    """Yield the arguments and common fields, as Typer takes them."""
    for field, (name, hint, option) in zip(fields(kind), option_fields(kind), strict=True):
        if is_dataclass(hint):
            yield from _flags(hint)
        if option is None or not (option.argument or option.common):
            continue
        default, flag = field.default, option.flag
        if option.read is not None:
            hint, default = option.typed, option.shown
            hint = hint if default is not None else hint | None
        elif hint is bool:
            flag, default = flag or "--" + name.replace("_", "-"), False  # one flag, that changes the default
        shown: Any = (
            typer.Argument(help=option.text)
            if option.argument
            else typer.Option(*filter(None, [flag]), help=option.text, min=option.least, max=option.most)
        )
        empty = inspect.Parameter.empty if default is MISSING else default
        yield _keyword(_flat_name(name, option), Annotated[hint, shown], empty)


def _setting_flags(settings: Mapping[str, Setting]) -> Iterator[inspect.Parameter]:
    """Yield --set and --options."""
    num_more = sum(not setting.option.common for setting in settings.values())

    def complete(incomplete: str) -> list[str]:
        name, equals, _ = incomplete.partition("=")
        if equals and name in settings:
            return [f"{name}={word}" for word in settings[name].shown_kind.split("|") if word.islower()]
        return [f"{known}=" for known in settings if known.startswith(incomplete)]

    more = f"{num_more} more, by `trimtab options`." if num_more else "Any option, by its name."
    words = typer.Option("--set", metavar="NAME=VALUE", help=more, autocompletion=complete)
    file = typer.Option("--options", metavar="FILE", help="YAML file of settings by name.")
    yield _keyword("set_words", Annotated[list[str] | None, words], None)
    yield _keyword("set_file", Annotated[Path | None, file], None)


def _typed_flags(context: typer.Context, settings: Mapping[str, Setting], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values of the flags and arguments that were typed, read."""
    typed = {}
    for name, value in given.items():
        source = context.get_parameter_source(name)
        if name not in settings or source is None or source.name != "COMMANDLINE":
            continue
        setting = settings[name]
        if setting.option.read is not None:
            value = setting.option.read(value)
        elif setting.kind is bool:
            value = not setting.default
        typed[name] = value
    return typed


def _words_of_set(
    context: typer.Context, given: Sequence[str], settings: Mapping[str, Setting], typed: Mapping[str, Any]
) -> dict[str, list[str]]:
    """Return what `--set` gave of each name."""
    words: dict[str, list[str]] = {}
    problems = []
    for text in given:
        name, equals, value = text.partition("=")
        if not equals:
            problems.append(f"--set {text} has no value: write it as NAME=VALUE, as in seed=1")
        elif name not in settings:
            problems.append(_unknown(context, name, settings))
        elif name in typed or (name in words and not settings[name].takes_many):
            problems.append(f"{name} was given twice: give it once")
        words.setdefault(name, []).append(value)
    if problems:
        raise TrimtabError(join_problems(problems))
    return words


def _words_of_file(context: typer.Context, file: Path | None, settings: Mapping[str, Setting]) -> dict[str, list[str]]:
    """Return what a YAML file says of each name, as it would be typed."""
    if file is None:
        return {}
    try:
        content = parse_yaml(read_small(file).decode("utf-8")) or {}
    except ValueError as error:
        raise TrimtabError(f"{file} is no YAML ({error}): write settings as in max_tokens: 8192") from None
    if not isinstance(content, dict):
        raise TrimtabError(f"{file} holds no settings: write one NAME: VALUE a line, as in max_tokens: 8192")
    unknown = [f"{file}: {_unknown(context, str(name), settings)}" for name in content if name not in settings]
    if unknown:
        raise TrimtabError(join_problems(unknown))
    return {name: _words(value) for name, value in content.items() if value is not None}


def _words(value: Any) -> list[str]:
    """Return a YAML value as it would be typed: a list is one word each, a mapping is NAME=VALUE,..."""
    if isinstance(value, list):
        return [word for one in value for word in _words(one)]
    if isinstance(value, dict):
        return [",".join(f"{name}={one}" for name, one in value.items())]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


def _unknown(context: typer.Context, name: str, settings: Mapping[str, Setting]) -> str:
    shown = name if len(name) <= 60 else name[:57] + "..."
    near = difflib.get_close_matches(name.lower().replace("-", "_")[:60], settings, n=1)
    meant = f"did you mean {near[0]}? " if near else ""
    verb_name = context.command.name
    return f"{verb_name} has no setting {shown!r}: {meant}`trimtab options {verb_name}` lists all"


def _read(words: Mapping[str, Sequence[str]], settings: Mapping[str, Setting]) -> dict[str, Any]:
    values, problems = {}, []
    for name, given in words.items():
        if len(given) > 1 and not settings[name].takes_many:
            problems.append(f"{name} has several values, and it takes one: give one")
            continue
        if not given:
            continue
        try:
            values[name] = settings[name].read(given)
        except TrimtabError as error:
            problems.append(str(error))
    if problems:
        raise TrimtabError(join_problems(problems))
    return values


def _make(kind: Any, values: Mapping[str, Any]) -> Any:
    """The dataclass from the values by name; the others keep its defaults."""
    made = {}
    for field, (_, hint, option) in zip(fields(kind), option_fields(kind), strict=True):
        if is_dataclass(hint):
            made[field.name] = _make(hint, values)
        elif option is not None and (name := _flat_name(field.name, option)) in values:
            made[field.name] = values[name]
    result = kind(**made)
    problems = option_problems(result)  # of a dataclass that does not check itself
    if problems:
        raise TrimtabError(join_problems(problems))
    return result


def moved_to(settings: Mapping[str, Setting], flag: str, value: str | None) -> str | None:
    """Return how a flag that became a setting is written: "--set max_tokens=8192"; None without such a setting."""
    name = flag.removeprefix("--").replace("-", "_")
    off = name.removeprefix("no_")
    if off in settings and settings[off].default is True:
        return f"--set {off}=false"
    if name not in settings:
        return None
    if settings[name].kind is bool:
        return f"--set {name}=true"
    return f"--set {name}={value if value is not None else settings[name].shown_kind}"


# -- trimtab options --------------------------------------------------------------------------------------------------


def list_settings(
    context: typer.Context,
    name: Annotated[str | None, typer.Argument(metavar="[VERB]", help="Only the settings of this verb.")] = None,
    as_json: JsonOption = False,
) -> None:
    """List the settings that --set and --options take, with type, default and help."""
    group: Any = context.find_root().command
    verbs = [name] if name is not None else group.list_commands(context)
    takers: dict[Setting, list[str]] = {}
    for known in verbs:
        command = group.get_command(context, known)
        if command is None:
            raise TrimtabError(f"{known!r} is no verb: choose one of {', '.join(group.list_commands(context))}")
        for setting in _settings_of_command(command).values():
            takers.setdefault(setting, []).append(known)
    if as_json:
        print_json({"settings": [_as_json(setting, verbs) for setting, verbs in takers.items()]})
        return
    for setting, verbs in takers.items():
        flag = f" (or --{setting.name.replace('_', '-')})" if setting.option.common else ""
        default = "" if setting.shown_default is None else f" [default: {setting.shown_default}]"
        of = "" if name is not None else f"  # {', '.join(verbs)}"
        print(f"{setting.name}={setting.shown_kind}{flag}{of}\n    {setting.option.text}{default}")


def _settings_of_command(command: Any) -> Mapping[str, Setting]:
    found: Mapping[str, Setting] = getattr(command.callback, "settings", {})
    return found


def _as_json(setting: Setting, verbs: Sequence[str]) -> dict[str, Any]:
    return {
        "name": setting.name,
        "type": setting.shown_kind,
        "default": setting.shown_default,
        "flag": setting.option.common,
        "many": setting.takes_many,
        "help": setting.option.text,
        "verbs": verbs,
    }
