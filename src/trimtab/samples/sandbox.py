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

_MAX_STEPS = 1_000_000  # turns of loops and calls, of one conversation
_MAX_NUMBER = 1_000_000  # handed to a function or filter, as a width
_MAX_LENGTH = 1 << 24  # of what `*` repeats
_WIDTH = re.compile(r"\d{7}|\*")


def _refuse(what: str) -> Any:
    raise jinja2.exceptions.SecurityError(f"a chat template must not {what}")


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Every turn of a loop and every call is counted: call `start` before each conversation."""

    intercepted_binops = frozenset(["*", "**", "%"])

    def __init__(self) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationBlock, jinja2.ext.loopcontrols])
        self._steps = 0
        self.filters = {name: _small_numbers(function) for name, function in self.filters.items()}
        self.filters["counted_turns"] = self._turns
        # the originals hand out attributes that a sandbox should not
        self.globals.update(dict=lambda *items, **fields: dict(*items, **fields), namespace=PublicNamespace)

    def start(self) -> None:
        self._steps = 0

    def _step(self) -> None:
        self._steps += 1
        if self._steps > _MAX_STEPS:
            _refuse(f"take more than {_MAX_STEPS:,} steps for one conversation")

    def _turns(self, items: Iterable[Any]) -> Iterator[Any]:
        for item in items:
            self._step()
            yield item

    def _parse(self, source: str, name: str | None, filename: str | None) -> jinja2.nodes.Template:
        tree = super()._parse(source, name, filename)
        for loop in tree.find_all(jinja2.nodes.For):
            loop.iter = jinja2.nodes.Filter(loop.iter, "counted_turns", [], [], None, None, lineno=loop.lineno)
        return tree

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805 (as jinja2 has it)
        __self._step()
        _check_numbers(args, kwargs)
        return super().call(__context, __obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        for one, other in ((left, right), (right, left)):
            if (
                operator == "*"
                and isinstance(one, int)
                and hasattr(other, "__len__")
                and one * len(other) > _MAX_LENGTH
            ):
                _refuse(f"repeat text {one} times")
        if operator == "**" and not (abs(left) <= _MAX_NUMBER and abs(right) <= 64):
            _refuse(f"compute {left} ** {right}")
        if operator == "%" and isinstance(left, str) and _WIDTH.search(left):
            _refuse("format with such a width")
        return super().call_binop(context, operator, left, right)


def _check_numbers(args: tuple[Any, ...], named: dict[str, Any]) -> None:
    for value in (*args, *named.values()):
        if isinstance(value, int) and abs(value) > _MAX_NUMBER:
            _refuse(f"hand {value} to a function")


def _small_numbers(function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter, whose arguments behind the filtered value are checked."""

    @functools.wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        first = 1 + hasattr(function, "jinja_pass_arg")
        _check_numbers(args[first:], named)
        return function(*args, **named)

    return checked


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
