"""Jinja for a stranger's chat template: what `apply_chat_template` offers, in bounded steps and memory."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.sandbox
import jinja2.utils
import jinja2.visitor

_MAX_STEPS = 1_000_000  # turns of loops and calls, of one conversation
_MAX_NUMBER = 1_000_000  # handed to a function or filter, as a width
_MAX_LENGTH = 1 << 24  # of one text or list
_MAX_MADE = 1 << 28  # characters of one conversation, those of texts on the way included; an item of a list is eight
_MAX_WIDTH = 64  # of the indent of `tojson`
_MAX_BITS = 1 << 20  # of a whole number
_MAX_PARSED = 1_000_000  # characters for a filter that searches them for words or addresses
_NUMBER = re.compile(r"\d+")
_NESTED = re.compile(r"\{[^{}]+\{")  # a width that is itself a field


def _refuse(what: str) -> Any:
    raise jinja2.exceptions.SecurityError(f"a chat template must not {what}")


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Every turn of a loop and every call is counted: call `start` before each conversation."""

    intercepted_binops = frozenset(["+", "*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols])
        self._steps = self._made = 0
        self.filters = {name: self.bounded(name, function) for name, function in self.filters.items()}
        self.filters["joined_parts"] = self.concat = self._concat  # type: ignore[method-assign]
        self.filters["counted_turns"] = self._turns
        # the originals hand out attributes that a sandbox should not
        del self.globals["lipsum"]
        self.globals.update(dict=lambda *items, **fields: dict(*items, **fields), namespace=PublicNamespace)

    def start(self) -> None:
        self._steps = self._made = 0

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            _refuse(f"take more than {_MAX_STEPS:,} steps for one conversation")

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _charge(self, value: Any) -> Any:
        """`value`, when all that was made until now is not too much."""
        if isinstance(value, str | bytes | list | tuple | dict):
            self._made += len(value) * (1 if isinstance(value, str | bytes) else 8)
            if self._made > _MAX_MADE:
                _refuse(f"make more than {_MAX_MADE:,} characters for one conversation")
        return value

    def _concat(self, parts: Iterable[Any]) -> str:
        """Of `~`, of blocks, and of all that is written."""
        texts, length = [], 0
        for part in parts:
            texts.append(str(part))
            length += len(texts[-1])
            _check_length(length)
        return str(self._charge("".join(texts)))

    def bounded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """The filter: arguments behind the filtered value are checked, and what comes out is counted."""

        @functools.wraps(function)
        def checked(*args: Any, **named: Any) -> Any:
            first = 1 + hasattr(function, "jinja_pass_arg")
            others = (*args[first:], *named.values())
            _check_numbers(others)
            value = args[first - 1] if len(args) >= first else None
            if name == "join":
                if isinstance(value, Iterator):
                    value = list(value)
                    args = (*args[: first - 1], value, *args[first:])
                _check_length(_length(value) * max(map(_length, others), default=0))
            elif name == "format":
                _check_format(str(value), others)
            elif name in ("urlize", "wordwrap") and _length(value) * max(1, *map(_length, others), 1) > _MAX_PARSED:
                _refuse(f"hand {_length(value)} characters to {name}")
            else:
                _check_method(name, value, others)
            return self._charge(function(*args, **named))

        return checked

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "counted_turns", [], [], None, None, lineno=loop.lineno)
        return _JoinedParts().visit(tree)  # type: ignore[no-any-return]

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as jinja2 has it)
        __self._step()
        others = (*args, *kwargs.values())
        _check_numbers(others)
        method = getattr(__obj, "__wrapped__", __obj)  # Jinja wraps `format` of a text
        owner, name = getattr(method, "__self__", None), getattr(method, "__name__", "")
        if isinstance(owner, str | bytes):
            _check_method(name, owner, others)
        return __self._charge(super().call(__context, __obj, *args, **kwargs))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_length(_length(left) + _length(right))
        if operator == "*":
            for one, other in ((left, right), (right, left)):
                if isinstance(one, int) and hasattr(other, "__len__") and one * len(other) > _MAX_LENGTH:
                    _refuse(f"repeat text {one} times")
            if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
                _refuse(f"compute numbers of more than {_MAX_BITS:,} bits")
        if operator == "**" and not (abs(left) <= _MAX_NUMBER and abs(right) <= 64):
            _refuse(f"compute {left} ** {right}")
        if operator == "%" and isinstance(left, str):
            if "*" in left:
                _refuse("format with such a width")
            _check_format(left, right if isinstance(right, tuple) else (right,))
        return self._charge(super().call_binop(context, operator, left, right))


