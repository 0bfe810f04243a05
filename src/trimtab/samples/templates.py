"""Chat templates: where one lies, and as a function of a conversation."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from trimtab.errors import ConfigError
from trimtab.files import read_small
from trimtab.typed_json import parse_json


class Render(Protocol):
    """A compiled chat template."""

    def __call__(
        self,
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None,
        /,
        *,
        generation_prompt: bool = False,
        marked: bool = False,
        more: Mapping[str, object] | None = None,
    ) -> str:
        """The chat as text; with `generation_prompt`, and what the assistant's next turn begins with.

        `marked`: `MARKS` stand around what {% generation %} blocks write. `more`: arguments that a record has for it.
        """
        ...


MARKS = ("\ue0f0", "\ue0f1")
"""Private characters around what the assistant wrote, where that is asked for."""


def find_template(tokenizer: Path) -> str | None:
    """The template that lies next to a tokenizer.json, in the order Transformers 5 looks; None if there is none."""
    folder = tokenizer.parent
    for name in ("chat_template.jinja", "chat_template.json", "tokenizer_config.json"):
        if (path := folder / name).is_file() and (template := read_template(path)) is not None:
            return template
    return None


def read_template(path: Path) -> str | None:
    """The Jinja text of a .jinja file, or of the `chat_template` field of a JSON file; None if the field is absent."""
    try:
        if path.suffix != ".json":
            return read_small(path).decode("utf-8")
        template = read_json_object(path).get("chat_template")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read the chat template {path}: {error}; name a .jinja or .json file") from None
    if isinstance(template, list):  # several templates with names
        named = {item.get("name"): item.get("template") for item in template if isinstance(item, dict)}
        template = named.get("default")
    if template is not None and not isinstance(template, str):
        raise ConfigError(f"chat_template in {path} is no text: name a .jinja file as the chat template")
    return template


def read_json_object(path: Path) -> dict[str, Any]:
    """Return a JSON file that must hold an object."""
    try:
        value = parse_json(read_small(path))
    except (OSError, ValueError) as error:
        raise ConfigError(f"cannot read {path}: {error}; download it again") from None
    if not isinstance(value, dict):
        raise ConfigError(f"{path} holds no JSON object: name the file that came with the tokenizer")
    return value


def compile_template(text: str, special_tokens: Mapping[str, str]) -> Render:
    """The template as a function.

    Names, filters and trimming are those of `apply_chat_template` in Transformers 5.23: `raise_exception`,
    `strftime_now` (today's date, so a template that writes it may count differently tomorrow), plain `tojson`, loop
    controls, the `generation` block. The template is a stranger's code: Jinja's sandbox keeps it from Python's
    objects, and the process it runs in bounds its time and memory (`trimtab.limited`).
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    def raise_exception(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: int | None = None,
        separators: tuple[str, str] | None = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    block = _generation_block()
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[block, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals.update(raise_exception=raise_exception, strftime_now=lambda form: datetime.now().strftime(form))
    try:
        template = environment.from_string(text)
    except (jinja2.TemplateError, RecursionError, SyntaxError, MemoryError) as error:  # Python compiles it too
        raise ConfigError(f"the chat template is not valid Jinja: {error}; name another with chat_template") from None

    def render(
        messages: Sequence[Mapping[str, object]],
        tools: Sequence[object] | None,
        *,
        generation_prompt: bool = False,
        marked: bool = False,
        more: Mapping[str, object] | None = None,
    ) -> str:
        block.marks = MARKS if marked else ("", "")
        own = {"documents": None, **special_tokens, **(more or {})}
        own |= {"messages": messages, "tools": tools, "add_generation_prompt": generation_prompt}
        return template.render(own)

    return render


@cache
def _generation_block() -> type[Any]:
    """Make the block {% generation %}: what the assistant wrote, between the marks that are asked for."""
    import jinja2.ext
    import jinja2.nodes

    class GenerationBlock(jinja2.ext.Extension):
        tags = {"generation"}  # noqa: RUF012 (read by jinja2)
        marks = ("", "")

        def parse(self, parser: Any) -> jinja2.nodes.Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_text"), [], [], body).set_lineno(line)

        def _text(self, caller: Callable[[], str]) -> str:
            start, stop = self.marks
            return f"{start}{caller()}{stop}"

    return GenerationBlock
