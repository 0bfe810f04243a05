"""Strict JSON and YAML; what they hold as frozen dataclasses, each missing, unknown or wrong field named by place."""

import json
import re
from collections.abc import Callable
from dataclasses import MISSING, Field, fields
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from trimtab.errors import TrimtabError


def _refuse_constant(constant: str) -> object:
    raise ValueError(f"{constant} is not a number in JSON")


def _refuse_twice(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"key {twice[:60]!r} stands twice in one object")
    return found


# made once: making one costs more than a short record
STRICT = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_refuse_twice)
_WITH_NAN = json.JSONDecoder(object_pairs_hook=_refuse_twice)


def parse_json(content: bytes, *, with_nan: bool = False) -> Any:
    """Use it for JSON from outside: strict, in UTF-8, no key twice; a `ValueError` says what is wrong.

    `with_nan`: numbers may be NaN or infinite, as Python writes them.

    >>> parse_json(b'{"a": [1, null]}')
    {'a': [1, None]}
    """
    text = content.decode("utf-8-sig")
    try:
        return refuse_surrogates((_WITH_NAN if with_nan else STRICT).decode(text), text)
    except RecursionError:
        raise ValueError("nested too deeply") from None


def refuse_surrogates(value: Any, text: str, start: int = 0, end: int | None = None) -> Any:
    """Return `value`, parsed of this part of a JSON text; a `ValueError` for half a character, as nothing encodes."""
    if text.find("\\ud", start, end) >= 0 or text.find("\\uD", start, end) >= 0:
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    return value


def parse_yaml(text: str) -> Any:
    """Use it for YAML from outside: plain data, no aliases, no key twice; a `ValueError` says what is wrong.

    >>> parse_yaml("sizes: [1, 2e6]")
    {'sizes': [1, 2000000.0]}
    """
    import yaml
    from yaml.composer import Composer

    base = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader

    class Loader(Composer, base):  # type: ignore[misc, valid-type]  # PyYAML's composer: that of libyaml overflows the stack
        def __init__(self, stream: str) -> None:
            base.__init__(self, stream)
            Composer.__init__(self)

        def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
            if self.check_event(yaml.AliasEvent):  # a few lines of aliases can stand for billions of nodes
                raise yaml.YAMLError("aliases are not allowed")
            return super().compose_node(parent, index)

        def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
            node: yaml.MappingNode = super().compose_mapping_node(anchor)
            seen: set[Any] = set()
            for key, _ in node.value:
                if isinstance(key, yaml.ScalarNode) and (key.tag, key.value) in seen:
                    raise yaml.YAMLError(f"key {key.value[:60]!r} stands twice{key.start_mark}")
                seen.add((key.tag, key.value) if isinstance(key, yaml.ScalarNode) else id(key))
            return node

    # as people write it, where YAML 1.1 asks for a point and a sign
    exponent = re.compile(r"[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$")
    Loader.add_implicit_resolver("tag:yaml.org,2002:float", exponent, list("-+0123456789"))
    try:
        return yaml.load(text, Loader=Loader)  # noqa: S506 - a SafeLoader
    except (yaml.YAMLError, RecursionError, ValueError) as error:  # ValueError: 2026-99-99 is no date
        raise ValueError(" ".join(str(error).split())[:200]) from None


ReadNumber = Callable[[str, Any, Any, list[str]], Any]


def has_default(field: Field[Any]) -> bool:
    """Return whether a file may leave the field out, where all that have a default may be."""
    return field.default is not MISSING


def read_typed(
    kind: Any,
    value: Any,
    where: str,
    problems: list[str],
    *,
    read_number: ReadNumber,
    optional: Callable[[Field[Any]], bool] = has_default,
    unknown: list[str] | None = None,
) -> Any:
    """Return `value` as `kind` (a frozen dataclass, tuple, Literal or plain type), problems appended with their place.

    Use it for files that came from outside: nothing is converted but whole numbers to floats, which `read_number`
    (place, kind, value, problems) judges and returns. `optional` says which fields of a dataclass may be absent;
    places of fields that it does not have go to `unknown` (None: they are problems).

    >>> from trimtab.typed_json import read_typed
    >>> problems = []
    >>> read_typed(tuple[int, ...], [1, "2"], "sizes", problems, read_number=lambda place, kind, value, problems: value)
    (1, '2')
    >>> problems
    ['sizes1: expected int, found str']
    """
    again: dict[str, Any] = {"read_number": read_number, "optional": optional, "unknown": unknown}
    if hasattr(kind, "__dataclass_fields__"):
        if not isinstance(value, dict):
            problems.append(f"{where or 'file'}: expected an object")
            return None
        hints, known = get_type_hints(kind), {f.name: f for f in fields(kind) if f.init}
        may_lack = {name for name, f in known.items() if optional(f)}
        problems += [f"{where}{name}: missing" for name in sorted(set(known) - set(value) - may_lack)]
        strange = [f"{where}{str(name)[:60]}" for name in value if name not in known]
        if unknown is None:
            problems += [f"{place}: unknown" for place in strange]
        else:
            unknown += strange
        before = len(problems)
        parts = {
            n: read_typed(hints[n], value[n], f"{where}{n}.", problems, **again)
            for n in sorted(set(known) & set(value))
        }
        if len(problems) > before or set(known) - may_lack - set(value):
            return None
        try:
            return kind(**parts)
        except TrimtabError as error:
            problems.append(f"{where}: {error}")
            return None
    place = where.rstrip(".")
    if get_origin(kind) in (UnionType, Union):  # X | None, or int | str
        kinds = [x for x in get_args(kind) if x is not NoneType]
        if value is None and len(kinds) < len(get_args(kind)):
            return None
        return read_typed(type(value) if type(value) in kinds else kinds[0], value, where, problems, **again)
    if get_origin(kind) is tuple:
        return _read_tuple(kind, value, where, problems, again)
    if get_origin(kind) is Literal:
        if value not in get_args(kind):
            problems.append(f"{place}: {repr(value)[:60]} is none of {', '.join(map(str, get_args(kind)))}")
        return value
    plain = {float: (int, float), int: (int,), str: (str,), bool: (bool,)}[kind]
    if not isinstance(value, plain) or isinstance(value, bool) != (kind is bool):
        problems.append(f"{place}: expected {kind.__name__}, found {type(value).__name__}")
    elif kind in (float, int):
        value = read_number(place, kind, value, problems)
    return value


def _read_tuple(kind: Any, value: Any, where: str, problems: list[str], again: dict[str, Any]) -> Any:
    """Read a tuple of any length, or of the one that its type spells out."""
    if not isinstance(value, list):
        problems.append(f"{where.rstrip('.')}: expected a list")
        return ()
    items = get_args(kind)
    if items[-1] is not Ellipsis and len(items) != len(value):
        problems.append(f"{where.rstrip('.')}: expected {len(items)} entries, found {len(value)}")
        return ()
    kinds = [items[0]] * len(value) if items[-1] is Ellipsis else items
    return tuple(
        read_typed(item, x, f"{where}{i}.", problems, **again)
        for i, (item, x) in enumerate(zip(kinds, value, strict=True))
    )