class _JoinedParts(jinja2.visitor.NodeTransformer):
    """`a ~ b` becomes a filter, because Jinja asks nobody about it."""

    def visit_Concat(self, node: jinja2.nodes.Concat) -> jinja2.nodes.Filter:  # noqa: N802 (as jinja2 has it)
        self.generic_visit(node)
        parts = jinja2.nodes.List(node.nodes, lineno=node.lineno)
        return jinja2.nodes.Filter(parts, "joined_parts", [], [], None, None, lineno=node.lineno)


def _length(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _check_length(length: int) -> None:
    if length > _MAX_LENGTH:
        _refuse(f"make a text or list of more than {_MAX_LENGTH:,}")


def _check_numbers(values: Iterable[Any]) -> None:
    for value in values:
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            _refuse(f"hand {value} to a function")


def _check_format(text: str, values: Iterable[Any]) -> None:
    """Widths of `%9d` and `{:9}` add up; every field may be the longest value."""
    widths = sum(int(digits[:8]) for digits in _NUMBER.findall(text))
    if any(len(digits) > 6 for digits in _NUMBER.findall(text)) or _NESTED.search(text.replace("{{", "")):
        _refuse("format with such a width")
    longest = max((len(str(value)) for value in values), default=0)
    _check_length(widths + (text.count("{") + text.count("%")) * longest)


def _check_method(name: str, value: Any, others: tuple[Any, ...]) -> None:
    """Methods of text, and filters of the same names, that write one text many times."""
    if name == "tojson":
        width = max((other if isinstance(other, int) else _length(other) for other in others), default=0)
        if width > _MAX_WIDTH:
            _refuse(f"indent by {width}")
    if isinstance(value, bytes):
        _refuse("call methods of bytes")
    if not isinstance(value, str):
        return
    if name in ("format", "format_map"):
        _check_format(value, others[0].values() if name == "format_map" else others)
    elif name == "join" and others:
        _check_length(len(value) * _length(others[0]))
    elif name == "replace" and len(others) > 1:
        _check_length(len(value) + value.count(others[0]) * _length(others[1]))
    elif name in ("indent", "expandtabs"):
        width = max((other if isinstance(other, int) else _length(other) for other in others), default=8)
        lines = value.count("\n" if name == "indent" else "\t")
        _check_length(len(value) + (lines + 1) * width)
    elif name == "translate":
        longest = max(map(_length, others[0].values()), default=0) if isinstance(others[0], dict) else 1
        _check_length(len(value) * longest)


class GenerationBlock(jinja2.ext.Extension):
    """{% generation %}: marks what the assistant wrote; here only its text."""

    tags = {"generation"}  # noqa: RUF012 (read by jinja2)

    def parse(self, parser: Any) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

    def _text(self, caller: Callable[[], str]) -> str:
        return caller()


class PublicNamespace(jinja2.utils.Namespace):
    """Without the names that begin with an underscore."""

    def __init__(*args: Any, **fields: Any) -> None:
        self, *positional = args
        values = dict(*positional, **fields)
        for name in values:
            _check_public(name)
        jinja2.utils.Namespace.__init__(self, values)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_public(name)
        super().__setitem__(name, value)


def _check_public(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"a chat template must not set {name!r} on a namespace")
