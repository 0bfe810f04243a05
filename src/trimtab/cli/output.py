"""What every verb prints: one JSON object on stdout, or text; progress and logs go to stderr."""

from __future__ import annotations

import json
import shlex
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]
_SHOW_AFTER_S, _LINE_EVERY_S = 1.0, 10.0


def print_json(content: Any) -> None:
    """Print one JSON object of a mapping or a dataclass: paths as text, non-finite numbers as null."""
    is_unicode = (sys.stdout.encoding or "utf-8").lower().startswith("utf")
    sys.stdout.write(json.dumps(_finite(content), allow_nan=False, ensure_ascii=not is_unicode) + "\n")


def _finite(value: Any) -> Any:
    if is_dataclass(value):
        return {field.name: _finite(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, Mapping):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [_finite(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, str):  # a NumPy scalar
        value = value.item()
    if isinstance(value, float) and value - value != 0.0:
        return None
    return value


def given_command(context: typer.Context, *, without: Collection[str], **changed: object) -> str:
    """The call again, in one order however it was typed: all that was given but the parameters `without` names.

    Those that `changed` names have its values. Settings of a file are written out: the command is whole without it.
    """
    words = ["trimtab", context.command.name or ""]
    for parameter in context.command.params:
        name = parameter.name or ""
        value = changed.get(name, context.params.get(name))
        if name in {*without, "set_words", "set_file"} or value == parameter.default or value in (None, [], ()):
            continue
        values = [str(v) for v in value] if isinstance(value, list | tuple) else [str(value)]
        if parameter.param_type_name == "argument":
            words += values
        elif value is True:
            words.append(parameter.opts[0])
        else:
            words += [word for v in values for word in (parameter.opts[0], v)]
    settings: Mapping[str, Sequence[str]] = context.meta.get("settings", {})
    given = [f"{name}={text}" for name, texts in settings.items() if name not in without for text in texts]
    return shlex.join([*words, *(word for text in given for word in ("--set", text))])


def console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False, soft_wrap=False)


def log(message: str) -> None:
    print(message, file=sys.stderr)


def _plain_lines(label: str) -> Callable[[int, int], None]:
    """Return a callback for logs: a line every ten seconds, none of work that is done before."""
    last_s = time.monotonic()

    def update(done: int, total: int) -> None:
        nonlocal last_s
        if time.monotonic() - last_s >= _LINE_EVERY_S:
            last_s = time.monotonic()
            log(f"{label}: {done:,} of {total:,}")

    return update


@contextmanager
def told_of_compiling() -> Iterator[None]:
    """Says once that loops are being compiled, should any be: the reason why a machine's first run takes longer."""
    from trimtab.compiled import event

    class Teller(event.Listener):  # type: ignore[misc]  # numba has no types
        is_told = False

        def on_start(self, _: event.Event) -> None:
            if not self.is_told:
                log("compiling, once on this machine: some seconds")
            self.is_told = True

        def on_end(self, _: event.Event) -> None:
            pass

    with event.install_listener("numba:compile", Teller()):
        yield


@contextmanager
def progress(label: str) -> Iterator[Callable[[int, int], None]]:
    """Show a bar on stderr for `callback(done, total)` after a second of work; without a terminal, plain lines."""
    if not sys.stderr.isatty():
        yield _plain_lines(label)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=console(stderr=True),
        transient=True,
    )
    started, task = time.monotonic(), bar.add_task(label, total=None)

    def update(done: int, total: int) -> None:
        if not bar.live.is_started and time.monotonic() - started > _SHOW_AFTER_S:
            bar.start()
        bar.update(task, completed=done, total=total)

    try:
        yield update
    finally:
        if bar.live.is_started:
            bar.stop()
