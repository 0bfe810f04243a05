"""`trimtab`: one file per verb; bad input ends with one sentence and exit code 2."""

from __future__ import annotations

import errno
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import suppress
from importlib.util import find_spec
from io import TextIOWrapper
from pathlib import Path
from typing import Annotated, NoReturn

import typer

from trimtab import __version__
from trimtab.cli import export
from trimtab.cli.check import check
from trimtab.cli.demo import demo
from trimtab.cli.describe import describe
from trimtab.cli.image_size import image_size
from trimtab.cli.map import map_model
from trimtab.cli.options import Verb, Verbs, is_further_rank, shorten_words
from trimtab.cli.pack import pack
from trimtab.cli.plan import plan
from trimtab.cli.predict import predict
from trimtab.cli.probe import probe
from trimtab.cli.profile import profile
from trimtab.cli.report import report
from trimtab.cli.serve import serve
from trimtab.cli.size import size
from trimtab.cli.train import train
from trimtab.cli.uneven import uneven
from trimtab.errors import TrimtabError

app = typer.Typer(
    cls=Verbs,
    help="Balance data, pipeline stages and memory of vision-language models; write the decisions as one plan.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
_VERBS: dict[str, Callable[..., None]] = {
    "demo": demo,
    "plan": plan,
    "predict": predict,
    "check": check,
    "probe": probe,
    "train": train,
    "report": report,
    "serve": serve,
    "map": map_model,
    "describe": describe,
    "image-size": image_size,
    "profile": profile,
    "size": size,
    "pack": pack,
    "uneven": uneven,
}
for name, function in _VERBS.items():
    app.command(name, cls=Verb)(function)
for exported in export.app.registered_commands:
    exported.cls = Verb
app.add_typer(export.app, name="export")

_INSTALL_HINTS = {
    "pyarrow": "data",
    "PIL": "data",
    "tokenizers": "data",
    "jinja2": "data",
    "torch": "torch",
    "transformers": "torch",
    "safetensors": "torch",
    "accelerate": "torch",
    "fastapi": "serve",
    "openai": "serve",
    "uvicorn": "serve",
}

_MADE_WITH = {"transformers": "5.23"}
"""Packages whose names moved from version to version, and the one that ours are of (docs/compatibility.md)."""


def _what_to_install(package: str, error: ImportError) -> str:
    """A sentence on a package that is not there, or is another version than the one that was imported from."""
    extra = _INSTALL_HINTS[package]
    if find_spec(package) is None:
        return f"this needs {package}, which is not installed: pip install 'trimtab[{extra}]'"
    needed = f"{package}=={_MADE_WITH[package]}.*" if package in _MADE_WITH else f"trimtab[{extra}]"
    found = getattr(sys.modules.get(package), "__version__", "the one that is installed")
    said = str(error).partition(" (")[0]  # without the file
    return f"this needs another version of {package} than {found} ({said}): pip install -U '{needed}'"


@app.callback(invoke_without_command=True)
def _root(version: Annotated[bool, typer.Option("--version", help="Print the version and stop.")] = False) -> None:
    if version:
        typer.echo(f"trimtab {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; the one place where errors become messages and exit codes."""
    warnings.showwarning = lambda message, *_: print(f"trimtab: warning: {message}", file=sys.stderr)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # `>&-`
            setattr(sys, name, Path(os.devnull).open("w", encoding="utf-8"))  # noqa: SIM115 (open to the end)
        elif isinstance(stream, TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # of characters that the terminal lacks
    try:
        try:
            app()
        finally:
            sys.stdout.flush()
    except SystemExit as stop:
        if isinstance(stop.__context__, BrokenPipeError):  # which typer has turned into exit code 1
            _stop_quietly()
        raise
    except BrokenPipeError:
        _stop_quietly()
    except TrimtabError as error:
        _fail(str(error), error)
    except ImportError as error:
        package = (error.name or "").split(".")[0]
        if package not in _INSTALL_HINTS:
            raise
        _fail(_what_to_install(package, error))
    except OSError as error:
        reason = (error.strerror or str(error) or "no reason given").lower()
        _fail(f"cannot use {error.filename or 'the output'}: {reason}; {_CURES.get(error.errno or 0, _OTHER)}", error)
    except MemoryError:
        _fail("this takes more memory than there is here: give less data at once, or use a larger machine")


_OTHER = "name another file or folder"
_CURES = {
    errno.ENOSPC: "make room there, or name another place",
    errno.EDQUOT: "make room there, or name another place",
    errno.EFBIG: "raise the limit on file sizes (ulimit -f), or name another place",
    errno.EMFILE: "raise the limit on open files (ulimit -n)",
}


def _stop_quietly() -> NoReturn:
    """The reader of our output went away: nothing is wrong, nobody is left to tell."""
    _drop_output()
    sys.exit(0)


def _drop_output() -> None:
    """What is left to print goes nowhere; else Python complains once more at its end."""
    with suppress(OSError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fail(message: str, error: Exception | None = None) -> NoReturn:
    is_said = getattr(error, "is_said", None)
    if is_said or (is_said is None and is_further_rank()):
        sys.exit(2)
    message = shorten_words(message)
    try:
        if "--json" in sys.argv:
            print(json.dumps({"error": message}))
        sys.stdout.flush()
    except OSError:
        _drop_output()
    print(f"trimtab: {message}", file=sys.stderr)
    sys.exit(2)
